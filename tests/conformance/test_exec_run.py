"""exec.run as a transaction: judged path by path, applied all or not at all, finished after a crash."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ringfence.sandbox.changes import ChangeSet, apply_changes
from ringfence.syscalls import errors, exec_run
from ringfence.syscalls.base import Effect, Rerun

sys.path.insert(0, str(Path(__file__).parent))
from exec_call import ALLOW_ALL, Environment, RecordedCall, recover, run

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = {
    "a": "a\n",
    "b": "b\n",
    "data/1": "1",
    "data/2": "2",
    "data/deep/3": "3",
    ".env": "secret\n",
    "keep/k": "k",
}


def tree(top: Path) -> dict[str, tuple[int, int, bytes]]:
    found: dict[str, tuple[int, int, bytes]] = {}
    for path in sorted(top.rglob("*")):
        facts = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(facts.st_mode) else b""
        found[str(path.relative_to(top))] = (facts.st_mode, facts.st_uid, data)
    return found


@pytest.fixture
def place() -> Iterator[Path]:
    top = Path(tempfile.mkdtemp(prefix="ringfence-exec-"))
    top.chmod(0o755)
    workspace = top / "workspace"
    for name, text in FILES.items():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if os.geteuid() == 0:
        for path in (workspace, *workspace.rglob("*")):
            os.chown(path, 247111, 247111)
    yield top
    subprocess.run(["chmod", "-R", "u+rwX", str(top)], check=False)
    shutil.rmtree(top)


@pytest.fixture
def env(place: Path) -> Environment:
    return Environment(place)


def with_rules(place: Path, *deny: str, allow: list[str] | None = None) -> Environment:
    return Environment(place, ALLOW_ALL if allow is None else allow, deny)


def left_over(env: Environment) -> list[Path]:
    return list(env.scratch_root.iterdir()) if env.scratch_root.exists() else []


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
    result = await run(call, "sh", "-c", "cat a; touch a; chmod 644 a; echo x > /tmp/x; echo t > t; rm t")
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
async def test_one_denied_path_discards_everything(place: Path, deny: str, command: str) -> None:
    env = with_rules(place, deny)
    before = tree(env.workspace.root)
    call = RecordedCall(env)
    with pytest.raises(errors.Denied):
        await run(call, "sh", "-c", command)
    assert tree(env.workspace.root) == before
    assert (call.point, call.progress) == (None, None)
    assert left_over(env) == []


async def test_what_nothing_allows_is_discarded(place: Path) -> None:
    env = with_rules(place, allow=['exec.run: "*"', 'fs.write: "/workspace/out/**"'])
    with pytest.raises(errors.Denied):
        await run(RecordedCall(env), "sh", "-c", "echo x > a")
    with pytest.raises(errors.Denied):
        await run(RecordedCall(env), "rm", "a")
    assert (env.workspace.root / "a").read_text() == "a\n"


@pytest.mark.parametrize("argv", [["rm", "a"], ["/bin/rm", "a"], ["./../bin/rm", "a"], ["/usr/bin/rm", "a"]])
async def test_a_denied_program_is_denied_by_any_path(place: Path, argv: list[str]) -> None:
    env = with_rules(place, 'exec.run: "rm *"')
    with pytest.raises(errors.Denied):
        await run(RecordedCall(env), *argv)
    assert (env.workspace.root / "a").exists()


async def test_a_denied_file_is_hidden_from_every_command(place: Path) -> None:
    env = with_rules(place, 'fs.*: "/workspace/.env"', 'fs.read: "/workspace/data/deep/**"')
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


COMMAND = ["sh", "-c", "echo out; echo new > a; rm -rf data; mkdir made; echo m > made/m; ln -s a soft"]


def crash_at(place: Path, where: str) -> None:
    script = Path(__file__).with_name("exec_call.py")
    done = subprocess.run(
        [sys.executable, str(script), str(place), where, *COMMAND], check=False, capture_output=True
    )
    assert done.returncode == -9, done.stderr.decode()


def assert_applied(env: Environment) -> None:
    root = env.workspace.root
    assert (root / "a").read_text() == "new\n"
    assert not (root / "data").exists()
    assert (root / "made/m").read_text() == "m\n"
    assert (root / "soft").readlink() == Path("a")
    assert left_over(env) == []


async def test_a_crash_before_the_record_runs_it_again(place: Path) -> None:
    env = Environment(place)
    before = tree(env.workspace.root)
    # Everything of the call is done but its record.
    script = "import sys, asyncio, os, signal; sys.path.insert(0, sys.argv[1])\nimport exec_call\nfrom pathlib import Path\n"
    script += "async def die(progress): os.kill(os.getpid(), signal.SIGKILL)\n"
    script += "async def main():\n  call = exec_call.RecordedCall(exec_call.Environment(Path(sys.argv[2])))\n"
    script += "  call.record = die\n  await exec_call.run(call, *sys.argv[3:])\nasyncio.run(main())\n"
    here = str(Path(__file__).parent)
    assert (
        subprocess.run([sys.executable, "-c", script, here, str(place), *COMMAND], check=False).returncode
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
async def test_a_crash_after_the_record_is_finished(place: Path, where: str) -> None:
    crash_at(place, where)
    env = Environment(place)
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
async def test_a_crash_in_the_middle_of_the_apply_is_finished(place: Path, applied: int) -> None:
    crash_at(place, "before_apply")
    env = Environment(place)
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


async def test_a_path_changed_by_others_after_the_crash_is_never_overwritten(place: Path) -> None:
    crash_at(place, "before_apply")
    env = Environment(place)
    (env.workspace.root / "a").write_text("by hand\n")
    with pytest.raises(errors.OutcomeUnknown, match="`/workspace/a`"):
        await recover(RecordedCall(env), *COMMAND)
    assert (env.workspace.root / "a").read_text() == "by hand\n"
    assert (env.workspace.root / "data/1").exists()


async def test_a_lost_layer_is_reported(place: Path) -> None:
    crash_at(place, "before_apply")
    env = Environment(place)
    (env.workspace.root / "data/deep/3").unlink()
    shutil.rmtree(env.scratch_root)
    with pytest.raises(errors.OutcomeUnknown, match="lost"):
        await recover(RecordedCall(env), *COMMAND)
