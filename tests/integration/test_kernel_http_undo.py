"""Destructive HTTP calls: kept before, put back by a rollback, refused where they can't be kept; over crashes as well."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from ringfence.agent import QuotaExceeded, SnapshotFailed
from support.kernels import Refused, eventually
from support.scenes import Held, Scene, console, scene_on

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]


class Drive(ThreadingHTTPServer):
    """A store of files by name: GET, PUT and DELETE of `/v1/files/NAME`, and `POST /v1/remove` with a name."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.keys: list[str] = []
        self.failing = False
        self.refused = ""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Drive

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.path = self.path.replace("/v1/keyed/", "/v1/").replace("/v1/paced/", "/v1/")
        self.server.asked.append(f"{self.command} {self.path}")
        self.server.keys.append(self.headers.get("idempotency-key", ""))
        name = self.path.removeprefix("/v1/files/")
        if self.path == "/v1/remove":
            name = json.loads(body)["file"]["name"]
        files = self.server.files
        if self.headers.get("authorization") != "Bearer drive-secret":
            self._answer(401, b"")
        elif self.server.failing or self.command == self.server.refused:
            self._answer(503, b"")
        elif self.command == "PUT":
            files[name] = body
            self._answer(201, b"")
        elif name not in files:
            self._answer(404, b"")
        elif self.command == "GET":
            self._answer(200, files[name])
        else:
            del files[name]
            self._answer(204, b"")

    do_GET = do_PUT = do_POST = do_DELETE = _serve

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "text/x-note")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        pass


CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    drive:
      type: http
      base: "{base}"
      auth: {{bearer: {{secret: drive}}}}
      effects: {{"DELETE /**": destroy, "POST /remove": destroy, "POST /burn": destroy, "POST /erase": destroy}}
      undo:
        "DELETE /files/*": {{keep: "GET {{path}}", put_back: "PUT {{path}}"}}
        "PUT /files/*": {{keep: "GET {{path}}", put_back: "PUT {{path}}", remove: "DELETE {{path}}"}}
        "POST /remove": {{keep: "GET /files/{{/file/name}}", put_back: "PUT /files/{{/file/name}}"}}
        "POST /erase": {{compensate: "POST /remake", body: {{names: ["{{/name}}"], by: "{{reply:/id}}"}}}}
    keyed:
      type: http
      base: "{base}/keyed"
      auth: {{bearer: {{secret: drive}}}}
      idempotency_header: Idempotency-Key
      effects: {{"DELETE /**": destroy}}
      undo: {{"DELETE /**": {{keep: "GET {{path}}", put_back: "PUT {{path}}"}}}}
    paced:
      type: http
      base: "{base}/paced"
      auth: {{bearer: {{secret: drive}}}}
      rate: 4/h
      effects: {{"DELETE /**": destroy}}
      undo: {{"DELETE /**": {{keep: "GET {{path}}", put_back: "PUT {{path}}"}}}}
