"""Cut streams, slow readers, replies of 50 MB, JSON that is none, wrong content types, two clients at once: at the gateway, and at both sides of MCP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.agent import CallFailed
from support import rude
from support.kernels import eventually
from support.scenes import Held, Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

PROGRAM = (Path(__file__).parent / "doors" / "rough.py").read_text()
CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    host: {{type: llm, base: "http://127.0.0.1:{port}/v1", models: ["gpt-*"]}}
    far: {{type: mcp, url: "http://127.0.0.1:{port}/mcp", timeout: 50s, tools: {{"other": {{effect: external}}, "*": {{effect: read}}}}}}
    near: {{type: mcp, command: [python, rude.py], files: {files}, timeout: 50s, tools: {{"*": {{effect: read}}}}}}
"""
DOORS = "sandbox: {doors: [models, mcp]}\nrestart: {policy: never}"
HELD_MB = 100
"""What 50 MB may cost the kernel at most, with all copies: much less than to have it once in each hand."""


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with rude.served() as port:
        config = CONFIG.format(port=port, files=Path(rude.__file__).parent)
        with scene_of_its_own(postgres_server, template_database, config=config) as scene:
            yield scene


class Peak:
    """How much memory the kernel came to hold above what it had."""

    def __init__(self, scene: Scene) -> None:
        assert scene.kernel.process is not None
        self._place = Path(f"/proc/{scene.kernel.process.pid}")
        (self._place / "clear_refs").write_text("5")
        self._before = self._mb("VmRSS")

    def _mb(self, name: str) -> int:
        lines = (self._place / "status").read_text().splitlines()
        return next(int(line.split()[1]) >> 10 for line in lines if line.startswith(f"{name}:"))

    def above_mb(self) -> int:
        return self._mb("VmHWM") - self._before


def started(scene: Scene, words: str, **more: Any) -> str:
    allow = ['llm.complete: {models: ["gpt-*"]}', 'fs.*: "/workspace/**"', 'messages.receive: "*"']
    return scene.submit(
        PROGRAM,
        allow=allow,
        more=DOORS,
        input_bytes=words.encode(),
        files={"long.txt": "0123456789" * 90_000},
        **more,
    )


def test_replies_of_a_host_that_are_none(scene: Scene) -> None:
    peak = Peak(scene)
    agent = started(scene, "models")
    scene.await_end(agent)
    said = dict(scene.said(agent))
    assert said["fine"] == [200, "stop"]
    assert {kind: said[kind][0] for kind in ("large", "garbage", "html", "cut")} == dict.fromkeys(
        ("large", "garbage", "html", "cut"), 502
    )
    assert "16" in said["large"][1]
    # One that has begun ends with an error and without the end of a reply; nothing else is passed on.
    assert said["large stream"] == [200, "text/event-stream", True, False]
    assert said["garbage stream"][2:] == [True, False]
    assert said["html stream"][2:] == [True, False]
    steps = scene.operator.steps(agent)
    assert [step["outcome"] for step in steps] == ["ok"] + ["error"] * 7
    assert steps[0]["used"]["tokens"] == 12
    assert peak.above_mb() < HELD_MB


def test_a_reader_who_takes_its_time_gets_all_of_a_stream(scene: Scene) -> None:
    agent = started(scene, "slow")
    eventually(lambda: '["asked"' in scene.output(agent), "it never asked")
    peak = Peak(scene)
    # The host is done with it, though nobody has read a word.
    eventually(
        lambda: (
            [s["outcome"] for s in scene.operator.steps(agent) if s["action"] == "llm.complete"] == ["ok"]
        ),
        "it never ended",
    )
    scene.operator.ask("Send", agent=agent, text="on")
    scene.await_end(agent)
    assert dict(scene.said(agent))["read"] == [True, True, True]
    assert peak.above_mb() < HELD_MB


def test_messages_to_the_door_of_tools_that_are_none(scene: Scene) -> None:
    agent = started(scene, "tools")
    scene.await_end(agent)
    said = dict(scene.said(agent))
    assert said["garbage"] == [400, -32700]
    assert said["surrogate"] == [400, -32700]
    assert said["html"][0] in (400, 415)
    assert said["large"][0] == 413
    assert said["both"] == [False] * 10
    # Each call is there once, and none of what was no call.
    steps = [step["action"] for step in scene.operator.steps(agent)]
    assert (steps.count("fs.append"), steps.count("fs.read"), len(steps)) == (10, 1, 11)
    assert {(scene.live(agent) / name).read_text() for name in ("c0", "c1")} == {"0 1 2 3 4 "}


@pytest.fixture(scope="module")
def held(scene: Scene) -> Held:
    held = scene.hold(allow=['mcp.far.*: "*"', 'mcp.near.*: "*"'])
    for server in ("far", "near"):
        assert held.rf.mcp.call(server, "fine", {"word": "hello"}).text == "hello"
    return held


@pytest.mark.parametrize("server", ["far", "near"])
def test_answers_of_a_server_that_are_none(held: Held, scene: Scene, server: str) -> None:
    """Before, one with half of a surrogate counted as none: the whole timeout passed."""
    peak = Peak(scene)
    for kind in ("large", "garbage", "surrogate", "html", "cut"):
        if (server, kind) == ("near", "html"):
            # What a program prints is no message, and is passed over.
            assert held.rf.mcp.call(server, kind).text == "after that"
            continue
        failed = held.refused(CallFailed, lambda kind=kind: held.rf.mcp.call(server, kind))
        assert failed.metadata["sent"] == "maybe"
        assert "did not answer within" not in failed.message, kind
        assert held.last()["outcome"] == "error"
    assert "can't be read" in held.refused(CallFailed, lambda: held.rf.mcp.call(server, "surrogate")).message
    # The next call finds a session that works.
    assert held.rf.mcp.call(server, "fine", {"word": "again"}).text == "again"
    assert peak.above_mb() < HELD_MB


def test_what_may_have_been_done_is_not_told_as_failed(held: Held) -> None:
    """Before, an answer of a wrong type was told as a refusal of the server's, and the agent was free to make the call again."""
    waiting = held.rf.thread(held.rf.mcp.call, "far", "other")
    eventually(lambda: held.operator.ask("Show", agent=held.id)["state"] == "unknown", "it is not unknown")
    held.operator.ask("Resolve", agent=held.id, step=held.last()["step"], outcome="done")
    assert waiting.result(30).content == []


@pytest.mark.parametrize("server", ["far", "near"])
def test_calls_of_one_agent_at_once_get_their_own_answers(held: Held, server: str) -> None:
    words = [f"{server}{number}" for number in range(8)]
    waiting = [held.rf.thread(held.rf.mcp.call, server, "fine", {"word": word}) for word in words]
    assert [one.result(60).text for one in waiting] == words
