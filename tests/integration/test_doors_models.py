"""Unmodified programs that ask models through the gateway on their loopback, with the official clients of both vendors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kernels import eventually
from support.model import Turn
from support.scenes import Scene, scene_of_its_own
from support.vendors import VendorHost

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

PROGRAMS = Path(__file__).parent / "doors"
SECRET = "s3cret-model-key"
CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    openai:
      type: llm
      base: "{base}"
      models: ["gpt-*", gpt-listed, own]
      price: {{input: 10, output: 100}}
      auth: {{bearer: {{secret: model-key}}}}
    anthropic:
      type: llm
      protocol: anthropic
      base: "{base}"
      models: ["claude-*", claude-listed, "other-*"]
      max_output: 1000
      auth: {{header: {{name: x-api-key, value: {{secret: model-key}}}}}}
"""
ALLOW = ('llm.complete: {models: ["gpt-*", "claude-*"]}',)
DOORS = "sandbox: {doors: [models]}\nrestart: {policy: never}"
CUT = Turn(words=("Good ", "day."), cut_after=1)


@pytest.fixture(scope="module")
def host() -> Iterator[VendorHost]:
    host = VendorHost()
    yield host
    host.close()


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str, host: VendorHost) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        scene.operator.ask("SecretSet", name="model-key", value=SECRET.encode())
        scene.kernel.config.write_text(CONFIG.format(base=host.base))
        scene.operator.ask("Reload")
        yield scene


@pytest.fixture(autouse=True)
def fresh(host: VendorHost) -> None:
    host.script()


def ran(scene: Scene, program: str, *, more: str = DOORS, allow: tuple[str, ...] = ALLOW) -> dict[str, Any]:
    """What a program said to its end, by the name of each thing that it tried; and its steps."""
    agent = scene.run((PROGRAMS / program).read_text(), allow=allow, more=more)
    return {**dict(scene.said(agent)), "steps": scene.operator.steps(agent), "agent": agent}


def test_the_client_of_openai(scene: Scene, host: VendorHost) -> None:
    tool, broken = (
        Turn(tool=True, finish="tool_calls"),
        Turn(status=422, body={"error": {"message": "no such knob", "code": "k1"}}),
    )
    host.script(Turn(), tool, Turn(), tool, Turn(), tool, broken, CUT, CUT)
    said = ran(scene, "with_openai.py")
    look = ["look", '{"a":1}']
    assert said["whole"] == ["Good day.", "stop", 7]
    assert said["tools"] == [[look], "tool_calls"]
    assert said["stream"] == ["Good day.", "stop", [11, 7]]
    assert said["stream tools"] == [look, "tool_calls", 0]
    assert said["response"] == ["Good day.", "completed", 18]
    assert said["response stream"] == ["Good day.", look, "completed"]
    assert said["models"] == ["gpt-listed"]
    denied, message = said["denied"]
    assert (denied["reason"], denied["code"]) == ("Denied", "permission_denied")
    assert "`own`" in message
    assert said["host's error"] == [422, {"message": "no such knob", "code": "k1"}]
    assert said["cut"] == 502
    assert said["hosted tool"] == [400, True]
    assert said["two replies"] == [400, True]
    first, answered = host.asked[0], [asked.path for asked in host.asked]
    hello = [{"role": "user", "content": "hello"}]
    assert first.body == {"model": "gpt-4o", "messages": hello, "max_tokens": 50, "temperature": 0.5}
    # The key that hosts know stays in the kernel.
    assert first.headers["authorization"] == f"Bearer {SECRET}"
    assert answered == ["/v1/chat/completions"] * 4 + ["/v1/responses"] * 2 + ["/v1/chat/completions"] * 2
    used = [step.get("used") for step in said["steps"]]
    assert used[:7] == [{"tokens": 18, "usd": pytest.approx(0.00081)}] * 6 + [None]
    assert [step["outcome"] for step in said["steps"]].count("ok") == 6


