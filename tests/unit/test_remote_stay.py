"""A session at a sandbox host: an order is answered when nothing of it is left."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from ringfence.sandbox.overlay_apply import discard
from ringfence.sandbox.remote import stay, trees, wire
from ringfence.sandbox.remote.lodging import Lodging, Uids
from ringfence.sandbox.types import SandboxError


class Refusing:
    """A backend that starts nothing."""

    async def run_command(self, _: object) -> Any:
        raise SandboxError("no")


async def test_a_command_given_up_while_its_files_are_removed_is_answered_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removing, go_on = threading.Event(), threading.Event()

    def slowly(path: Path) -> None:
        removing.set()
        assert go_on.wait(30)
        discard(path)

    sandbox: Any = Refusing()
    uids = Uids(None, 1)
    lodging = Lodging(
        kernel="k", owner="o", root=tmp_path / "k", sandbox=sandbox, uids=uids, cache_bytes=1 << 20
    )
    monkeypatch.setattr(stay, "discard", slowly)
    draft = lodging.mirrors.draft(None, "a")
    draft.apply(trees.Delta(entries=[trees.Entry(path=b"", kind="directory", mode=0o755)]))
    tree = await lodging.build(draft)
    here = stay.Stay(lodging=lodging, lease_s=10)
    limits = wire.Limited(memory_bytes=0, pids=0, cpu=0, disk_bytes=0, timeout_s=0)
    body = wire.RunCommand(
        agent="a",
        argv=[b"true"],
        env={},
        lower=tree.name,
        binds={},
        mounts={},
        provided=[],
        require=[],
        cwd=b".",
        limits=limits,
        stdin=1,
        stdin_bytes=0,
        upper=3,
    )
    here._handle(wire.Order(call=7, body=body))
    (answer,) = here._answering
    here._handle(wire.End(channel=1))
    assert await asyncio.to_thread(removing.wait, 30)
    here._handle(wire.Cancel(call=7))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not answer.done()
    go_on.set()
    await answer
    assert list((lodging.root / "scratch").iterdir()) == []
