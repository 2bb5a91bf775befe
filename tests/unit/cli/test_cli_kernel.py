"""up, down, status, reload: how a kernel is started, found and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

STATUS = {
    "pid": 1,
    "version": "0.1.0",
    "data": "/d",
    "listen": "unix:/d/s",
    "database": {"embedded": True, "version": "18.6", "state": "ok"},
    "agents": {"running": 2, "done": 1},
    "config": {"file": "/k.yaml", "loaded_at": "2026-01-31T08:00:00Z", "error": None},
}


def test_status(door, run) -> None:
    door.answers["Status"] = STATUS
    result = run("status")
    assert result.exit_code == 0
    assert "database  ok (embedded, PostgreSQL 18.6)" in result.stdout
    assert "agents    running 2, done 1" in result.stdout
    assert json.loads(run("status", "--json").stdout) == STATUS


@pytest.mark.parametrize(
    "change",
    [
        {"database": {"embedded": False, "version": "16", "state": "away"}},
        {"config": {"file": "/k.yaml", "error": "/k.yaml:1:1: bad"}},
        {"database": {}},
        {"a2a": {"listen": "http://127.0.0.1:1", "problem": "a2a can't listen"}},
    ],
)
def test_status_that_is_not_well(change, door, run) -> None:
    door.answers["Status"] = {**STATUS, **change}
    assert run("status").exit_code == 1
    assert run("status", "--json").exit_code == 1


def test_status_says_where_tasks_are_heard_or_what_stands_in_the_way(door, run) -> None:
    door.answers["Status"] = {**STATUS, "a2a": {"listen": "http://127.0.0.1:1", "problem": None}}
    assert "a2a       http://127.0.0.1:1" in run("status").stdout
    door.answers["Status"] = {**STATUS, "a2a": {"listen": "http://127.0.0.1:1", "problem": "can't listen"}}
    assert "a2a       can't listen" in run("status").stdout


def test_reload(door, run) -> None:
    door.answers["Reload"] = {
        "file": "/k.yaml",
        "loaded_at": "2026-01-31T08:00:00Z",
        "resources": ["crm", "rates"],
    }
    assert "resources  crm, rates" in run("reload").stdout


@pytest.fixture
def sleeper():
    """A process that stands for a kernel on its way out."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


@pytest.mark.parametrize("answered", [True, False])
def test_down_returns_when_the_kernel_is_gone(answered, door, run, refusal, sleeper) -> None:
    import grpc

    door.answers["Status"] = {**STATUS, "pid": sleeper.pid}

    def leave(_request):
        sleeper.stdin.close()
        return (
            {"pid": sleeper.pid, "state": "stopping"}
            if answered
            else refusal("", None, status=grpc.StatusCode.UNAVAILABLE)
        )

    door.answers["Shutdown"] = leave
    result = run("down", "--drain", "1m", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"pid": sleeper.pid, "state": "stopped"})
    assert door.asked("Shutdown").drain_ms == 60_000
    assert sleeper.wait(0) == 0


def test_down_that_is_refused(door, run, refusal, sleeper) -> None:
    door.answers["Status"] = {**STATUS, "pid": sleeper.pid}
    door.answers["Shutdown"] = lambda _: refusal("the database can't be used", 6, "JournalUnavailable")
    assert run("down").exit_code == 6
    assert sleeper.poll() is None


@pytest.mark.parametrize("drain", ["soon", "-1"])
def test_down_with_a_drain_that_is_none(drain, door, run) -> None:
    assert run("down", f"--drain={drain}").exit_code == 2
    assert door.requests == []


# -- up: the kernel's own module is replaced, because these tests are about what the command hands to it ------------------


@pytest.fixture
def kernel_main(monkeypatch):
    module = ModuleType("ringfence.kernel.main")

    class StartError(Exception):
        def __init__(self, message: str, exit_code: int = 1) -> None:
            super().__init__(message)
            self.exit_code = exit_code

    module.StartError = StartError
    module.given = []

    def run(settings, announce):
        module.given.append(settings)
        announce("ringfence listens on unix:/x")
        return 0

    module.run = run
    monkeypatch.setitem(sys.modules, "ringfence.kernel.main", module)
    return module


def test_up_hands_over_its_settings(kernel_main, run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "k.yaml").write_text("x")
    result = run(
        "up", "--data", "d", "--config", "k.yaml", "--dsn", "postgresql://h/d", "--listen", "[::1]:7"
    )
    assert (result.exit_code, result.stdout) == (0, "ringfence listens on unix:/x\n")
    (settings,) = kernel_main.given
    assert (settings.data, settings.config) == (tmp_path / "d", tmp_path / "k.yaml")
    assert (settings.dsn, settings.listen) == ("postgresql://h/d", "[::1]:7")


