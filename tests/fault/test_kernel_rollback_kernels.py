"""`rollback --all` over two kernels of one database: from either of them, all agents go back as one or none does, whoever dies meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from support.kernels import Refused, eventually
from support.scenes import Held, Scene, console, scene_on

pytestmark = [pytest.mark.fault, pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(300)]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec: {{resources: {{shop: {{type: postgres, dsn: "{shop}"}}}}}}
"""

ALL = ['fs.*: "/workspace/**"', 'state.*: "**"', 'messages.*: "*"', "sql.*: {database: shop}"]
RESTS = "an operator, after a rollback"


@pytest.fixture(scope="module")
def shop(postgres_server: Any) -> Iterator[str]:
    name = postgres_server.create()
    dsn = postgres_server.dsn(name)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table stock (id int primary key, name text not null)")
    yield dsn
    postgres_server.drop(name)


@pytest.fixture(scope="module")
def database(postgres_server: Any, template_database: str) -> Iterator[str]:
    name = postgres_server.create(template_database)
    yield postgres_server.dsn(name)
    postgres_server.drop(name)


@pytest.fixture
def here(database: str, shop: str) -> Iterator[Scene]:
    with scene_on(database, config=CONFIG.format(shop=shop)) as scene:
        yield scene


@pytest.fixture
def there(database: str, shop: str, here: Scene) -> Iterator[Scene]:
    with scene_on(database, config=CONFIG.format(shop=shop)) as scene:
        yield scene


def now() -> str:
    return datetime.now(UTC).isoformat()


class World:
    """One agent on each of two kernels; they write one key, one row and each other's mailbox in turn."""

    def __init__(self, here: Scene, there: Scene, shop: str) -> None:
        self.shop, self.here, self.there = shop, here, there
        self.ann = here.hold(name="ann", allow=ALL, files={"f": "old"})
        self.bob = there.hold(name="bob", allow=ALL, files={"f": "old"})
        self.both = (self.ann, self.bob)
        self.rows("delete from stock")
        self.rows("insert into stock values (1, 'zero'), (2, 'zero')")
        self.ann.rf.state.put("turn", 0)
        self.before = self.picture()
        self.moment = now()
        for number, one in enumerate((self.ann, self.bob, self.ann, self.bob, self.ann), 1):
            one.rf.state.put("turn", number)
            one.rf.sql.execute("shop", f"update stock set name = 'by {number}' where id = 1")
            one.rf.fs.write_text("f", f"new {number}")
        self.bob.rf.sql.execute("shop", "update stock set name = 'by bob' where id = 2")
        self.ann.rf.messages.send(self.bob.id, "to bob")
        assert self.bob.rf.messages.receive(timeout_s=0) is not None
        for one in self.both:
            one.disconnect()
        self.after = self.picture()
        assert self.after != self.before

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.shop, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def picture(self) -> tuple[Any, ...]:
        (value,) = self.here.sql("select value from state where key = 'turn'")[0]
        files: list[str] = []
        for one in self.both:
            with contextlib.suppress(FileNotFoundError):
                files.append((one.live / "f").read_text())
        return json.loads(value), self.rows("select * from stock order by id"), files

    def stands(self) -> list[tuple[str, str]]:
        found = self.here.sql(
            "select state, waiting_for from agents where id = any(%s) order by id", [o.id for o in self.both]
        )
        return [(state, why) for state, why in found]

    def await_back(self) -> None:
        eventually(
            lambda: self.picture() == self.before and self.stands() == [("paused", RESTS)] * 2,
            f"not all went back: {self.picture()}, {self.stands()}",
        )

    def await_homes(self) -> None:
        """Each agent is its own kernel's again."""
        for one in self.both:
            eventually(lambda one=one: self.owner(one) == pid_of(one.scene), f"{one.id} is not given back")
            eventually(lambda one=one: known(one), f"{one.id} is not known to its kernel")

    def owner(self, held: Held) -> Any:
        rows = self.here.sql(
            "select k.pid from agents a join kernels k on k.key = a.owner where a.id = %s", held.id
        )
        return rows[0][0] if rows else None

    def go_on(self) -> None:
        """Its program goes on from where it was put back to."""
        for one in self.both:
            one.scene.operator.ask("Start", agent=one.id)
            one.again()
            if one is self.ann:
                one.rf.state.put("turn", 0)  # answered from its journal
            one.rf.fs.write_text("f", "further")
            assert (one.live / "f").read_text() == "further"

    def end(self) -> None:
        for one in self.both:
            one.end()