"""


@pytest.fixture(scope="module")
def drive() -> Iterator[Drive]:
    with Drive() as drive:
        yield drive
        drive.shutdown()


@pytest.fixture(scope="module")
def scene(drive: Drive) -> Iterator[Scene]:
    with scene_on(None, config=CONFIG.format(base=drive.base)) as scene:
        scene.operator.ask("SecretSet", name="drive", value=b"drive-secret")
        yield scene


@pytest.fixture
def held(scene: Scene, drive: Drive) -> Held:
    drive.files = {"a": b"\x00 first", "b": b"second"}
    drive.asked.clear()
    drive.keys.clear()
    return scene.hold(
        allow=[f'http.*: "{drive.base}/**"', 'fs.*: "/workspace/**"'],
        more="budgets: {total: {destructive: 3}}",
    )


def remove(held: Held, drive: Drive, name: Any) -> Any:
    return held.rf.http.post(f"{drive.base}/remove", json={"file": {"name": name}})


def test_what_a_call_destroys_is_kept_before_and_put_back(held: Held, drive: Drive) -> None:
    assert held.rf.http.delete(f"{drive.base}/files/a").status == 204
    assert remove(held, drive, "b").status == 204
    assert drive.files == {}
    # After anything but a DELETE it is asked how the call left what it changed.
    assert drive.asked == [
        *("GET /v1/files/a", "DELETE /v1/files/a"),
        *("GET /v1/files/b", "POST /v1/remove", "GET /v1/files/b"),
    ]
    steps = held.steps()
    assert [step["effect"] for step in steps] == ["DESTROY", "DESTROY"]
    points = held.operator.ask("Points", agent=held.id, verify=True)["points"]
    assert sorted((p["kind"], *p["covers"], p["verified"]) for p in points) == [
        ("http", f"{drive.base}/files/{name}", True) for name in "ab"
    ]
    preview = held.operator.ask("Rollback", agent=held.id, to="0", preview=True)
    assert {(c["kind"], c["target"], c["action"]) for c in preview["changes"]} == {
        ("http", f"{drive.base}/files/{name}", "restore") for name in "ab"
    }
    assert preview["not_undoable"] == []
    assert drive.files == {}
    done = held.operator.ask("Rollback", agent=held.id, to="0", start=True)
    assert done["conflicts"] == []
    assert drive.files == {"a": b"\x00 first", "b": b"second"}
    # To do it again is another effect: it is not answered from the record, and can be undone as well.
    held.again()
    assert held.rf.http.delete(f"{drive.base}/files/a").status == 204
    assert drive.files == {"b": b"second"}
    held.operator.ask("Rollback", agent=held.id, to="0")
    assert drive.files["a"] == b"\x00 first"


def test_what_can_not_be_kept_is_not_destroyed(held: Held, drive: Drive) -> None:
    for work in (
        lambda: held.rf.http.delete(f"{drive.base}/files/none"),  # nothing there
        lambda: remove(held, drive, ""),
        lambda: remove(held, drive, {"name": "a"}),
        lambda: remove(held, drive, "../files/a"),
        lambda: held.rf.http.post(f"{drive.base}/remove", data=b'{"file": {"name": "\\ud800"}}'),
        lambda: held.rf.http.post(f"{drive.base}/remove", data=b"name=a"),
        # What is kept would not be what is destroyed: targets differ in how they read these.
        lambda: held.rf.http.post(f"{drive.base}/remove", data=b'{"file": {"name": "b", "name": "a"}}'),
        lambda: held.rf.http.post(f"{drive.base}/remove", data=b'{"file": {"name": "a", "Name": "b"}}'),
        lambda: held.rf.http.post(
            f"{drive.base}/remove",
            data=b'{"file": {"name": "a"}, "x": "&file[name]=b"}',
            headers={"content-type": "application/x-www-form-urlencoded"},
        ),
    ):
        held.refused(SnapshotFailed, work)
    drive.failing = True
    try:
        held.refused(SnapshotFailed, lambda: held.rf.http.delete(f"{drive.base}/files/a"))
    finally:
        drive.failing = False
    assert set(drive.files) == {"a", "b"}
    assert [one for one in drive.asked if not one.startswith("GET ")] == []


def test_what_others_did_meanwhile_is_left_alone(held: Held, drive: Drive) -> None:
    held.rf.http.delete(f"{drive.base}/files/a")
    held.rf.http.delete(f"{drive.base}/files/b")
    drive.files["a"] = b"somebody else's"
    drive.files["b"] = b"second"
    done = held.operator.ask("Rollback", agent=held.id, to="0")
    assert [(c["kind"], c["target"], c["reason"]) for c in done["conflicts"]] == [
        ("http", f"{drive.base}/files/a", "something else stands there now")
    ]
    assert drive.files == {"a": b"somebody else's", "b": b"second"}


def test_what_somebody_did_between_two_calls_is_left_alone(held: Held, drive: Drive) -> None:
    for name in ("a", "b"):
        held.rf.http.delete(f"{drive.base}/files/{name}")
    drive.files["a"] = b"theirs"
    held.rf.http.delete(f"{drive.base}/files/a")
    done = held.operator.ask("Rollback", agent=held.id, to="0")
    assert [(c["target"], c["reason"].partition(";")[0]) for c in done["conflicts"]] == [
        (f"{drive.base}/files/a", "changed by somebody else between two of these calls")
    ]
    assert drive.files == {"b": b"second"}
    held.operator.ask("Rollback", agent=held.id, to="2")
    assert drive.files == {"a": b"theirs", "b": b"second"}


def test_what_is_left_alone_is_taken_back_for_nobody(scene: Scene, held: Held, drive: Drive) -> None:
    other = scene.hold(allow=[f'http.*: "{drive.base}/**"'])
    begun = datetime.now(UTC).isoformat()
    held.rf.http.delete(f"{drive.base}/files/a")
    drive.files["a"] = b"theirs"
    other.rf.http.delete(f"{drive.base}/files/a")
    words = ("--to", begun, "--start", "--json", "--data", str(scene.kernel.data))
    done = console("rollback", "--all", *words)
    assert done.returncode == 5, done.stderr
    found = {one["agent"]: [c["target"] for c in one["conflicts"]] for one in json.loads(done.stdout)}
    assert found == {held.id: [], other.id: [f"{drive.base}/files/a"]}
    drive.files["a"] = b"new"
    # What the first one did was not undone: made again it is recognised.
    held.again()
    assert held.rf.http.delete(f"{drive.base}/files/a").status == 204
    assert drive.files["a"] == b"new"


def test_a_target_that_fails_is_a_conflict(held: Held, drive: Drive) -> None:
    held.rf.http.delete(f"{drive.base}/files/a")
    drive.failing = True
    try:
        done = held.operator.ask("Rollback", agent=held.id, to="0")
    finally:
        drive.failing = False
    assert "503" in done["conflicts"][0]["reason"]
    assert "a" not in drive.files


def test_what_two_did_in_turn_goes_back_to_before_the_first(scene: Scene, held: Held, drive: Drive) -> None:
    """One puts back what lies among the points of the other."""
    before = dict(drive.files)
    other = scene.hold(allow=[f'http.*: "{drive.base}/**"'])
    begun = datetime.now(UTC).isoformat()
    held.rf.http.put(f"{drive.base}/files/a", data=b"mine")
    held.rf.http.put(f"{drive.base}/files/new", data=b"mine")
    other.rf.http.delete(f"{drive.base}/files/a")
    done = console("rollback", "--all", "--to", begun, "--json", "--data", str(scene.kernel.data))
    assert done.returncode == 0, done.stderr
    found = {one["agent"]: one["changes"] for one in json.loads(done.stdout)}
    assert [(c["target"], c["action"]) for c in found[other.id]] == [(f"{drive.base}/files/a", "restore")]
    assert [(c["target"], c["action"]) for c in found[held.id]] == [(f"{drive.base}/files/new", "remove")]
    assert drive.files == before


def test_what_keeps_and_puts_back_has_its_part_of_the_rate(held: Held, drive: Drive) -> None:
    held.rf.http.delete(f"{drive.base}/paced/files/a")
    assert drive.asked == ["GET /v1/files/a", "DELETE /v1/files/a"]
    # The third and the last one in this hour: a look at what stands there, and putting it back.
    held.disconnect()
    done = held.operator.ask("Rollback", agent=held.id, to="0", start=True)
    assert (done["conflicts"], drive.asked[2:]) == ([], ["GET /v1/files/a", "PUT /v1/files/a"])
    held.again()
    refused = held.refused(QuotaExceeded, lambda: held.rf.http.delete(f"{drive.base}/paced/files/b"))
    assert "has a turn in" in str(refused)
    assert drive.asked[4:] == []
    assert "b" in drive.files


def test_what_is_refused_at_that_moment_is_taken_back_for_nobody(
    scene: Scene, held: Held, drive: Drive
) -> None:
    """Of a joint rollback one puts back what both did. It can't, the kernel dies, and the next one carries the other's part out."""
    kernel = scene.kernel
    other = scene.hold(allow=[f'http.*: "{drive.base}/**"'])
    begun = datetime.now(UTC).isoformat()
    held.rf.http.put(f"{drive.base}/files/a", data=b"mine")
    other.rf.http.put(f"{drive.base}/files/a", data=b"other")
    drive.refused = "PUT"
    kernel.arm("rollback:after_outcome")
    asking = threading.Thread(target=roll_back, args=(scene, begun))
    asking.start()
    kernel.await_hit("rollback:after_outcome")
    kernel.kill()
    kernel.disarm("rollback:after_outcome")
    asking.join()
    kernel.start()
    for one in (held, other):
        eventually(
            lambda one=one: scene.show(one.id)["waiting_for"] == "an operator, after a rollback", one.id
        )
    drive.refused = ""
    assert drive.files["a"] == b"other"
    # What the first one did was not undone: made again it is recognised. To go back again goes on where it was.
    scene.operator.ask("Start", agent=held.id)
    held.again()
    assert held.rf.http.put(f"{drive.base}/files/a", data=b"mine").status == 201
    assert drive.files["a"] == b"other"
    scene.operator.ask("RollbackAll", to=begun)
    assert drive.files == {"a": b"\x00 first", "b": b"second"}
    # Now it is: made again it is sent.
    scene.operator.ask("Start", agent=held.id)
    held.again()
    held.rf.http.put(f"{drive.base}/files/a", data=b"mine")
    assert drive.files["a"] == b"mine"


def roll_back(scene: Scene, to: str) -> None:
    with contextlib.suppress(Refused):  # the kernel was killed under it
        scene.operator.ask("RollbackAll", to=to)


def test_what_destroys_has_to_name_what_makes_up_for_it(held: Held, drive: Drive) -> None:
    url = f"{drive.base}/erase"
    for data, kind in (
        (b"name=a", "application/x-www-form-urlencoded"),
        (b'{"name": "a"}', "text/plain"),
        (b'{"other": "a"}', "application/json"),
        (b'{"name": "a", "NAME": "b"}', "application/json"),
    ):
        error = held.refused(
            SnapshotFailed,
            lambda data=data, kind=kind: held.rf.http.post(url, data=data, headers={"content-type": kind}),
        )
        assert "make up for" in str(error)
    held.refused(SnapshotFailed, lambda: held.rf.http.post(url))
    assert drive.asked == []
    held.rf.http.post(url, json={"name": "a"})
    assert drive.asked == ["POST /v1/erase"]


def test_a_base_that_moved_sends_no_credential_to_where_it_was(
    scene: Scene, held: Held, drive: Drive
) -> None:
    held.rf.http.delete(f"{drive.base}/files/a")
    before = list(drive.asked)
    with Drive() as other:
        scene.kernel.config.write_text(CONFIG.format(base=other.base))
        try:
            scene.operator.ask("Reload")
            done = held.operator.ask("Rollback", agent=held.id, to="0")
        finally:
            scene.kernel.config.write_text(CONFIG.format(base=drive.base))
            scene.operator.ask("Reload")
            other.shutdown()
        assert other.asked == []
    assert [(c["target"], c["reason"]) for c in done["conflicts"]] == [
        (f"{drive.base}/files/a", "it is no longer below `drive` in the kernel file")
    ]
    assert drive.asked == before


@pytest.mark.fault
def test_a_crash_before_the_request_keeps_nothing_twice(scene: Scene, held: Held, drive: Drive) -> None:
    scene.kernel.arm("http.delete:before_effect")
    work = held.rf.thread(lambda: held.rf.http.delete(f"{drive.base}/files/a"))
    scene.kernel.await_hit("http.delete:before_effect")
    scene.kernel.kill()
    scene.kernel.disarm("http.delete:before_effect")
    assert drive.files["a"] == b"\x00 first"
    scene.kernel.start()
    eventually(lambda: scene.show(held.id)["state"] == "unknown", "the call is not reported as unknown")
    held.disconnect()
    held.operator.ask("Resolve", agent=held.id, step=held.steps()[0]["step"], outcome="not-done")
    del work
    held.again()
    assert held.rf.http.delete(f"{drive.base}/files/a").status == 204
    held.operator.ask("Rollback", agent=held.id, to="0")
    assert drive.files["a"] == b"\x00 first"


@pytest.mark.fault
def test_what_was_kept_before_a_crash_is_what_is_put_back(scene: Scene, held: Held, drive: Drive) -> None:
    """It was destroyed, and the kernel died before it could say so: what stands there now must not be taken for it."""
    url = f"{drive.base}/keyed/files/a"
    scene.kernel.arm("http.delete:after_effect")
    held.rf.thread(lambda: held.rf.http.delete(url))
    scene.kernel.await_hit("http.delete:after_effect")
    assert "a" not in drive.files
    scene.kernel.kill()
    scene.kernel.disarm("http.delete:after_effect")
    held.disconnect()
    scene.kernel.start()
    held.again()
    # The target takes a key, so it is sent again with the same one; this target has no memory and finds nothing.
    worker = held.rf.thread(lambda: held.rf.http.delete(url))
    assert worker.result().status == 404
    deletes = [key for asked, key in zip(drive.asked, drive.keys, strict=True) if asked.startswith("DELETE")]
    assert len(deletes) == 2
    assert len(set(deletes)) == 1
    done = held.operator.ask("Rollback", agent=held.id, to="0")
    assert done["conflicts"] == []
    assert drive.files["a"] == b"\x00 first"


def test_a_fork_leaves_to_the_original_what_it_destroyed(held: Held, drive: Drive) -> None:
    held.rf.fs.write_text("a.txt", "x")
    held.rf.http.delete(f"{drive.base}/files/a")
    held.rf.fs.write_text("b.txt", "x")
    fork = held.operator.ask("Fork", agent=held.id, at=str(held.steps()[-1]["step"]))["id"]
    done = held.operator.ask("Rollback", agent=fork, to="1")
    assert "a" not in drive.files
    assert [(one["action"], one["effect"]) for one in done["not_undoable"]] == [("http.delete", "DESTROY")]
    held.operator.ask("Rollback", agent=held.id, to="0")
    assert "a" in drive.files
