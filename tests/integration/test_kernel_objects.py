"""Objects in a bucket: what agents change there is kept before and comes back exactly; the accident with the backups, ended."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from ringfence.agent import BudgetExhausted, Conflict, Denied, InvalidRequest, NoSuchResource, SnapshotFailed
from ringfence.syscalls.drivers import ABSENT, ObjectDriver, Stat, open_driver
from support.bucket import KEY, SECRET, Bucket, a_bucket
from support.kernels import eventually
from support.scenes import Held, Scene, console, scene_on

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    backups:
      type: object
      driver: s3
      options: {{bucket: shelf, endpoint: "{endpoint}", access_key: {{secret: s3-id}}, secret_key: {{secret: s3-key}}}}
      keep_max: 1MiB
      untrusted: true
    tape: {{type: object, driver: tape, options: {{reel: 7}}}}
"""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with a_bucket(tmp_path_factory.mktemp("s3")) as bucket:
        yield bucket


@pytest.fixture(scope="module")
def scene(bucket: Bucket) -> Iterator[Scene]:
    with scene_on(None, config=CONFIG.format(endpoint=bucket.endpoint)) as scene:
        scene.operator.ask("SecretSet", name="s3-id", value=KEY.encode())
        scene.operator.ask("SecretSet", name="s3-key", value=SECRET.encode())
        yield scene


class Shelf:
    """The bucket as somebody else sees it."""

    def __init__(self, bucket: Bucket) -> None:
        given: dict[str, Any] = {"bucket": "shelf", "endpoint": bucket.endpoint}
        self.driver: ObjectDriver = open_driver("s3", {**given, "access_key": KEY, "secret_key": SECRET})

    async def put(self, key: str, data: bytes, **attributes: str) -> None:
        now = await self.driver.describe(key)
        version = now.version if now else ABSENT
        await self.driver.write(key, io.BytesIO(data), len(data), attributes, version)

    async def stands(self) -> dict[str, tuple[bytes, dict[str, str]]]:
        found: dict[str, tuple[bytes, dict[str, str]]] = {}
        for one in (await self.driver.list("", "", 1000)).objects:
            stat = await self.driver.describe(one.key)
            assert stat
            found[one.key] = await self._content(one.key, stat), dict(stat.attributes)
        return found

    async def _content(self, key: str, stat: Stat) -> bytes:
        return b"".join([piece async for piece in self.driver.read(key, stat.version, 0, stat.size)])

    async def clear(self) -> None:
        for one in (await self.driver.list("", "", 1000)).objects:
            await self.driver.remove(one.key, one.version)


@pytest.fixture
async def shelf(bucket: Bucket) -> Shelf:
    shelf = Shelf(bucket)
    await shelf.clear()
    await shelf.put(
        "2026/db.dump", b"\x00 the only copy", **{"Content-Type": "application/x-dump", "by": "nightly"}
    )
    await shelf.put("2026/notes.txt", b"first", **{"Content-Type": "text/plain"})
    await shelf.put("secret/key", b"nobody's")
    return shelf


@pytest.fixture
def held(scene: Scene) -> Held:
    return scene.hold(
        allow=['object.*: "backups/**"'],
        deny=['object.*: "backups/secret/**"'],
        more="budgets: {total: {destructive: 5, bytes: 64KiB}, on_exhausted: refuse}",
    )


async def test_the_backups_that_were_deleted_come_back(held: Held, shelf: Shelf) -> None:
    before = await shelf.stands()
    objects = held.rf.objects
    assert [one.object for one in objects.list("backups/2026")] == [
        "backups/2026/db.dump",
        "backups/2026/notes.txt",
    ]
    for one in objects.list("backups/2026"):
        objects.delete(one.object)
    made = objects.put("backups/2026/new", "fresh", metadata={"by": "agent"})
    assert (made.created, made.size_bytes) == (True, 5)
    again = objects.put("backups/2026/new", b"other", content_type="a/b", if_version=made.version)
    assert not again.created
    got = objects.get("backups/2026/new", offset=1, limit=3)
    assert (got, got.content_type, got.size_bytes, got.version) == (b"the", "a/b", 5, again.version)
    assert set(await shelf.stands()) == {"2026/new", "secret/key"}
    points = held.operator.ask("Points", agent=held.id, verify=True)["points"]
    assert {(p["kind"], p["action"], p["verified"]) for p in points} == {
        ("object", "object.delete", True),
        ("object", "object.put", True),
    }
    preview = held.operator.ask("Rollback", agent=held.id, to="0", preview=True)
    assert {(c["kind"], c["target"], c["action"]) for c in preview["changes"]} == {
        ("object", "backups/2026/db.dump", "create"),
        ("object", "backups/2026/notes.txt", "create"),
        ("object", "backups/2026/new", "remove"),
    }
    assert preview["not_undoable"] == []
    done = held.operator.ask("Rollback", agent=held.id, to="0")
    assert done["conflicts"] == []
    assert await shelf.stands() == before


