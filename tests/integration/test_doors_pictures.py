"""Pictures and files that programs send to models through the gateway: kept once, sent whole, and from where rules allow."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kernels import eventually
from support.model import Turn
from support.scenes import Scene, console, scene_of_its_own
from support.vendors import VendorHost

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

PROGRAM = (Path(__file__).parent / "doors" / "with_pictures.py").read_text()
CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    openai: {{type: llm, base: "{base}", models: ["gpt-*"]}}
    anthropic: {{type: llm, protocol: anthropic, base: "{base}", models: ["claude-*"], max_output: 1000}}
"""
PICTURE = b"\x89PNG\r\n\x1a\n" + hashlib.sha256(b"a picture").digest() * 60_000
CODED = base64.b64encode(PICTURE).decode()
SHORT = base64.b64encode(PICTURE[:300]).decode()
REF = hashlib.sha256(PICTURE).hexdigest()
POINTER = f"ringfence://artifacts/sent.{REF}?base64={len(PICTURE)}"
ALLOW = (
    'llm.complete: {models: ["gpt-*", "claude-*"]}',
    'messages.receive: "*"',
    'artifacts.put: "*"',
    "artifacts.get: logo",
    'fs.read: "/workspace/**"',
    'http.get: "https://pictures.example/a/**"',
)
DENY = ('fs.read: "/workspace/.env"',)
FILES: dict[str, Any] = {
    "pictures/a b.png": PICTURE[:900],
    "notes.txt": "remember the milk\n",
    ".env": "KEY=1",
}


@pytest.fixture(scope="module")
def host() -> Iterator[VendorHost]:
    host = VendorHost()
    yield host
    host.close()


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str, host: VendorHost) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        scene.kernel.config.write_text(CONFIG.format(base=host.base))
        scene.operator.ask("Reload")
        yield scene


@pytest.fixture(autouse=True)
def fresh(host: VendorHost) -> None:
    host.script()


def begun(scene: Scene, words: str, *, restart: str = "never", more: str = "", **rights: Any) -> str:
    spec = f"sandbox: {{doors: [models]}}\nrestart: {{policy: {restart}}}\n{more}"
    rights = {"allow": ALLOW, "deny": DENY, **rights}
    return scene.submit(PROGRAM, files=FILES, input_bytes=words.encode(), more=spec, **rights)


def sources(host: VendorHost) -> list[Any]:
    """The parts beside texts that came to the host, of each request."""
    found: list[Any] = []
    for asked in host.asked:
        prompt = asked.body.get("messages") or asked.body["input"]
        parts = [part for one in prompt if isinstance(one["content"], list) for part in one["content"]]
        found.append([part for part in parts if part["type"] != "text"])
    return found


def recorded(scene: Scene, agent: str) -> list[str]:
    """The bodies of the journal's rows of an agent's calls of models."""
    rows = scene.sql(
        "select convert_from(body, 'UTF8') from journal where chain = %s and action = 'llm.complete' order by pos",
        scene.key_of(agent),
    )
    return [row[0] for row in rows]


def test_a_picture_is_sent_whole_with_every_turn_and_kept_once(scene: Scene, host: VendorHost) -> None:
    agent = begun(scene, "turns")
    scene.await_end(agent)
    url = f"data:image/png;base64,{CODED}"
    shown = {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "base64", "media_type": "image/png", "data": CODED}
    assert sources(host) == [
        [shown],
        [shown],
        [{"type": "input_image", "image_url": url, "detail": "low"}],
        [{"type": "image", "source": source}],
        [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SHORT}"}}],
    ]
    # What only reads like a pointer is a text like any other.
    assert host.asked[-1].body["messages"][0]["content"][1] == {"type": "text", "text": POINTER}
    kept = scene.sql(
        "select name, version, ref, media_type, size_bytes from artifacts where agent = %s order by size_bytes desc",
        scene.key_of(agent),
    )
    text = POINTER.encode()
    told = hashlib.sha256(text).hexdigest()
    assert kept == [
        (f"sent.{REF}", 1, REF, "image/png", len(PICTURE)),
        (f"sent.{told}", 1, told, "text/plain; charset=utf-8", len(text)),
    ]
    rows = recorded(scene, agent)
    assert max(len(row) for row in rows) < 4000
    assert sum(f"data:image/png;base64,{POINTER}" in row for row in rows) == 3
    assert sum(f'"data":"{POINTER}"' in row for row in rows) == 1


def test_it_is_answered_from_the_record_after_a_restart(scene: Scene, host: VendorHost) -> None:
    agent = begun(scene, "turns wait", restart="on-failure")
    eventually(lambda: "waits" in scene.output(agent), "it did not come to its end")
    scene.kill_program(agent)
    eventually(lambda: scene.output(agent).count("waits") == 2, "it was not started again")
    assert len(host.asked) == 5
    scene.operator.ask("Send", agent=agent, text="go on")
    scene.await_end(agent)
    assert [step["outcome"] for step in scene.operator.steps(agent)] == ["ok"] * 6


def test_one_that_a_kernel_died_over_is_sent_whole_again(scene: Scene, host: VendorHost) -> None:
    host.script(Turn(hold=True), Turn())
    agent = begun(scene, "turns", restart="on-failure")
    eventually(lambda: len(host.asked) == 1, "nobody asked")
    scene.kernel.kill()
    host.go.set()
    scene.kernel.start()
    scene.await_end(agent)
    assert sources(host)[0] == sources(host)[1]
    assert [step["attempts"] for step in scene.operator.steps(agent)] == [2, 1, 1, 1, 1]


