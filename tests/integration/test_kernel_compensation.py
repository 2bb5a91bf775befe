"""Calls that left the system and are made up for by a rollback: over failures and crashes, and never twice; and those that nothing makes up for."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from ringfence.agent import Denied
from support.kernels import Refused, eventually
from support.scenes import Held, Scene, scene_on
from support.signed import new_key

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]


class Shop(ThreadingHTTPServer):
    """Orders with a `Location`, payments and refunds that take a key, and notes by name."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.clear()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def clear(self) -> None:
        self.orders: dict[str, Any] = {}
        self.payments: dict[str, Any] = {}
        self.notes: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.keys: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.carried_out: list[str] = []
        self.told: list[dict[str, Any]] = []
        self.failing = self.silent = False

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def sent(self, begin: str) -> list[str]:
        return [one for one in self.asked if one.startswith(begin)]


class _Handler(BaseHTTPRequestHandler):
    server: Shop

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == "/hook":
            self.server.told.append(json.loads(body)["data"])
            self.send_response(204)
            self.end_headers()
            return
        self.server.asked.append(f"{self.command} {self.path}")
        key = self.headers.get("idempotency-key", "")
        known = self.server.keys.get(key) if key else None
        if known is None:
            known = (503, {}, b"{}") if self.server.failing else self._answer(body)
            if key and not self.server.failing:
                self.server.keys[key] = known
        if self.server.silent:
            return
        status, headers, answer = known
        self.send_response(status)
        for name, value in {"content-type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST = do_DELETE = _serve

    def _answer(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        shop, (_, area, kind, *rest) = self.server, [*self.path.split("/"), ""]
        name = rest[0] if rest else ""
        if self.command != "GET":
            shop.carried_out.append(f"{self.command} {self.path} {body.decode()}".strip())
        if kind == "notes":
            there = name in shop.notes
            if self.command == "PUT":
                shop.notes[name] = body
                return 200 if there else 201, {}, b""
            if not there:
                return 404, {}, b"{}"
            return 200, {}, shop.notes[name] if self.command == "GET" else shop.notes.pop(name)
        if self.command == "POST" and kind == "refunds":
            wanted = json.loads(body)
            shop.payments.pop(wanted["payment"])
            return 201, {}, b"{}"
        table = shop.payments if kind == "pay" else shop.orders
        if self.command == "POST":
            fresh = f"{kind}-{len(shop.carried_out)}"
            table[fresh] = json.loads(body)
            return 201, {"location": f"/{area}/{kind}/{fresh}"}, json.dumps({"id": fresh}).encode()
        return (204, {}, b"") if table.pop(name, None) is not None else (404, {}, b"{}")

    def log_message(self, *_args: object) -> None:
        pass


CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  webhooks: {{chat: {{url: "{base}/hook", key: {{secret: hook}}, events: [approval.asked]}}}}
  resources:
    shop:
      type: http
      base: "{base}/shop"
      effects: {{"DELETE /orders/**": destroy}}
      undo:
        "POST /orders": {{compensate: "DELETE {{location}}"}}
        "PUT /notes/*": {{keep: "GET {{path}}", put_back: "PUT {{path}}", remove: "DELETE {{path}}"}}
    bank:
      type: http
      base: "{base}/bank"
      idempotency_header: Idempotency-Key
      undo:
        "POST /pay":
          compensate: "POST /refunds"
          body: {{payment: "{{reply:/id}}", amount: "{{/amount}}", note: "takes back {{reply:/id}}"}}
    kiosk:
      type: http
      base: "{base}/kiosk"
      undo: {{"POST /pay": {{compensate: "POST /refunds", body: {{payment: "{{reply:/id}}"}}}}}}
    plain:
      type: http
      base: "{base}/plain"
      idempotency_header: Idempotency-Key
"""


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with Shop() as shop:
        yield shop
        shop.shutdown()


@pytest.fixture(scope="module")
def scene(shop: Shop) -> Iterator[Scene]:
    with scene_on(None, config=CONFIG.format(base=shop.base)) as scene:
        scene.operator.ask("SecretSet", name="hook", value=new_key().encode())
        yield scene


@pytest.fixture
def held(scene: Scene, shop: Shop) -> Held:
    shop.clear()
    # No right to take anything back: that is the operator's, who declared how.
    return scene.hold(
        allow=[
            *(f'http.post: "{shop.base}/**"', f'http.put: "{shop.base}/**"'),
            f'http.delete: "{shop.base}/shop/orders/*"',
        ],
        more="budgets: {total: {calls: 6}}",
    )


def order(held: Held, shop: Shop) -> Any:
    return held.rf.http.post(f"{shop.base}/shop/orders", json={"item": 7})


def pay(held: Held, shop: Shop, where: str = "bank") -> Any:
    return held.rf.http.post(f"{shop.base}/{where}/pay", json={"amount": 25, "to": "ann"})


def back(held: Held, **more: Any) -> dict[str, Any]:
    return held.operator.ask("Rollback", agent=held.id, to="0", **more)


def http_changes(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(c["action"], c["detail"]) for c in document["changes"] if c["kind"] == "http"]


def test_what_the_answer_located_is_removed_and_may_be_made_anew(held: Held, shop: Shop) -> None:
    made = order(held, shop)
    place = f"{shop.base}{made.headers['location']}"
    preview = back(held, preview=True)
    assert [(c["kind"], c["target"], c["action"]) for c in preview["changes"]] == [
        ("http", place, "compensate")
    ]
    assert preview["not_undoable"] == []
    assert shop.orders
    done = back(held, start=True)
    assert http_changes(done) == [("compensate", "DELETE for step 1")]
    assert done["conflicts"] == []
    assert shop.orders == {}
    rows = [row for row in held.operator.steps(held.id) if row["action"] == "compensate"]
    assert [(row["lane"], row["outcome"], row["resource"]) for row in rows] == [
        ("op", "ok", f"DELETE {place}")
    ]
    # It is done no more, so to make it again is another order.
    held.again()
    assert order(held, shop).status == 201
    assert len(shop.orders) == 1
    assert shop.sent("POST") == ["POST /shop/orders"] * 2
    back(held)
    assert shop.orders == {}


def test_a_payment_that_nothing_takes_back_is_recognised(held: Held, shop: Shop) -> None:
    paid = pay(held, shop, "plain")
    done = back(held, start=True)
    assert [(one["action"], one["why"]) for one in done["not_undoable"]] == [("http.post", None)]
    held.again()
    assert pay(held, shop, "plain").body == paid.body
    assert len(shop.payments) == 1
    assert len(shop.sent("POST")) == 1


def test_a_refund_has_the_values_of_request_and_answer_and_is_tried_until_it_is_done(
    held: Held, shop: Shop
) -> None:
    paid = pay(held, shop)
    shop.failing = True
    try:
        done = back(held, start=True)
    finally:
        shop.failing = False
    assert [(c["kind"], c["target"]) for c in done["conflicts"]] == [
        ("http", f"POST {shop.base}/bank/refunds")
    ]
    assert "503" in done["conflicts"][0]["reason"]
    # Not taken back, so it is recognised; the branch now rests on it.
    held.again()
    assert pay(held, shop).body == paid.body
    assert len(shop.payments) == 1
    again = back(held, start=True)
    assert again["conflicts"] == []
    assert shop.payments == {}
    name = json.loads(paid.body)["id"]
    sent = [one for one in shop.carried_out if one.startswith("POST /bank/refunds")]
    assert [json.loads(one.split(" ", 2)[2]) for one in sent] == [
        {"payment": name, "amount": 25, "note": f"takes back {name}"}
    ]
    held.again()
    assert pay(held, shop).body != paid.body
    assert len(shop.payments) == 1


def test_an_amount_goes_back_as_written_and_what_none_can_carry_stops_no_rollback(
    held: Held, shop: Shop
) -> None:
    for amount in (b"12.50", b'"\\ud800"', b"NaN"):
        held.rf.http.post(
            f"{shop.base}/bank/pay",
            data=b'{"amount": ' + amount + b"}",
            headers={"content-type": "application/json"},
        )
    done = back(held)
    assert http_changes(done) == [("compensate", "POST for step 1")]
    assert [one["step"] for one in done["not_undoable"]] == [3, 2]
    sent = [one for one in shop.carried_out if one.startswith("POST /bank/refunds")]
    assert ['"amount":12.50,' in one for one in sent] == [True]


def test_a_refund_without_a_key_that_got_no_answer_is_not_sent_twice(
    scene: Scene, held: Held, shop: Shop
) -> None:
    pay(held, shop, "kiosk")
    shop.silent = True
    try:
        first = back(held, start=True)
    finally:
        shop.silent = False
    held.again()
    pay(held, shop, "kiosk")  # recognised, as far as anybody knows
    # In between it can't be sent at all: that tells nothing of the first time.
    scene.kernel.config.write_text(CONFIG.format(base=shop.base).replace("/kiosk", "/moved"))
    scene.operator.ask("Reload")
    try:
        second = back(held)
    finally:
        scene.kernel.config.write_text(CONFIG.format(base=shop.base))
        scene.operator.ask("Reload")
    reasons = [[c["reason"] for c in done["conflicts"]] for done in (first, second, back(held))]
    assert [len(one) for one in reasons] == [1, 1, 1]
    assert "may have arrived" in reasons[0][0]
    assert "no longer below" in reasons[1][0]
    assert all("not sent twice" in one for (one,) in reasons)
    assert shop.sent("POST /kiosk/refunds") == ["POST /kiosk/refunds"]


def test_what_stays_is_not_made_up_for_by_a_later_rollback(held: Held, shop: Shop) -> None:
    pay(held, shop)
    shop.failing = True
    try:
        back(held, start=True)
    finally:
        shop.failing = False
    held.again()
    pay(held, shop)  # recognised: this branch has paid too
    paid = held.steps()[-1]["step"]
    order(held, shop)
    done = held.operator.ask("Rollback", agent=held.id, to=str(paid))
    assert http_changes(done) == [("compensate", f"DELETE for step {paid + 1}")]
    assert len(shop.payments) == 1


def test_snapshots_of_what_was_put_there(held: Held, shop: Shop) -> None:
    shop.notes = {"old": b"as it was", "theirs": b"before"}
    url = f"{shop.base}/shop/notes"
    for name in ("old", "new", "theirs"):
        held.rf.http.put(f"{url}/{name}", data=b"mine")
    held.rf.http.put(f"{url}/old", data=b"mine again")
    shop.notes["theirs"] = b"somebody else's"
    done = back(held, start=True)
    assert sorted(http_changes(done)) == [("remove", "DELETE"), ("restore", "PUT")]
    assert [(c["target"], c["reason"]) for c in done["conflicts"]] == [
        (f"{url}/theirs", "something else stands there now")
    ]
    assert shop.notes == {"old": b"as it was", "theirs": b"somebody else's"}
    held.again()
    assert held.rf.http.put(f"{url}/old", data=b"mine").status == 200
    assert shop.notes["old"] == b"mine"


def asked_about(held: Held) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def look() -> bool:
        found[:] = held.operator.ask("Approvals", agent=held.id)["approvals"]
        return bool(found)

    eventually(look, "nobody was asked")
    return found[0]


def test_what_can_not_be_undone_is_asked_whatever_rules_allow(held: Held, shop: Shop) -> None:
    shop.orders["o1"] = {"item": 1}
    url = f"{shop.base}/shop/orders/o1"
    asked = held.operator.ask("PolicyCanI", agent=held.id, action="http.delete", resource=url)
    assert (asked["verdict"], asked["rule"]) == ("ask", "irreversible")
    held_call = held.rf.thread(lambda: held.rf.http.delete(url))
    approval = asked_about(held)
    assert (
        approval["detail"]["undo"]
        == "can't be undone: the resource `shop` declares no `undo` for this DELETE"
    )
    assert approval["rules"] == ["irreversible"]
    eventually(lambda: bool(shop.told), "the receiver was not told")
    assert (shop.told[0]["approval"], shop.told[0]["undo"]) == (approval["id"], approval["detail"]["undo"])
    shown = held.operator.ask("ApprovalShow", id=approval["id"])
    assert shown["why"] == ["it destroys, and can't be undone"]
    assert shop.orders == {"o1": {"item": 1}}
    held.operator.ask("Deny", id=approval["id"], reason="not this one")
    with pytest.raises(Denied):
        held_call.result()
    held_call = held.rf.thread(lambda: held.rf.http.delete(url))
    held.operator.ask("Approve", id=asked_about(held)["id"])
    assert held_call.result().status == 204
    step = held.steps()[-1]
    assert (step["effect"], step["verdict"], step["outcome"]) == ("DESTROY", "ask", "ok")
    done = back(held)
    assert [(one["action"], one["effect"]) for one in done["not_undoable"]] == [("http.delete", "DESTROY")]
    assert shop.orders == {}


def test_a_fork_makes_up_for_nothing_of_its_original(held: Held, shop: Shop) -> None:
    order(held, shop)
    pay(held, shop)
    fork = held.operator.ask("Fork", agent=held.id, at="2")["id"]
    done = held.operator.ask("Rollback", agent=fork, to="0")
    assert [one["why"] for one in done["not_undoable"]] == ["the original did it, and can undo it"] * 2
    assert shop.orders
    assert shop.payments
    back(held)
    assert (shop.orders, shop.payments) == ({}, {})


@pytest.mark.fault
def test_a_crash_around_a_compensation_sends_none_twice(scene: Scene, held: Held, shop: Shop) -> None:
    """Killed when it was sent and not yet recorded: the next kernel finishes the rollback by itself."""
    pay(held, shop)
    order(held, shop)
    scene.kernel.arm("rollback:after_compensation")
    worker = threading.Thread(target=_rolled, args=(held,))
    worker.start()
    scene.kernel.await_hit("rollback:after_compensation")
    assert shop.orders == {}
    assert shop.payments
    scene.kernel.kill()
    worker.join()
    scene.kernel.disarm("rollback:after_compensation")
    held.disconnect()
    scene.kernel.start()
    eventually(lambda: scene.show(held.id)["state"] == "paused" and not shop.payments, "it is not finished")
    rows = [row for row in scene.operator.steps(held.id) if row["action"] == "compensate"]
    assert [row["outcome"] for row in rows] == ["ok", "ok"]
    assert len([one for one in shop.carried_out if "refunds" in one]) == 1
    assert (shop.orders, shop.payments) == ({}, {})


def _rolled(held: Held) -> None:
    with contextlib.suppress(Refused):  # the kernel is killed under it
        back(held)
