"""What agents keep: memories that are found by their words, and artifacts in versions."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ringfence.kernel.thread import Thread
from ringfence.syscalls import artifacts_put
from ringfence.syscalls.errors import CallFailed, Denied, InvalidRequest, NoSuchResource
from support.heart import Heart, heart_on
from support.scenes import short_directory

pytestmark = pytest.mark.postgres

ALL = ['memory.*: "**"', 'artifacts.*: "*"']


class Shelf:
    """Agents that keep things; each call is the next one of its agent's lane."""

    def __init__(self, heart: Heart) -> None:
        self.heart = heart
        self._steps: dict[int, int] = {}

    async def agent(self, name: str = "ann", allow: list[str] = ALL) -> Thread:
        return await self.heart.agent(allow=allow, name=name)

    async def call(self, thread: Thread, action: str, **arguments: Any) -> Any:
        step = self._steps.get(thread.key, 0)
        self._steps[thread.key] = step + 1
        answer = await self.heart.call(thread, step, action, **arguments)
        return answer.failure if answer.failure is not None else json.loads(answer.result)

    async def keep(self, thread: Thread, text: str, **more: Any) -> str:
        return (await self.call(thread, "memory.append", text=text, **more))["id"]

    async def find(self, thread: Thread, query: str, **more: Any) -> list[str]:
        found = await self.call(thread, "memory.search", query=query, **more)
        return [entry["text"] for entry in found["entries"]]


@pytest.fixture
async def shelf(dsn: str) -> AsyncIterator[Shelf]:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield Shelf(heart)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# -- memory -----------------------------------------------------------------------------------------------------------


async def test_an_entry_comes_back_as_it_was_kept(shelf: Shelf) -> None:
    ann = await shelf.agent()
    entry = await shelf.keep(ann, "Größe 42 costs a lot", tags=["price", "ä"], metadata={"page": [1, None]})
    found = await shelf.call(ann, "memory.search", query="größe")
    (one,) = found["entries"]
    assert found["truncated"] is False
    assert one.pop("created_at").endswith("Z")
    assert one.pop("score") > 0
    assert one == {
        "id": entry,
        "text": "Größe 42 costs a lot",
        "tags": ["price", "ä"],
        "metadata": {"page": [1, None]},
        "agent": ann.id,
    }


async def test_words_phrases_alternatives_and_exclusions(shelf: Shelf) -> None:
    ann = await shelf.agent()
    for text in ("red apple pie", "green apple", "pear pie", "apple pie apple pie"):
        await shelf.keep(ann, text)
    assert await shelf.find(ann, "apple pie") == ["apple pie apple pie", "red apple pie"]
    assert await shelf.find(ann, '"red apple"') == ["red apple pie"]
    assert sorted(await shelf.find(ann, "pear or green")) == ["green apple", "pear pie"]
    assert await shelf.find(ann, "apple -pie") == ["green apple"]
    assert await shelf.find(ann, "') | ! & :*") == []
    assert await shelf.find(ann, "") == ["apple pie apple pie", "pear pie", "green apple", "red apple pie"]


async def test_a_language_counts_forms_of_a_word_as_one(shelf: Shelf) -> None:
    ann = await shelf.agent()
    await shelf.keep(ann, "the invoices were printed", language="english")
    assert await shelf.find(ann, "invoice printing", language="english") == ["the invoices were printed"]
    assert await shelf.find(ann, "invoice") == []


async def test_pages_are_bounded_and_say_whether_there_is_more(shelf: Shelf) -> None:
    ann = await shelf.agent()
    for number in range(13):
        await shelf.keep(ann, f"note {number}", tags=["odd"] if number % 2 else [])
    first = await shelf.call(ann, "memory.search", query="note")
    assert (len(first["entries"]), first["truncated"]) == (10, True)
    rest = await shelf.call(ann, "memory.search", query="note", offset=10, limit=100)
    assert (len(rest["entries"]), rest["truncated"]) == (3, False)
    texts = [entry["text"] for entry in (*first["entries"], *rest["entries"])]
    assert sorted(texts) == sorted(f"note {number}" for number in range(13))
    assert await shelf.find(ann, "note", tags=["odd"], limit=2) == ["note 11", "note 9"]


