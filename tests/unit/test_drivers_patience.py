"""A driver that hangs is waited for so long and no longer, whatever it was asked; one that only takes its time isn't."""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from ringfence.syscalls.drivers import DriverError, ObjectDriver, Objects, Page, Snapshot, Stat
from ringfence.syscalls.drivers.patience import Patient
from support.shelf import documented

KEPT = Snapshot(key="k", stat=Stat(size=3, version="1"), sha256="00")
PIECES = 5


class Hanging(Objects):
    """Answers nothing, and never."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def _hang(self) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1

    async def describe(self, key: str) -> Stat | None:
        return await self._hang()

    async def list(self, prefix: str, after: str, limit: int) -> Page:
        return await self._hang()

    async def read(self, key: str, version: str, start: int, length: int) -> AsyncIterator[bytes]:
        yield await self._hang()

    async def write(
        self, key: str, content: BinaryIO, size: int, attributes: Mapping[str, str], expect: str
    ) -> str:
        return await self._hang()

    async def remove(self, key: str, expect: str) -> None:
        await self._hang()


async def _read_all(driver: ObjectDriver) -> None:
    async for _ in driver.read("k", "1", 0, 3):
        pass


async def _kept(driver: ObjectDriver) -> None:
    with tempfile.TemporaryFile() as file:
        await driver.snapshot("k", cast("BinaryIO", file), 10)


ASKED: list[tuple[Callable[[ObjectDriver], Coroutine[Any, Any, Any]], bool]] = [
    (lambda d: d.describe("k"), False),
    (lambda d: d.list("", "", 1), False),
    (_read_all, False),
    (_kept, False),
    (lambda d: d.verify(KEPT), False),
    (lambda d: d.restore(KEPT, io.BytesIO(b"abc"), ""), True),
    (lambda d: d.write("k", io.BytesIO(b"abc"), 3, {}, ""), True),
    (lambda d: d.remove("k", "1"), True),
]


@pytest.mark.parametrize(("ask", "sent"), ASKED)
async def test_one_that_hangs_is_given_up(
    ask: Callable[[ObjectDriver], Coroutine[Any, Any, Any]], sent: bool
) -> None:
    inner = Hanging()
    with pytest.raises(DriverError, match=r"gave no answer within 0\.0\d+ s") as caught:
        await ask(Patient(inner, 0.01))
    assert caught.value.sent is sent
    await asyncio.sleep(0)
    assert inner.cancelled == 1


class Dripping(Hanging):
    """Gives the next piece when it was looked for."""

    def __init__(self, looked: asyncio.Event) -> None:
        super().__init__()
        self._looked = looked

    async def snapshot(self, key: str, into: BinaryIO, most: int) -> Snapshot:
        for _ in range(PIECES):
            await self._looked.wait()
            self._looked.clear()
            into.write(b"x")
            into.flush()
        return KEPT


async def test_one_that_goes_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, fstat = asyncio.Event(), os.fstat

    def look(fd: int) -> os.stat_result:
        looked.set()
        return fstat(fd)

    with tempfile.TemporaryFile() as file:
        monkeypatch.setattr(os, "fstat", look)
        assert await Patient(Dripping(looked), 0.01).snapshot("k", cast("BinaryIO", file), 10) == KEPT


async def test_all_else_is_the_drivers(tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    inner: ObjectDriver = documented(tmp_path).Directory({"root": str(tmp_path / "shelf")})
    driver = Patient(inner, 30)
    assert driver.identity == getattr(inner, "identity", "")
    version = await driver.write("a", io.BytesIO(b"abc"), 3, {}, "")
    stat = await driver.describe("a")
    assert stat is not None
    assert (stat.size, stat.version) == (3, version)
    with tempfile.TemporaryFile() as file:
        kept = await driver.snapshot("a", cast("BinaryIO", file), 10)
        assert await driver.verify(kept)
        await driver.remove("a", version)
        file.seek(0)
        await driver.restore(kept, cast("BinaryIO", file), "")
    assert await driver.verify(kept)
    assert [one.key for one in (await driver.list("", "", 10)).objects] == ["a"]
    await driver.close()
