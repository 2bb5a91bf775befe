"""An approval of a request to a model is one of what its pointers named when a person was asked."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import Conflict, NoSuchResource
from support.kernels import eventually
from support.model import Turn
from support.scenes import Held, Scene, console, scene_of_its_own
from support.vendors import VendorHost

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    openai: {{type: llm, base: "{base}", models: ["gpt-*"]}}
"""
OLD, NEW = b"\x89PNG\r\n\x1a\n the old one", b"\x89PNG\r\n\x1a\n another one"
FILE, ARTIFACT = "ringfence://workspace/p.png", "ringfence://artifacts/art"
ALLOW = ('artifacts.*: "*"', 'fs.*: "/workspace/**"')
ASK = ('llm.complete: {models: ["gpt-*"]}',)
HOUR_MS = 3_600_000


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


@pytest.fixture
def held(scene: Scene, host: VendorHost) -> Held:
    host.script()
    held = scene.hold(allow=ALLOW, ask=ASK, files={"p.png": OLD})
    held.rf.artifacts.put("art", OLD, media_type="image/png")
    return held


def asked(held: Held, *pointers: str) -> tuple[Any, dict[str, Any]]:
    """Send pointers to a model; gives what becomes of it, and its approval as a person sees it."""
    parts = [{"type": "image_url", "image_url": {"url": pointer}} for pointer in pointers]
    messages = [{"role": "user", "content": parts}]
    making = held.rf.thread(lambda: held.rf.llm.complete(model="gpt-4o", messages=messages, max_tokens=20))
    return making, waiting(held)


def waiting(held: Held) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = held.operator.ask("Approvals", agent=held.id)["approvals"]
        return bool(found)

    eventually(there, "nobody is asked")
    return held.operator.ask("ApprovalShow", id=found[0]["id"])


def sent(host: VendorHost) -> list[bytes]:
    """Contents that came to the host with its last request."""
    parts = host.asked[-1].body["messages"][0]["content"]
    return [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in parts]


def told(pointer: str, data: bytes, version: int) -> dict[str, Any]:
    return {
        "pointer": pointer,
        "sha256": hashlib.sha256(data).hexdigest(),
        "media_type": "image/png",
        "size_bytes": len(data),
        "version": version,
    }


def refused(held: Held, step: int) -> None:
    """Wait until a call has failed."""

    def there() -> bool:
        return "error" in [one["outcome"] for one in held.operator.steps(held.id) if one["step"] == step]

    eventually(there, "it was not refused")


def change(held: Held, pointer: str) -> None:
    if pointer == FILE:
        held.rf.fs.write_bytes("p.png", NEW)
    else:
        held.rf.artifacts.put("art", NEW, media_type="image/png")


def test_what_pointers_name_is_shown_and_sent(held: Held, host: VendorHost) -> None:
    making, shown = asked(held, FILE, ARTIFACT)
    assert shown["detail"]["pointed"] == [told(FILE, OLD, 0), told(ARTIFACT, OLD, 1)]
    printed = console("approvals", "show", shown["id"], "--data", str(held.scene.kernel.data))
    assert printed.stdout.count(f"SHA-256 {hashlib.sha256(OLD).hexdigest()}") == 2
    held.operator.ask("Approve", id=shown["id"])
    making.result()
    assert sent(host) == [OLD, OLD]


@pytest.mark.parametrize("pointer", [FILE, ARTIFACT])
def test_another_content_is_refused_and_asked_about_anew(held: Held, host: VendorHost, pointer: str) -> None:
    making, shown = asked(held, FILE, ARTIFACT)
    change(held, pointer)
    held.operator.ask("Approve", id=shown["id"])
    with pytest.raises(
        Conflict, match=f"approval {shown['id']} no longer holds: what `{pointer}` names changed"
    ):
        making.result()
    assert host.asked == []
    again, anew = asked(held, FILE, ARTIFACT)
    held.operator.ask("Approve", id=anew["id"])
    again.result()
    assert sent(host) == [NEW if one == pointer else OLD for one in (FILE, ARTIFACT)]


def test_it_holds_over_a_killed_kernel(held: Held, host: VendorHost) -> None:
    _, shown = asked(held, FILE)
    change(held, FILE)
    held.scene.kernel.kill()
    held.scene.kernel.start()
    held.operator.ask("Approve", id=shown["id"])
    refused(held, shown["step"])
    assert host.asked == []


def test_what_is_sent_again_after_a_crash_is_what_was_approved(held: Held, host: VendorHost) -> None:
    host.script(Turn(hold=True), Turn())
    _, shown = asked(held, FILE)
    held.operator.ask("Approve", id=shown["id"])
    eventually(lambda: len(host.asked) == 1, "nobody asked")
    held.rf.thread(lambda: change(held, FILE)).result()
    held.scene.kernel.kill()
    host.go.set()
    held.scene.kernel.start()
    refused(held, shown["step"])
    assert sent(host) == [OLD]
    assert len(host.asked) == 1


def test_an_approval_for_longer_than_once_is_bound_too(held: Held, host: VendorHost) -> None:
    making, shown = asked(held, FILE)
    held.operator.ask("Approve", id=shown["id"], for_ms=HOUR_MS)
    making.result()
    parts = [{"type": "image_url", "image_url": {"url": FILE}}]
    messages = [{"role": "user", "content": parts}]
    held.rf.llm.complete(model="gpt-4o", messages=messages, max_tokens=20)  # asks nobody
    change(held, FILE)
    making, anew = asked(held, FILE)
    assert anew["detail"]["pointed"] == [told(FILE, NEW, 0)]
    held.operator.ask("Approve", id=anew["id"])
    making.result()
    assert sent(host) == [NEW]


def test_a_pointer_to_nothing_asks_nobody(held: Held, host: VendorHost) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "ringfence://artifacts/none"}}]
    with pytest.raises(NoSuchResource, match="no artifact `none`"):
        held.rf.llm.complete(model="gpt-4o", messages=[{"role": "user", "content": parts}], max_tokens=20)
    assert held.operator.ask("Approvals", agent=held.id)["approvals"] == []
    assert host.asked == []


def test_arguments_that_a_person_edits_may_point_elsewhere(held: Held, host: VendorHost) -> None:
    held.rf.fs.write_bytes("q.png", NEW)
    making, shown = asked(held, FILE, ARTIFACT)
    edited = json.dumps(shown["arguments"]).replace("workspace/p.png", "workspace/q.png")
    held.operator.ask("Approve", id=shown["id"], arguments=edited.encode())
    making.result()
    assert sent(host) == [NEW, OLD]
    making, shown = asked(held, FILE, ARTIFACT)
    change(held, ARTIFACT)
    held.operator.ask("Approve", id=shown["id"], arguments=edited.encode())
    with pytest.raises(Conflict, match=ARTIFACT):
        making.result()
    assert len(host.asked) == 1
