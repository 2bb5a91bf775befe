"""Random tables, writes, rollbacks, other writers and kills on a real server, held against what an independent dumper wrote down.

`RINGFENCE_SQL_MACHINE=N` runs N examples. `RINGFENCE_SQL_TARGET=DSN` takes a database of yours, in place of one on the embedded server,
and empties it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from ringfence.sandbox.snapshots import SnapshotStore
from ringfence.syscalls import sql_write
from ringfence.syscalls.base import Rerun
from ringfence.syscalls.errors import CallFailed, Conflict, SyscallError
from ringfence.syscalls.sql_target.restore import plan_restore, restore, take_point
from ringfence.syscalls.sql_target.session import close_targets
from support.sql_shapes import SETUP, Shape, inserts, shapes, statements
from support.tables import Done, Dump, Place, dump, put, wanted_of
from support.targets import Database, Killed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EXAMPLES = int(os.environ.get("RINGFENCE_SQL_MACHINE", "20"))
_TERMINATE = """
select pg_terminate_backend(pid) from pg_stat_activity
where datname = current_database() and application_name = 'ringfence' and pid <> pg_backend_pid() and state <> 'idle'
"""

WAYS = [
    *["plain"] * 6,
    *["others"] * 2,
    *("lose before_effect", "lose after_effect"),
    *(
        "kill before_effect",
        "kill after_effect",
        "kill raise before",
        "kill raise after",
        "kill 0.05",
        "kill 0.1",
    ),
]


class Machine(RuleBasedStateMachine):
    server: Any = None
    victim: subprocess.Popen[str]
    base = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.mkdtemp(prefix="rf-rows-")
        self.numbers = itertools.count(1)
        self.done: list[Done] = []
        self.disturbed = False
        self.tables: tuple[Shape, ...] = ()

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        self.admin = psycopg.connect(self.base, autocommit=True)
        self.admin.execute(
            'drop schema if exists public cascade; create schema public; drop schema if exists "Odd one" cascade'
        )
        self.admin.execute(
            SETUP + "create table watched (id int primary key, n serial); insert into watched values (1, 1)"
        )  # pyright: ignore[reportArgumentType, reportCallIssue]
        for number in range(data.draw(st.integers(1, 2))):
            shape = data.draw(shapes(number, self.tables))
            self.admin.execute(shape.ddl.encode())
            for statement in shape.late:
                self.admin.execute(statement.encode())
            self.tables = (*self.tables, shape)
            for _ in range(data.draw(st.integers(1, 4))):
                with contextlib.suppress(psycopg.Error):
                    self.admin.execute(data.draw(inserts(shape)).encode())
        self.db = Database(self.base, SnapshotStore(Path(self.directory) / "points"))
        self.first = self.look()

    def teardown(self) -> None:
        self.run(close_targets())
        self.loop.close()
        if self.tables:
            self.admin.close()
        shutil.rmtree(self.directory)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 120))

    def look(self) -> Dump:
        """Write everything down; tables keep their shapes and sequences never go back, whatever happens."""
        found = dump(self.admin)
        last = getattr(self, "last", found)
        assert found.shapes == last.shapes
        assert all(found.sequences[name] >= value for name, value in last.sequences.items())
        self.last = found
        return found

    def rows(self, found: Dump) -> dict[Place, str]:
        """Rows by table and key."""
        by_name = {(shape.schema, shape.name): shape for shape in self.tables}
        rows: dict[Place, str] = {}
        for table, lines in found.rows.items():
            shape = by_name.get(table)
            keyed = shape is not None and not (shape.bad and "primary key" not in shape.ddl)
            for at, line in enumerate(lines):
                cells = line.split("\t")
                key = tuple(cells[place] for place in shape.key) if shape and keyed else (str(at), line)
                rows[table, key] = line
        return rows

    def between(self, point: str, before: Dump, after: Dump) -> Done:
        was, now = self.rows(before), self.rows(after)
        changed = {place for place in was | now if was.get(place) != now.get(place)}
        return Done(point, {place: (was.get(place), now.get(place)) for place in changed})

    def note(self, before: Dump, after: Dump) -> None:
        self.done.append(self.between(f"p{self.db.step}", before, after))

    @rule(data=st.data(), how=st.sampled_from(WAYS), count=st.integers(1, 3))
    def work(self, data: st.DataObject, how: str, count: int) -> None:
        """Writes, one of them cut off or with others in between."""
        for _ in range(count - 1):
            self.write(data, 1)
        if how in ("plain", "others"):
            self.write(data, int(how == "plain"))
        elif how.startswith("lose"):
            self.lose(data, how.removeprefix("lose "))
        else:
            self.kill(data, how.removeprefix("kill "))

    def write(self, data: st.DataObject, meanwhile: int) -> None:
        before = [self.look()]
        theirs = data.draw(statements(self.tables), label="other") if meanwhile == 0 else ""

        def others(name: str) -> None:
            # A truncate keeps everybody away.
            if name == "before_effect" and theirs and not statement.startswith("truncate"):
                self.someone(theirs)
                before.append(self.look())

        statement = data.draw(statements(self.tables), label="write")
        try:
            call = self.db.prepare_write(statement, on_failpoint=others)
            self.run(sql_write.run(*call))
        except SyscallError as error:
            event(type(error).__name__)
            assert self.look().rows == before[-1].rows
        else:
            event("written")
            self.note(before[-1], self.look())

    @rule(which=st.integers(0, 5), how=st.sampled_from(["plain", "lose", "killed"]))
    def drop(self, which: int, how: str) -> None:
        """A table is dropped and brought back: all is as it was, sequences too; what can't be is refused."""
        if which >= len(self.tables):
            return
        shape = self.tables[which]
        before = self.look()

        def cut(name: str) -> None:
            if how == "lose" and name == "after_effect":
                self.admin.execute(_TERMINATE.encode())

        try:
            call = self.db.prepare_write(f"drop table {shape.sql}", on_failpoint=cut)
            self.run(sql_write.run(*call))
        except SyscallError as error:
            event(f"not dropped: {type(error).__name__}")
            assert dump(self.admin) == before
            return
        event("dropped")
        gone = dump(self.admin)
        assert gone.shapes.keys() == before.shapes.keys() - {(shape.schema, shape.name)}
        point = f"p{self.db.step}"
        if how == "killed":
            self.order(what="restore", points=[point], after_s=0.005)
            with contextlib.suppress(psycopg.Error):
                self.admin.execute("set lock_timeout = '10s'; lock table watched")
            assert dump(self.admin) in (gone, before)
        plan = self.run(plan_restore(self.db.resource, [self.db.store.require(point).extra]))
        assert plan.conflicts == ()
        # Once more changes nothing: what is as it should be is left alone.
        for _ in range(2):
            self.run(restore(self.db.resource, plan))
        assert dump(self.admin) == before

    @rule(data=st.data(), count=st.integers(1, 2))
    def other(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.someone(data.draw(statements(self.tables), label="other"))

    def someone(self, statement: str) -> None:
        """Somebody else's statement, in a transaction of its own, which waits for nobody."""
        if not statement.startswith(("insert", "update", "delete", "merge")) or "setval" in statement:
            return
        before = self.look()
        with contextlib.suppress(psycopg.Error):
            self.admin.execute(b"set local lock_timeout = 20; " + statement.encode())
        self.disturbed = self.disturbed or self.look().rows != before.rows

    def kill(self, data: st.DataObject, at: str) -> None:
        """The process dies: at a failpoint or at any time; recovery finds out from the target what became of the write."""
        statement = data.draw(statements(self.tables), label="killed")
        before = self.look()
        died = at not in ("raise before", "raise after")
        try:
            call, arguments = self.db.prepare_write(statement, kill_at="" if died else f"{at[6:]}_effect")
        except SyscallError:
            return
        if died:
            timed = at[0] == "0"
            self.order(
                what="write", statement=statement, step=self.db.step, at=at, after_s=float(at) if timed else 0
            )
        else:
            with contextlib.suppress(SyscallError, Killed):
                self.run(sql_write.run(call, arguments))
        again, _ = self.db.prepare_write(statement)
        again.step = self.db.step = call.step
        found = self.run(sql_write.recover(again, arguments))
        after = self.look()
        event(f"killed {at}: {'rerun' if found is Rerun.RERUN else 'done'}")
        if found is Rerun.RERUN:
            assert after.rows == before.rows
            assert not at.endswith("after_effect") or self.db.store.load(f"p{call.step}") is None
        else:
            assert at != "before_effect"
            self.note(before, after)

    def lose(self, data: st.DataObject, when: str) -> None:
        """The target ends the connection between the record and the commit, or just after."""
        before = self.look()

        def cut(name: str) -> None:
            if name == when:
                self.admin.execute(_TERMINATE.encode())

        statement = data.draw(statements(self.tables), label="lost")
        try:
            self.run(sql_write.run(*self.db.prepare_write(statement, on_failpoint=cut)))
        except SyscallError:
            assert self.look().rows == before.rows
        else:
            assert when == "after_effect"
            self.note(before, self.look())

    def order(self, **job: Any) -> None:
        assert self.victim.stdin is not None
        assert self.victim.stdout is not None
        self.victim.stdin.write(
            json.dumps({"dsn": self.base, "store": f"{self.directory}/points", **job}) + "\n"
        )
        self.victim.stdin.flush()
        assert self.victim.stdout.readline() in ("killed\n", "ended\n")

    @rule(
        data=st.data(),
        how=st.sampled_from(["last", "last", "last", "forth", "forth", "killed", "one", "while"]),
        which=st.integers(1, 30),
        after_s=st.sampled_from([0.002, 0.005, 0.01]),
    )
    def back(self, data: st.DataObject, how: str, which: int, after_s: float) -> None:
        """Kills come when they come: nothing that is drawn depends on what they left."""
        theirs = data.draw(statements(self.tables), label="other") if how == "while" else ""
        if not self.done:
            return
        if how == "one":
            self.undo_one(which)
        elif how == "while":
            self.roll_back_while_others_write(theirs)
        else:
            self.roll_back(1 + which % 6, undo=how == "forth", after_s=after_s if how == "killed" else 0)

    def roll_back(self, count: int, *, undo: bool, after_s: float) -> None:
        """Undo the last writes, and sometimes that again."""
        chosen = self.done[-count:]
        if after_s:
            before = self.look()
            self.order(what="restore", points=[done.point for done in reversed(chosen)], after_s=after_s)
            with contextlib.suppress(psycopg.Error):
                self.admin.execute("set lock_timeout = '10s'; lock table watched")  # whoever died has let go
            half = self.look()
            wanted, _ = wanted_of(chosen, self.rows(before))
            assert self.rows(half) in (self.rows(before), wanted)
        point = self.undo(chosen, must=not self.disturbed)
        if point is None:
            return
        event("rolled back")
        if undo and not after_s:
            self.undo([point], must=True)
            event("rolled back and forth")
        else:
            del self.done[-count:]

    def undo_one(self, which: int) -> None:
        """Undo a single write, from among others."""
        place = which % len(self.done)
        point = self.undo([self.done[place]], must=False)
        if point is not None:
            event("undone alone")
            self.done.append(point)
            del self.done[place]
            self.disturbed = True

    def roll_back_while_others_write(self, theirs: str) -> None:
        """Somebody writes between the plan and its carrying out."""
        before = self.look()
        records = [self.db.store.require(done.point).extra for done in reversed(self.done)]
        planned, _ = wanted_of(self.done, self.rows(before))
        plan = self.run(plan_restore(self.db.resource, records))
        self.someone(theirs)
        now = self.rows(self.look())
        wanted = dict(now)
        for place in {place for done in self.done for place in done.rows}:
            if now.get(place) == self.rows(before).get(place):
                put(wanted, place, planned.get(place))
        try:
            self.run(restore(self.db.resource, plan))
        except (CallFailed, Conflict):
            assert self.rows(self.look()) == now
        else:
            assert self.rows(self.look()) == wanted
            self.done.clear()
            self.disturbed = True

    def undo(self, chosen: Sequence[Done], *, must: bool) -> Done | None:
        """Undo some writes; returns the point from just before, or None where the target would not take it."""
        before = self.look()
        wanted, conflicts = wanted_of(chosen, self.rows(before))
        records = [self.db.store.require(done.point).extra for done in reversed(chosen)]
        plan = self.run(plan_restore(self.db.resource, records))
        assert self.rows(self.look()) == self.rows(before)
        assert len(plan.conflicts) == len(conflicts)
        point = f"r{next(self.numbers)}"
        self.db.store.put_record(point, self.run(take_point(self.db.resource, plan)))
        try:
            report = self.run(restore(self.db.resource, plan))
        except (CallFailed, Conflict):
            if must:
                raise
            assert self.look().rows == before.rows
            return None
        assert report.conflicts == ()
        after = self.look()
        assert self.rows(after) == wanted
        return self.between(point, before, after)


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Iterator[str]:
    """The connection URL of an empty database."""
    given = os.environ.get("RINGFENCE_SQL_TARGET")
    if given:
        yield given
        return
    server = request.getfixturevalue("postgres_server")
    name = server.create()
    try:
        yield server.dsn(name)
    finally:
        server.drop(name)


def test_tables_are_what_they_were(own: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "support.sql_victim"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as victim:
        Machine.base, Machine.victim = own, victim
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=(Phase.explicit, Phase.reuse, Phase.generate),
                report_multiple_bugs=False,
            ),
        )
        assert victim.stdin is not None
        victim.stdin.close()
