"""Agents for tests of a real kernel: programs that run in their sandbox, and held ones whose calls the test makes itself.

A held agent is a real process in a real sandbox that only waits; the test talks to its socket with its token and the
library that agents use, so every call takes the whole path of the kernel, at the moment the test wants it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from ringfence.agent import RingfenceError
from ringfence.agent.runtime import Ringfence
from ringfence.agent.session import Session
from ringfence.agent.wire import Settings
from ringfence.v1 import syscalls_pb2 as pb
from support.kernels import KernelProcess, Operator, eventually

HOLD = "printf '%s\\n' \"$RINGFENCE_TOKEN\"; exec sleep 100000"
STREAM = "/ringfence.v1.SyscallService/Stream"
ENDED = frozenset({"done", "failed", "killed", "unknown", "parked"})


def manifest_of(
    name: str,
    command: list[str],
    *,
    allow: Iterable[str] = (),
    ask: Iterable[str] = (),
    deny: Iterable[str] = (),
    labels: str = "",
    more: str = "",
) -> str:
    """A manifest; rules are lines such as `fs.read: "/workspace/**"`, `more` are further keys of `spec`."""
    lines = [
        "apiVersion: ringfence/v1",
        "kind: Agent",
        f"metadata: {{name: {name}, labels: {{{labels}}}}}",
        "spec:",
        f"  run: {{command: {json.dumps(command)}}}",
        "  permissions:",
    ]
    for verdict, rules in (("allow", list(allow)), ("ask", list(ask)), ("deny", list(deny))):
        lines += (
            [f"    {verdict}:", *(f"      - {rule}" for rule in rules)] if rules else [f"    {verdict}: []"]
        )
    return "\n".join(lines) + "\n" + "".join(f"  {line}\n" for line in more.strip().splitlines())


class Stream:
    """One raw stream to an agent's door: what the library would never send."""

    def __init__(self, target: str, token: str, *, greet: bool = True) -> None:
        import queue

        self._channel = grpc.insecure_channel(target, options=(("grpc.use_local_subchannel_pool", 1),))
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = self._channel.stream_stream(
            STREAM,
            request_serializer=pb.StreamRequest.SerializeToString,
            response_deserializer=pb.StreamResponse.FromString,
        )(iter(self._queue.get, None))
        self._number = 0
        if greet:
            self.send(pb.StreamRequest(hello=pb.Hello(token=token, protocol=1, client="test")))
            self.welcome = self.receive().welcome

    def send(self, frame: pb.StreamRequest) -> None:
        self._queue.put(frame)

    def receive(self) -> pb.StreamResponse:
        return next(self._call)

    def post(self, action: str, arguments: bytes = b"{}", *, lane: str = "0", step: int) -> None:
        self._number += 1
        call = pb.Call(id=self._number, lane=lane, step=step, action=action, arguments=arguments)
        self.send(pb.StreamRequest(call=call))

    def ask(self, action: str, arguments: bytes = b"{}", *, lane: str = "0", step: int) -> pb.Reply:
        self.post(action, arguments, lane=lane, step=step)
        return self.receive().reply

    def close(self) -> None:
        self._queue.put(None)
        self._call.cancel()
        self._channel.close()


@dataclass
class Held:
    """An agent whose calls the test makes."""

    scene: Scene
    id: str
    token: str
    socket: Path
    _session: Session | None = field(default=None, repr=False)
    _rf: Ringfence | None = field(default=None, repr=False)

    @property
    def rf(self) -> Ringfence:
        """The library, connected to this agent's door."""
        if self._rf is None:
            self._session = Session(Settings(socket=str(self.socket), token=self.token))
            self._rf = Ringfence(self._session, 1, None)
        return self._rf

    @property
    def live(self) -> Path:
        return self.scene.live(self.id)

    @property
    def operator(self) -> Operator:
        return self.scene.operator

    def stream(self, token: str | None = None, *, greet: bool = True) -> Stream:
        return Stream(f"unix:{self.socket}", self.token if token is None else token, greet=greet)

    def steps(self) -> list[dict[str, Any]]:
        return self.operator.steps(self.id)

    def last(self) -> dict[str, Any]:
        return self.steps()[-1]

    def refused(self, kind: type[RingfenceError], call: Callable[[], Any]) -> RingfenceError:
        """The call raises exactly this error."""
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind, caught.value
        return caught.value

    def disconnect(self) -> None:
        """Ends the test's connection; the agent's process lives on."""
        if self._session is not None:
            self._session.close()
        self._session = self._rf = None

    def again(self) -> Held:
        """The next start of the same agent, after a restart or a rollback: a new token and a fresh connection."""
        self.disconnect()
        known = self.token
        eventually(
            lambda: self.scene.token_of(self.id) not in (known, ""), f"{self.id} was not started again"
        )
        self.token = self.scene.token_of(self.id)
        return self

    def end(self) -> None:
        self.disconnect()
        with contextlib.suppress(Exception):
            self.operator.ask("Kill", agent=self.id)