def test_up_takes_the_dsn_from_the_environment(kernel_main, run, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RINGFENCE_DSN", "postgresql://e/d")
    document = json.loads(run("up", "--data", tmp_path, "--json").stdout)
    assert document == {
        "pid": os.getpid(),
        "listen": f"unix:{tmp_path}/run/operator.sock",
        "data": str(tmp_path),
    }
    assert kernel_main.given[0].dsn == "postgresql://e/d"


def test_up_without_a_directory_takes_the_users(kernel_main, run, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("RINGFENCE_DATA")
    run("up")
    assert kernel_main.given[0].data == tmp_path / "share" / "ringfence"
    assert kernel_main.given[0].dsn is None


def test_a_start_that_fails(kernel_main, run, tmp_path, monkeypatch) -> None:
    def run_it(_settings, _announce):
        raise kernel_main.StartError("the data directory is in use by a kernel (pid 7)", 5)

    monkeypatch.setattr(kernel_main, "run", run_it)
    result = run("up", "--data", tmp_path)
    assert (result.exit_code, result.stderr) == (
        5,
        "ringfence: the data directory is in use by a kernel (pid 7)\n",
    )


@pytest.mark.parametrize(
    "words", [("--config", "{}/none.yaml"), ("--config", "{}"), ("--connect", "unix:/x")]
)
def test_up_usage(words, kernel_main, run, tmp_path) -> None:
    result = run("up", *(word.format(tmp_path) for word in words))
    assert result.exit_code == 2
    assert kernel_main.given == []


# -- up --detach: a real child process, with a stand-in for the kernel on its path ------------------------------------------

STAND_IN = """
import json, os, sys, threading
from concurrent.futures import ThreadPoolExecutor
import grpc
import signal

class StartError(Exception):
    def __init__(self, message, exit_code=1):
        super().__init__(message)
        self.exit_code = exit_code

def run(settings, announce):
    mode = os.environ["STAND_IN"]
    if mode == "busy":
        raise StartError("the data directory is in use", 5)
    if mode == "crash":
        raise ZeroDivisionError("oh")
    if mode == "shot":
        os.kill(os.getpid(), signal.SIGKILL)
    listen = f"unix:{settings.data}/s"
    status = {"pid": os.getpid(), "listen": listen, "data": str(settings.data), "dsn": settings.dsn,
              "argv": sys.argv, "config": str(settings.config), "cwd": os.getcwd(), "session": os.getsid(0)}
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    from ringfence.v1 import operator_pb2 as pb
    def answer(request, context):
        return pb.Document(json=json.dumps(status).encode()).SerializeToString()
    handlers = {"Status": grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ringfence.v1.OperatorService", handlers),))
    server.add_insecure_port(listen)
    server.start()
    (settings.data / "kernel.json").write_text(json.dumps({"listen": listen}))
    (settings.data / "status").write_text(json.dumps(status))
    over.wait()
    server.stop(None).wait()
    return 0
"""


@pytest.fixture
def detach(tmp_path, door, monkeypatch):
    """Run `up --detach` with the stand-in; the data directory is short, for the socket."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, importlib\nclass Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'ringfence.kernel.main':\n"
        "            import importlib.util\n"
        f"            return importlib.util.spec_from_file_location(name, {str(tmp_path / 'stand_in.py')!r})\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    data = door.data / "d"

    def start(mode: str, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "STAND_IN": mode,
            "XDG_STATE_HOME": str(tmp_path),
        }
        environment.pop("RINGFENCE_DSN", None)
        command = [sys.executable, "-m", "ringfence.console", "up", "--detach", "--data", str(data), *words]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, cwd=tmp_path
        )

    start.data = data
    return start


def test_detach_returns_when_the_kernel_answers(detach, tmp_path) -> None:
    (tmp_path / "k.yaml").write_text("x")
    done = detach("serve", "--json", "--dsn", "postgresql://u:pw@h/d", "--config", "k.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    status = json.loads((detach.data / "status").read_text())
    command_line = Path(f"/proc/{said['pid']}/cmdline").read_bytes()
    os.kill(said["pid"], 15)
    assert said == {key: status[key] for key in ("pid", "listen", "data")}
    assert b"pw@h" not in command_line
    assert status["dsn"] == "postgresql://u:pw@h/d"
    assert status["config"] == str(tmp_path / "k.yaml")
    assert status["session"] == status["pid"]
    assert (detach.data.stat().st_mode & 0o777, (detach.data / "kernel.log").stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("busy", 5, "ringfence: the data directory is in use\n"),
        ("shot", 1, "ringfence: the kernel was ended by SIGKILL while it started; see `"),
        ("crash", 1, "ringfence: this is a bug in ringfence: ZeroDivisionError: oh; the details are in `"),
    ],
)
def test_detach_shows_why_the_kernel_ended(mode, code, said, detach) -> None:
    detach.data.mkdir()
    (detach.data / "kernel.log").write_text("ringfence: an old complaint\n")
    done = detach(mode)
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_detach_where_no_directory_can_be(detach) -> None:
    detach.data.write_text("a file")
    done = detach("serve")
    assert done.returncode == 2
    assert "can't be a data directory: file exists" in done.stderr


def test_demo_is_handed_its_directory(run, tmp_path, monkeypatch) -> None:
    module = ModuleType("ringfence.console.demo")
    given: list[object] = []
    module.main = lambda **words: given.append(words) or 1
    monkeypatch.setitem(sys.modules, "ringfence.console.demo", module)
    assert run("demo", "--data", tmp_path).exit_code == 1
    monkeypatch.delenv("RINGFENCE_DATA")
    run("demo", "--json")
    assert given == [{"data": Path(tmp_path), "as_json": False}, {"data": None, "as_json": True}]
