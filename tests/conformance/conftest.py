"""One suite for every backend and mode of `backends.KINDS`: `root` gives each agent a uid, `user` is an ordinary user's
kernel. Tests that ask for `native_box` look into what is the native backend's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ringfence.kernel.environment import interpreter_directories
from ringfence.sandbox.native.invocation import FLAGS_ON

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

sys.path.insert(0, str(Path(__file__).parent))
import exec_call
from backends import KINDS, OF_ONE_MODE, PYTHON, Kind

ANSWER_S = 60
CANARY = "host-canary-4711"
_SOURCE = Path(__file__).parents[2] / "sandbox"

WORKSPACE_FILES = {
    "a": "a\n",
    "b": "b\n",
    "data/1": "1",
    "data/2": "2",
    "data/deep/3": "3",
    ".env": "secret\n",
    "keep/k": "k",
}


def group_of(uid: int) -> int:
    """Of a user, who may be one that no table knows."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_gid
    return uid


class BackendError(Exception):
    """What the backend raised; `kind` is the name of the exception."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class Host:
    """The process that owns a backend."""

    def __init__(self, mode: str, data: Path, source: Path, script: str = "backend_host.py") -> None:
        uid = KINDS[mode].kernel_uid
        identity: dict[str, Any] = {}
        if uid is not None:
            identity = {"user": uid, "group": group_of(uid), "extra_groups": []}
        interpreter = sys.executable if uid is None else PYTHON
        self.process = subprocess.Popen(
            [interpreter, str(source / script), mode, str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                "PYTHONPATH": str(source),
                "PATH": os.environ["PATH"],
                "CANARY": CANARY,
                **{name: os.environ[name] for name in ("DOCKER_HOST",) if name in os.environ},
            },
            cwd="/",
            **identity,
        )
        self._waiting: dict[int, Future[Any]] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            reply = json.loads(line)
            future = self._waiting.pop(reply["id"])
            if "error" in reply:
                future.set_exception(BackendError(reply["error"], reply["kind"]))
            else:
                future.set_result(reply["result"])
        for future in self._waiting.values():
            future.set_exception(BackendError("the host is gone", "HostGone"))

    def begin(self, op: str, /, **arguments: Any) -> tuple[int, Future[Any]]:
        assert self.process.stdin is not None
        with self._lock:
            self._next += 1
            number = self._next
        future: Future[Any] = Future()
        self._waiting[number] = future
        order = json.dumps({"id": number, "op": op, "arguments": arguments})
        self.process.stdin.write(order.encode() + b"\n")
        self.process.stdin.flush()
        return number, future

    def call(self, op: str, /, **arguments: Any) -> Any:
        return self.begin(op, **arguments)[1].result(ANSWER_S)

    def end(self) -> None:
        """Kill it as a crash would."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@dataclass
class Running:
    """A program that was started."""

    host: Host
    number: int
    identity: dict[str, str | int]
    stdout: Path
    stderr: Path

    @property
    def pid(self) -> int:
        """Of the first process, where the backend's sandboxes are among this host's processes."""
        return int(self.identity["pid"])

    def wait(self) -> tuple[str, int]:
        ended = self.call("wait")
        return ended["reason"], ended["code"]

    def kill(self) -> None:
        self.call("kill")

    def call(self, op: str) -> Any:
        return self.host.call(op, program=self.number)

    def begin(self, op: str) -> tuple[int, Future[Any]]:
        return self.host.begin(op, program=self.number)


@dataclass
class Done:
    """A command that ended."""

    reason: str
    code: int
    upper: Path
    out: str
    err: str
    facts: dict[str, Any]


