"""exec.run as a transaction: judged path by path, applied all or not at all, finished after a crash."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ringfence.syscalls import errors, exec_run
from ringfence.syscalls.base import Effect, Rerun

sys.path.insert(0, str(Path(__file__).parent))
from exec_call import Environment, RecordedCall, left_over, recover, run, tree, with_rules


@pytest.fixture
def env(exec_place: Path) -> Environment:
    return Environment(exec_place)


async def test_a_command_changes_the_workspace_behind_a_point(env: Environment) -> None:
    before = tree(env.workspace.root)
    call = RecordedCall(env)
    result = await run(
        call, "sh", "-c", "echo out; echo err >&2; echo new > a; mkdir d; echo n > d/n; exit 3"
    )
    assert (result.exit_code, result.reason, result.stdout, result.stderr) == (3, "exit", b"out\n", b"err\n")
    assert result.changed == ["/workspace/a", "/workspace/d", "/workspace/d/n"]
    assert (env.workspace.root / "a").read_text() == "new\n"
    assert call.effect is Effect.WRITE
    assert call.point is not None
    assert call.point[0] == result.changed
    assert call.reached == ["recorded", "before_apply", "check_live", "after_apply"]
    assert env.snapshots.verify("p1")
    assert left_over(env) == []
    owners = {path.stat().st_uid for path in env.workspace.root.rglob("*")}
    assert owners == {os.geteuid() if env.uid is None else env.uid}
    env.snapshots.restore(env.workspace, env.snapshots.plan_restore(env.workspace, ["p1"]).items)
    assert tree(env.workspace.root) == before


async def test_removals_destroy_and_come_back(env: Environment) -> None:
    before = tree(env.workspace.root)
    call = RecordedCall(env)
    result = await run(call, "rm", "-rf", "data", "b")
    assert call.effect is Effect.DESTROY
    gone = [
        "/workspace/b",
        "/workspace/data",
        "/workspace/data/1",
        "/workspace/data/2",
        "/workspace/data/deep",
        "/workspace/data/deep/3",
    ]
    assert result.changed == gone
    assert [q.resource for q in call.asked if q.action == "fs.delete"] == gone
    env.snapshots.restore(env.workspace, env.snapshots.plan_restore(env.workspace, ["p1"]).items)
    assert tree(env.workspace.root) == before


async def test_without_changes_there_is_no_point_and_no_record(env: Environment) -> None:
    call = RecordedCall(env)
    result = await run(
        call, "sh", "-c", "cat a; touch -r a a; chmod 644 a; echo x > /tmp/x; echo t > t; rm t"
    )
    assert (result.stdout, result.changed) == (b"a\n", [])
    assert (call.point, call.progress, call.reached) == (None, None, [])


@pytest.mark.parametrize(
    ("deny", "command"),
    [
        ('fs.write: "/workspace/keep/**"', "echo x > a; echo x > keep/k"),
        ('fs.write: "/workspace/keep/**"', "echo x > a; echo x > keep/new"),
        ('fs.delete: "/workspace/data/deep/**"', "echo x > a; rm -rf data"),
        ('fs.delete: "/workspace/data/1"', "mv data elsewhere"),
        ('fs.delete: "/workspace/data/1"', "rm -r data; mkdir data; echo other > data/2"),
        ('fs.write: "/workspace/a"', "chmod 600 a"),
        ('fs.write: "/workspace/a"', "ln -sf b a"),
        ('fs.*: "**/.env"', "mkdir later; echo x > later/.env"),
    ],
)
async def test_one_denied_path_discards_everything(exec_place: Path, deny: str, command: str) -> None:
    env = with_rules(exec_place, deny)
    before = tree(env.workspace.root)
    call = RecordedCall(env)
    with pytest.raises(errors.Denied):
        await run(call, "sh", "-c", command)
    assert tree(env.workspace.root) == before
    assert (call.point, call.progress) == (None, None)
    assert left_over(env) == []


async def test_what_nothing_allows_is_discarded(exec_place: Path) -> None:
    env = with_rules(exec_place, allow=['exec.run: "*"', 'fs.write: "/workspace/out/**"'])
    with pytest.raises(errors.Denied):
        await run(RecordedCall(env), "sh", "-c", "echo x > a")
    with pytest.raises(errors.Denied):
        await run(RecordedCall(env), "rm", "a")
    assert (env.workspace.root / "a").read_text() == "a\n"


@pytest.mark.parametrize("argv", [["rm", "a"], ["/bin/rm", "a"], ["./../bin/rm", "a"], ["/usr/bin/rm", "a"]])
async def test_a_denied_program_is_denied_by_any_path(exec_place: Path, argv: list[str]) -> None:
    env = with_rules(exec_place, 'exec.run: "rm *"')
    with pytest.raises(errors.Denied):
        await run(RecordedCall(env), *argv)
    assert (env.workspace.root / "a").exists()


async def test_a_denied_file_is_hidden_from_every_command(exec_place: Path) -> None:
    env = with_rules(exec_place, 'fs.*: "/workspace/.env"', 'fs.read: "/workspace/data/deep/**"')
    for command in ("cat .env", "cat /workspace/.env", "cp .env copy", "cat data/deep/3", "grep -r secret ."):
        result = await run(RecordedCall(env), "sh", "-c", command)
        assert b"secret" not in result.stdout.replace(b"grep", b"")
        assert result.exit_code != 0
        assert result.changed == []
    result = await run(RecordedCall(env), "sh", "-c", "rm -rf data .env; ls data .env")
    assert (env.workspace.root / ".env").read_text() == "secret\n"
    assert (env.workspace.root / "data/deep/3").read_text() == "3"
    assert "/workspace/data/deep/3" not in result.changed


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("mkfifo p", "fifo"),
        ("python3 -c 'import socket; socket.socket(1).bind(\"s\")'", "socket"),
        ("cp /bin/true s; chmod 4755 s", "set-user-ID"),
        ("chmod g+s a", "set-user-ID"),
    ],
)
async def test_special_files_are_refused(env: Environment, command: str, what: str) -> None:
    before = tree(env.workspace.root)
    with pytest.raises(errors.Denied, match=f"(?i){what}"):
        await run(RecordedCall(env), "sh", "-c", f"echo x > a; {command}")
    assert tree(env.workspace.root) == before


async def test_a_command_that_the_kernel_ended_leaves_nothing(env: Environment) -> None:
    before = tree(env.workspace.root)
    result = await run(RecordedCall(env), "sh", "-c", "echo x > a; echo said; sleep 1000", timeout_ms=400)
    assert (result.reason, result.exit_code, result.stdout, result.changed) == ("timeout", -9, b"said\n", [])
    big = "n=0; while :; do n=$((n+1)); head -c 900000 /dev/zero > f$n; done"
    result = await run(RecordedCall(env), "sh", "-c", big)
    assert (result.reason, result.changed) == ("disk", [])
    assert tree(env.workspace.root) == before
    assert left_over(env) == []


async def test_a_command_that_died_of_a_signal_is_applied(env: Environment) -> None:
    result = await run(RecordedCall(env), "sh", "-c", "echo x > a; kill -SEGV $$")
    assert (result.reason, result.exit_code, result.changed) == ("signal", -11, ["/workspace/a"])


async def test_the_deadline_of_the_call_bounds_the_command(env: Environment) -> None:
    result = await run(RecordedCall(env, deadline_s=5.4), "sleep", "1000")
    assert result.reason == "timeout"


async def test_long_output_keeps_both_ends(env: Environment) -> None:
    script = (
        "echo first; head -c 1000000 /dev/zero | tr '\\0' x; echo; echo last; head -c 70000 /dev/zero >&2"
    )
    result = await run(RecordedCall(env), "sh", "-c", script)
    assert result.stdout_bytes == 1_000_012
    assert result.stdout.startswith(b"first\nxxx")
    assert result.stdout.endswith(b"xxx\nlast\n")
    assert b"[ringfence: 934476 bytes left out]" in result.stdout
    assert len(result.stdout) < 70_000
    assert result.stderr_bytes == 70_000
    # All of it is kept under its name, and the result says where.
    kept = {name: (size, ref) for name, size, ref in env.artifacts.kept}
    assert kept == {
        "exec-1-stdout": (1_000_012, result.stdout_ref),
        "exec-1-stderr": (70_000, result.stderr_ref),
    }
    assert env.artifacts.blobs.get(result.stdout_ref) == b"first\n" + b"x" * 1_000_000 + b"\nlast\n"
    assert env.artifacts.blobs.get(result.stderr_ref) == bytes(70_000)


async def test_short_output_is_no_artifact(env: Environment) -> None:
    result = await run(RecordedCall(env), "sh", "-c", "head -c 65536 /dev/zero; echo x >&2")
    assert (result.stdout_bytes, result.stdout_ref, result.stderr_ref) == (65536, "", "")
    assert env.artifacts.kept == []


async def test_stdin_cwd_and_environment_reach_the_command(env: Environment) -> None:
    result = await run(
        RecordedCall(env),
        "sh",
        "-c",
        "cat; pwd; echo $EXTRA",
        cwd="data/deep",
        stdin=b"in\n",
        env={"EXTRA": "more"},
    )
    assert result.stdout == b"in\n/workspace/data/deep\nmore\n"


@pytest.mark.parametrize(
    "arguments",
    [
        {"argv": []},
        {"argv": [""]},
        {"argv": ["bin/"]},
        {"argv": ["ls"], "cwd": "/etc"},
        {"argv": ["ls"], "cwd": "../.."},
        {"argv": ["ls"], "timeout_ms": -1},
        {"argv": ["ls"], "env": {"PATH": "/workspace"}},
        {"argv": ["ls"], "env": {"LD_PRELOAD": "x"}},
        {"argv": ["ls"], "env": {"A=B": "x"}},
        {"argv": ["x" * 200_000]},
    ],
)
def test_requests_that_make_no_sense_are_refused_early(env: Environment, arguments: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        exec_run.plan(exec_run.Arguments(**arguments), env)
    assert "\n" not in str(caught.value)


async def test_a_program_that_does_not_exist_is_an_ordinary_failure(env: Environment) -> None:
    with pytest.raises(errors.CallFailed, match="`no-such-thing`"):
        await run(RecordedCall(env), "no-such-thing")
    assert left_over(env) == []


async def test_a_right_that_went_away_meanwhile_stops_the_apply(env: Environment) -> None:
    before = tree(env.workspace.root)
    call = RecordedCall(env)

    def gone() -> None:
        raise errors.Revoked("revoked")

    call.at["check_live"] = gone
    with pytest.raises(errors.Revoked):
        await run(call, "sh", "-c", "echo x > a")
    assert tree(env.workspace.root) == before
    assert left_over(env) == []
    call.at.clear()
    assert await recover(call, "sh") is Rerun.RERUN


async def test_cancelling_ends_the_command_and_frees_the_workspace(env: Environment) -> None:
    before = tree(env.workspace.root)
    task = asyncio.create_task(run(RecordedCall(env), "sh", "-c", "echo up > up; sleep 1000"))
    while not (env.scratch_root / "p1/upper/up").exists():
        assert not task.done()
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tree(env.workspace.root) == before
    assert left_over(env) == []
    assert list((env.place / "data/sandboxes").glob("*.json")) == []
    async with asyncio.timeout(30), env.lock():
        pass


async def test_commands_run_one_at_a_time(env: Environment) -> None:
    script = "n=$(cat count 2>/dev/null || echo 0); echo $((n + 1)) > count"
    await asyncio.gather(*(run(RecordedCall(env, step), "sh", "-c", script) for step in range(1, 6)))
    assert (env.workspace.root / "count").read_text() == "5\n"


async def test_a_point_that_cannot_be_taken_stops_the_apply(env: Environment) -> None:
    before = tree(env.workspace.root)
    (env.place / "points").write_text("in the way")
    call = RecordedCall(env)
    with pytest.raises(errors.SnapshotFailed):
        await run(call, "sh", "-c", "echo x > a")
    assert tree(env.workspace.root) == before
    assert call.progress is None
