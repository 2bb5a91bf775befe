"""The suite's client scenarios: each server that it starts is declared to a running kernel, and an agent lists and calls its tools."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ringfence.agent import RingfenceError
from support.scenes import Held, Scene

from bench.mcp_conformance.found import Found, suite_of, taken_from

HERE = Path(__file__).parent
FOCAL, ECHO = "json_schema_2020_12_tool", "json_schema_echo"
TIMEOUT_MS = "20000"


class Harness:
    """Does what the suite's client is asked to do.

    Args:
        scene: a kernel; its file is written anew for each scenario, with that one server in it.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._before = scene.kernel.config.read_text()
        self._count = 0
        self._lock = threading.Lock()
        self._held: Held = scene.hold(allow=['mcp.*: "*"'])

    def _declare(self, resources: dict[str, Any]) -> None:
        file = {"apiVersion": "ringfence/v1", "kind": "Kernel", "spec": {"resources": resources}}
        self._scene.kernel.config.write_text(json.dumps(file))
        self._scene.operator.ask("Reload")

    def do(self, said: dict[str, Any]) -> str:
        """Declare the server, list its tools, and call those that there are to call."""
        with self._lock:
            self._count += 1
            name = f"s{self._count}"
            self._declare({name: {"type": "mcp", "url": said["url"], "timeout": "10s"}})
            try:
                return json.dumps(self._use(name, said["context"].get("toolCalls")))
            finally:
                # The session ends with that: the suite waits for its servers to be left alone.
                self._declare({})

    def _use(self, name: str, wanted: Sequence[dict[str, Any]] | None) -> list[Any]:
        mcp = self._held.rf.mcp
        tools = {tool.name: tool for tool in mcp.tools(name)}
        arguments: dict[str, Any] = {"add_numbers": {"a": 5, "b": 3}}
        if ECHO in tools:
            arguments[ECHO] = {"schema": tools[FOCAL].input_schema}
        calls = wanted or [{"name": tool, "arguments": arguments.get(tool, {})} for tool in tools]
        answers = [mcp.call(name, call["name"], call.get("arguments", {})).text for call in calls]
        return [sorted(tools), answers]

    def serve(self, listener: socket.socket) -> None:
        """Answer until the listener is shut."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, connection.makefile() as words:
                    said = json.loads(words.readline())
                    try:
                        answer = {"status": 0, "text": self.do(said)}
                    except RingfenceError as error:
                        answer = {"status": 1, "text": str(error)}
                    connection.sendall(json.dumps(answer).encode() + b"\n")

    def end(self) -> None:
        """Leave the kernel's file as it was."""
        self._scene.kernel.config.write_text(self._before)
        self._scene.operator.ask("Reload")


@contextlib.contextmanager
def serving(scene: Scene, path: Path) -> Iterator[None]:
    """A harness that listens at a path."""
    harness = Harness(scene)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=harness.serve, args=(listener,))
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            harness.end()


def run(scene: Scene, directory: Path, version: str, out: Path) -> list[Found]:
    """What came of the client scenarios that a version requires.

    Args:
        scene: a kernel, whose declared resources are others meanwhile.
        directory: of the suite's packages.
        version: of the protocol.
        out: an empty directory for what the suite writes.
    """
    path = out / "harness.sock"
    command = f"{sys.executable} -I -S {HERE / 'client.py'} {path}"
    words = [
        "client",
        "--command",
        command,
        "--requirements",
        version,
        "--timeout",
        TIMEOUT_MS,
        "-o",
        str(out),
    ]
    with serving(scene, path):
        subprocess.run(
            [*suite_of(directory), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    return taken_from(out)
