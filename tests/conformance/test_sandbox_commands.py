"""Commands of exec.run: the overlay, its masks, what they may write, and what is left of them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Box

sys.path.insert(0, str(Path(__file__).parent))
from workspace_kit import facts_of, workspace_of


def test_a_command_sees_the_workspace_and_leaves_it_untouched(box: Box) -> None:
    workspace = workspace_of(box)
    before = facts_of(workspace)
    done = box.run("cat a.txt; pwd; id -un; echo changed > a.txt; cat a.txt; rm -rf dir; ls", workspace)
    assert (done.reason, done.code, done.err) == ("exit", 0, "")
    assert done.out.splitlines()[:4] == ["hello", "/workspace", "agent", "changed"]
    assert "dir" not in done.out.splitlines()
    assert facts_of(workspace) == before
    assert box.left() == []


def test_the_working_directory_stdin_and_environment(box: Box) -> None:
    workspace = workspace_of(box)
    done = box.run("pwd; cat; env", workspace, cwd="/workspace/dir/sub", stdin="given\n", env={"X": "1"})
    lines = done.out.splitlines()
    assert lines[:2] == ["/workspace/dir/sub", "given"]
    assert {line.split("=")[0] for line in lines[2:]} <= {"X", "PATH", "PWD", "OLDPWD", "SHLVL", "_"}
    assert "host-canary" not in done.out
    with pytest.raises(Exception, match="`/workspace/nowhere`"):
        box.run("true", workspace, cwd="/workspace/nowhere")
    with pytest.raises(Exception, match="not a plain path"):
        box.run("true", workspace, cwd="/workspace/../etc")


def test_a_command_has_no_syscall_socket_and_no_program(box: Box) -> None:
    done = box.run("ls /run /program 2>&1; ls /", workspace_of(box))
    assert "ringfence" not in done.out
    assert "/program" not in done.out.replace("'/program': No such file", "")


def test_exit_status_and_signals(box: Box) -> None:
    workspace = workspace_of(box)
    assert (box.run("exit 9", workspace).reason, box.run("exit 9", workspace).code) == ("exit", 9)
    done = box.run("kill -TERM $$", workspace)
    assert (done.reason, done.code) == ("signal", -signal.SIGTERM)
    # A pipe that closes early ends its writer quietly: the signal is not ignored inside.
    assert box.run("yes | head -n 1", workspace).out == "y\n"


MASKED = {
    "keep": "k",
    ".env": "secret-1",
    "data/.env": "secret-2",
    "data/other": "o",
    ".ssh/id": "secret-3",
    ".ssh/deep/x": "secret-4",
}
MASKS = [
    "/workspace/.env",
    "/workspace/data/.env",
    "/workspace/.ssh",
    "/workspace/alias",
    "/workspace/absent",
]


def test_masked_paths_cannot_be_read_or_changed(box: Box) -> None:
    workspace = workspace_of(box, MASKED)
    (workspace / "alias").symlink_to("data/other")
    box.give(workspace)
    before = facts_of(workspace)
    script = """
