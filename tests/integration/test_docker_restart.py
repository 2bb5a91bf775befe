"""An engine of the test's own that is stopped, killed and started anew while an agent runs in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.sandbox.docker import image
from ringfence.sandbox.docker.engine import Engine
from support.engines import base_image, engine
from support.kernels import KernelProcess, eventually
from support.scenes import manifest_of, short_directory

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.postgres,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

AGENT = """
from ringfence import agent
with agent.boot() as rf:
    for number in range(3):
        print("told", rf.messages.receive().text, flush=True)
"""


class OwnEngine:
    """In a network namespace of its own, so that nothing of it reaches this host's network."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.host = f"unix://{place}/docker.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = ["unshare", "--net", "dockerd", "--data-root", str(self.place / "data"), "--exec-root"]
        argv += [
            str(self.place / "exec"),
            "--pidfile",
            str(self.place / "pid"),
            "--host",
            self.host,
            "--group",
            "root",
        ]
        argv += ["--iptables=false", "--ip-forward=false", "--ip-masq=false", "--shutdown-timeout", "5"]
        # Of a killed engine this names a process that may be dead and not yet reaped, and the next one would wait for it.
        (self.place / "exec" / "containerd" / "containerd.pid").unlink(missing_ok=True)
        with (self.place / "log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        eventually(self._answers, f"the engine does not start: see {self.place}/log")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(5)
            asking.connect(self.host.removeprefix("unix://"))
            asking.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in asking.recv(100)
        return False

    def containers(self) -> list[dict[str, Any]]:
        with contextlib.closing(Engine(self.host)) as reached:
            return reached.ask(lambda api: api.containers(all=True))

    def end(self, number: int = signal.SIGTERM) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(60)

    def sweep(self) -> None:
        """Unmount what an engine left that did not end in order."""
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in sorted((one for one in mounts if one.startswith(f"{self.place}/")), reverse=True):
            subprocess.run(["umount", "--lazy", place], check=False)

    def load(self) -> str:
        """The base image of the engine that the tests use."""
        base_image()
        archive = self.place / "image.tar"
        with archive.open("wb") as file:
            for part in engine().ask(lambda api: api.get_image(image.TAG), slow=True):
                file.write(part)
        with archive.open("rb") as file, contextlib.closing(Engine(self.host)) as reached:
            return image.load(reached, file, image.TAG)


@pytest.fixture
def own() -> Iterator[OwnEngine]:
    if os.geteuid() != 0:
        pytest.skip("only root can start an engine")
    if shutil.which("dockerd") is None:
        pytest.skip("`dockerd` is not installed")
    with short_directory() as place:
        made = OwnEngine(place)
        made.start()
        try:
            yield made
        finally:
            made.end()
            made.sweep()


def test_an_engine_that_is_killed_or_stopped_takes_no_agent_by_surprise(own: OwnEngine) -> None:
    digest = own.load()
    config = (
        "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n"
        f"  sandbox: {{backend: docker, docker: {{image: '{digest}', host: '{own.host}'}}}}\n"
    )
    kernel = KernelProcess(own.place / "d", config=config)
    kernel.start()
    try:
        manifest = manifest_of(
            "boxed",
            ["python3", "agent.py"],
            allow=['messages.receive: "*"'],
            more="restart: {policy: on-failure, max: 10}\napprovals: {linger: 1h}",
        )
        agent = kernel.operator.submit(manifest, {"agent.py": AGENT})

        def told(text: str) -> None:
            kernel.operator.ask("Send", agent=agent, text=text)
            said = lambda: b"".join(kernel.operator.stream("Logs", agent=agent)).decode()  # noqa: E731
            eventually(
                lambda: f"told {text}" in said(),
                f"{text}: {kernel.operator.ask('Show', agent=agent)['error']}",
            )

        def show() -> dict[str, Any]:
            return kernel.operator.ask("Show", agent=agent)

        def run_again(wanted: Callable[[dict[str, Any]], bool]) -> None:
            eventually(
                lambda: wanted(show()) or show()["state"] == "failed",
                f"it is not as it should: {show()['error']}",
            )
            assert wanted(show()), (
                show()["state"],
                show()["restarts"],
                show()["error"],
                kernel.log.read_text()[-3000:],
            )

        told("one")
        # Stopped in order, it takes its containers along; the kernel tries again, ever more slowly.
        own.end()
        run_again(lambda shown: shown["restarts"] > 0)
        shown = show()
        assert shown["state"] == "pending", (shown["state"], shown["error"])
        assert "docker engine" in shown["error"] or "ended from outside" in shown["error"], shown["error"]
        own.start()
        # It would be started again by itself, up to half a minute later.
        kernel.operator.ask("Start", agent=agent)
        told("two")
        # Killed, it leaves them running: calls don't pass it, and neither does the program's end.
        own.end(signal.SIGKILL)
        told("three")
        done = kernel.operator.wait(agent)
        assert (done["state"], done["error"]) == ("done", None), done
        assert [step["attempts"] for step in kernel.operator.steps(agent)] == [1] * 3
        own.start()
        eventually(lambda: own.containers() == [], "a container was left")
    finally:
        kernel.stop()
