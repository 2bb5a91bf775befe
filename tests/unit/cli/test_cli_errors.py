"""However a command fails: one line on standard error, and the exit code of the contract."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import grpc
import pytest
from ringfence.console import commands_agents


def line(result) -> str:
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("ringfence: ")
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix("ringfence: ").rstrip("\n")


@pytest.mark.parametrize(
    ("reason", "exit_code"),
    [
        ("Denied", 3),
        ("NoSuchAgent", 4),
        ("Conflict", 5),
        ("BadManifest", 2),
        ("JournalUnavailable", 6),
        ("SandboxError", 1),
    ],
)
def test_the_kernels_own_line_and_exit_code(reason, exit_code, door, run, refusal) -> None:
    door.answers["Kill"] = lambda _: refusal("no agent `x`; see: ringfence ps", exit_code, reason)
    result = run("kill", "x")
    assert (result.exit_code, line(result)) == (exit_code, "no agent `x`; see: ringfence ps")


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [
        ("INVALID_ARGUMENT", 2),
        ("PERMISSION_DENIED", 3),
        ("NOT_FOUND", 4),
        ("ABORTED", 5),
        ("UNAVAILABLE", 6),
        ("UNIMPLEMENTED", 2),
        ("INTERNAL", 1),
        ("RESOURCE_EXHAUSTED", 1),
    ],
)
def test_a_bare_status_has_an_exit_code_too(status, exit_code, door, run, refusal) -> None:
    door.answers["Kill"] = lambda _: refusal("two\nlines", None, status=grpc.StatusCode[status])
    result = run("kill", "x")
    assert result.exit_code == exit_code
    line(result)


def test_several_problems_are_a_line_each(door, run, refusal) -> None:
    door.answers["Reload"] = lambda _: refusal("a.yaml:1:2: one\na.yaml:3:4: two", 2, "BadConfig")
    result = run("reload")
    assert result.stderr == "ringfence: a.yaml:1:2: one\nringfence: a.yaml:3:4: two\n"
    assert result.exit_code == 2


def test_hostile_error_text_is_escaped(door, run, refusal) -> None:
    door.answers["Kill"] = lambda _: refusal("bad `\x1b[2J\u202e`", 5)
    assert line(run("kill", "x")) == "bad `\\x1b[2J\\u202e`"


@pytest.mark.parametrize(
    "words", [("ps",), ("status",), ("down",), ("steps", "a"), ("audit", "verify"), ("secrets", "ls")]
)
def test_no_kernel(words, run, tmp_path) -> None:
    result = run(*words, "--data", tmp_path)
    assert result.exit_code == 6
    assert line(result).startswith(
        f"no kernel is reachable at `unix:{tmp_path}/run/operator.sock`; start one with `ringfence up`"
    )
    assert result.stdout == ""


def test_a_dead_kernels_file(run, tmp_path) -> None:
    (tmp_path / "kernel.json").write_text(f'{{"pid": 1, "listen": "unix:{tmp_path}/gone.sock"}}')
    result = run("ps", "--data", tmp_path)
    assert result.exit_code == 6
    assert "gone.sock" in line(result)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"listen": 5}', '{"listen": "10.0.0.1:5"}'])
def test_a_broken_kernel_file(text, run, tmp_path) -> None:
    (tmp_path / "kernel.json").write_text(text)
    assert run("ps", "--data", tmp_path).exit_code == 6


def test_a_socket_path_that_is_too_long(run, tmp_path) -> None:
    result = run("ps", "--connect", f"unix:{tmp_path}/{'x' * 120}")
    assert result.exit_code == 6
    line(result)


def test_other_transports_are_refused(run) -> None:
    result = run("ps", "--connect", "127.0.0.1:7070")
    assert result.exit_code == 2
    assert "`127.0.0.1:7070`" in line(result)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's socket")
def test_another_users_socket_is_denied(door) -> None:
    (door.data / "door.sock").chmod(0o600)
    door.data.chmod(0o711)
    code = (
        "import os\n"
        "from ringfence.console.errors import ConsoleError\n"
        "from ringfence.console.locate import probe\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"try: probe('unix:{door.data}/door.sock')\n"
        "except ConsoleError as error: print(error.code, error.message)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("3 "), (done.stdout, done.stderr)
    assert "run as the user that started the kernel" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nope",), "no such command `nope`"),
        (("ps", "--nope"), "no such option `--nope`"),
        (("kill",), "missing argument `AGENT`"),
        (("kill", "a", "b"), "unexpected extra argument"),
        (("policy",), "missing command"),
        (("grant", "a", "fs.read: /workspace/a", "--uses", "0"), "`--uses`"),
        (("policy", "explain", "a", "x"), "`x` is not a valid integer"),
        (("resolve", "a", "1", "--as", "maybe"), "`--as`"),
        (("rollback", "a"), "missing option `--to`"),
    ],
)
def test_usage(words, said, run) -> None:
    result = run(*words)
    assert result.exit_code == 2
    text = line(result)
    assert said in text
    assert text[0].islower()
    assert "--help`" in text


def test_a_name_keeps_its_capitals(door, run, monkeypatch) -> None:
    def wrong(*_words: object) -> None:
        raise click.UsageError("JSON is wanted")

    monkeypatch.setattr(commands_agents, "records", wrong)
    assert "JSON is wanted" in run("ps").stderr


def test_an_answer_that_is_no_document(door, run) -> None:
    door.answers["Kill"] = "nonsense"
    result = run("kill", "x")
    assert result.exit_code == 1
    assert "not a JSON document" in line(result)


def test_a_stream_that_breaks_ends_the_command(door, run, refusal) -> None:
    door.answers["Steps"] = lambda _: [{"step": 1, "action": "now"}, refusal("the database can't be used", 6)]
    result = run("steps", "a", "--json")
    assert result.exit_code == 6
    assert line(result) == "the database can't be used"
    assert not result.stdout.rstrip().endswith("]")


def test_a_refused_stream_prints_nothing(door, run, refusal) -> None:
    door.answers["Steps"] = lambda _: refusal("no agent `a`", 4, "NoSuchAgent")
    result = run("steps", "a", "--json")
    assert (result.exit_code, result.stdout) == (4, "")


def test_a_bug_is_one_line_and_a_file(run, monkeypatch, tmp_path) -> None:
    def broken(*_words: object) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(commands_agents.render, "emit", broken)
    result = run("ps", "--json")
    assert result.exit_code == 1
    text = line(result)
    assert text.startswith("this is a bug in ringfence: ZeroDivisionError: by zero; the details are in `")
    log = Path(text.split("`")[1])
    assert log.parent == tmp_path / "state" / "ringfence"
    assert log.stat().st_mode & 0o777 == 0o600
    assert "Traceback" in log.read_text()


def test_interrupt_is_silent(run, monkeypatch) -> None:
    def interrupted(*_words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands_agents.render, "emit", interrupted)
    result = run("ps", "--json")
    assert result.exit_code == 130
    assert result.stderr.strip() == ""


def command_line(*words: object) -> list[str]:
    return [sys.executable, "-m", "ringfence.console", *(str(word) for word in words)]


def test_a_reader_that_goes_away(door) -> None:
    door.answers["Steps"] = lambda _: [
        {"step": n, "action": "now", "resource": "x" * 500} for n in range(2000)
    ]
    reader, writer = os.pipe()
    child = subprocess.Popen(
        command_line("steps", "a", "--data", door.data), stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    os.read(reader, 10)
    os.close(reader)
    _, said = child.communicate()
    assert (child.returncode, said) == (141, "")


def test_a_real_interrupt_of_a_followed_stream(door) -> None:
    import threading

    released = threading.Event()

    def steps(_request):
        yield {"step": 1, "action": "now"}
        released.wait()

    door.answers["Steps"] = steps
    child = subprocess.Popen(
        command_line("steps", "a", "-f", "--json", "--data", door.data),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == '{"step": 1, "action": "now"}\n'
    child.send_signal(signal.SIGINT)
    out, said = child.communicate()
    released.set()
    assert (child.returncode, out, said.strip()) == (130, "", "")


@pytest.mark.parametrize(
    "words",
    [
        ("show", "\udcff"),
        ("send", "bot", "\udcff"),
        ("approvals", "deny", "a1", "--reason", "\udcff"),
        ("policy", "can-i", "bot", "fs.read", "\udcff"),
        ("pull", "bot", "--to", "\udcff"),
        ("rollback", "bot", "--to", "3", "--path", "\udcff"),
        ("ps", "--data", "\udcff"),
    ],
)
def test_an_argument_that_is_no_text(words, door, run) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert line(result) == "`\\xff` is not UTF-8 text; give names, paths and texts in UTF-8"
    assert door.requests == []


def test_a_number_below_zero_is_not_taken_for_an_option(door, run) -> None:
    result = run("budget", "bot", "set", "usd", "-1.5")
    assert result.exit_code == 2
    assert line(result) == "`-1.5` is below zero; give a value from 0 on; see `ringfence budget --help`"
    assert "no such option `-x`" in line(run("budget", "bot", "-x"))
    assert door.requests == []


@pytest.mark.parametrize("words", [("policy", "lint"), ("submit",)])
def test_a_directory_for_a_file(words, run, tmp_path) -> None:
    result = run(*words, tmp_path)
    assert (result.exit_code, line(result)) == (2, f"`{tmp_path}` is a directory; name a file in it")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_the_data_directory_of_another_user(door) -> None:
    door.data.chmod(0o700)
    # Imported before it becomes the other user, who may not read this interpreter's directory.
    program = "import os, ringfence.console.client, ringfence.console.cli as c; os.setgroups([]); os.setgid(65534); os.setuid(65534); c.main()"
    words = [sys.executable, "-c", program, "ps", "--data", str(door.data)]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 3
    assert "does not let you in: permission denied; run as the user that started the kernel" in done.stderr