cat .env; cat data/.env; cat .ssh/id; ls .ssh; ls .ssh/deep; cat alias; cp .env copy; cat /proc/self/cwd/.env; tar cf - . | grep -a secret-
ln .env hard; ln data/.env hard2; mv .env moved; rm -f .env; rm -rf .ssh; rm -rf data; mv data data2; chmod 777 .env .ssh; echo x > .env
echo x > .ssh/new; mkdir .ssh/new; ln -s data/.env soft; cat soft; python3 -c 'import mmap; open(".env","r+b")'
"""
    done = box.run(script, workspace, masks=MASKS)
    assert "secret-" not in done.out + done.err
    assert "o\n" not in done.out
    changes = box.changes(done, workspace)
    touched = {row[0] for row in changes}
    assert not touched & {
        f"/workspace/{name}"
        for name in (".env", "data/.env", ".ssh", ".ssh/id", ".ssh/deep", "alias", "data")
    }
    assert all(
        "secret" not in path.read_text(errors="replace") for path in done.upper.rglob("*") if path.is_file()
    )
    assert facts_of(workspace) == before
    assert "Permission denied" in done.err


def test_a_masked_file_is_masked_for_every_tool(box: Box) -> None:
    workspace = workspace_of(box, {".env": "secret", "sub/x": "x"})
    for argv in (
        ["cat", ".env"],
        ["cat", "/workspace/.env"],
        ["cat", "sub/../.env"],
        ["dd", "if=.env"],
        ["/bin/cp", ".env", "/tmp/c"],
    ):
        done = box.run("", workspace, argv=argv, masks=["/workspace/.env"])
        assert done.code != 0
        assert "secret" not in done.out


@pytest.mark.parametrize(
    "mask", ["/etc/passwd", "/workspace", "/workspace/../etc", "/workspace/a/", "relative"]
)
def test_masks_that_make_no_sense_are_refused(box: Box, mask: str) -> None:
    with pytest.raises(Exception, match=r"not a plain path|whole workspace"):
        box.run("true", workspace_of(box), masks=[mask])


def test_a_mask_that_leads_through_a_link_stops_the_start(box: Box) -> None:
    workspace = workspace_of(box, {"real/secret": "s"})
    (workspace / "alias").symlink_to("real")
    box.give(workspace)
    with pytest.raises(Exception, match="wall `masks`"):
        box.run("cat alias/secret", workspace, masks=["/workspace/alias/secret"])


def test_huge_output_stays_bounded_and_keeps_both_ends(box: Box) -> None:
    workspace = workspace_of(box)
    # A process starts with the peak of the one that started it, so what it added is what counts.
    assert box.run("true", workspace).code == 0
    before = box.host.call("peak_bytes")
    script = "echo first; yes 0123456789 | head -c 209715200; echo; echo the error is here; echo e >&2"
    done = box.run(script, workspace, limits={"disk_bytes": 16 << 20})
    assert (done.reason, done.code) == ("exit", 0)
    assert done.facts["stdout_bytes"] == 209715200 + len("first\n\nthe error is here\n")
    assert done.facts["stderr_bytes"] == 2
    size = Path(done.facts["stdout"]).stat().st_size
    assert size <= (4 << 20) + 100
    assert done.out.startswith("first\n0123456789\n")
    assert done.out.endswith("\nthe error is here\n")
    assert "bytes left out]" in done.out
    peak = box.host.call("peak_bytes")
    for who, size in peak.items():
        assert size < max(100 << 20, before[who] + (32 << 20)), (who, before, peak)


def test_one_long_line_of_output(box: Box) -> None:
    done = box.run(
        "head -c 52428800 /dev/zero | tr '\\0' x", workspace_of(box), limits={"disk_bytes": 8 << 20}
    )
    assert done.facts["stdout_bytes"] == 52428800
    assert (done.reason, done.code) == ("exit", 0)


REMOVED = """
import os
for n in range(1000):
    f = open("gone", "wb"); os.unlink("gone")
    f.write(bytes(1 << 20)); f.flush(); os.dup(f.fileno())
import time; time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("argv", "ended"),
    [
        (["sh", "-c", "while head -c 1048576 /dev/zero >> big; do :; done; exit 1"], ("exit", 1)),
        (["sh", "-c", "n=0; while :; do n=$((n+1)); head -c 300000 /dev/zero > f$n; done"], ("disk", -9)),
        (["python3", "-c", REMOVED], ("disk", -9)),
    ],
    ids=["one file", "many files", "removed files"],
)
def test_the_upper_layer_is_bounded(box: Box, argv: list[str], ended: tuple[str, int]) -> None:
    workspace = workspace_of(box)
    done = box.run("", workspace, argv=argv, limits={"disk_bytes": 8 << 20, "timeout_s": 30})
    # One file alone can't grow past the limit; all together are measured, and the command is killed.
    assert (done.reason, done.code) == ended
    assert box.alive() == []
    assert box.left() == []


def test_memory_of_a_command(box: Box) -> None:
    workspace = workspace_of(box)
    eat = ["python3", "-c", "x = bytearray(400 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1"]
    assert box.run("", workspace, argv=eat, limits={"memory_bytes": 96 << 20}).reason == "memory"
    assert box.alive() == []


def test_cancelling_ends_the_tree_first(box: Box) -> None:
    workspace = workspace_of(box)
    script = "python3 -c 'import time; time.sleep(1000)' $0 & wait"
    spec = box.command_spec(["/bin/sh", "-c", script, box.token], workspace)
    number, future = box.host.begin("command", **spec)
    while len(box.alive()) < 2:
        assert not future.done()
    box.host.call("cancel", order=number)
    assert box.alive() == []
    with pytest.raises(Exception, match="cancelled"):
        future.result(30)
    assert box.left() == []


def test_commands_on_one_workspace_do_not_share_layers(box: Box) -> None:
    workspace = workspace_of(box)
    first = box.run("echo 1 > one", workspace)
    second = box.run("ls one", workspace)
    assert second.code != 0
    assert box.changes(first, workspace) == [["/workspace/one", "create", "file", 0o644, False]]
    assert box.changes(second, workspace) == []


def test_a_scratch_directory_in_use_is_refused(box: Box) -> None:
    workspace = workspace_of(box)
    spec = box.command_spec(["/bin/true"], workspace)
    box.host.call("command", **spec)
    with pytest.raises(Exception, match="wall `scratch directory`"):
        box.host.call("command", **spec)


def test_what_may_be_written_may_be_moved_between_directories(box: Box) -> None:
    """One call each: `mv` would copy where that is refused."""
    code = "import os; os.rename('one/a', 'two/b'); os.link('two/b', 'one/c'); print(os.listdir('one'))"
    done = box.run(f'mkdir one two; echo new > one/a; python3 -c "{code}"', workspace_of(box))
    assert (done.code, done.err, done.out) == (0, "", "['c']\n")
