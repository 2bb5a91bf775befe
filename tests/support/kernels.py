"""A real kernel process, its operator client, and the separate processes that count effects."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from ringfence.v1 import operator_pb2 as pb
from support.kernel_template import Forked, template

SERVICE = pb.DESCRIPTOR.services_by_name["OperatorService"]
WAIT_S = 60.0
START_S = 600.0
"""How long a kernel's start may take while it makes progress: a machine may be shared by many."""


class Refused(Exception):
    """What the kernel told an operator."""

    def __init__(self, error: Any) -> None:
        super().__init__(error.details())
        metadata = dict(error.trailing_metadata() or ())
        self.reason = metadata.get("ringfence-reason", error.code().name)
        self.exit_code = int(metadata.get("ringfence-exit-code", "-1"))


class Operator:
    """The operator service of one kernel."""

    def __init__(self, socket: str) -> None:
        self._channel = grpc.insecure_channel(socket)

    def close(self) -> None:
        self._channel.close()

    def _method(self, name: str, kind: str) -> tuple[Any, Any]:
        method = SERVICE.methods_by_name[name]
        request = message_factory.GetMessageClass(method.input_type)
        answer = message_factory.GetMessageClass(method.output_type)
        call = getattr(self._channel, kind)(
            f"/{SERVICE.full_name}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=answer.FromString,
        )
        return call, request

    def ask(self, name: str, /, timeout: float = WAIT_S, **fields: Any) -> Any:
        call, request = self._method(name, "unary_unary")
        try:
            return json.loads(call(request(**fields), timeout=timeout).json)
        except grpc.RpcError as error:
            raise Refused(error) from None

    def stream(self, name: str, **fields: Any) -> list[Any]:
        call, request = self._method(name, "unary_stream")
        try:
            parts = list(call(request(**fields), timeout=WAIT_S))
        except grpc.RpcError as error:
            raise Refused(error) from None
        return [p.data if isinstance(p, pb.Chunk) else json.loads(p.json) for p in parts]

    def submit(
        self, manifest: str, files: dict[str, Any], *, name: str = "", input_bytes: bytes = b""
    ) -> str:
        header = pb.SubmitHeader(manifest=manifest, source="test.yaml", name=name, input=input_bytes)
        frames = [pb.SubmitRequest(header=header), pb.SubmitRequest(workspace=tar_of(files))]
        call, _ = self._method("Submit", "stream_unary")
        try:
            return json.loads(call(iter(frames), timeout=WAIT_S).json)["id"]
        except grpc.RpcError as error:
            raise Refused(error) from None

    def wait(self, agent: str) -> dict[str, Any]:
        return self.ask("Wait", agent=agent)

    def steps(self, agent: str) -> list[dict[str, Any]]:
        return self.stream("Steps", agent=agent)


def tar_of(files: dict[str, Any]) -> bytes:
    """A workspace: text or bytes by path; None makes a directory, a `(mode, content)` pair sets its mode."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, given in files.items():
            info = tarfile.TarInfo(path)
            info.mode, content = given if isinstance(given, tuple) else (0o644, given)
            if content is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(info)
                continue
            data = content.encode() if isinstance(content, str) else content
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


class KernelProcess:
    """`ringfence up` as a child; may be killed and started again on the same data."""

    def __init__(
        self, data: Path, *, dsn: str | None = None, config: str = "", wrap: Sequence[str] = ()
    ) -> None:
        self.data = data
        self.wrap = wrap
        self.dsn = dsn
        self.failpoints = data.parent / f"{data.name}-failpoints"
        self.failpoints.mkdir(parents=True, exist_ok=True)
        self.config = data.parent / f"{data.name}.yaml"
        self.log = data.parent / f"{data.name}.log"
        self.config.write_text(config or "apiVersion: ringfence/v1\nkind: Kernel\nspec: {}\n")
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self.env: dict[str, str] = {}
        self.operator: Operator = None  # type: ignore[assignment]

    def start(self, **env: str) -> Operator:
        words = ["up", "--data", str(self.data), "--config", str(self.config)]
        if self.dsn:
            words += ["--dsn", self.dsn]
        own = {**self.env, **env}
        environment = {**os.environ, "RINGFENCE_FAILPOINTS": str(self.failpoints), **own}
        made = template()
        if not self.wrap and not own and made.suits():
            self.process = made.start(["ringfence", *words], environment, self.log)
        else:
            argv = [*self.wrap, sys.executable, "-m", "ringfence.console", *words]
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
                )
        told = self.data / "kernel.json"
        pid = self.process.pid
        eventually(lambda: self._listening(told), f"the kernel did not start: see {self.log}", of=pid)
        self.operator = Operator(json.loads(told.read_text())["listen"])
        eventually(self._answers, f"the kernel does not answer: see {self.log}", of=pid)
        return self.operator

    def _listening(self, told: Path) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return json.loads(told.read_text())["pid"] == self.process.pid
        return False

    def _answers(self) -> bool:
        with contextlib.suppress(Refused):
            return bool(self.operator.ask("Status", timeout=2))
        return False

    def kill(self) -> None:
        """SIGKILL from outside."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.operator.close()

    def stop(self) -> int:
        """An ordered stop."""
        if self.process is None or self.process.poll() is not None:
            return 0
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        self.operator.close()
        return code

    # -- failpoints ---------------------------------------------------------------------------------------------------

    def arm(self, name: str) -> None:
        (self.failpoints / name).touch()

    def disarm(self, name: str) -> None:
        for path in (self.failpoints / name, self.failpoints / f"{name}.hit"):
            path.unlink(missing_ok=True)

    def hit(self, name: str) -> bool:
        return (self.failpoints / f"{name}.hit").exists()

    def await_hit(self, name: str) -> None:
        eventually(lambda: self.hit(name), f"failpoint {name} was not reached")


def eventually(
    true: Callable[[], bool], message: str, within_s: float = WAIT_S, *, of: int | None = None
) -> None:
    """Poll for a state of another process: it has no other way to tell.

    Args:
        true: the state.
        message: what an assertion says where it does not come.
        within_s: how long nothing may move.
        of: a process; as long as it takes processor time, by itself or by what it started, it is waited for up to `START_S`.
    """
    began = moved = time.monotonic()
    taken = -1
    while not true():
        now = time.monotonic()
        if of is not None and now < began + START_S and (ticks := _ticks(of)) != taken:
            taken, moved = ticks, now
        if now > moved + within_s:
            raise AssertionError(message)
        time.sleep(0.01)


def _ticks(pid: int) -> int:
    """Processor time of a process and of those that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return sum(int(field) for field in fields[11:15])


@contextlib.contextmanager
def running(data: Path, **more: Any) -> Iterator[KernelProcess]:
    """A kernel for one test; nothing of it is left afterwards."""
    kernel = KernelProcess(data, **more)
    try:
        kernel.start()
        yield kernel
    finally:
        kernel.stop()