def test_the_client_of_anthropic(scene: Scene, host: VendorHost) -> None:
    tool, busy = (
        Turn(tool=True, finish="tool_calls"),
        Turn(status=529, body={"type": "error", "error": {"type": "overloaded_error"}}),
    )
    host.script(Turn(), tool, Turn(), tool, busy)
    said = ran(scene, "with_anthropic.py")
    assert said["whole"] == ["Good day.", "end_turn", 7]
    assert said["tools"] == [["thinking", "text", "tool_use"], {"a": 1}, "tool_use"]
    assert said["stream"] == ["Good day.", "end_turn", [11, 7]]
    assert said["stream tools"] == [["thinking", "text", "tool_use"], {"a": 1}, "c2ln", "tool_use"]
    assert said["models"] == ["claude-listed"]
    assert 20 < said["count"][0] == said["count"][1]
    assert said["denied"] == ["permission_error", "Denied"]
    assert said["host's error"] == [529, "overloaded_error"]
    assert said["hosted tool"] == [400, "invalid_request_error"]
    first, second = host.asked[0], host.asked[1]
    assert first.path == "/v1/messages"
    assert first.headers["x-api-key"] == SECRET
    assert first.headers["anthropic-version"].startswith("20")
    assert first.headers["anthropic-beta"] == "some-beta"
    assert first.body["system"] == "be short"
    # What the manifest's host gives at most is less than what the program asks for.
    assert first.body["max_tokens"] == 1000
    assert second.body["messages"][0]["content"][1]["source"]["data"] == "aWNo"
    assert said["steps"][0]["used"]["tokens"] == 18


def test_a_stream_comes_as_it_is_written(scene: Scene, host: VendorHost) -> None:
    words = ("what a ", "lot ", "to say")
    host.script(Turn(words=words, hold=True), Turn(words=words, hold=True), Turn(words=words, cut_after=2))
    agent = scene.submit((PROGRAMS / "streamed.py").read_text(), allow=ALLOW, more=DOORS)
    for first in ("chat", "messages"):
        eventually(lambda what=first: f'["{what}", "first"]' in scene.output(agent), "no word came")
        # The host has said no more than that.
        assert "all" not in scene.output(agent).splitlines()[-1]
        host.go.set()
        eventually(lambda what=first: f'["{what}", "all' in scene.output(agent), "the rest did not come")
        host.go.clear()
    scene.await_end(agent)
    said, whole = scene.said(agent), "".join(words)
    assert [said[1], said[3]] == [["chat", f"all: {whole}, stop"], ["messages", f"all: {whole}, end_turn"]]
    assert (said[4][0], said[4][2]) == ("cut", "`openai` ")
    assert said[4][1] == words[0] + words[1]
    # What came of the last one is charged as it was counted here.
    assert 1 < scene.operator.steps(agent)[-1]["used"]["tokens"] < 40


def test_what_is_no_request(scene: Scene, host: VendorHost) -> None:
    said = ran(scene, "odd_requests.py")
    assert said["no json"] == [400, "invalid_request_error"]
    assert said["no object"] == [400, "invalid_request_error"]
    assert said["form"] == [400, "invalid_request_error"]
    assert said["gzip"] == [415, "invalid_request_error"]
    assert said["no model"] == [400, "invalid_request_error"]
    assert said["deep"] == [400, "invalid_request_error"]
    assert said["no path"] == [404, "invalid_request_error"]
    assert said["no method"] == [405, "invalid_request_error"]
    assert said["long"] == [413, "invalid_request_error"]
    assert said["key"] == [401, "authentication_error"]
    assert said["no http"] == 400
    assert said["elsewhere"] == ["refused"] * 3
    assert said["other sockets"] == ["refused"] * 4
    assert host.asked == []


def test_the_same_again_after_a_restart(scene: Scene, host: VendorHost) -> None:
    host.script(Turn(words=("one",)), Turn(words=("two",)), Turn(words=("three",)))
    program = (PROGRAMS / "restarted.py").read_text()
    agent = scene.submit(
        program,
        allow=(*ALLOW, 'messages.receive: "*"'),
        more=DOORS.replace("never", "on-failure"),
    )
    eventually(lambda: "two" in scene.output(agent), "the program said nothing")
    scene.kill_program(agent)
    eventually(lambda: scene.output(agent).count("two") == 2, "the program was not started again")
    assert len(host.asked) == 2
    scene.operator.ask("Send", agent=agent, text="go on")
    scene.await_end(agent)
    assert [json.loads(line) for line in scene.output(agent).splitlines()] == [
        *(["one", "two"] * 2),
        "three",
    ]
    assert len(host.asked) == 3


def raw(scene: Scene, words: str, *, more: str = DOORS) -> str:
    program = (PROGRAMS / "raw.py").read_text()
    return scene.submit(program, allow=ALLOW, more=more, input_bytes=words.encode())


def test_who_leaves_finds_the_answer_and_two_at_once_have_one_each(scene: Scene, host: VendorHost) -> None:
    host.script(Turn(words=("one",), hold=True), Turn(words=("two",)), Turn(words=("three",)))
    agent = raw(scene, "-a a b+b")
    eventually(lambda: "left" in scene.output(agent), "nobody left")
    host.go.set()
    scene.await_end(agent)
    said = scene.said(agent)
    assert said[:2] == [["a", "left"], ["a", 200, "one"]]
    assert sorted(said[2:]) == [["b", 200, "three"], ["b", 200, "two"]]
    assert len(host.asked) == 3
    assert [step["lane_step"] for step in scene.operator.steps(agent)] == [0, 0, 1]


