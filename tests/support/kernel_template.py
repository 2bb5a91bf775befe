"""Kernels of tests, started by a process that has loaded what a kernel is made of: a fork of it is a kernel.

Loading takes most of the processor time of a start, and tests start kernels by the hundred. What a fork runs is the command
line itself, `ringfence up` with its words, environment, directory and log; only the loading is not done again. Kernels that
get an environment or a program around them are started as programs of their own, and so are those that commands start.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_LOADS = ("PYTHON", "LD_", "GRPC", "MALLOC")
"""Beginnings of names that count when a program is loaded."""
_MODULES = (
    "ringfence.console.cli",
    "ringfence.kernel.main",
    "ringfence.kernel.kernel_log",
    "ringfence.sandbox.native",
)


class Forked:
    """A kernel that the template has made, with what tests use of `subprocess.Popen`."""

    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template
        # It can't be another's by now: only `reap` makes the number free.
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """How it ended; None: it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it did not come.
        """
        if self.returncode is None:
            looking = select.poll()
            looking.register(self._handle, select.POLLIN)
            if not looking.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("ringfence up", timeout or 0)
            self.returncode = self._template.ask(reap=self.pid)
            os.close(self._handle)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that forks; it has no thread and nothing open but two pipes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lock = threading.Lock()
        self._loaded = _that_load(os.environ)
        atexit.register(self.end)

    def suits(self) -> bool:
        """Whether a program that starts now would be loaded as this one was."""
        return self._process.poll() is None and self._loaded == _that_load(os.environ)

    def start(self, words: list[str], env: dict[str, str], log: Path) -> Forked:
        return Forked(self, self.ask(words=words, env=env, log=str(log), cwd=str(Path.cwd())))

    def ask(self, **order: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate()


_template: Template | None = None


def template() -> Template:
    """The one of this process; made when it is first asked for."""
    global _template  # noqa: PLW0603 - there is one, as long as this process lives
    if _template is None:
        _template = Template()
    return _template


def _that_load(env: Any) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_LOADS)}


# -- the process itself -----------------------------------------------------------------------------------------------


def _serve() -> dict[str, Any] | None:
    """Take orders until nobody gives any: None. In a fork: what it is to be."""
    for line in sys.stdin:
        order = json.loads(line)
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            return order
        print(pid, flush=True)
    return None


def _become(order: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for at, fd in enumerate((nothing, log, log)):
        os.dup2(fd, at)
    for fd in {nothing, log}:
        os.close(fd)
    sys.argv = order["words"]
    importlib.import_module("ringfence.console.cli").main()


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = importlib.import_module("ringfence.kernel.config")
    for name, value in config.GRPC_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in _MODULES:
        importlib.import_module(name)
    order = _serve()
    if order is not None:
        _become(order)


if __name__ == "__main__":
    _main()
