"""What people get wrong at `up` and `submit`: one clear line, the right exit code, and never a traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kernels import KernelProcess
from support.scenes import Scene, console, scene_of_its_own, short_directory

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

NOWHERE = "postgresql://127.0.0.1:9/none"

GOOD = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: good}
spec:
  run: {command: ["true"]}
  permissions: {allow: []}
"""


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


@pytest.fixture
def place() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


def up(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return console("up", *words, **more)


def one_line(done: subprocess.CompletedProcess[str], code: int, *wanted: str) -> str:
    """The one line of a refusal; it names what is wrong and has no traceback behind it."""
    text = done.stderr.strip()
    assert done.returncode == code, (done.returncode, text, done.stdout)
    assert "Traceback" not in text
    assert len(text.splitlines()) == 1, text
    for word in wanted:
        assert word in text, text
    return text


# -- up ---------------------------------------------------------------------------------------------------------------


def test_up_with_a_missing_kernel_file(place: Path) -> None:
    one_line(up("--data", str(place / "d"), "--config", str(place / "none.yaml")), 2, "none.yaml")


def test_up_with_a_wrong_kernel_file_names_the_place(place: Path) -> None:
    config = place / "ringfence.yaml"
    config.write_text("apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  ceilings:\n    denyy: []\n")
    one_line(up("--data", str(place / "d"), "--config", str(config)), 2, "ringfence.yaml:5:5:", "denyy")
    config.write_bytes(b"\xff\xfe")
    one_line(up("--data", str(place / "d"), "--config", str(config)), 2, "ringfence.yaml")


@pytest.mark.parametrize(
    ("dsn", "code"),
    [
        ("postgresql://127.0.0.1:9/none?connect_timeout=2", 6),
        ("postgresql:///none?host=/nonexistent", 6),
        ("not a dsn at all", 2),
        ("postgresql://[::1", 2),
    ],
)
def test_up_with_a_database_that_is_not_there(place: Path, dsn: str, code: int) -> None:
    one_line(up("--data", str(place / "d"), "--dsn", dsn), code, "database" if code == 6 else "DSN")


def test_up_shows_no_password_of_its_dsn(place: Path) -> None:
    for dsn in (
        "postgresql://user:hunter2@127.0.0.1:9/none?connect_timeout=2",
        "postgresql://user:hunter2%zz@127.0.0.1/none",
        "host=127.0.0.1 port=9 password='hunter2",
    ):
        done = up("--data", str(place / "d"), "--dsn", dsn)
        assert done.returncode in (2, 6), done.stderr
        assert "hunter2" not in done.stderr + done.stdout
        assert "Traceback" not in done.stderr


def test_up_on_a_directory_in_use(scene: Scene) -> None:
    data = scene.kernel.data
    assert scene.kernel.process is not None
    done = up("--data", str(data), "--dsn", str(scene.kernel.dsn))
    one_line(done, 5, "in use", str(scene.kernel.process.pid))
    # The one that runs is none the worse for it.
    assert scene.operator.ask("Status")["pid"] == scene.kernel.process.pid
    assert console("status", "--data", str(data)).returncode == 0


def test_up_where_it_is_not_known_where_sandboxes_ran(place: Path) -> None:
    (place / "d/remote").mkdir(parents=True)
    (place / "d").chmod(0o700)
    (place / "d/remote/owner.json").write_text("{")
    done = up("--data", str(place / "d"), "--dsn", NOWHERE)
    one_line(done, 1, "owner.json", "it is damaged; mend or remove it")


def test_up_on_what_is_no_directory(place: Path) -> None:
    file = place / "file"
    file.write_text("")
    one_line(up("--data", str(file), "--dsn", NOWHERE), 1, str(file))
    one_line(up("--data", str(file / "below"), "--dsn", NOWHERE), 1, "below")


def test_up_on_a_directory_that_may_not_be_written(place: Path) -> None:
    closed = place / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    argv = [sys.executable, "-m", "ringfence.console", "up", "--data", str(closed / "d"), "--dsn", NOWHERE]
    if os.geteuid() == 0:
        # Root may write anywhere by a capability; without it, it may not.
        argv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *argv]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    one_line(done, 1, "closed")


def test_commands_without_a_kernel(place: Path) -> None:
    for words in (["ps"], ["show", "x"], ["status"], ["kill", "x"], ["audit", "verify"]):
        one_line(console(*words, "--data", str(place / "none")), 6)
    # One that was killed and left its file.
    kernel = KernelProcess(place / "k")
    (place / "k").mkdir()
    (place / "k" / "kernel.json").write_text(
        '{"pid": 999999, "listen": "unix:/nonexistent/s.sock", "version": "0"}'
    )
    one_line(console("ps", "--data", str(kernel.data)), 6)
    (place / "k" / "kernel.json").write_text("garbage")
    one_line(console("ps", "--data", str(kernel.data)), 6)


# -- submit -------------------------------------------------------------------------------------------------------------

