"""Bytes of artifacts go once nothing names them: no artifact, row, archived part or origin; and never under a call that goes on."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ringfence.kernel.artifact_sweep import ArtifactSweep, Swept
from ringfence.kernel.journal import lately
from ringfence.kernel.journal.blobs import Blobs
from ringfence.kernel.journal.segments import ArchiveError
from ringfence.kernel.operations import pruning, removal
from ringfence.kernel.thread import Thread
from ringfence.policy.keeping import Keeping
from support.heart import Heart, heart_on
from support.scenes import short_directory

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]

NOW = Keeping(journal_s=0.0, journal_steps=0, archive_s=0.0)
ALLOWED = ['artifacts.*: "*"', "checkpoint.save"]
LONG = b"x" * 20_000


@pytest.fixture
async def heart(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Heart]:
    monkeypatch.setattr("ringfence.kernel.compaction.ROWS_LEAST", 1)
    monkeypatch.setattr("ringfence.kernel.compaction.PAUSE_S", 0)
    monkeypatch.setattr(lately, "TURN_S", 0.0)
    with short_directory() as directory:
        async with heart_on(dsn, directory) as heart:
            yield heart


def refs(heart: Heart) -> set[str]:
    return {path.parent.name + path.name for path in heart.kernel.layout.blobs.glob("??/*")}


async def swept(heart: Heart, *, dry: bool = False) -> Swept:
    """What goes of what was put long ago: two looks have begun since."""
    for path in heart.kernel.layout.blobs.glob("??/*"):
        os.utime(path, (1, 1))
    heart.core.blobs.turn()
    sweep = ArtifactSweep(core=heart.core, origins=heart.kernel.layout.data / "origins")
    return await sweep.look(60, dry=dry, whole=True)


async def worked(heart: Heart) -> tuple[Thread, str, str]:
    """An agent with an artifact and a long result in its journal; their references."""
    thread = await heart.agent(allow=ALLOWED)
    before = refs(heart)
    put = await heart.call(thread, 0, "artifacts.put", name="kept", data=base64.b64encode(LONG).decode())
    (artifact,) = refs(heart) - before
    assert put.result is not None
    assert json.loads(put.result)["ref"] == artifact
    await heart.call(thread, 1, "artifacts.get", name="kept")
    await heart.call(thread, 2, "checkpoint.save", state={}, schema_version=1, next_child=0)
    (long,) = refs(heart) - before - {artifact}
    return thread, artifact, long


async def test_what_something_names_stays_until_nothing_does(heart: Heart) -> None:
    thread, artifact, long = await worked(heart)
    nobody = heart.core.blobs.put(b"of a call that was never committed")
    assert (await swept(heart, dry=True)).artifacts == 1
    assert refs(heart) == {artifact, long, nobody}
    done = await swept(heart)
    assert done.artifacts == 1
    assert done.size_bytes > 0
    assert refs(heart) == {artifact, long}
    # In the archive it is named as it was in the database.
    done = await heart.kernel.compaction.compact(thread, NOW, dry=False)
    assert done.rows > 1
    assert (await swept(heart)).artifacts == 0
    # Whoever can't read a part does not know what it names.
    (file,) = (heart.core.store.archive.root / thread.id).iterdir()
    data = file.read_bytes()
    file.unlink()
    with pytest.raises(ArchiveError):
        await swept(heart)
    file.write_bytes(data)
    await heart.processes.set_state(thread, "done")
    await removal.remove(heart.kernel, thread.id, "me")
    # The archived row of the call that put it tells of it still.
    assert (await swept(heart)).artifacts == 0
    assert await heart.core.store.take_agent(thread.key, heart.core.kernel)
    await heart.core.journal.adopt(thread.key)
    await heart.kernel.compaction.give_up(thread.key, thread.id, 0.0, done, dry=False)
    assert (await swept(heart)).artifacts == 2
    assert refs(heart) == set()


async def test_an_origin_names_what_came_with_it(heart: Heart) -> None:
    ref = heart.core.blobs.put(b"imported")
    origin = heart.kernel.layout.origin("moved-abcde")
    origin.mkdir(parents=True)
    (origin / "journal.jsonl").write_text(json.dumps({"body": json.dumps({"artifact": ref})}) + "\n")
    assert (await swept(heart)).artifacts == 0
    (origin / "journal.jsonl").unlink()
    assert (await swept(heart)).artifacts == 1


async def test_prune_says_what_went(heart: Heart) -> None:
    ref = heart.core.blobs.put(b"nobody's")
    for _ in range(2):
        heart.core.blobs.turn()
    assert refs(heart) == {ref}
    done = await pruning.prune(heart.kernel, "", older_than_ms=0, dry=True, operator="me")
    assert (done["artifacts"], done["artifact_bytes"] > 0, refs(heart)) == (1, True, {ref})
    done = await pruning.prune(heart.kernel, "", older_than_ms=0, dry=False, operator="me")
    assert (done["artifacts"], refs(heart)) == (1, set())


def test_what_was_put_lately_stays_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lately, "TURN_S", 0.0)
    blobs = Blobs(tmp_path / "blobs")
    ref = blobs.put(b"under way")
    later = time.time() + 1e9
    for _ in range(2):
        assert blobs.older(later, "", 10) == [ref]
        assert blobs.remove(ref) == 0
        blobs.turn()
    # Again: it is there, and counts as put now.
    assert blobs.put(b"under way") == ref
    blobs.turn()
    assert blobs.remove(ref) == 0
    blobs.turn()
    assert blobs.remove(ref, dry=True) > 0
    assert blobs.remove(ref) > 0
    assert blobs.remove(ref) == 0
    assert blobs.put(b"under way") == ref
    assert blobs.get(ref) == b"under way"


def test_a_turn_takes_its_time(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs")
    ref = blobs.put(b"under way")
    for _ in range(10):
        blobs.turn()
    assert blobs.remove(ref) == 0