def pid_of(scene: Scene) -> int:
    assert scene.kernel.process is not None
    return scene.kernel.process.pid


def known(held: Held) -> bool:
    try:
        return held.scene.show(held.id)["state"] == "paused"
    except Refused:
        return False


def back_all(scene: Scene, to: str, *more: str) -> Any:
    return console(
        "rollback", "--all", "--to", to, "--json", "--yes", "--data", str(scene.kernel.data), *more
    )


@pytest.mark.parametrize("asked", ["here", "there"])
def test_all_go_back_from_whichever_kernel_is_asked(here: Scene, there: Scene, shop: str, asked: str) -> None:
    world = World(here, there, shop)
    scene = here if asked == "here" else there
    shown = back_all(scene, world.moment, "--preview")
    assert shown.returncode == 0, shown.stderr
    preview = {one["agent"]: one for one in json.loads(shown.stdout)}
    assert set(preview) == {world.ann.id, world.bob.id}
    # Nobody was held up to be looked at.
    assert [one.scene.show(one.id)["state"] for one in world.both] == ["running", "running"]
    assert world.picture() == world.after
    done = back_all(scene, world.moment)
    assert done.returncode == 0, done.stderr
    told = {one["agent"]: one for one in json.loads(done.stdout)}
    assert {agent: one["changes"] for agent, one in told.items()} == {
        agent: one["changes"] for agent, one in preview.items()
    }
    for one in told.values():
        assert (one["conflicts"], one["not_undoable"], one["state"]) == ([], [], "paused")
    world.await_back()
    world.await_homes()
    assert here.sql("select count(*) from handovers") == [(0,)]
    world.go_on()
    assert here.operator.ask("AuditVerify")["ok"]
    world.end()


def test_they_can_go_forward_again_and_be_started(here: Scene, there: Scene, shop: str) -> None:
    world = World(here, there, shop)
    between = now()
    assert back_all(here, world.moment).returncode == 0
    world.await_homes()
    forward = back_all(there, between, "--start")
    assert forward.returncode == 0, forward.stderr
    assert world.picture() == world.after
    for one in world.both:
        eventually(lambda one=one: running(one), f"{one.id} was not started")
    world.end()


def running(held: Held) -> bool:
    try:
        return held.scene.show(held.id)["process"] == "live"
    except Refused:
        return False


def test_what_ended_on_the_other_kernel_goes_back_too(here: Scene, there: Scene, shop: str) -> None:
    world = World(here, there, shop)
    there.operator.ask("Kill", agent=world.bob.id)
    done = back_all(here, world.moment)
    assert done.returncode == 0, done.stderr
    world.await_back()
    world.await_homes()
    world.end()


KILLS = ("before_intent", "after_intent", "after_restore", "after_rows", "after_outcome")