@dataclass
class Box:
    """One test's use of a backend in one mode."""

    mode: str
    place: Path
    host: Host
    source: Path
    hosts: list[Host] = field(default_factory=list)
    token: str = field(default_factory=lambda: f"token-{uuid.uuid4().hex}")
    number: int = 0

    @property
    def data(self) -> Path:
        return self.place / "data"

    @property
    def kind(self) -> Kind:
        return KINDS[self.mode]

    @property
    def owner(self) -> int | None:
        return self.kind.owner_uid

    @property
    def uid(self) -> int | None:
        return self.kind.agent_uid

    def directory(self, name: str, files: dict[str, str] | None = None, *, owner: int | None = None) -> Path:
        """A directory that the sandbox's user owns, with files in it."""
        top = self.place / name
        top.mkdir(mode=0o755)
        for relative, text in (files or {}).items():
            path = top / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.give(top, owner)
        return top

    def give(self, top: Path, owner: int | None = None) -> None:
        owner = self.owner if owner is None else owner
        if owner is not None:
            for path in (top, *top.rglob("*")):
                os.lchown(path, owner, owner)

    def fresh(self, name: str) -> str:
        self.number += 1
        return f"{name}-{self.number}"

    def another_host(self, script: str = "backend_host.py", data: Path | None = None) -> Host:
        """A second kernel process, on the same data directory or on one of its own."""
        host = Host(self.mode, data or self.data, self.source, script)
        self.hosts.append(host)
        return host

    def renew(self) -> None:
        """Let a new kernel take the place of the first, where a backend serves only the latest of a data directory."""
        if self.kind.fences:
            self.host.end()
            self.host = Host(self.mode, self.data, self.source)

    def program(
        self, argv: list[str], *, files: dict[str, str] | None = None, host: Host | None = None, **more: Any
    ) -> Running:
        """Start a program."""
        host = host or self.host
        name = self.fresh("program")
        image = self.directory(f"{name}-image", files)
        sockets = more.pop("socket_dir", None) or self.directory(f"{name}-sockets")
        # The kernel's own user owns what it opens for output.
        logs = self.directory(f"{name}-logs", owner=self.kind.kernel_uid)
        stdout, stderr = (Path(more.pop(stream, logs / stream)) for stream in ("stdout", "stderr"))
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TOKEN": self.token, **more.pop("env", {})}
        spec = {
            "agent": "agent-1",
            "argv": argv,
            "env": env,
            "image": str(image),
            "socket_dir": str(sockets),
            **more,
        }
        reply = host.call("start", **{"stdout": str(stdout), "stderr": str(stderr), "uid": self.uid, **spec})
        return Running(host, reply["program"], reply["identity"], stdout, stderr)

    def interpreter(self) -> tuple[list[str], dict[str, Any]]:
        """Words that come before a Python program's text, and what else its spec needs."""
        if not self.kind.warm:
            return [PYTHON, "-I", "-S", "-c"], {}
        env = {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", **FLAGS_ON}
        return ["python", "-c"], {"env": env, "readonly": [str(path) for path in interpreter_directories()]}

    def python(self, code: str, *arguments: str, **more: Any) -> Running:
        """Start a Python program; its processes carry the token on their command lines."""
        words, needed = self.interpreter()
        for name, value in needed.items():
            given = more.get(name)
            more[name] = value if given is None else {**value, **given} if name == "env" else [*value, *given]
        return self.program([*words, code, self.token, *arguments], **more)

    def command_spec(self, argv: list[str], workspace: Path, **more: Any) -> dict[str, Any]:
        scratch = self.directory(self.fresh("scratch"), owner=self.kind.kernel_uid)
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", **more.pop("env", {})}
        return {
            "agent": "agent-1",
            "argv": argv,
            "env": env,
            "lower": str(workspace),
            "scratch": str(scratch),
            "uid": self.uid,
            **more,
        }

    def run(self, script: str, workspace: Path, *, argv: list[str] | None = None, **more: Any) -> Done:
        """Run a shell script, or `argv`, as a command to its end."""
        spec = self.command_spec(argv or ["/bin/sh", "-c", script, self.token], workspace, **more)
        facts = self.host.call("command", **spec)
        out = Path(facts["stdout"]).read_text(errors="replace")
        err = Path(facts["stderr"]).read_text(errors="replace")
        return Done(facts["reason"], facts["code"], Path(facts["upper"]), out, err, facts)

    def changes(self, done: Done, workspace: Path) -> list[list[Any]]:
        text = self.host.call("changes", upper=str(done.upper), lower=str(workspace))
        return json.loads(text)["changes"]

    def alive(self) -> list[int]:
        """Processes of this test's sandboxes on the whole host."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if self.token.encode() in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def left(self) -> list[str]:
        """What is left of sandboxes on this host."""
        return [*map(str, self.alive()), *self.kind.left(self.data)]


@pytest.fixture(scope="session", params=list(KINDS))
def mode(request: pytest.FixtureRequest) -> str:
    kind = KINDS[request.param]
    if reason := kind.unsuited():
        pytest.skip(reason)
    if reason := kind.missing():
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="session")
def backend_source() -> Iterator[Path]:
    """The backend where any user can read it."""
    place = Path(tempfile.mkdtemp(prefix="ringfence-source-"))
    place.chmod(0o755)
    shutil.copytree(_SOURCE / "ringfence", place / "ringfence", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("backend_host.py", "backends.py", "crash_host.py", "points.py"):
        shutil.copy(Path(__file__).with_name(name), place)
    subprocess.run(["chmod", "-R", "a+rX", str(place)], check=True)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def module_box(mode: str, backend_source: Path) -> Iterator[Box]:
    """A backend whose process serves a whole test module."""
    place = Path(tempfile.mkdtemp(prefix="ringfence-conformance-"))
    place.chmod(0o755)
    kernel = KINDS[mode].kernel_uid
    box = Box(mode, place, None, backend_source)  # type: ignore[arg-type] # the host needs the directory first
    box.directory("data", owner=kernel)
    if kernel is not None:
        os.chown(place, kernel, kernel)
    with box.kind.around(box.data):
        box.host = Host(mode, box.data, backend_source)
        yield box
        for host in (box.host, *box.hosts):
            host.end()
    subprocess.run(["chmod", "-R", "u+rwX", str(place)], check=False)
    while place.exists():
        # What a killed kernel left may be cleaning up still.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(place)


@pytest.fixture
def box(module_box: Box) -> Box:
    """The module's backend with a token of this test's own."""
    module_box.token = f"token-{uuid.uuid4().hex}"
    return module_box


@pytest.fixture
def native_box(box: Box) -> Box:
    """The same for tests of what is the native backend's own; other modes are not collected."""
    return box


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything here starts real sandboxes."""
    here = Path(__file__).parent
    foreign: set[pytest.Item] = set()
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.sandbox)
            if _is_foreign(item):
                foreign.add(item)
    if foreign:
        config.hook.pytest_deselected(items=list(foreign))
        items[:] = [item for item in items if item not in foreign]


def _is_foreign(item: pytest.Item) -> bool:
    """Whether it is of the native backend's own, in a mode of another, or says nothing about its mode."""
    call = getattr(item, "callspec", None)
    if call is None or "mode" not in call.params:
        return False
    if call.params["mode"] != OF_ONE_MODE.get(item.path.stem, call.params["mode"]):
        return True
    kind = KINDS[call.params["mode"]]
    if kind.only and item.path.stem not in kind.only:
        return True
    return kind.backend != "native" and "native_box" in getattr(item, "fixturenames", ())


@pytest.fixture
async def exec_place() -> AsyncIterator[Path]:
    top = Path(tempfile.mkdtemp(prefix="ringfence-exec-"))
    top.chmod(0o755)
    workspace = top / "workspace"
    for name, text in WORKSPACE_FILES.items():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if os.geteuid() == 0:
        for path in (workspace, *workspace.rglob("*")):
            os.chown(path, exec_call.AGENT_UID, exec_call.AGENT_UID)
    yield top
    while exec_call.BACKENDS:
        await exec_call.BACKENDS.pop().close()
    subprocess.run(["chmod", "-R", "u+rwX", str(top)], check=False)
    shutil.rmtree(top)