async def test_an_own_memory_is_private_and_a_space_is_shared(shelf: Shelf) -> None:
    ann, bob = await shelf.agent("ann"), await shelf.agent("ann")
    await shelf.keep(ann, "secret plan")
    await shelf.keep(ann, "shared plan", space="team/plans")
    assert await shelf.find(bob, "plan") == []
    assert await shelf.find(bob, "plan", space="own") == []
    assert await shelf.find(bob, "plan", space="team/plans") == ["shared plan"]
    assert await shelf.find(ann, "plan") == ["secret plan"]


async def test_rules_name_spaces(shelf: Shelf) -> None:
    ann = await shelf.agent(allow=['memory.append: "own"', 'memory.search: "team/**"'])
    await shelf.keep(ann, "x", space="own")
    assert await shelf.find(ann, "x", space="team/a") == []
    assert isinstance(await shelf.call(ann, "memory.append", text="x", space="team/a"), Denied)
    assert isinstance(await shelf.call(ann, "memory.search", query="x"), Denied)


@pytest.mark.parametrize(
    ("action", "arguments", "said"),
    [
        ("append", {"text": ""}, "1 to 65536 bytes"),
        ("append", {"text": "x" * 65537}, "this one has 65537"),
        ("append", {"text": "x", "metadata": [1]}, "no JSON object"),
        ("append", {"text": "x", "metadata": {"x": "y" * 16384}}, "metadata is larger"),
        ("append", {"text": "x", "tags": ["t"] * 33}, "33 tags"),
        ("append", {"text": "x", "tags": [""]}, "a tag has 1 to 128 bytes"),
        ("append", {"text": "x", "language": "klingon"}, "no language `klingon`; there are: arabic"),
        ("append", {"text": "x", "space": "../y"}, "empty, `.` or `..`"),
        ("search", {"limit": 101}, "between 0 and 100"),
        ("search", {"offset": -1}, "between 0 and 10000"),
        ("search", {"query": "x" * 4097}, "longer than 4096"),
    ],
)
async def test_what_a_memory_can_not_take_says_why(
    shelf: Shelf, action: str, arguments: dict[str, Any], said: str
) -> None:
    failure = await shelf.call(await shelf.agent(), f"memory.{action}", **arguments)
    assert isinstance(failure, InvalidRequest)
    assert said in failure.message


async def test_a_search_is_replayed_as_it_was(shelf: Shelf) -> None:
    ann = await shelf.agent()
    await shelf.keep(ann, "one")
    assert await shelf.find(ann, "one") == ["one"]
    await shelf.keep(ann, "one more")
    again = await shelf.heart.adopted_again(ann)
    await shelf.heart.call(again, 0, "memory.append", text="one")
    replayed = await shelf.heart.call(again, 1, "memory.search", query="one")
    assert [entry["text"] for entry in json.loads(replayed.result)["entries"]] == ["one"]


# -- artifacts ----------------------------------------------------------------------------------------------------


async def test_every_put_is_a_version_and_each_can_be_read(shelf: Shelf) -> None:
    ann = await shelf.agent()
    contents = [b"one", b"\0\xff two", b""]
    refs = [hashlib.sha256(data).hexdigest() for data in contents]
    for nr, data in enumerate(contents):
        put = await shelf.call(ann, "artifacts.put", name="report.txt", data=b64(data), media_type="text/x")
        assert put == {"ref": refs[nr], "version": nr + 1, "size_bytes": len(data)}
    newest = await shelf.call(ann, "artifacts.get", name="report.txt")
    assert newest == {
        "data": "",
        "size_bytes": 0,
        "name": "report.txt",
        "version": 3,
        "ref": refs[2],
        "media_type": "text/x",
    }
    for nr, data in enumerate(contents):
        by_version = await shelf.call(ann, "artifacts.get", name="report.txt", version=nr + 1)
        by_ref = await shelf.call(ann, "artifacts.get", ref=refs[nr])
        assert by_version == by_ref
        assert base64.b64decode(by_ref["data"]) == data


async def test_as_much_as_fits_into_one_call_is_kept(shelf: Shelf) -> None:
    ann = await shelf.agent()
    data = bytes(artifacts_put.DATA_BYTES_MAX)
    assert (await shelf.call(ann, "artifacts.put", name="n" * 63, data=b64(data)))["size_bytes"] == len(data)
    assert base64.b64decode((await shelf.call(ann, "artifacts.get", name="n" * 63))["data"]) == data


