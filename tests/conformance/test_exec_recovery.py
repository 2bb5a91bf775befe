"""exec.run after a crash: run again, applied to the end, or reported; never half, never over what others did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ringfence.sandbox.changes import ChangeSet, apply_changes, discard
from ringfence.syscalls import errors
from ringfence.syscalls.base import Rerun

sys.path.insert(0, str(Path(__file__).parent))
from exec_call import Environment, RecordedCall, left_over, recover, run, tree, with_rules

COMMAND = ["sh", "-c", "echo out; echo new > a; rm -rf data; mkdir made; echo m > made/m; ln -s a soft"]


def crash_at(exec_place: Path, where: str, command: list[str] = COMMAND) -> None:
    script = Path(__file__).with_name("exec_call.py")
    done = subprocess.run(
        [sys.executable, str(script), str(exec_place), where, *command], check=False, capture_output=True
    )
    assert done.returncode == -9, done.stderr.decode()


def assert_applied(env: Environment) -> None:
    root = env.workspace.root
    assert (root / "a").read_text() == "new\n"
    assert not (root / "data").exists()
    assert (root / "made/m").read_text() == "m\n"
    assert (root / "soft").readlink() == Path("a")
    assert left_over(env) == []


async def test_a_crash_before_the_record_runs_it_again(exec_place: Path) -> None:
    env = Environment(exec_place)
    before = tree(env.workspace.root)
    # Everything of the call is done but its record.
    script = "import sys, asyncio, os, signal; sys.path.insert(0, sys.argv[1])\nimport exec_call\nfrom pathlib import Path\n"
    script += "async def die(progress): os.kill(os.getpid(), signal.SIGKILL)\n"
    script += "async def main():\n  call = exec_call.RecordedCall(exec_call.Environment(Path(sys.argv[2])))\n"
    script += "  call.record = die\n  await exec_call.run(call, *sys.argv[3:])\nasyncio.run(main())\n"
    here = str(Path(__file__).parent)
    assert (
        subprocess.run(
            [sys.executable, "-c", script, here, str(exec_place), *COMMAND], check=False
        ).returncode
        == -9
    )
    assert tree(env.workspace.root) == before
    assert len(left_over(env)) == 1
    call = RecordedCall(env)
    assert await recover(call, *COMMAND) is Rerun.RERUN
    assert left_over(env) == []
    await run(call, *COMMAND)
    assert_applied(env)


@pytest.mark.parametrize("where", ["recorded", "before_apply", "after_apply"])
async def test_a_crash_after_the_record_is_finished(exec_place: Path, where: str) -> None:
    crash_at(exec_place, where)
    env = Environment(exec_place)
    call = RecordedCall(env)
    result = await recover(call, *COMMAND)
    assert_applied(env)
    assert (result.exit_code, result.stdout, result.reason) == (0, b"out\n", "exit")
    assert "/workspace/data/deep/3" in result.changed
    assert call.point is not None
    assert call.point[0] == result.changed
    assert ("check_live" in call.reached) == (where != "after_apply")
    again = await recover(RecordedCall(env), *COMMAND)
    assert again == result
    assert_applied(env)


@pytest.mark.parametrize("applied", [1, 4, 8])
async def test_a_crash_in_the_middle_of_the_apply_is_finished(exec_place: Path, applied: int) -> None:
    crash_at(exec_place, "before_apply")
    env = Environment(exec_place)
    manifest = env.snapshots.load("p1")
    assert manifest is not None
    changes = ChangeSet.from_json(manifest.extra["changes"]).changes
    order = [change for change in reversed(changes) if change.kind == "remove"]
    order += [change for change in changes if change.kind != "remove"]
    part = {change.path for change in order[:applied]}
    some = ChangeSet(changes=tuple(change for change in changes if change.path in part))
    apply_changes(env.scratch_root / "p1/upper", env.workspace.root, some, uid=env.uid)
    call = RecordedCall(env)
    await recover(call, *COMMAND)
    assert_applied(env)
    # What was under way when its right went away is finished; half a command is worse than a whole one.
    assert "check_live" not in call.reached


async def test_a_directory_that_the_crash_left_half_made_is_finished(exec_place: Path) -> None:
    crash_at(exec_place, "before_apply")
    env = Environment(exec_place)
    (env.workspace.root / "made").mkdir(mode=0o700)
    # Nobody had begun to apply: somebody else made it.
    with pytest.raises(errors.OutcomeUnknown, match="`/workspace/made`"):
        await recover(RecordedCall(env), *COMMAND)
    (env.scratch_root / "p1/begun").touch()
    await recover(RecordedCall(env), *COMMAND)
    assert_applied(env)


async def test_a_change_of_attributes_alone_is_finished_too(exec_place: Path) -> None:
    command = ["python3", "-c", "import os; os.setxattr('a', 'user.kind', b'draft')"]
    crash_at(exec_place, "before_apply", command)
    env = Environment(exec_place)
    await recover(RecordedCall(env), *command)
    assert os.getxattr(env.workspace.root / "a", "user.kind") == b"draft"
    plan = env.snapshots.plan_restore(env.workspace, ["p1"])
    env.snapshots.restore(env.workspace, plan.items)
    assert os.listxattr(env.workspace.root / "a") == []


@pytest.mark.parametrize("where", ["before_apply", "after_apply"])
async def test_a_change_of_a_time_alone_is_finished_too(exec_place: Path, where: str) -> None:
    command = ["touch", "-d", "@1000000000", "a"]
    file = exec_place / "workspace" / "a"
    before = file.stat().st_mtime_ns
    crash_at(exec_place, where, command)
    env = Environment(exec_place)
    assert await recover(RecordedCall(env), *command) is not Rerun.RERUN
    assert file.stat().st_mtime == 1_000_000_000
    env.snapshots.restore(env.workspace, env.snapshots.plan_restore(env.workspace, ["p1"]).items)
    assert file.stat().st_mtime_ns == before


async def test_a_path_changed_by_others_after_the_crash_is_never_overwritten(exec_place: Path) -> None:
    crash_at(exec_place, "before_apply")
    env = Environment(exec_place)
    (env.workspace.root / "a").write_text("by hand\n")
    with pytest.raises(errors.OutcomeUnknown, match="`/workspace/a`"):
        await recover(RecordedCall(env), *COMMAND)
    assert (env.workspace.root / "a").read_text() == "by hand\n"
    assert (env.workspace.root / "data/1").exists()


async def test_a_lost_layer_is_reported(exec_place: Path) -> None:
    crash_at(exec_place, "before_apply")
    env = Environment(exec_place)
    (env.workspace.root / "data/deep/3").unlink()
    discard(env.scratch_root / "p1")
    with pytest.raises(errors.OutcomeUnknown, match="lost"):
        await recover(RecordedCall(env), *COMMAND)


async def test_what_had_not_begun_needs_its_permission_still(exec_place: Path) -> None:
    crash_at(exec_place, "before_apply")
    before = tree(Environment(exec_place).workspace.root)
    env = with_rules(exec_place, 'fs.delete: "/workspace/data/**"')
    assert await recover(RecordedCall(env), *COMMAND) is Rerun.RERUN
    assert tree(env.workspace.root) == before
    assert left_over(env) == []
