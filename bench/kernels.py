"""A real kernel, `ringfence up`, as a child; and its operator."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ringfence.console.client import Client
from ringfence.console.errors import ConsoleError
from ringfence.kernel.postgres import EmbeddedPostgres

from bench.host import BenchError, child, cpu_seconds, end, eventually, last_line

PART_BYTES = 1 << 20
"""Bytes of a workspace that are sent at a time."""


TIMED = b"""
import json, sys, time
from ringfence import agent

job = json.load(sys.stdin)
clock = time.perf_counter
with agent.boot() as rf:
    def timed(work):
        began = clock()
        work()
        return clock() - began
"""
"""How programs begin that time their own calls: `job` is their input, `timed(work)` gives seconds. What follows is indented once."""


class Kernel:
    """One data directory, and the kernel process that serves it now."""

    def __init__(self, data: Path, dsn: str | None = None, config: str = "") -> None:
        self.data = data
        self._config = data.parent / f"{data.name}.yaml" if config else None
        if self._config is not None:
            self._config.write_text(config)
        self._dsn = dsn
        self._log = data.parent / f"{data.name}.log"
        self.process: subprocess.Popen[Any] | None = None
        self.client: Client | None = None

    @property
    def pid(self) -> int:
        """Of the running kernel."""
        assert self.process is not None
        return self.process.pid

    @property
    def operator(self) -> Client:
        """Connected to the running kernel."""
        assert self.client is not None
        return self.client

    def start(self) -> None:
        """Start it, and return when it answers an operator."""
        with self._log.open("ab") as log:
            argv = [sys.executable, "-m", "ringfence.console", "up", "--data", str(self.data)]
            if self._dsn is not None:
                argv += ["--dsn", self._dsn]
            if self._config is not None:
                argv += ["--config", str(self._config)]
            bytecode = self.data.parent.parent / "bytecode"
            self.process = child(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_installed(bytecode)
            )
        # On a busy machine it may take long; nothing is wrong as long as it gets on.
        pid = self.process.pid
        eventually(self._answers, "the kernel did not answer", every_s=0.01, moves=lambda: cpu_seconds(pid))

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise BenchError(f"the kernel ended: {last_line(self._log)}")
        told = self.data / "kernel.json"
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, ConsoleError):
            facts = json.loads(told.read_text())
            if facts["pid"] == self.process.pid:
                client = Client(facts["listen"])
                try:
                    client.call("Status", 2.0)
                except ConsoleError:
                    client.close()
                    raise
                self.client = client
                return True
        return False

    def kill(self) -> None:
        """SIGKILL from outside."""
        assert self.process is not None
        self.operator.close()
        self.client = None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """An ordered stop."""
        if self.client is not None:
            self.client.close()
            self.client = None
        if self.process is not None:
            end(self.process)

    def submit(self, manifest: str, files: Mapping[str, bytes], *, job: bytes = b"") -> str:
        """Submit an agent; gives its id."""
        header = {"manifest": manifest, "source": "bench.yaml", "input": job}
        tar = tar_of(files)
        parts = (tar[at : at + PART_BYTES] for at in range(0, len(tar), PART_BYTES))
        return str(self.operator.submit(header, parts)["id"])

    def output(self, agent: str, *, stderr: bool = False) -> str:
        """What an agent has printed."""
        return b"".join(self.operator.chunks("Logs", agent=agent, stderr=stderr)).decode()

    def finished(self, agent: str) -> dict[str, Any]:
        """Wait for the end of an agent; gives the JSON document of its last line.

        Raises:
            BenchError: it failed.
        """
        ended = self.operator.call("Wait", 600.0, agent=agent)
        if ended["state"] != "done":
            said = self.output(agent, stderr=True).strip().splitlines()
            raise BenchError(
                f"agent `{agent}` is {ended['state']}: {said[-1] if said else ended.get('error', '')}"
            )
        return json.loads(self.output(agent).strip().splitlines()[-1])

    @property
    def dsn(self) -> str:
        """Of its database: what it was given, else of the embedded server."""
        return self._dsn or EmbeddedPostgres(self.data).dsn()


def _installed(bytecode: Path) -> dict[str, str]:
    """An environment in which modules are compiled once, as those of an installed package are, and not at each start."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(bytecode)}


@contextlib.contextmanager
def running(directory: Path, config: str = "") -> Iterator[Kernel]:
    """A kernel for one measurement, with a kernel file where one is given; nothing of it is left afterwards."""
    kernel = Kernel(directory / "k", config=config)
    try:
        kernel.start()
        yield kernel
    except ConsoleError as error:
        raise BenchError(f"the kernel refused: {error}") from error
    finally:
        kernel.stop()


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """A workspace."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.mode, info.size = 0o644, len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def environment() -> dict[str, str]:
    """For bare references: the same interpreter, without gRPC's chatter."""
    return {**os.environ, "GRPC_VERBOSITY": "NONE"}
