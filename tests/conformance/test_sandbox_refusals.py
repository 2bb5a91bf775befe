"""What can't start is an error that says why; nothing runs, and nothing is left of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Box

sys.path.insert(0, str(Path(__file__).parent))
from workspace_kit import facts_of, workspace_of


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["no-such-program"], ["`no-such-program`", "PATH"]),
        (["./missing.py"], ["`./missing.py`", "is not there"]),
        (["/etc/passwd"], ["can't be executed"]),
        ([], ["command is empty"]),
    ],
)
def test_a_program_that_cannot_be_run_is_an_error(box: Box, argv: list[str], words: list[str]) -> None:
    with pytest.raises(Exception, match=words[0]) as caught:
        box.program(argv)
    assert caught.value.kind == "SandboxError"
    assert all(word in str(caught.value) for word in words)
    assert box.left() == []


def refused(box: Box, words: str, argv: list[str] | None = None, **more: object) -> None:
    """Neither as a program nor, where that makes sense, as a command."""
    with pytest.raises(Exception, match=words) as caught:
        box.program(["/bin/true"] if argv is None else argv, **more)
    assert caught.value.kind == "SandboxError"
    text = str(caught.value)
    assert text[0].islower() or text[0] == "`"
    assert "\n" not in text
    assert box.left() == []


def refused_command(box: Box, words: str, argv: list[str] | None = None, **more: object) -> None:
    workspace = workspace_of(box)
    before = facts_of(workspace)
    with pytest.raises(Exception, match=words) as caught:
        box.run("", workspace, argv=["/bin/true"] if argv is None else argv, **more)
    assert caught.value.kind == "SandboxError"
    assert "\n" not in str(caught.value)
    assert facts_of(workspace) == before
    assert box.left() == []


def test_a_command_that_cannot_be_run(box: Box) -> None:
    refused_command(box, "`no-such-program` is not on the sandbox's PATH", ["no-such-program"])
    refused_command(box, r"`\./a\.txt` can't be executed", ["./a.txt"])
    refused_command(box, "is not there", ["./missing"])
    refused_command(box, "can't be executed|is not there", ["/workspace/dir"])
    refused_command(box, "command is empty", [""])


def test_a_script_whose_interpreter_is_missing(box: Box) -> None:
    files = {"bad": "#!/no/such/interpreter\n", "none": "echo no first line\n", "ok": "#!/bin/sh\nexit 3\n"}
    image = box.directory(box.fresh("scripts"), files)
    for name in files:
        (image / name).chmod(0o755)
    refused(box, r"`\./bad` can't be executed: No such file", ["./bad"], image=str(image))
    refused(box, r"`\./none` can't be executed: .*a script needs a `#!` line", ["./none"], image=str(image))
    assert box.program(["./ok"], image=str(image)).wait() == ("exit", 3)


def test_directories_that_are_gone(box: Box) -> None:
    gone = str(box.place / box.fresh("gone"))
    file = box.directory(box.fresh("files"), {"a": "a"}) / "a"
    for path in (gone, str(file)):
        refused(box, r"program image .* is not a directory; create it first", image=path)
        refused(box, r"socket directory .* is not a directory; create it first", socket_dir=path)
        refused(box, r"not a directory; create it first", readonly=[path])
        refused_command(box, r"workspace .* is not a directory; create it first", lower=path)
        refused_command(box, r"scratch directory .* is not a directory; create it first", scratch=path)
        refused_command(box, r"not a directory; create it first", readonly=[path])


def test_words_that_no_program_can_be_given(box: Box) -> None:
    refused(box, "NUL", ["/bin/echo", "a\0b"])
    refused_command(box, "NUL", ["/bin/echo", "a\0b"])
    # Linux takes 128 kB in one word and a quarter of the stack, two megabytes, in all.
    refused(box, r"`/bin/echo` can't be executed: Argument list too long", ["/bin/echo", "x" * 200_000])
    refused_command(box, r"Argument list too long", ["/bin/echo", *["x" * 100_000] * 80])
    assert box.program(["/bin/true", *["x" * 100_000] * 10]).wait() == ("exit", 0)


@pytest.mark.parametrize(
    "env",
    [{"": "x"}, {"A=B": "x"}, {"A\0B": "x"}, {"A": "x\0y"}],
    ids=["empty", "equals", "nul", "nul value"],
)
def test_environments_that_cannot_be(box: Box, env: dict[str, str]) -> None:
    refused(box, "environment variable .* can't exist", env=env)
    refused_command(box, "environment variable .* can't exist", env=env)


def test_users_that_a_sandbox_cannot_have(box: Box) -> None:
    refused(box, r"uid 0|only root can run a sandbox as uid", uid=0)
    refused_command(box, r"uid 0|only root can run a sandbox as uid", uid=0)


@pytest.mark.parametrize("limit", ["memory_bytes", "pids", "cpu", "disk_bytes", "timeout_s"])
def test_limits_that_make_no_sense(box: Box, limit: str) -> None:
    refused(box, f"limit `{limit}` is negative", limits={limit: -1})
    refused_command(box, f"limit `{limit}` is negative", limits={limit: -1})
    # Zero is the default, not nothing and not everything.
    assert box.program(["/bin/true"], limits={limit: 0}).wait() == ("exit", 0)


def test_odd_words_reach_the_program_as_they_are(box: Box) -> None:
    words = ["", " ", "a b", "$HOME", "*", "--", "\n", "\x01", "é", "日本", "\udcff", "-c", "'\""]
    code = "import sys, os; os.write(1, b'\\0'.join(os.fsencode(w) for w in sys.argv[1:]))"
    program = box.program(
        ["/usr/bin/env", "python3", "-c", code, *words], env={"LC_ALL": "C.UTF-8", "W": "é\n="}
    )
    assert program.wait() == ("exit", 0), program.stderr.read_text()
    assert program.stdout.read_bytes().split(b"\0") == [
        word.encode("utf-8", "surrogateescape") for word in words
    ]


def test_a_refusal_leaves_the_next_start_alone(box: Box) -> None:
    for _ in range(3):
        with pytest.raises(Exception, match="no-such-program"):
            box.program(["no-such-program"])
        assert box.program(["/bin/true"]).wait() == ("exit", 0)
    assert box.left() == []
