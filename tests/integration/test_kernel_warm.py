"""Agents forked from a warm interpreter talk with a real kernel as executed ones do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from support.kernels import running
from support.scenes import manifest_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.kernels import KernelProcess

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(120)]

PROGRAM = b"""
import json, os, sys
early = "google.protobuf" in sys.modules
from ringfence import agent

def forked():
    "A child of the agent's own, while the connection is up: it ends by itself, and the parent's calls go on."
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, b"child")
        os._exit(3)
    return [os.read(read, 10).decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]

with agent.boot() as rf:
    found = {"early": early, "one": rf.fs.read_text("a.txt")}
    found["many"] = rf.parallel([lambda n=n: rf.state.get(f"t/{n}") for n in range(8)])
    worker = rf.thread(rf.fs.read_text, "a.txt")
    found["thread"] = worker.result()
    found["fork"] = forked()
    found["after"] = rf.fs.read_text("a.txt")
print(json.dumps(found), flush=True)
"""
ASYNC = b"""
import asyncio, json, sys
early = "google.protobuf" in sys.modules
from ringfence import agent

async def main():
    async with agent.boot_async() as rf:
        texts = await asyncio.gather(*(rf.fs.read_text("a.txt") for _ in range(1)))
        print(json.dumps({"early": early, "texts": texts}), flush=True)
asyncio.run(main())
"""


@pytest.fixture
def kernel(tmp_path: Path, dsn: str) -> Iterator[KernelProcess]:
    with running(tmp_path / "k", dsn=dsn) as found:
        yield found


def ended(kernel: KernelProcess, program: bytes, env: str = "") -> dict[str, Any]:
    manifest = manifest_of(
        "warm", ["python", "agent.py"], allow=['fs.read: "/workspace/**"', 'state.*: "t/**"']
    )
    if env:
        manifest = manifest.replace("command: ", f"env: {{{env}}}, command: ")
    agent = kernel.operator.submit(manifest, {"agent.py": program, "a.txt": b"text"})
    shown = kernel.operator.wait(agent)
    log = b"".join(kernel.operator.stream("Logs", agent=agent))
    assert shown["state"] == "done", (shown, log)
    return json.loads(log)


def test_a_warm_agent_calls_from_threads_and_around_a_fork(kernel: KernelProcess) -> None:
    found = ended(kernel, PROGRAM)
    assert found.pop("early") is True
    executed = ended(kernel, PROGRAM, 'PYTHONHASHSEED: "1"')
    assert executed.pop("early") is False
    assert found == executed
    assert found["fork"] == ["child", 3]
    assert found["one"] == found["thread"] == found["after"] == "text"


def test_a_warm_agent_calls_from_a_loop(kernel: KernelProcess) -> None:
    assert ended(kernel, ASYNC) == {"early": True, "texts": ["text"]}
    assert ended(kernel, ASYNC, 'PYTHONHASHSEED: "1"') == {"early": False, "texts": ["text"]}