def test_a_kernel_that_dies_in_a_stream_sends_only_that_again(scene: Scene, host: VendorHost) -> None:
    host.script(Turn(), Turn(words=("what a ", "lot"), hold=True), Turn(words=("more ", "yet")))
    agent = raw(scene, "a ~b", more=DOORS.replace("never", "on-failure"))
    eventually(lambda: "what a" in scene.output(agent), "no word came")
    scene.kernel.kill()
    host.go.set()
    scene.kernel.start()
    scene.await_end(agent)
    whole, torn = ["a", 200, "Good day."], ["b", "what a "]
    assert scene.said(agent) == [whole, torn, whole, ["b", "more "], ["b", "yet"], ["b", None]]
    assert len(host.asked) == 3
    assert [step["attempts"] for step in scene.operator.steps(agent)] == [1, 2]


def test_a_right_that_is_taken_away_in_a_stream(scene: Scene, host: VendorHost) -> None:
    host.script(Turn(words=("what a ", "lot"), hold=True))
    agent = raw(scene, "~a b")
    eventually(lambda: "what a" in scene.output(agent), "no word came")
    report = scene.operator.ask("Revoke", agent=agent, all=True)
    # The host had been asked: the call is named, and comes to its end.
    assert "under way" in json.dumps(report)
    host.go.set()
    scene.await_end(agent)
    assert scene.said(agent) == [["a", "what a "], ["a", "lot"], ["a", None], ["b", 403, "permission_denied"]]
    assert len(host.asked) == 1


def test_a_spent_total_parks_the_program_and_its_request_waits(scene: Scene, host: VendorHost) -> None:
    agent = raw(scene, "a b", more=f"{DOORS}\nbudgets: {{total: {{tokens: 4112}}}}")
    eventually(lambda: scene.show(agent)["state"] == "parked", "it is not parked")
    assert scene.said(agent) == [["a", 200, "Good day."]]
    scene.operator.ask("Budget", agent=agent, name="tokens", value="20k")
    scene.await_end(agent)
    assert scene.said(agent)[1:] == [["a", 200, "Good day."], ["b", 200, "Good day."]]
    assert len(host.asked) == 2


def test_a_spent_budget_and_a_full_prompt(scene: Scene, host: VendorHost) -> None:
    more = f"""{DOORS}
budgets:
  total: {{usd: 0.01}}
  on_exhausted: refuse
  context: {{max_tokens: 900, on_overflow: page}}"""
    host.script(Turn(words=("fits",)), Turn(words=("paged",)))
    said = ran(scene, "bounded.py", more=more)
    assert said["spent"] == [429, "insufficient_quota", True, "false"]
    assert said["paged"] == "paged"
    assert said["full"] == [400, "context_length_exceeded"]
    result = host.asked[1].body["messages"][2]["content"][0]
    assert result["tool_use_id"] == "c1"
    assert result["content"].startswith("[paged out")


def test_a_program_without_doors_has_no_network(scene: Scene) -> None:
    program = "import os, socket\ntry:\n    socket.socket()\nexcept OSError as e:\n    print(e.errno)\nprint(int('OPENAI_API_KEY' in os.environ))"
    assert scene.said(scene.run(program)) == [97, 0]


EDITS = """
import json, os, urllib.request
def ask():
    body = json.dumps({"model": "gpt-4o", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("first", "w").write(ask())
open("second", "w").write(ask())
os.remove("first")
"""


def test_one_that_edits_its_files_is_judged_before_each_question(scene: Scene, host: VendorHost) -> None:
    host.script(Turn(), Turn())
    more = "sandbox: {doors: [models], workspace: direct}\nrestart: {policy: never}"
    agent = scene.run(EDITS, allow=(*ALLOW, 'fs.*: "/workspace/**"'), more=more)
    assert [(step["action"], step["resource"]) for step in scene.operator.steps(agent)] == [
        ("workspace.commit", "before llm.complete"),  # the file is opened before the question is asked
        ("llm.complete", "gpt-4o"),
        ("workspace.commit", "before llm.complete"),
        ("llm.complete", "gpt-4o"),
        ("workspace.commit", "at the program's end"),
    ]
    assert (scene.live(agent) / "second").read_text() == "Good day."
    assert not (scene.live(agent) / "first").exists()
    host.script(Turn(), Turn())
    refused = scene.run(EDITS, expect="failed", allow=(*ALLOW, 'fs.write: "/workspace/second"'), more=more)
    assert [step["outcome"] for step in scene.operator.steps(refused)] == ["denied"]
