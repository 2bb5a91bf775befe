"""submit: what leaves this machine, and how it ends."""

from __future__ import annotations

import io
import json
import os
import socket
import stat
import tarfile
from pathlib import Path

import pytest
from ringfence.console.errors import ConsoleError
from ringfence.console.overrides import apply_overrides
from ringfence.console.pack import CHUNK_BYTES, pack

MANIFEST = """# a comment
apiVersion: ringfence/v1
kind: Agent
metadata: {name: bot}
spec:
  run:
    command: [python, 'agent.py']   # quoted
    workspace: ./workspace
    env: {REGION: us}
  permissions:
    allow:
      - fs.read: "/workspace/**"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    workspace = tmp_path / "workspace"
    (workspace / "empty").mkdir(parents=True)
    (workspace / "agent.py").write_text("print('hello')\n")
    (workspace / "agent.py").chmod(0o4755)
    (workspace / "link").symlink_to("./agent.py")
    (workspace / "big").write_bytes(os.urandom(CHUNK_BYTES * 2 + 17))
    (tmp_path / "agent.yaml").write_text(MANIFEST)
    return tmp_path


def submitted(door) -> tuple[object, dict[str, tarfile.TarInfo], dict[str, bytes]]:
    frames = door.asked("Submit")
    header = frames[0].header
    assert all(frame.WhichOneof("frame") == "workspace" for frame in frames[1:])
    assert all(len(frame.workspace) <= 3 * CHUNK_BYTES for frame in frames[1:])
    with tarfile.open(fileobj=io.BytesIO(b"".join(frame.workspace for frame in frames[1:]))) as tar:
        members = {member.name: member for member in tar}
        content = {name: tar.extractfile(name).read() for name, member in members.items() if member.isreg()}
    return header, members, content


def test_an_empty_name_is_no_name(home, door, run) -> None:
    result = run("submit", home / "agent.yaml", "--name", "")
    assert result.exit_code == 2
    assert result.stderr == (
        "ringfence: `--name` is empty; give a name, or leave it out to take the manifest's\n"
    )


def test_submit_prints_the_id(home, door, run) -> None:
    door.answers["Submit"] = {"id": "a1", "name": "bot", "state": "running"}
    result = run("submit", home / "agent.yaml", "--input", "-", "--name", "july", stdin=b"\x00in")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "a1\n", "")
    header, members, content = submitted(door)
    assert (header.manifest, header.source, header.name, header.input) == (
        MANIFEST,
        f"{home}/agent.yaml",
        "july",
        b"\x00in",
    )
    assert list(members) == ["agent.py", "big", "empty", "link"]
    assert members["agent.py"].mode == 0o755
    assert (members["agent.py"].uid, members["agent.py"].uname) == (0, "")
    assert members["link"].linkname == "./agent.py"
    assert members["empty"].isdir()
    assert content["big"] == (home / "workspace" / "big").read_bytes()


def test_set_changes_what_is_sent(home, door, run) -> None:
    door.answers["Submit"] = {"id": "a1"}
    result = run(
        "submit",
        home / "agent.yaml",
        "--set",
        "spec.run.env.REGION=eu",
        "--set",
        "spec.run.command.1=other.py",
        "--json",
    )
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"id": "a1"})
    header, _, _ = submitted(door)
    assert "REGION: eu" in header.manifest
    assert "other.py" in header.manifest
    assert "# a comment" in header.manifest


def test_a_manifest_from_a_pipe(home, door, run, monkeypatch) -> None:
    monkeypatch.chdir(home)
    door.answers["Submit"] = {"id": "a1"}
    assert run("submit", "-", stdin=MANIFEST).exit_code == 0
    header, members, _ = submitted(door)
    assert header.source == "manifest"
    assert "agent.py" in members


def test_no_workspace_sends_none(home, door, run) -> None:
    (home / "agent.yaml").write_text(MANIFEST.replace("    workspace: ./workspace\n", ""))
    door.answers["Submit"] = {"id": "a1"}
    assert run("submit", home / "agent.yaml").exit_code == 0
    assert len(door.asked("Submit")) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{}/none.yaml",), "no such file or directory"),
        (("{}",), "is a directory"),
        (("{}/agent.yaml", "--input", "{}/none"), "can't be read as input: no such file"),
        (("-", "--input", "-"), "can't both be standard input"),
        (
            ("{}/agent.yaml", "--set", "spec.run.workspace=./elsewhere"),
            "workspace `./elsewhere` does not exist",
        ),
        (("{}/agent.yaml", "--set", "spec.run.workspace=./agent.yaml"), "is not a directory"),
        (("{}/agent.yaml", "--set", "nonsense"), "write it as `path=value`"),
        (("{}/agent.yaml", "--set", "spec.colour=red"), "`colour`"),
    ],
)
def test_bad_input_is_exit_2_before_the_kernel_is_asked(words, said, home, door, run) -> None:
    result = run("submit", *(word.format(home) for word in words))
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith("ringfence: ")
    assert result.stderr.count("\n") == 1
    assert door.requests == []


def test_manifest_problems_have_line_and_column(home, door, run) -> None:
    (home / "agent.yaml").write_text(MANIFEST.replace("fs.read", "fs.fly"))
    result = run("submit", home / "agent.yaml")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"ringfence: {home}/agent.yaml:12:9: ")


def test_too_much_input(home, door, run) -> None:
    result = run("submit", home / "agent.yaml", "--input", "-", stdin=b"x" * (17 << 20))
    assert result.exit_code == 2
    assert "put large data in the workspace" in result.stderr


def test_special_files_are_left_out_and_named(home, door, run) -> None:
    door.answers["Submit"] = {"id": "a1"}
    os.mkfifo(home / "workspace" / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home / "workspace" / "s"))
        result = run("submit", home / "agent.yaml")
    assert result.exit_code == 0
    assert "left `pipe` out of the workspace: a fifo" in result.stderr
    assert "left `s` out of the workspace: a socket" in result.stderr
    assert not {"pipe", "s"} & set(submitted(door)[1])


def test_half_a_workspace_is_never_a_whole_one(home, door, run, monkeypatch) -> None:
    import ringfence.console.commands_submit as module

    def broken(_root: Path, *, left_out: object):
        yield b"x" * 1024
        raise ConsoleError("`big` changed while it was packed")

    finished: list[int] = []
    monkeypatch.setattr(module, "pack", broken)
    door.answers["Submit"] = lambda frames: finished.append(len(frames)) or {"id": "a1"}
    result = run("submit", home / "agent.yaml")
    assert (result.exit_code, result.stderr) == (1, "ringfence: `big` changed while it was packed\n")
    assert result.stdout == ""


def test_the_kernels_refusal(home, door, run, refusal) -> None:
    door.answers["Submit"] = lambda _: refusal(
        "agent.yaml: the kernel file declares no role `clerk`", 2, "BadManifest"
    )
    result = run("submit", home / "agent.yaml")
    assert (result.exit_code, result.stderr) == (
        2,
        "ringfence: agent.yaml: the kernel file declares no role `clerk`\n",
    )


@pytest.mark.parametrize(
    ("end", "exit_code", "said"),
    [
        ({"state": "done", "exit_code": 0, "error": None}, 0, "bot: done\n"),
        (
            {"state": "failed", "exit_code": 3, "error": None},
            1,
            "ringfence: `bot` is failed: exit code 3; see: ringfence show a1\n",
        ),
        (
            {"state": "unknown", "exit_code": None, "error": "step 3\nhangs"},
            1,
            "ringfence: `bot` is unknown: step 3 hangs; see: ringfence show a1\n",
        ),
        ({"state": "killed"}, 1, "ringfence: `bot` is killed; see: ringfence show a1\n"),
    ],
)
def test_wait(end, exit_code, said, home, door, run) -> None:
    door.answers["Submit"] = {"id": "a1", "name": "bot", "state": "running"}
    door.answers["Wait"] = {"id": "a1", **end}
    result = run("submit", home / "agent.yaml", "--wait")
    assert (result.exit_code, result.stdout, result.stderr) == (exit_code, "a1\n", said)
    assert door.asked("Wait").agent == "a1"
    report = run("submit", home / "agent.yaml", "--wait", "--json")
    assert report.exit_code == exit_code
    assert json.loads(report.stdout) == {"id": "a1", "name": "bot", **end}


def test_a_parked_agent_is_said_once_and_waited_for(home, door, run) -> None:
    door.answers["Submit"] = {"id": "a1", "name": "bot", "state": "running"}
    parked = {"id": "a1", "state": "parked", "waiting_for": "a larger budget `calls`"}
    asked: list[str] = []

    def wait(request):
        asked.append(request.parked_for)
        return parked if len(asked) == 1 else {"id": "a1", "state": "done", "exit_code": 0, "error": None}

    door.answers["Wait"] = wait
    result = run("submit", home / "agent.yaml", "--wait")
    assert (result.exit_code, result.stdout) == (0, "a1\n")
    assert result.stderr.splitlines() == [
        (
            "ringfence: `bot` is parked and waits for a larger budget `calls`; see: ringfence show a1; "
            "still waiting for its end"
        ),
        "bot: done",
    ]
    assert asked == ["", "a larger budget `calls`"]


# -- --set -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("spec.run.env.REGION=eu", "env: {REGION: eu}"),
        ("spec.run.env.NEW=1", "env: {REGION: us, NEW: 1}"),
        ("spec.run.env.REGION=", "env: {REGION: ''}"),
        ("spec.run.env.REGION=a=b", "env: {REGION: a=b}"),
        ("spec.run.command=[sh, -c, ls]", "command: [sh, -c, ls]"),
        ("spec.run.command.2=-v", "command: [python, 'agent.py', -v]"),
        ('spec.budgets.rate."http.get"=10/s', "      http.get: 10/s"),
        ('spec.permissions.allow.0={fs.read: "/workspace/a"}', '- {fs.read: "/workspace/a"}'),
    ],
)
def test_overrides(override: str, line: str) -> None:
    changed = apply_overrides(MANIFEST, [override])
    assert line in changed
    assert changed.startswith("# a comment\n")
    assert "metadata: {name: bot}" in changed


def test_no_override_leaves_every_byte() -> None:
    assert apply_overrides("a:   [1]\r\n", []) == "a:   [1]\r\n"


@pytest.mark.parametrize(
    "override",
    [
        "",
        "=x",
        "a..b=1",
        ".a=1",
        "a.=1",
        'a."b=1',
        'a."b"c=1',
        "kind.x=1",
        "spec.run.command.9=x",
        "spec.run.command.x=1",
        "spec.run.env=[",
        "kind",
    ],
)
def test_overrides_that_make_no_sense(override: str) -> None:
    with pytest.raises(ConsoleError) as caught:
        apply_overrides(MANIFEST, [override])
    assert caught.value.code == 2
    assert caught.value.message.startswith("`--set ")


@pytest.mark.parametrize("text", ["[", "a: 1\na: 2\n", "- 1", ""])
def test_a_broken_manifest_is_left_to_its_own_check(text: str) -> None:
    assert apply_overrides(text, ["a=1"]) == text


# -- packing -----------------------------------------------------------------------------------------------------------


def test_unreadable_files_end_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "secret").write_text("x")
    real = os.open

    def refuse(path, *rest, **more):
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConsoleError, match=r"secret` can't be read for the workspace: permission denied"):
        list(pack(tmp_path, left_out=lambda *_: None))


@pytest.mark.parametrize("size", [5, 50])
def test_a_file_that_changes_its_size_ends_it(size, tmp_path, monkeypatch) -> None:
    (tmp_path / "log").write_bytes(b"x" * size)
    real = Path.lstat

    def old_facts(path: Path) -> os.stat_result:
        facts = real(path)
        if stat.S_ISREG(facts.st_mode):
            values = list(facts)
            values[stat.ST_SIZE] = 20
            return os.stat_result(values)
        return facts

    monkeypatch.setattr(Path, "lstat", old_facts)
    with pytest.raises(ConsoleError, match="changed while it was packed"):
        list(pack(tmp_path, left_out=lambda *_: None))


def test_names_that_are_no_text_and_very_long(tmp_path) -> None:
    odd = os.fsdecode(b"\xff-\xc3\xa9")
    deep = tmp_path.joinpath(*["d" * 60] * 5)
    deep.mkdir(parents=True)
    (deep / odd).write_text("1")
    data = b"".join(pack(tmp_path, left_out=lambda *_: None))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames()[-1] == f"{'/'.join(['d' * 60] * 5)}/{odd}"
