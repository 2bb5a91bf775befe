"""Agents in containers, through a real kernel and a real engine: calls, commands, crashes of the kernel, rollback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import base_image, containers, volumes
from support.kernels import KernelProcess, eventually
from support.scenes import console, manifest_of, short_directory

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(300)]

AGENT = """
import os, subprocess, sys
from ringfence import agent

with agent.boot() as rf:
    print("uid", os.getuid(), flush=True)
    rf.fs.write_text("out/first.txt", "one")
    done = rf.exec.run(["sh", "-c", "echo two > out/second.txt; rm in/old.txt; ls /run; cat secret.txt"])
    print("command", done.exit_code, done.stdout.split(), "denied" in done.stderr, flush=True)
    print("told", rf.messages.receive().text, flush=True)
    rf.fs.write_text("out/last.txt", "three")
    print("end", flush=True)
"""
ALLOW = ['fs.*: "/workspace/**"', 'exec.run: "*"', 'messages.receive: "*"']
FILES: dict[str, Any] = {"agent.py": AGENT, "in/old.txt": "old", "secret.txt": "secret"}
MORE = "sandbox: {backend: docker, memory: 128Mi}\nrestart: {policy: never}\napprovals: {linger: 1h}"


def config(image: str, host: str = "") -> str:
    where = f", host: '{host}'" if host else ""
    return (
        f"apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  sandbox: {{docker: {{image: '{image}'{where}}}}}\n"
    )


@pytest.fixture
def place() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


def submit(kernel: KernelProcess, name: str, code: str = AGENT, more: str = MORE) -> str:
    manifest = manifest_of(
        name, ["python3", "agent.py"], allow=ALLOW, deny=['fs.read: "/workspace/secret.txt"'], more=more
    )
    return kernel.operator.submit(manifest, {**FILES, "agent.py": code})


def show(kernel: KernelProcess, agent: str) -> dict[str, Any]:
    return kernel.operator.ask("Show", agent=agent)


def until(kernel: KernelProcess, agent: str, text: str) -> str:
    """Its output, once it has said something."""
    said = ""

    def has_said() -> bool:
        nonlocal said
        said = b"".join(kernel.operator.stream("Logs", agent=agent)).decode()
        return text in said or show(kernel, agent)["state"] == "failed"

    eventually(has_said, f"`{text}` was not said")
    assert text in said, (said, show(kernel, agent)["error"], kernel.log.read_text()[-2000:])
    return said


def test_an_agent_lives_in_containers_over_a_killed_kernel(place: Path) -> None:
    kernel = KernelProcess(place / "d", config=config(base_image()))
    kernel.start()
    try:
        agent = submit(kernel, "boxed")
        said = until(kernel, agent, "command")
        live = Path(show(kernel, agent)["workspace"])
        assert f"uid {live.stat().st_uid}" in said
        assert "command 1 ['start'] True" in said  # the hidden file can't be read, and there is no socket
        assert (live / "out" / "second.txt").read_text() == "two\n"
        assert not (live / "in" / "old.txt").exists()

        box = show(kernel, agent)["sandbox"]
        walls = {wall["name"]: wall for wall in box["walls"]}
        assert (box["backend"], walls["seccomp"]["ok"], walls["docker engine"]["ok"]) == (
            "docker",
            True,
            True,
        )
        [held] = containers(agent=agent)
        assert held["Id"].startswith(box["identity"]["container"])
        # Who only looks ends nothing.
        done = console("doctor", "--data", str(kernel.data), "--config", str(kernel.config), "--json")
        assert '"docker seccomp"' in done.stdout, done.stderr
        assert [one["Id"] for one in containers(agent=agent)] == [held["Id"]]

        kernel.operator.ask("Pause", agent=agent)
        assert containers(agent=agent)[0]["State"] == "paused"
        kernel.operator.ask("Resume", agent=agent)
        kernel.operator.ask("Pause", agent=agent)
        # A frozen container outlives its kernel, and the next one ends it.
        kernel.kill()
        assert [one["Id"] for one in containers(agent=agent)] == [held["Id"]]
        kernel.start()
        assert containers(agent=agent) == []
        assert volumes(agent=agent) == []

        kernel.operator.ask("Resume", agent=agent)
        kernel.operator.ask("Send", agent=agent, text="go on")
        done = kernel.operator.wait(agent)
        assert (done["state"], done["error"]) == ("done", None), done
        assert (live / "out" / "last.txt").read_text() == "three"
        # What was answered before the crash was not done again.
        assert [step["attempts"] for step in kernel.operator.steps(agent)] == [1] * 4

        kernel.operator.ask("Rollback", agent=agent, to="0")
        assert sorted(str(path.relative_to(live)) for path in live.rglob("*.txt")) == [
            "in/old.txt",
            "secret.txt",
        ]
        assert containers(agent=agent) == []
    finally:
        kernel.stop()