def test_approved_calls_send_what_was_shown(scene: Scene, host: VendorHost) -> None:
    asks = ('llm.complete: {models: ["gpt-*"]}',)
    agent = begun(scene, "turns", allow=('llm.complete: {models: ["claude-*"]}',), ask=asks)
    for number in range(4):
        eventually(lambda: scene.operator.ask("Approvals", agent=agent)["approvals"], "nobody is asked")
        (waits,) = scene.operator.ask("Approvals", agent=agent)["approvals"]
        shown = json.dumps(waits["arguments"])
        # The last has one as a text, which is taken out itself.
        pointer = POINTER if number < 3 else f"sent.{hashlib.sha256(POINTER.encode()).hexdigest()}?text="
        assert (pointer in shown, len(shown) < 4000, len(host.asked)) == (True, True, number + number // 3)
        scene.operator.ask("Approve", id=waits["id"])
        eventually(lambda n=number: len(host.asked) > n + n // 3, "it was not sent")
    scene.await_end(agent)
    assert CODED in json.dumps(host.asked[0].body)


def test_an_export_brings_pictures_along(scene: Scene, host: VendorHost, tmp_path: Path) -> None:
    agent = begun(scene, "turns")
    scene.await_end(agent)
    parcel = tmp_path / "parcel"
    data = ("--data", str(scene.kernel.data))
    assert console("export", agent, "--to", str(parcel), *data).returncode == 0
    moved = console("import", str(parcel), "--json", *data)
    assert moved.returncode == 0, moved.stderr
    there = json.loads(moved.stdout)["id"]
    names = scene.sql("select name from artifacts where agent = %s", scene.key_of(there))
    assert (f"sent.{REF}",) in names
    assert len(host.asked) == 5


def test_a_refused_call_keeps_no_picture(scene: Scene, host: VendorHost) -> None:
    agent = begun(scene, "turns", allow=('llm.complete: {models: ["claude-*"]}',))
    scene.await_end(agent, "failed")
    assert [step["outcome"] for step in scene.operator.steps(agent)] == ["denied"]
    assert scene.sql("select count(*) from artifacts where agent = %s", scene.key_of(agent)) == [(0,)]
    assert POINTER in recorded(scene, agent)[0]
    assert host.asked == []


def test_pointers_to_what_the_agent_may_read(scene: Scene, host: VendorHost) -> None:
    agent = begun(scene, "pointed")
    scene.await_end(agent)
    logo, file = SHORT, base64.b64encode(PICTURE[:900]).decode()

    def shown(data: str) -> Any:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    whole = f"data:image/png;base64,{file}"
    assert sources(host) == [
        [shown(logo), shown(file)],
        [{"type": "input_file", "file_data": whole, "filename": "a b.png"}],
        [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": logo}},
            {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": "remember the milk\n"},
            },
        ],
    ]
    said = dict(scene.said(agent))
    assert [said[name][0] for name in ("no artifact", "no rule", "no file", "denied file", "no kind")] == [
        *(403, 403, 404, 403, 400)
    ]
    assert "allows artifacts.get on `hidden`" in said["no rule"][1]
    assert "file:///etc/passwd" in said["no kind"][1]
    # Recorded is what the program wrote.
    assert "ringfence://workspace/pictures/a%20b.png" in recorded(scene, agent)[0]


def test_what_a_host_would_fetch_takes_a_rule(scene: Scene, host: VendorHost) -> None:
    agent = begun(scene, "fetched")
    scene.await_end(agent)
    said = dict(scene.said(agent))
    assert said["allowed"] == "sent"
    for name in ("elsewhere", "messages", "responses"):
        status, message = said[name]
        assert (status, "allows http.get on `https://evil.example/" in message) == (403, True)
    assert sources(host) == [
        [{"type": "image_url", "image_url": {"url": "https://pictures.example/a/b.png?size=2"}}]
    ]


def test_sound_in_a_reply_is_kept_once_and_told_whole_again(scene: Scene, host: VendorHost) -> None:
    sound = {"id": "a1", "data": CODED, "expires_at": 1, "transcript": POINTER}
    message = {"role": "assistant", "content": None, "audio": sound}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    head = {"id": "c1", "object": "chat.completion", "created": 1, "model": "gpt-4o"}
    host.script(Turn(body={**head, "choices": [choice], "usage": usage}), Turn())
    agent = begun(scene, "spoken wait", restart="on-failure")
    eventually(lambda: "waits" in scene.output(agent), "it did not come to its end")
    scene.kill_program(agent)
    eventually(lambda: scene.output(agent).count("waits") == 2, "it was not started again")
    scene.operator.ask("Send", agent=agent, text="go on")
    scene.await_end(agent)
    assert scene.said(agent) == [["spoken", [None, "a1", True]], ["and then", "Good day."], ["waits", 1]] * 2
    assert len(host.asked) == 2
    assert host.asked[1].body["messages"][1]["audio"]["data"] == CODED
    assert max(len(row) for row in recorded(scene, agent)) < 4000
    kept = scene.sql(
        "select name, version from artifacts where agent = %s order by size_bytes desc", scene.key_of(agent)
    )
    assert kept[0] == (f"sent.{REF}", 1)


def test_what_a_call_carries_is_counted_whole(scene: Scene, host: VendorHost) -> None:
    agent = begun(scene, "turns", more="budgets: {total: {bytes: 3MB}, on_exhausted: refuse}")
    scene.await_end(agent, "failed")
    # The picture has 2.5 MB as base64: there is room for it once.
    outcomes = [step["outcome"] for step in scene.operator.steps(agent)]
    assert (outcomes[0], outcomes[-1], len(host.asked)) == ("ok", "refused", 1)