async def test_a_part_is_read_alone(shelf: Shelf) -> None:
    ann = await shelf.agent()
    data = bytes(range(256)) * 8192
    await shelf.call(ann, "artifacts.put", name="big", data=b64(data))
    for offset, limit in (
        (0, 10),
        (1 << 20, 7),
        ((1 << 20) - 3, 9),
        (len(data) - 2, 100),
        (len(data) + 5, 3),
    ):
        part = await shelf.call(ann, "artifacts.get", name="big", offset=offset, limit=limit)
        assert base64.b64decode(part["data"]) == data[offset : offset + limit]
        assert part["size_bytes"] == len(data)


async def test_artifacts_are_the_agents_own_and_rules_name_them(shelf: Shelf) -> None:
    ann, bob = await shelf.agent("ann"), await shelf.agent("bob")
    put = await shelf.call(ann, "artifacts.put", name="secret.txt", data=b64(b"s"))
    for which in ({"name": "secret.txt"}, {"ref": put["ref"]}):
        assert isinstance(await shelf.call(bob, "artifacts.get", **which), NoSuchResource)
    eve = await shelf.agent("eve", ['artifacts.put: "*"', 'artifacts.get: "public*"'])
    put = await shelf.call(eve, "artifacts.put", name="secret.txt", data=b64(b"e"))
    for which in ({"name": "secret.txt"}, {"ref": put["ref"]}):
        assert isinstance(await shelf.call(eve, "artifacts.get", **which), Denied)
    await shelf.call(eve, "artifacts.put", name="public.txt", data=b64(b"p"))
    assert (await shelf.call(eve, "artifacts.get", name="public.txt"))["version"] == 1


@pytest.mark.parametrize(
    ("action", "arguments", "said"),
    [
        ("put", {"name": "a/b"}, "no name of an artifact"),
        ("put", {"name": "a" * 64}, "no name of an artifact"),
        ("put", {"name": "a", "media_type": "text"}, "no media type"),
        (
            "put",
            {"name": "a", "data": b64(bytes(artifacts_put.DATA_BYTES_MAX + 1))},
            "3080193 bytes; one call carries at most 3080192",
        ),
        ("get", {"version": 1}, "by `name` or by `ref`"),
        ("get", {"name": "a", "ref": "b" * 64}, "by `name` or by `ref`"),
        ("get", {"ref": "xyz"}, "64 hex digits"),
        ("get", {"ref": "b" * 64, "version": 1}, "leave `version` out"),
        ("get", {"name": "a", "offset": -1}, "can't be negative"),
    ],
)
async def test_what_is_no_artifact_says_why(
    shelf: Shelf, action: str, arguments: dict[str, Any], said: str
) -> None:
    failure = await shelf.call(await shelf.agent(), f"artifacts.{action}", **arguments)
    assert isinstance(failure, InvalidRequest)
    assert said in failure.message


async def test_a_store_that_can_not_keep_the_bytes_leaves_no_name(shelf: Shelf) -> None:
    ann = await shelf.agent()
    blobs = shelf.heart.kernel.layout.blobs
    (blobs / "fresh").rmdir()
    failure = await shelf.call(ann, "artifacts.put", name="a", data=b64(b"x"))
    assert isinstance(failure, CallFailed)
    assert isinstance(await shelf.call(ann, "artifacts.get", name="a"), NoSuchResource)
    (blobs / "fresh").mkdir()
    assert (await shelf.call(ann, "artifacts.put", name="a", data=b64(b"x")))["version"] == 1


async def test_bytes_that_changed_on_disk_are_not_given_out(shelf: Shelf) -> None:
    ann = await shelf.agent()
    ref = (await shelf.call(ann, "artifacts.put", name="a", data=b64(b"x")))["ref"]
    place = shelf.heart.kernel.layout.blobs / ref[:2] / ref[2:]
    place.write_bytes(place.read_bytes()[:-1] + b"?")
    failure = await shelf.call(ann, "artifacts.get", name="a")
    assert isinstance(failure, CallFailed)
    assert "has changed on disk" in failure.message