WRONG = [
    ("kind: Agent\n", "apiVersion"),
    (GOOD.replace("metadata: {name: good}\n", ""), "metadata"),
    (GOOD.replace("name: good", "name: 'a b'"), "name"),
    (GOOD.replace("permissions", "permisions"), "permisions"),
    (GOOD.replace("allow: []", "allow: [fs.read: /etc/passwd]"), "/etc/passwd"),
    (GOOD.replace("allow: []", "allow: [fs.raed: x]"), "fs.raed"),
    (GOOD.replace("allow: []", "allow: [], allow: []"), "allow"),
    (GOOD.replace('["true"]', "[]"), "command"),
    (GOOD.replace('["true"]', "true"), "command"),
    (GOOD + "  sandbox: {memory: lots}\n", "lots"),
    (GOOD + "  budgets: {rate: {fs.read: fast}}\n", "fast"),
    (GOOD + "  restart: {policy: sometimes}\n", "sometimes"),
    (GOOD + "  run: {command: [again]}\n", "run"),
    (GOOD + "  when: [{action: fs.read, if: tainted, then: allow}]\n", "when"),
    (GOOD + "  schedule: {cron: '* * * *'}\n", "cron"),
    (GOOD + "\tx: 1\n", ""),
    (GOOD.replace("{name: good}", "&a {name: good}"), "anchor"),
    ("[]", ""),
    ("", ""),
]


@pytest.mark.parametrize(("text", "word"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_every_problem_of_a_manifest_has_its_place(scene: Scene, text: str, word: str) -> None:
    """Through the operator's door, which is where other tools come in."""
    from support.kernels import Refused

    with pytest.raises(Refused) as refused:
        scene.operator.submit(text, {})
    assert refused.value.exit_code == 2
    for line in str(refused.value).splitlines():
        assert re.match(r"test\.yaml:\d+:\d+: .+; .+", line), line
    assert word in str(refused.value)


def test_submit_shows_all_problems_and_makes_nothing(scene: Scene, place: Path) -> None:
    manifest = place / "agent.yaml"
    manifest.write_text(GOOD.replace("permissions", "permisions") + "  restart: {policy: sometimes}\n")
    done = console("submit", str(manifest), "--data", str(scene.kernel.data))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    problems = [line for line in done.stderr.splitlines() if re.search(r"agent\.yaml:\d+:\d+: ", line)]
    assert len(problems) >= 2
    assert [row for row in scene.operator.ask("List", all=True)["agents"] if row["name"] == "good"] == []


def test_submit_of_what_is_not_there(scene: Scene, place: Path) -> None:
    data = str(scene.kernel.data)
    one_line(console("submit", str(place / "none.yaml"), "--data", data), 2, "none.yaml")
    one_line(console("submit", str(place), "--data", data), 2)
    manifest = place / "agent.yaml"
    manifest.write_text(GOOD.replace('{command: ["true"]}', '{command: ["true"], workspace: ./none}'))
    one_line(console("submit", str(manifest), "--data", data), 2, "none")
    manifest.write_text(GOOD)
    one_line(
        console("submit", str(manifest), "--data", data, "--input", str(place / "no-input")), 2, "no-input"
    )
    manifest.write_bytes(b"\xff\xfe\x00")
    one_line(console("submit", str(manifest), "--data", data), 2, "agent.yaml")
    manifest.write_text("#" * (300 << 10))
    done = console("submit", str(manifest), "--data", data)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_submit_waits_and_ends_as_the_agent_ends(scene: Scene, place: Path) -> None:
    data = str(scene.kernel.data)
    manifest = place / "agent.yaml"
    manifest.write_text(GOOD)
    done = console("submit", str(manifest), "--data", data, "--wait")
    assert done.returncode == 0, done.stderr
    manifest.write_text(GOOD.replace('["true"]', '["false"]') + "  restart: {policy: never}\n")
    done = console("submit", str(manifest), "--data", data, "--wait")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


# -- workspaces -----------------------------------------------------------------------------------------------------------


def test_a_workspace_that_reaches_outside_is_refused(scene: Scene) -> None:
    import io
    import tarfile

    from ringfence.v1 import operator_pb2 as pb
    from support.kernels import Refused

    def submit(tar: bytes) -> None:
        header = pb.SubmitHeader(manifest=GOOD, source="test.yaml")
        frames = [pb.SubmitRequest(header=header), pb.SubmitRequest(workspace=tar)]
        call, _ = scene.operator._method("Submit", "stream_unary")
        import grpc

        try:
            call(iter(frames), timeout=60)
        except grpc.RpcError as error:
            raise Refused(error) from None

    def tar_with(**facts: Any) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            info = tarfile.TarInfo(facts.pop("name"))
            for key, value in facts.items():
                setattr(info, key, value)
            tar.addfile(info)
        return out.getvalue()

    before = sorted(path.name for path in (scene.kernel.data / "agents").iterdir())
    known = scene.operator.ask("List", all=True)["agents"]
    outside = scene.kernel.data.parent / "outside"
    for tar in (
        tar_with(name="../outside"),
        tar_with(name=str(outside)),
        tar_with(name="dev", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        tar_with(name="fifo", type=tarfile.FIFOTYPE),
        tar_with(name="hard", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        b"this is no tar" * 100,
    ):
        with pytest.raises(Refused) as refused:
            submit(tar)
        assert refused.value.exit_code == 2
        assert "\n" not in str(refused.value)
    assert not outside.exists()
    assert sorted(path.name for path in (scene.kernel.data / "agents").iterdir()) == before
    assert scene.operator.ask("List", all=True)["agents"] == known