@pytest.mark.parametrize("point", KILLS)
@pytest.mark.parametrize("again", ["restarted", "left dead"])
def test_the_kernel_that_was_asked_dies(here: Scene, there: Scene, shop: str, point: str, again: str) -> None:
    """Whichever agent's part it was at: another kernel finishes it, for all or for none, and so does the one that comes back."""
    world = World(here, there, shop)
    here.kernel.arm(f"rollback:{point}")
    asking = threading.Thread(target=asked, args=(here, world.moment))
    asking.start()
    here.kernel.await_hit(f"rollback:{point}")
    here.kernel.kill()
    asking.join()
    here.kernel.disarm(f"rollback:{point}")
    if again == "restarted":
        here.kernel.start()
    if point == "before_intent":
        # Nothing was recorded: nothing is undone, of nobody.
        eventually(lambda: known(world.bob) or running(world.bob), "it does not go home")
        assert world.picture() == world.after
    else:
        world.await_back()
    if again == "left dead":
        here.kernel.start()
    if point != "before_intent":
        world.await_homes()
    assert there.operator.ask("AuditVerify")["ok"]
    world.end()


def asked(scene: Scene, to: str) -> None:
    with contextlib.suppress(Refused):
        scene.operator.ask("RollbackAll", to=to)


def test_the_other_kernel_dies_before_it_hands_over(here: Scene, there: Scene, shop: str) -> None:
    """Its agents are taken over as soon as its lease has run out, and put back with the others."""
    world = World(here, there, shop)
    there.kernel.arm("handover:before")
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(here.operator.ask("RollbackAll", to=world.moment))
    )
    asking.start()
    there.kernel.await_hit("handover:before")
    there.kernel.kill()
    there.kernel.disarm("handover:before")
    asking.join()
    assert {one["agent"] for one in answers[0]["agents"]} == {world.ann.id, world.bob.id}
    world.await_back()
    there.kernel.start()
    world.await_homes()
    world.go_on()
    world.end()


def test_the_other_kernel_dies_after_it_handed_over(here: Scene, there: Scene, shop: str) -> None:
    world = World(here, there, shop)
    here.kernel.arm("rollback:after_restore")
    asking = threading.Thread(target=asked, args=(here, world.moment))
    asking.start()
    here.kernel.await_hit("rollback:after_restore")
    there.kernel.kill()
    there.kernel.start()
    here.kernel.disarm("rollback:after_restore")
    asking.join()
    world.await_back()
    world.await_homes()
    world.go_on()
    world.end()


def test_a_kernel_that_stands_still_is_named_and_nothing_is_done(
    here: Scene, there: Scene, shop: str
) -> None:
    world = World(here, there, shop)
    process = there.kernel.process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        refused = back_all(here, world.moment)
        assert refused.returncode == 5, refused.stdout
        assert world.bob.id in refused.stderr
        assert f"(pid {process.pid})" in refused.stderr
        assert world.picture() == world.after
        # Nothing was done, and the preview says the same.
        shown = back_all(here, world.moment, "--preview")
        assert (shown.returncode, world.bob.id in shown.stderr) == (1, True), shown.stderr
        assert [one["agent"] for one in json.loads(shown.stdout)] == [world.ann.id]
        left = back_all(here, world.moment, "--skip-unreachable")
        assert world.bob.id in left.stderr
        assert (world.ann.live / "f").read_text() == "old"
        assert (world.bob.live / "f").read_text() == "new 4"
    finally:
        os.kill(process.pid, signal.SIGCONT)
    eventually(lambda: known(world.bob) or running(world.bob), "its agent is gone")
    world.end()


def test_files_that_cannot_be_reached_refuse_all_before_anything_is_done(
    here: Scene, there: Scene, shop: str
) -> None:
    world = World(here, there, shop)
    here.sql("update kernels set host = 'far', data_dir = '/nowhere' where pid = %s", pid_of(there))
    refused = back_all(here, world.moment)
    assert (refused.returncode, refused.stderr.count("\n")) == (5, 1), refused.stderr
    assert (
        f"`{world.bob.id}` can't be reached from this kernel: its files are on host `far`" in refused.stderr
    )
    assert "--skip-unreachable" in refused.stderr
    assert world.picture() == world.after
    assert [one.scene.show(one.id)["state"] for one in world.both] == ["running", "running"]
    world.end()