async def test_what_others_did_meanwhile_is_left_alone(held: Held, shelf: Shelf) -> None:
    objects = held.rf.objects
    objects.delete("backups/2026/db.dump")
    objects.put("backups/2026/notes.txt", "mine")
    objects.put("backups/2026/new", "mine")
    await shelf.put("2026/db.dump", b"somebody else's")
    await shelf.put("2026/new", b"theirs too")
    done = held.operator.ask("Rollback", agent=held.id, to="0")
    assert [(c["kind"], c["target"], c["reason"]) for c in done["conflicts"]] == [
        ("object", name, "something else stands there now")
        for name in ("backups/2026/new", "backups/2026/db.dump")
    ]
    now = await shelf.stands()
    assert now["2026/notes.txt"] == (b"first", {"Content-Type": "text/plain"})
    assert (now["2026/db.dump"][0], now["2026/new"][0]) == (b"somebody else's", b"theirs too")


async def test_what_somebody_did_between_two_calls_is_left_alone(held: Held, shelf: Shelf) -> None:
    before = await shelf.stands()
    objects = held.rf.objects
    objects.put("backups/2026/db.dump", "mine")
    objects.put("backups/2026/notes.txt", "mine")
    await shelf.put("2026/notes.txt", b"theirs")
    theirs = (await shelf.stands())["2026/notes.txt"]
    objects.put("backups/2026/notes.txt", "mine again")
    objects.put("backups/2026/db.dump", "mine again")
    done = held.operator.ask("Rollback", agent=held.id, to="0")
    assert [(c["target"], c["reason"].partition(";")[0]) for c in done["conflicts"]] == [
        ("backups/2026/notes.txt", "changed by somebody else between two of these calls")
    ]
    now = await shelf.stands()
    assert (now["2026/notes.txt"][0], now["2026/db.dump"]) == (b"mine again", before["2026/db.dump"])
    # To a later step theirs comes back.
    held.operator.ask("Rollback", agent=held.id, to="2")
    assert (await shelf.stands())["2026/notes.txt"] == theirs


async def test_what_was_kept_of_one_bucket_goes_into_no_other(
    scene: Scene, bucket: Bucket, held: Held, shelf: Shelf
) -> None:
    held.rf.objects.delete("backups/2026/db.dump")
    (bucket.root / "other").mkdir()
    scene.kernel.config.write_text(
        CONFIG.format(endpoint=bucket.endpoint).replace("bucket: shelf", "bucket: other")
    )
    try:
        scene.operator.ask("Reload")
        done = held.operator.ask("Rollback", agent=held.id, to="0")
    finally:
        scene.kernel.config.write_text(CONFIG.format(endpoint=bucket.endpoint))
        scene.operator.ask("Reload")
    assert [c["target"] for c in done["conflicts"]] == ["backups/2026/db.dump"]
    assert "another target now" in done["conflicts"][0]["reason"]
    assert [path for path in (bucket.root / "other").rglob("*") if path.is_file()] == []
    assert set(await shelf.stands()) == {"2026/notes.txt", "secret/key"}


async def test_what_two_did_in_turn_goes_back_to_before_the_first(
    scene: Scene, held: Held, shelf: Shelf
) -> None:
    before = await shelf.stands()
    other = scene.hold(allow=['object.*: "backups/**"'])
    begun = datetime.now(UTC).isoformat()
    held.rf.objects.put("backups/2026/notes.txt", "mine")
    other.rf.objects.delete("backups/2026/notes.txt")
    # Alone the first one's change is somebody else's by now.
    preview = held.operator.ask("Rollback", agent=held.id, to="0", preview=True)
    assert [c["reason"] for c in preview["conflicts"]] == ["somebody removed it since"]
    done = console("rollback", "--all", "--to", begun, "--json", "--data", str(scene.kernel.data))
    assert done.returncode == 0, done.stderr
    found = {one["agent"]: one["changes"] for one in json.loads(done.stdout)}
    assert [(c["target"], c["action"]) for c in found[other.id]] == [("backups/2026/notes.txt", "create")]
    assert found[held.id] == []
    assert await shelf.stands() == before


