"""kill -9 of the kernel at every point of a rollback of two agents, also while it finishes one: both go back, whole, and it can be undone."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from support.kernels import Refused, eventually
from support.scenes import Held, Scene, scene_on

pytestmark = [pytest.mark.fault, pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(300)]

KILLS = (
    ("", "before_intent"),
    ("", "after_intent", "after_restore", "after_branch"),
    ("", "before_restore", "after_state", "after_outcome"),
    ("after_outcome", "before_point", "after_rows", "after_messages"),
)
"""Where the kernel is killed, and again where its next start comes in finishing it. Before that, what the first one's part comes to
ahead of the second one's; empty: the first one is caught."""

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec: {resources: {shop: {type: postgres, embedded: true}}}
"""

ALL = ['fs.*: "/workspace/**"', 'state.*: "**"', 'messages.*: "*"', "sql.*: {database: shop}"]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with scene_on(None, config=CONFIG) as scene:
        yield scene


WORLD = ("files", "key", "rows", "messages")


def shop(scene: Scene, statement: str) -> list[tuple[object, ...]]:
    import psycopg
    from ringfence.kernel.postgres import EmbeddedPostgres

    dsn = EmbeddedPostgres(scene.kernel.data).dsn("shop", "shop")
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def rows(scene: Scene) -> list[tuple[object, ...]]:
    """All tables with their rows."""
    tables = shop(
        scene,
        "select relname from pg_class where relkind = 'r' and relnamespace = 'public'::regnamespace order by 1",
    )
    return [(name, shop(scene, f"select t::text from {name} t order by 1")) for (name,) in tables]


def world(scene: Scene, pair: list[Held]) -> tuple[object, ...]:
    """Files, the key, tables with their rows, and who has what in the mailbox."""
    (value,) = scene.sql("select value from state where key = 'turn'")[0]
    waits = scene.sql(
        "select a.id, count(m.key) from agents a left join messages m on m.recipient = a.key and m.taken_step is null "
        "and m.voided_at is null and m.sender not like 'kernel:%%' where a.id = any(%s) group by a.id",
        [one.id for one in pair],
    )
    files = [files_of(one) for one in pair]
    return files, json.loads(value), rows(scene), sorted(waits)


def files_of(held: Held) -> list[tuple[str, str]]:
    """Name and content of each; a rollback may be at work, and what it takes away meanwhile is not there."""
    found: list[tuple[str, str]] = []
    for path in held.live.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append((path.name, path.read_text()))
    return sorted(found)


def await_world(scene: Scene, pair: list[Held], wanted: tuple[object, ...], message: str) -> None:
    try:
        eventually(lambda: world(scene, pair) == wanted, message, 60)
    except AssertionError as error:
        shown = [scene.show(one.id) for one in pair]
        names = ("id", "state", "waiting_for", "error")
        stands = [{name: one[name] for name in names} for one in shown]
        lacks = [
            f"{name}: {is_now!r}, not {was!r}"
            for name, is_now, was in zip(WORLD, world(scene, pair), wanted, strict=True)
            if is_now != was
        ]
        raise AssertionError(f"{error}; {'; '.join(lacks)}; agents: {stands}") from error


def roll_back(scene: Scene, to: str) -> None:
    try:
        scene.operator.ask("RollbackAll", to=to)
    except Refused:
        return  # the kernel was killed under it


def test_killed_at_every_point_of_it(scene: Scene) -> None:
    for points in KILLS:
        killed_at(scene, *points)
    assert scene.operator.ask("AuditVerify")["ok"]


def killed_at(scene: Scene, ahead: str, begun: str, *again: str) -> None:
    kernel = scene.kernel
    ann, bob = (scene.hold(name=name, allow=ALL, files={"f": "old", "gone": "g"}) for name in ("ann", "bob"))
    shop(scene, "drop table if exists stock, kept, made")
    shop(
        scene,
        "create table stock (id int primary key, name text); create table kept (id serial primary key, n int)",
    )
    shop(scene, "insert into stock values (1, 'old'); insert into kept (n) values (1), (2)")
    ann.rf.state.put("turn", 0)
    before = world(scene, [ann, bob])
    moment = datetime.now(UTC).isoformat()
    for number, one in enumerate((ann, bob, ann), 1):
        one.rf.state.put("turn", number)
        one.rf.sql.execute("shop", f"update stock set name = 'by {number}' where id = 1")
        one.rf.fs.write_text("f", f"by {number}")
    ann.rf.sql.execute("shop", "create table made (id int primary key)")
    bob.rf.sql.execute("shop", "insert into made values (1)")
    ann.rf.sql.execute("shop", "update kept set n = 9 where id = 1")
    bob.rf.sql.execute("shop", "drop table kept")
    bob.rf.fs.delete("gone")
    ann.rf.messages.send(bob.id, "hello")
    assert bob.rf.messages.receive(timeout_s=0) is not None
    after, between = world(scene, [ann, bob]), datetime.now(UTC).isoformat()
    for one in (ann, bob):
        one.disconnect()
    first = ahead or begun
    kernel.arm(f"rollback:{first}")
    asking = threading.Thread(target=roll_back, args=(scene, moment))
    asking.start()
    kernel.await_hit(f"rollback:{first}")
    if ahead:
        kernel.arm(f"rollback:{begun}")
        kernel.disarm(f"rollback:{first}")
    for point in (begun, *again):
        kernel.arm(f"rollback:{point}")
        if kernel.process is not None and kernel.process.poll() is not None:
            kernel.start()
        kernel.await_hit(f"rollback:{point}")
        kernel.kill()
        kernel.disarm(f"rollback:{point}")
    asking.join()
    kernel.start()
    if begun != "before_intent":
        await_world(scene, [ann, bob], before, f"not all went back after {begun}")
        for one in (ann, bob):
            eventually(
                lambda one=one: scene.show(one.id)["waiting_for"] == "an operator, after a rollback",
                f"{one.id} does not rest after {begun}",
            )
            done = [s["outcome"] for s in scene.operator.steps(one.id) if s["action"] == "rollback"]
            assert done == ["ok"], (begun, one.id)
        scene.operator.ask("RollbackAll", to=between)
    assert world(scene, [ann, bob])[:3] == after[:3], begun
    for one in (ann, bob):
        one.end()


def between_two(scene: Scene) -> tuple[Held, Held, tuple[object, ...], str]:
    """Two of which the one that goes back first has sent a message to the other one, and a row that both wrote."""
    bob, ann = (scene.hold(name=name, allow=ALL, files={"f": "old"}) for name in ("bob", "ann"))
    shop(scene, "drop table if exists stock")
    shop(scene, "create table stock (id int primary key, name text)")
    shop(scene, "insert into stock values (1, 'old')")
    ann.rf.state.put("turn", 0)
    before, moment = world(scene, [ann, bob]), datetime.now(UTC).isoformat()
    for one in (ann, bob):
        one.rf.state.put("turn", one.id)
        one.rf.sql.execute("shop", f"update stock set name = '{one.id}' where id = 1")
        one.rf.fs.write_text("f", one.id)
    ann.rf.messages.send(bob.id, "hello")
    assert bob.rf.messages.receive(timeout_s=0) is not None
    for one in (ann, bob):
        one.disconnect()
    return ann, bob, before, moment


def test_killed_before_it_is_told_that_all_is_done(scene: Scene) -> None:
    """Both parts are on record as done, and what the one gave back that the other had sent is not voided yet."""
    kernel = scene.kernel
    ann, bob, before, moment = between_two(scene)
    kernel.arm("rollback:after_outcome")
    asking = threading.Thread(target=roll_back, args=(scene, moment))
    asking.start()
    kernel.await_hit("rollback:after_outcome")
    kernel.arm("rollback:after_branch")
    kernel.disarm("rollback:after_outcome")
    kernel.await_hit("rollback:after_branch")
    kernel.arm("rollback:after_outcome")
    kernel.disarm("rollback:after_branch")
    kernel.await_hit("rollback:after_outcome")
    kernel.kill()
    kernel.disarm("rollback:after_outcome")
    asking.join()
    kernel.start()
    await_world(scene, [ann, bob], before, "not all went back")
    for one in (ann, bob):
        eventually(
            lambda one=one: scene.show(one.id)["waiting_for"] == "an operator, after a rollback", one.id
        )
        one.end()


def test_what_a_target_holds_up_is_tried_again_until_it_is_done(scene: Scene) -> None:
    """The target is away when the kernel starts: nobody fails of it, nobody is started, and it is finished when the target is back."""
    kernel = scene.kernel
    ann, bob, before, moment = between_two(scene)
    kernel.arm("rollback:before_point")
    asking = threading.Thread(target=roll_back, args=(scene, moment))
    asking.start()
    kernel.await_hit("rollback:before_point")
    close_shop(scene, closed=True)
    kernel.kill()
    kernel.disarm("rollback:before_point")
    asking.join()
    kernel.start()
    try:
        for one in (ann, bob):
            eventually(lambda one=one: "2nd time" in (scene.show(one.id)["waiting_for"] or ""), one.id)
            shown = scene.show(one.id)
            assert shown["state"] == "paused"
            assert shown["waiting_for"].startswith("a rollback that is under way, tried again at 20")
            assert "`shop`" in shown["waiting_for"]
            assert "`shop`" in shown["error"]
            for verb in ("Start", "Resume"):
                with pytest.raises(Refused, match="`shop`"):
                    scene.operator.ask(verb, agent=one.id)
            scene.operator.ask("Pause", agent=one.id)
            assert scene.show(one.id)["waiting_for"].startswith("a rollback that is under way")
        # Not even a kernel that comes later forgets what it is about.
        kernel.kill()
        kernel.start()
        assert {scene.show(one.id)["state"] for one in (ann, bob)} == {"paused"}
    finally:
        close_shop(scene, closed=False)
    await_world(scene, [ann, bob], before, "not all went back")
    for one in (ann, bob):
        eventually(
            lambda one=one: scene.show(one.id)["waiting_for"] == "an operator, after a rollback", one.id
        )
        assert scene.show(one.id)["error"] is None
        done = [s["outcome"] for s in scene.operator.steps(one.id) if s["action"] == "rollback"]
        assert done == ["ok"]
        scene.operator.ask("Start", agent=one.id)
        one.end()


def close_shop(scene: Scene, *, closed: bool) -> None:
    import psycopg
    from ringfence.kernel.postgres import EmbeddedPostgres

    with psycopg.connect(EmbeddedPostgres(scene.kernel.data).dsn("postgres"), autocommit=True) as connection:
        connection.execute(f"alter database shop allow_connections {str(not closed).lower()}")
        connection.execute(
            "select pg_terminate_backend(pid, 30000) from pg_stat_activity where datname = 'shop'"
        )
