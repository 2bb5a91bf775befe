"""A sandbox host on what is as good as another machine: a network and mount namespace of its own, with nothing of the test's.

    elsewhere.py WORK

Runs as the host process itself: leaves the test's namespaces but for one inherited listening socket, hides every path that
the test can name behind file systems of its own, and becomes `ringfence sandbox-host`. `start` is the test's side.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SERVER = Path("/tmp/server")
"""Where the host has its data, in its own /tmp."""
START_S = 60
_PR_SET_PDEATHSIG = 1


@dataclass
class Elsewhere:
    """A machine that runs a sandbox host.

    Attributes:
        certs: the kernel's certificates.
        address: what the kernel is told.
    """

    place: Path
    certs: Path
    lease: str = "30s"
    provide: tuple[Path, ...] = ()
    address: str = ""
    process: subprocess.Popen[bytes] | None = None
    _listener: socket.socket | None = None
    _work: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return (self.place / "host.log").read_text()

    def start(self) -> None:
        """Start the host, or start it again after its death on the same address."""
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        fd = self._listener.fileno()
        certs = {p.name: p.read_text() for p in (self.place / "certs" / "host-sandbox-host").iterdir()}
        words = ["--json", "--data", str(SERVER / "data"), "sandbox-host", "--listen", f"fd:{fd}"]
        words += ["--certs", str(SERVER / "certs"), "--lease", self.lease]
        for path in self.provide:
            words += ["--provide", str(path)]
        work = {"certs": certs, "words": words, "keep": [str(path) for path in (*kept(), *self.provide)]}
        with (self.place / "host.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(work)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[fd],
                cwd="/",
            )
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], START_S)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.kill()
        assert line, f"the sandbox host does not start: {self.log}"

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> int:
        """An ordered stop; answers the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(START_S)
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def make(place: Path, **more: Any) -> Elsewhere:
    """Certificates for a kernel and a host, and the machine that the host is to run on."""
    from ringfence.sandbox.remote import issue

    place.mkdir(exist_ok=True)
    issue.make_authority(place / "certs/ca")
    for role, name, peer in (("host", "sandbox-host", "kernel"), ("kernel", "kernel", "sandbox-host")):
        issue.issue(place / "certs/ca", place / f"certs/{role}-{name}", role, name, peers=(peer,), days=1)
    return Elsewhere(place, place / "certs/kernel-kernel", **more)


@contextlib.contextmanager
def running(place: Path, **more: Any) -> Iterator[Elsewhere]:
    """The same, started, and ended with the context."""
    machine = make(place, **more)
    machine.start()
    try:
        yield machine
    finally:
        machine.close()


def kept() -> list[Path]:
    """What the host process itself runs from."""
    import ringfence.console
    import ringfence.policy
    import ringfence.sandbox
    import ringfence.syscalls
    import ringfence.v1

    packages = (ringfence.console, ringfence.policy, ringfence.sandbox, ringfence.syscalls, ringfence.v1)
    sources = [Path(package.__path__[0]).parent.parent for package in packages]
    found = [Path(entry) for entry in sys.path if entry and Path(entry).is_dir()]
    return [Path(sys.prefix), Path(sys.base_prefix), *sources, *found]


def leave(work: dict[str, Any]) -> None:
    """Leave the test's namespaces and hide its files."""
    from ringfence.sandbox.native import linux

    linux.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a test that is killed leaves nothing behind
    uid, gid = os.geteuid(), os.getegid()
    user = 0 if uid == 0 else linux.CLONE_NEWUSER
    linux.unshare(user | linux.CLONE_NEWNET | linux.CLONE_NEWNS | linux.CLONE_NEWIPC)
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    hidden = ("/tmp", "/var/tmp", "/home", "/root")
    handles = {
        path: os.open(path, os.O_PATH | os.O_CLOEXEC)
        for path in sorted({os.path.realpath(path) for path in work["keep"]} | set(work["keep"]))
        if any(path.startswith(f"{top}/") for top in hidden)
    }
    for top in hidden:
        if Path(top).is_dir():
            linux.mount("tmpfs", top, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777")
    for path, handle in handles.items():
        Path(path).mkdir(parents=True, exist_ok=True)
        linux.mount(f"/proc/self/fd/{handle}", path, None, linux.MS_BIND | linux.MS_REC)
        os.close(handle)
    (SERVER / "certs").mkdir(parents=True, mode=0o700)
    for name, text in work["certs"].items():
        path = SERVER / "certs" / name
        path.touch(mode=0o600)
        path.write_text(text)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    leave(asked)
    os.execv(sys.executable, [sys.executable, "-m", "ringfence.console", *asked["words"]])  # noqa: S606 - no shell