class Scene:
    """A kernel with agents."""

    def __init__(self, kernel: KernelProcess) -> None:
        self.kernel = kernel
        self._held: list[Held] = []
        self._count = 0

    @property
    def operator(self) -> Operator:
        return self.kernel.operator

    def name(self, stem: str) -> str:
        self._count += 1
        return f"{stem}-{self._count}"

    def live(self, agent: str) -> Path:
        """The live workspace of an agent on this host."""
        return self.kernel.data / "agents" / agent / "live"

    def output(self, agent: str, *, stderr: bool = False) -> str:
        return b"".join(self.operator.stream("Logs", agent=agent, stderr=stderr)).decode("utf-8", "replace")

    def said(self, agent: str) -> list[Any]:
        """What a program printed, a JSON document a line."""
        return [json.loads(line) for line in self.output(agent).splitlines()]

    def token_of(self, agent: str) -> str:
        lines = self.output(agent).splitlines()
        return lines[-1] if lines else ""

    def kill_program(self, agent: str) -> None:
        """SIGKILL from outside; returns when that process is gone, which may take a busy machine a while."""
        pid = self.show(agent)["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: self.show(agent)["pid"] != pid, f"the program of {agent} does not die")

    def show(self, agent: str) -> dict[str, Any]:
        return self.operator.ask("Show", agent=agent)

    # -- programs -----------------------------------------------------------------------------------------------------

    def submit(
        self,
        program: str,
        *,
        name: str = "program",
        files: dict[str, Any] | None = None,
        input_bytes: bytes = b"",
        **manifest: Any,
    ) -> str:
        """Starts a Python program in its sandbox; gives the agent's id."""
        text = manifest_of(self.name(name), ["python", "agent.py"], **manifest)
        return self.operator.submit(text, {"agent.py": program, **(files or {})}, input_bytes=input_bytes)

    def run(self, program: str, *, expect: str = "done", **more: Any) -> str:
        """Runs a program to its end."""
        agent = self.submit(program, **more)
        self.await_end(agent, expect)
        return agent

    def await_end(self, agent: str, expect: str = "done") -> dict[str, Any]:
        ended = self.operator.wait(agent)
        assert ended["state"] == expect, (
            ended,
            self.output(agent, stderr=True)[-2000:],
            self.operator.steps(agent)[-3:],
        )
        return ended

    # -- held agents --------------------------------------------------------------------------------------------------

    def hold(
        self, *, name: str = "held", files: dict[str, Any] | None = None, command: str = HOLD, **manifest: Any
    ) -> Held:
        """Starts an agent whose process only waits, and hands its door to the test."""
        text = manifest_of(self.name(name), ["sh", "-c", command], **manifest)
        return self.held(self.operator.submit(text, files or {}))

    def held(self, agent: str) -> Held:
        """The door of an agent that runs `HOLD`: one that the test submitted, or that another agent spawned."""
        eventually(
            lambda: "\n" in self.output(agent),
            f"{agent} gave no token: {self.operator.ask('Show', agent=agent)}",
        )
        held = Held(self, agent, self.token_of(agent), self.socket_of(agent))
        self._held.append(held)
        return held

    def socket_of(self, agent: str) -> Path:
        """The agent's own socket; its number is the agent's key in the database."""
        listen = json.loads((self.kernel.data / "kernel.json").read_text())["listen"]
        return Path(listen.removeprefix("unix:")).parent / f"a{self.key_of(agent)}" / "syscall.sock"

    def key_of(self, agent: str) -> int:
        rows = self.sql("select key from agents where id = %s", agent)
        return rows[0][0]

    def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Asks the kernel's own database, beside the kernel."""
        import psycopg

        with psycopg.connect(self.database, autocommit=True) as connection:
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    @property
    def database(self) -> str:
        """Where the kernel keeps its journal."""
        from ringfence.kernel.postgres import EmbeddedPostgres

        return self.kernel.dsn or EmbeddedPostgres(self.kernel.data).dsn()

    def release(self) -> None:
        """Ends every held agent."""
        for held in self._held:
            held.end()
        self._held.clear()


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for sockets, with enough space behind it."""
    path = Path(tempfile.mkdtemp(prefix="rf-k-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def scene_on(dsn: str | None, **more: Any) -> Iterator[Scene]:
    """A kernel on a database, with nothing left of it afterwards."""
    env = more.pop("env", {})
    with short_directory() as directory:
        kernel = KernelProcess(directory / "d", dsn=dsn, **more)
        try:
            kernel.start(**env)
            scene = Scene(kernel)
            yield scene
            scene.release()
        finally:
            kernel.stop()


@contextlib.contextmanager
def scene_of_its_own(server: Any, template: str, **more: Any) -> Iterator[Scene]:
    """A kernel on a fresh database of the session's server; both are gone afterwards."""
    name = server.create(template)
    try:
        with scene_on(server.dsn(name), **more) as scene:
            yield scene
    finally:
        server.drop(name)


def console(
    *words: str, env: dict[str, str] | None = None, cwd: Path | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """One command of the command line, as a process."""
    return subprocess.run(
        [sys.executable, "-m", "ringfence.console", *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=90,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        check=False,
        **more,
    )