async def test_what_is_refused(held: Held, shelf: Shelf, scene: Scene) -> None:
    before = await shelf.stands()
    objects = held.rf.objects
    held.refused(Denied, lambda: objects.get("backups/secret/key"))
    held.refused(Denied, lambda: objects.list("backups/secret"))
    assert [one.object for one in objects.list("backups")] == [
        "backups/2026/db.dump",
        "backups/2026/notes.txt",
    ]
    for name in ("backups/../secret/key", "backups/2026//db.dump", "backups/./x", "backups/", "backups/a\nb"):
        held.refused(InvalidRequest, lambda name=name: objects.get(name))
    held.refused(NoSuchResource, lambda: objects.get("nowhere/x"))
    held.refused(NoSuchResource, lambda: objects.get("backups/2026/none"))
    held.refused(NoSuchResource, lambda: objects.delete("backups/2026/none"))
    held.refused(Conflict, lambda: objects.delete("backups/2026/db.dump", if_version='"stale"'))
    held.refused(InvalidRequest, lambda: objects.put("backups/x", b"", metadata={"content-type": "a/b"}))
    error = held.refused(NoSuchResource, lambda: objects.get("tape/1"))
    assert "no driver `tape` is installed" in str(error)
    assert await shelf.stands() == before
    # What can't be kept is not destroyed.
    await shelf.put("large", bytes(1 << 20) + b"x")
    held.refused(SnapshotFailed, lambda: objects.delete("backups/large"))
    held.refused(SnapshotFailed, lambda: objects.put("backups/large", b"x"))
    assert "large" in await shelf.stands()
    held.refused(BudgetExhausted, lambda: objects.get("backups/large"))
    # What anybody can write there taints who reads it, and the credential shows nowhere.
    facts = held.operator.ask("PolicyExplain", agent=held.id, step=held.last()["step"])["facts"]
    assert "backups" in json.dumps(facts["tainted"])
    shown = json.dumps([scene.show(held.id), held.steps(), held.operator.ask("Status")])
    assert SECRET not in shown
    assert KEY not in shown


@pytest.mark.fault
async def test_a_kernel_that_is_killed_around_a_change(scene: Scene, held: Held, shelf: Shelf) -> None:
    """One is killed between the copy and the change, another between the change and its record."""
    before = await shelf.stands()
    other = scene.hold(allow=['object.*: "backups/**"'])
    points = ("object.put:before_effect", "object.delete:after_effect")
    for point in points:
        scene.kernel.arm(point)
    held.rf.thread(lambda: _quiet(held, lambda: held.rf.objects.put("backups/2026/notes.txt", "mine")))
    other.rf.thread(lambda: _quiet(other, lambda: other.rf.objects.delete("backups/2026/db.dump")))
    for point in points:
        scene.kernel.await_hit(point)
    assert set(await shelf.stands()) == {"2026/notes.txt", "secret/key"}
    scene.kernel.kill()
    for point in points:
        scene.kernel.disarm(point)
    held.disconnect()
    other.disconnect()
    scene.kernel.start()
    eventually(lambda: other.steps()[-1]["outcome"] == "ok", "what was done is not found out")
    assert (await shelf.stands())["2026/notes.txt"][0] == b"first"
    held.again()
    held.rf.thread(lambda: held.rf.objects.put("backups/2026/notes.txt", "mine")).result()
    assert (await shelf.stands())["2026/notes.txt"][0] == b"mine"
    for one in (held, other):
        assert one.operator.ask("Rollback", agent=one.id, to="0")["conflicts"] == []
    assert await shelf.stands() == before


def _quiet(held: Held, call: Any) -> None:
    del held
    with contextlib.suppress(Exception):
        call()


def test_a_driver_that_can_not_be_opened_is_shown(scene: Scene) -> None:
    (missing,) = scene.operator.ask("Status")["config"]["unavailable"]
    assert missing["name"] == "tape"
    assert "there are: s3" in missing["reason"]
