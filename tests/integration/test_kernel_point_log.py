"""Points of rows in the log of a real kernel: kept over a kill, pruned, and told when they are damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator

import psycopg
import pytest
from ringfence.kernel.postgres import EmbeddedPostgres
from support.kernels import Refused
from support.scenes import Held, Scene, console, scene_on

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec: {resources: {shop: {type: postgres, embedded: true}}}
"""


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with scene_on(None, config=CONFIG) as scene:
        yield scene


def stock(scene: Scene, statement: str = "select id, n from stock order by id") -> list[tuple[int, ...]]:
    dsn = EmbeddedPostgres(scene.kernel.data).dsn("shop", "shop")
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def writer(scene: Scene) -> Held:
    """Five points of rows of one agent."""
    stock(scene, "drop table if exists stock; create table stock (id int primary key, n int)")
    stock(scene, "insert into stock values (1, 0), (2, 0)")
    held = scene.hold(allow=["sql.*: {database: shop}"])
    for number in range(1, 6):
        held.rf.sql.execute("shop", "update stock set n = %s", [number])
    return held


def test_they_are_pruned_and_undone_after_a_kill(scene: Scene) -> None:
    held = writer(scene)
    store = scene.kernel.data / "points" / held.id
    assert list(store.glob("*.json")) == []
    held.disconnect()
    scene.kernel.kill()
    scene.kernel.start()
    points = held.operator.ask("Points", agent=held.id, verify=True)["points"]
    assert [(p["id"], p["verified"]) for p in points] == [(f"p{n}", True) for n in range(1, 6)]
    pruned = held.operator.ask("PrunePoints", agent=held.id, keep=3)
    assert pruned["pruned"] == ["p1", "p2"]
    left = b"".join(path.read_bytes() for path in (store / "log").iterdir())
    assert [f'"point":"p{n}"'.encode() in left for n in range(1, 6)] == [False, False, True, True, True]
    held.operator.ask("Rollback", agent=held.id, to="2")
    assert stock(scene) == [(1, 2), (2, 2)]


def test_a_damaged_one_is_named_and_nothing_is_undone_by_it(scene: Scene) -> None:
    held = writer(scene)
    (path,) = (scene.kernel.data / "points" / held.id / "log").iterdir()
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"row_count":2', b'"row_count":3', 3)[: len(data)])
    done = console("points", "verify", held.id, "--json", "--data", str(scene.kernel.data))
    assert done.returncode == 1
    found = {p["id"]: [d["lost"] for d in p["damage"]] for p in json.loads(done.stdout)}
    assert found == {
        "p1": ["every way back to before step 1"],
        "p2": ["every way back to before step 2"],
        "p3": ["every way back to before step 3"],
        "p4": [],
        "p5": [],
    }
    held.disconnect()
    with pytest.raises(Refused, match="`p3` is damaged"):
        held.operator.ask("Rollback", agent=held.id, to="2")
    assert stock(scene) == [(1, 5), (2, 5)]
    held.operator.ask("Rollback", agent=held.id, to="3")
    assert stock(scene) == [(1, 3), (2, 3)]
