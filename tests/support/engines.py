"""The docker engine of this host for tests, and a front for it that a test can spoil."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.sandbox.docker import image
from ringfence.sandbox.docker.engine import Engine, usual_host
from ringfence.sandbox.types import SandboxError

_engines: dict[str, Engine] = {}


def engine() -> Engine:
    """The one that `DOCKER_HOST` names, or the usual one."""
    return _engines.setdefault(usual_host(), Engine(usual_host()))


def base_image() -> str:
    """The digest of the base image; skips where there is none or no engine, and fails where CI=true."""
    try:
        found = image.find(engine(), image.TAG)
        reason = "" if found else "there is no base image on the engine: ringfence image build"
    except SandboxError as error:
        found, reason = "", str(error)
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return found


def containers(**labels: str) -> list[dict[str, Any]]:
    """Containers with these labels, `io.ringfence.` left out."""
    wanted = [f"io.ringfence.{name}={value}" for name, value in labels.items()]
    return engine().ask(lambda api: api.containers(all=True, filters={"label": wanted}))


def volumes(**labels: str) -> list[str]:
    wanted = [f"io.ringfence.{name}={value}" for name, value in labels.items()]
    found = engine().ask(lambda api: api.volumes(filters={"label": wanted}))["Volumes"] or []
    return [one["Name"] for one in found]


class Front:
    """A socket that passes everything on to the engine, until it is told to hang, to break off, or to listen no more.

    An engine that is started anew, or that hangs, can't be had in a test: others use it too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hanging = threading.Event()
        self._stopped = False
        self._pairs: list[socket.socket] = []
        self.open()

    @property
    def host(self) -> str:
        return f"unix://{self.path}"

    def open(self) -> None:
        self._stopped = False
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self.path))
        self.path.chmod(0o666)
        self._server.listen(64)
        threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def close(self) -> None:
        """As when the engine stops: nobody listens, and what was under way breaks off."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.path.unlink(missing_ok=True)
        for one in self._pairs:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def _accept(self, server: socket.socket) -> None:
        while not self._stopped:
            try:
                client, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as real:
            real.connect(usual_host().removeprefix("unix://"))
            self._pairs += [client, real]
            other = {client: real, real: client}
            with contextlib.suppress(OSError, ValueError):
                while not self._stopped:
                    for ready in select.select([client, real], [], [], 1)[0]:
                        data = ready.recv(1 << 16)
                        if not data:
                            return
                        if self.hanging.is_set():
                            continue  # it takes what is said, and never answers
                        other[ready].sendall(data)


@contextlib.contextmanager
def front(directory: Path) -> Iterator[Front]:
    made = Front(directory / "engine.sock")
    try:
        yield made
    finally:
        made.close()
