"""Kernels' own chains leave the database for the archive, and what they sign is held against them as before."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from ringfence.kernel.journal.audit import AuditReport, export, verify_file, verify_store
from ringfence.kernel.operations import pruning
from support.heart import Heart, heart_on
from support.scenes import short_directory

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROWS_LEAST", 4), ("SEGMENT_ROWS", 8), ("PAUSE_S", 0)):
        monkeypatch.setattr(f"ringfence.kernel.compaction.{name}", value)


async def signed(heart: Heart, rounds: int = 10) -> None:
    """Rows of operators, each with heads that were signed after it."""
    thread = await heart.agent(allow=["now"])
    for at in range(rounds):
        await heart.call(thread, at, "now")
        await heart.core.operator_event("operator.test", str(at))
        await heart.kernel.anchor.sign_heads(heart.core.journal, heart.core.store)


async def checked(heart: Heart) -> AuditReport:
    return await verify_store(heart.core.store, heart.kernel.anchor, heart.core.journal)


async def left(heart: Heart, kernel: int) -> int:
    return len(await heart.core.store.rows_between(-kernel, 1, 1 << 40))


async def test_they_are_read_and_verified_as_before(dsn: str, tmp_path: Path) -> None:
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            await signed(heart)
            own = -heart.core.kernel
            before = [row async for row in heart.core.store.audit(own)]
            done = await pruning.prune(heart.kernel, "", older_than_ms=0, dry=True, operator="me")
            (told,) = done["agents"]
            assert told["archived_rows"] > 8
            assert await left(heart, heart.core.kernel) == len(before)
            done = await pruning.prune(heart.kernel, "", older_than_ms=0, dry=False, operator="me")
            assert done["agents"][0]["archived_rows"] == told["archived_rows"]
            assert await left(heart, heart.core.kernel) < len(before)
            rows = [row async for row in heart.core.store.audit(own)]
            assert rows[: len(before)] == before
            # It goes on behind its archive, and signs.
            await signed(heart, 2)
            report = await checked(heart)
            assert (report.ok, report.archived) == (True, told["archived_rows"]), report.first_bad
            path = tmp_path / "all.jsonl"
            lines = [json.dumps(document) async for document in export(heart.core.store)]
            path.write_text("\n".join(lines) + "\n")
            assert verify_file(path, heart.kernel.anchor.path, heart.kernel.anchor.public_key)["ok"]
            file = next((heart.core.store.archive.root / told["agent"]).iterdir())
            data = file.read_bytes()
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            assert not (await checked(heart)).ok


async def test_a_successor_archives_those_of_its_data_directory_alone(dsn: str) -> None:
    with short_directory() as directory, short_directory() as elsewhere:
        async with heart_on(dsn, directory) as first:
            await signed(first)
            dead = first.core.kernel
        async with heart_on(dsn, elsewhere) as other:
            await signed(other)
            async with heart_on(dsn, directory) as heart:
                before = await left(heart, dead)
                (told,) = await heart.kernel.compaction.compact_kernels(0.0, dry=False)
                assert told.rows == before - await left(heart, dead) > 8
                assert await left(heart, dead) >= 1
                chains = await heart.core.store.kernel_chains(heart.core.kernel, 0.0, 1, 1)
                assert other.core.kernel not in [key for _, key, _ in chains]
                assert await refused(heart, dead, other.core.kernel) is None
                assert (await checked(heart)).ok


async def refused(heart: Heart, dead: int, kernel: int) -> int | None:
    """What archiving a part of another directory's chain answers."""
    store = heart.core.store
    part = dataclasses.replace((await store.segments(-dead))[0], chain=-kernel)
    return await store.archive_rows(heart.core.kernel, heart.core.fence, part, [1])
