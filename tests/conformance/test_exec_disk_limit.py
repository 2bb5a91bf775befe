"""Commands don't grow the workspace beyond its limit: what doesn't fit is not applied, in part or whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ringfence.sandbox.types import Limits
from ringfence.sandbox.usage import Meter, Usage, tree_usage
from ringfence.syscalls import errors

sys.path.insert(0, str(Path(__file__).parent))
from exec_call import Environment, RecordedCall, left_over, run, tree

LIMIT = 200_000


@pytest.fixture
def env(exec_place: Path) -> Environment:
    made = Environment(exec_place)
    made.meter = Meter(made.workspace, LIMIT)
    return made


async def test_changes_that_do_not_fit_are_not_applied(env: Environment) -> None:
    before = tree(env.workspace.root)
    call = RecordedCall(env)
    with pytest.raises(errors.CallFailed, match="more don't fit") as refused:
        await run(call, "sh", "-c", "rm a; head -c 150000 /dev/zero > x; head -c 60000 /dev/zero > y")
    assert "nothing was applied" in str(refused.value)
    assert tree(env.workspace.root) == before
    assert left_over(env) == []
    assert call.progress is None
    # A hole is as large as it is long.
    with pytest.raises(errors.CallFailed, match="more don't fit"):
        await run(RecordedCall(env, 2), "truncate", "-s", "1M", "hole")
    assert tree(env.workspace.root) == before


async def test_what_replaces_and_removes_is_counted_as_it_is(env: Environment) -> None:
    steps = [
        "head -c 150000 /dev/zero > x",
        "head -c 150000 /dev/urandom > x; mkdir -p d/e; echo 1 > d/e/f; ln -s x l",
        "rm x; head -c 150000 /dev/zero > y",
        "mv d n; rm -rf data; mkdir data; rm l; mkdir l",
        "rm -rf n l; chmod 700 data",
    ]
    env.meter.used()
    for number, script in enumerate(steps, 1):
        result = await run(RecordedCall(env, number), "sh", "-c", script)
        assert (result.exit_code, result.stderr) == (0, b"")
        assert env.meter.known == tree_usage(env.workspace.root), script
    with pytest.raises(errors.CallFailed, match="more don't fit"):
        await run(RecordedCall(env, 9), "sh", "-c", "head -c 150000 /dev/zero > z")


async def test_so_many_files_are_not_applied_either(env: Environment) -> None:
    env.meter.limit = Usage(content_bytes=LIMIT, entries=env.meter.used().entries + 10)
    before = tree(env.workspace.root)
    with pytest.raises(errors.CallFailed, match="files, links and directories"):
        await run(RecordedCall(env), "sh", "-c", "for n in 1 2 3 4 5 6 7 8 9 10 11; do : > f$n; done")
    assert tree(env.workspace.root) == before


async def test_a_command_that_makes_files_without_end_is_ended(env: Environment) -> None:
    """Empty files take no block, but a place on the host's disk each."""
    env.limits = Limits(timeout_s=60, disk_bytes=1 << 20)
    before = tree(env.workspace.root)
    script = "import os\nfor n in range(10**7): os.close(os.open(f'f{n}', os.O_CREAT))"
    result = await run(RecordedCall(env), "python3", "-c", script)
    assert result.reason == "disk"
    assert tree(env.workspace.root) == before
