"""Drivers of objects: that of S3 on a server that runs beside, and the one that docs/drivers.md shows, by the same checks."""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from ringfence.syscalls.drivers import (
    ABSENT,
    BadOptions,
    Changed,
    DriverError,
    ObjectDriver,
    open_driver,
)
from support.bucket import KEY, SECRET, Bucket, a_bucket
from support.shelf import documented

pytestmark = pytest.mark.timeout(120)

ATTRIBUTES = {"Content-Type": "text/x-note", "taken-by": "nightly"}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with a_bucket(tmp_path_factory.mktemp("s3")) as bucket:
        yield bucket


def options(bucket: Bucket, **more: Any) -> dict[str, Any]:
    return {"bucket": "shelf", "endpoint": bucket.endpoint, "access_key": KEY, "secret_key": SECRET, **more}


@pytest.fixture(params=["s3", "documented"])
async def driver(
    request: pytest.FixtureRequest, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ObjectDriver]:
    # What lies in the environment is the kernel's own, and opens nothing here.
    monkeypatch.setenv("AWS_SESSION_TOKEN", "stray")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stray")
    if request.param == "s3":
        made: ObjectDriver = open_driver("s3", options(bucket))
    else:
        (tmp_path / "objects").mkdir()
        made = documented(tmp_path).Directory({"root": str(tmp_path / "objects")})
    yield made
    for one in (await made.list("", "", 1000)).objects:
        await made.remove(one.key, one.version)
    await made.close()


async def write(driver: ObjectDriver, key: str, data: bytes, expect: str = ABSENT, **attributes: str) -> str:
    return await driver.write(key, io.BytesIO(data), len(data), attributes or ATTRIBUTES, expect)


async def read(driver: ObjectDriver, key: str, version: str, start: int, length: int) -> bytes:
    return b"".join([piece async for piece in driver.read(key, version, start, length)])


async def test_what_was_kept_comes_back_exactly(driver: ObjectDriver) -> None:
    data = b"\x00 first"
    await write(driver, "a/b", data)
    file = cast("BinaryIO", io.BytesIO())
    kept = await driver.snapshot("a/b", file, 100)
    assert cast("io.BytesIO", file).getvalue() == data
    assert kept.sha256 == hashlib.sha256(data).hexdigest()
    assert kept.stat is not None
    assert dict(kept.stat.attributes) == ATTRIBUTES
    assert await driver.verify(kept)
    other = await write(driver, "a/b", b"other", kept.stat.version, **{"Content-Type": "text/x-other"})
    assert not await driver.verify(kept)
    file.seek(0)
    with pytest.raises(Changed):
        await driver.restore(kept, file, kept.stat.version)
    file.seek(0)
    await driver.restore(kept, file, other)
    assert await driver.verify(kept)
    now = await driver.describe("a/b")
    assert now is not None
    assert await read(driver, "a/b", now.version, 2, 3) == b"fir"
    await driver.remove("a/b", now.version)
    file.seek(0)
    await driver.restore(kept, file, ABSENT)
    assert await driver.verify(kept)


async def test_where_nothing_was_nothing_is_again(driver: ObjectDriver) -> None:
    kept = await driver.snapshot("new", cast("BinaryIO", io.BytesIO()), 100)
    assert (kept.stat, kept.sha256) == (None, "")
    assert await driver.verify(kept)
    version = await write(driver, "new", b"x")
    assert not await driver.verify(kept)
    with pytest.raises(Changed):
        await driver.restore(kept, None, "another")
    assert await driver.restore(kept, None, version) == ABSENT
    assert await driver.describe("new") is None
    await driver.restore(kept, None, ABSENT)


async def test_nothing_is_changed_over_another_version(driver: ObjectDriver) -> None:
    version = await write(driver, "k", b"one")
    for work in (
        write(driver, "k", b"two"),
        write(driver, "k", b"two", "another"),
        driver.remove("k", "another"),
        write(driver, "none", b"x", version),
        read(driver, "k", "another", 0, 3),
    ):
        with pytest.raises(Changed):
            await work
    now = await driver.describe("k")
    assert now is not None
    assert (now.size, now.version) == (3, version)
    with pytest.raises(DriverError, match="at most"):
        await driver.snapshot("k", cast("BinaryIO", io.BytesIO()), 2)


async def test_lists_in_parts(driver: ObjectDriver) -> None:
    for key in ("a/1", "a/2", "a/3", "ab", "b"):
        await write(driver, key, b"x")
    first = await driver.list("a/", "", 2)
    assert ([one.key for one in first.objects], first.more) == (["a/1", "a/2"], True)
    rest = await driver.list("a/", "a/2", 2)
    assert ([one.key for one in rest.objects], rest.more) == (["a/3"], False)
    assert [one.key for one in (await driver.list("", "", 9)).objects] == ["a/1", "a/2", "a/3", "ab", "b"]


async def test_a_large_object_is_kept_and_brought_back_in_pieces(bucket: Bucket) -> None:
    driver = open_driver("s3", options(bucket))
    size, piece = 20 << 20, bytes(range(256)) * 4096
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as kept_in:
        for _ in range(size // len(piece)):
            source.write(piece)
        source.seek(0)
        version = await driver.write("large", cast("BinaryIO", source), size, ATTRIBUTES, ABSENT)
        kept = await driver.snapshot("large", cast("BinaryIO", kept_in), size)
        await driver.remove("large", version)
        kept_in.seek(0)
        await driver.restore(kept, cast("BinaryIO", kept_in), ABSENT)
    assert await driver.verify(kept)
    now = await driver.describe("large")
    assert now is not None
    await driver.remove("large", now.version)


async def test_what_is_wrong_is_said_without_the_credential(bucket: Bucket) -> None:
    driver = open_driver("s3", options(bucket, secret_key="another-secret-key"))
    with pytest.raises(DriverError) as caught:
        await write(driver, "x", b"x")
    assert "\n" not in str(caught.value)
    assert "another-secret-key" not in str(caught.value)
    away = open_driver("s3", options(bucket, endpoint="http://127.0.0.1:1"))
    with pytest.raises(DriverError):
        await away.describe("x")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bucket": None}, "has to be a str"),
        ({"buckets": "x"}, "has no option `buckets`"),
        ({"path_style": "yes"}, "has to be a bool"),
        ({"secret_key": ""}, "has to be a str"),
    ],
)
def test_options_are_checked(given: dict[str, Any], words: str) -> None:
    wanted: dict[str, Any] = {"bucket": "b", "access_key": "a", "secret_key": "s", **given}
    with pytest.raises(BadOptions, match=words):
        open_driver("s3", wanted)


def test_a_driver_that_is_not_there() -> None:
    with pytest.raises(BadOptions, match="no driver `tape` is installed; there are: s3"):
        open_driver("tape", {})
    with pytest.raises(BadOptions, match="needs the option `access_key`"):
        open_driver("s3", {"bucket": "b"})
