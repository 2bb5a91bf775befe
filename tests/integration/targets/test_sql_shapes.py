"""What changes keys, joins other tables or finds rows in its place, and targets that can't tell: undone exactly, or refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from ringfence.syscalls.base import Effect
from ringfence.syscalls.declared import SqlResource
from ringfence.syscalls.errors import CallFailed, Conflict, SnapshotFailed
from ringfence.syscalls.sql_target import capture
from ringfence.syscalls.sql_target.restore import plan_restore, restore
from ringfence.syscalls.sql_target.session import close_targets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from conftest import Database


@pytest.fixture(params=["tells both", "reads first"])
def goods(request: pytest.FixtureRequest, crm: Database, monkeypatch: pytest.MonkeyPatch) -> Database:
    """Two tables, on a server as it is and as one of before version 18."""
    if request.param == "reads first":
        monkeypatch.setattr(capture, "TELLS_BOTH", 1_000_000)
    elif int(crm.run("show server_version_num")[0][0]) < capture.TELLS_BOTH:
        pytest.skip("the given server is older")
    crm.run("create table goods (id int primary key, name text unique, n int)")
    crm.run("insert into goods values (1, 'nut', 5), (2, 'bolt', 7), (3, 'cog', null), (4, 'old', 1)")
    crm.run("create table orders (good int, n int, primary key (good, n))")
    crm.run("insert into orders values (1, 1), (1, 2), (2, 9)")
    return crm


@pytest.fixture
async def clerk(crm: Database) -> AsyncIterator[Any]:
    """The target, used as a role that owns nothing; `grant` gives it rights."""
    role = crm.run("select 'clerk_' || substr(md5(current_database()), 1, 8)")[0][0]
    crm.run(f"create role {role} login")
    crm.resource = SqlResource(name="crm", dsn=crm.dsn.replace("//ringfence@", f"//{role}@"))
    crm.env.sql = {"crm": crm.resource}
    try:
        yield lambda words: crm.run(words.format(role))
    finally:
        await close_targets()
        crm.run(f"drop owned by {role}; drop role {role}")


async def undo(crm: Database, *, since: int = 0) -> None:
    steps = [s for s in range(crm.step, since, -1) if crm.store.load(f"p{s}") is not None]
    plan = await plan_restore(crm.resource, [crm.record(step) for step in steps])
    assert plan.conflicts == ()
    assert (await restore(crm.resource, plan)).conflicts == ()


def both(crm: Database) -> list[str]:
    return crm.dump("goods") + crm.dump("orders")


@pytest.mark.parametrize(
    ("statement", "count"),
    [
        ("update goods set id = id + 10", 4),
        ("update goods set id = id + 10, name = name || '!' where n > 0 returning id, name", 3),
        ("update goods set n = o.n from orders o where o.good = goods.id and goods.id < 3", 2),
        (
            "update goods g set n = x.n + 100 from (orders o join goods x on x.id = o.good) where x.id = g.id",
            2,
        ),
        ("update goods set n = old.n from orders as old where old.good = goods.id and old.n <> 2", 2),
        ("update goods as old set n = old.n + 1 where old.id < 3", 2),
        ("update goods as new set n = 0 returning new.name", 4),
        ("delete from goods using orders o where o.good = goods.id", 2),
        ("delete from goods old using orders new where new.good = old.id returning old.*", 2),
        ("with old as (select 2 as id) update goods set n = old.id from old where old.id = goods.id", 1),
    ],
)
async def test_rows_come_back(goods: Database, statement: str, count: int) -> None:
    before = both(goods)
    assert (await goods.write(statement)).row_count == count
    assert both(goods) != before
    await undo(goods)
    assert both(goods) == before


@pytest.mark.parametrize(
    ("statement", "count"),
    [
        (
            "insert into goods values (1, 'nut', 9), (7, 'new', 1) on conflict (id) do update set n = excluded.n + goods.n",
            2,
        ),
        (
            "insert into goods values (9, 'nut', 9) on conflict (name) do update set id = 90, n = 8 returning id, n",
            1,
        ),
        (
            "insert into goods as new values (1, 'x', 9) on conflict (id) do update set n = new.n + 1 where new.n > 0 returning n",
            1,
        ),
        (
            (
                "merge into goods g using orders o on g.id = o.good and o.n <> 2 when matched and o.n = 9 then delete "
                "when matched then update set n = o.n returning merge_action(), g.id"
            ),
            2,
        ),
        (
            (
                "merge into goods using (values (1, 'a'), (8, 'b')) v (id, name) on goods.id = v.id when matched then update set "
                "name = v.name when not matched then insert values (v.id, v.name, 0) when not matched by source then delete"
            ),
            5,
        ),
    ],
)
async def test_rows_found_in_place_come_back(goods: Database, statement: str, count: int) -> None:
    before = both(goods)
    if capture.TELLS_BOTH > 180000:
        with pytest.raises(SnapshotFailed, match="needs a target of PostgreSQL 18"):
            await goods.write(statement)
        assert both(goods) == before
        return
    assert (await goods.write(statement)).row_count == count
    assert both(goods) != before
    await undo(goods)
    assert both(goods) == before


async def test_a_merge_that_deletes_is_a_deletion(goods: Database) -> None:
    def effect(action: str) -> Effect | None:
        return goods.prepare_write(f"merge into goods using orders on false when matched then {action}")[
            0
        ].plan.effect

    assert effect("update set n = 1") is None
    assert effect("delete") is Effect.DESTROY


async def test_an_update_that_changes_its_mind_never_counts(goods: Database) -> None:
    """200 coins thrown twice: what the copy found is not what was changed, which is found out, or can't be."""
    goods.run("insert into goods select g, 'x' || g, 1 from generate_series(100, 300) g")
    rows = goods.dump("goods")
    for sets in ("n = 2", "id = id + 1000"):
        try:
            await goods.write(f"update goods set {sets} where random() < 0.5")
        except SnapshotFailed as error:
            assert "other rows" in str(error)  # noqa: PT017 - where the server doesn't tell both
        else:
            await undo(goods, since=goods.step - 1)
        assert goods.dump("goods") == rows


async def test_values_that_went_round(goods: Database) -> None:
    """Neither order of putting back will do: each row's value is another's now."""
    before = both(goods)
    goods.run("create table notes (good int references goods)")
    goods.run("insert into notes values (1), (2), (3)")
    for statement in (
        "update goods set name = 'tmp' where id = 1",
        "update goods set name = 'nut' where id = 2",
        "update goods set name = 'bolt' where id = 3",
        "update goods set name = 'cog' where id = 1",
    ):
        await goods.write(statement)
    await undo(goods)
    assert both(goods) == before
    assert goods.dump("notes") == ["(1)", "(2)", "(3)"]


async def test_a_unique_key_is_as_good_as_a_primary_one(goods: Database) -> None:
    goods.run(
        "create table u (a int not null, b text not null, n int, unique (b, a)); create table v (a int unique)"
    )
    goods.run("insert into u values (1, 'x', 1), (2, 'x', 2)")
    before = goods.dump("u")
    await goods.write("update u set n = 7, a = a + 5")
    await goods.write("delete from u where a = 7")
    await undo(goods)
    assert goods.dump("u") == before
    with pytest.raises(SnapshotFailed, match="no unique one"):
        await goods.write("insert into v values (1)")


async def test_an_identity_that_nothing_can_put_back(goods: Database) -> None:
    goods.run("create table t (id int primary key, serial int generated always as identity)")
    goods.run("insert into t values (1), (2)")
    before = goods.dump("t")
    with pytest.raises(SnapshotFailed, match="always generated"):
        await goods.write("update t set serial = default")
    await goods.write("update t set id = 5 where id = 1")
    await undo(goods)
    assert goods.dump("t") == before
    # Another row under the same key has another one, which no update could put back.
    goods.run("create table notes (t int references t)")
    await goods.write("delete from t where id = 2")
    await goods.write("insert into t values (2)")
    goods.run("insert into notes values (2)")
    await undo(goods, since=goods.step - 2)
    assert goods.dump("t") == before


async def test_rights_that_would_not_do_to_undo_it(crm: Database, clerk: Any) -> None:
    crm.run("create table t (id int primary key, a int, b int); insert into t values (1, 1, 1)")
    before = crm.dump("t")
    clerk("grant select, insert on t to {}")
    with pytest.raises(SnapshotFailed, match="may not delete"):
        await crm.write("insert into t values (2)")
    clerk("revoke insert on t from {0}; grant delete, update (a) on t to {0}")
    with pytest.raises(SnapshotFailed, match="may not insert whole rows"):
        await crm.write("delete from t")
    await crm.write("update t set a = 2")
    await undo(crm)
    clerk("grant update (id) on t to {}")
    with pytest.raises(SnapshotFailed, match="may not both insert and delete"):
        await crm.write("update t set id = 2")
    clerk("revoke update (id, a) on t from {0}; grant insert on t to {0}")
    since = crm.step
    await crm.write("insert into t values (2)")
    await crm.write("delete from t where id = 1")
    await undo(crm, since=since)
    assert crm.dump("t") == before


async def test_row_policies_are_tried_before_they_are_relied_on(crm: Database, clerk: Any) -> None:
    crm.run("create table t (id int primary key, who text, n int); alter table t enable row level security")
    crm.run("insert into t values (1, 'me', 1), (2, 'me', 2), (3, 'them', 3)")
    before = crm.dump("t")
    clerk("grant select, insert, update, delete, truncate on t to {}")
    clerk("create policy p on t to {} using (who = 'me')")
    with pytest.raises(SnapshotFailed, match="row policies hide"):
        await crm.write("truncate t")
    await crm.write("update t set n = n + 1")
    await crm.write("delete from t where id = 1")
    await crm.write("insert into t values (4, 'me', 4)")
    await undo(crm)
    assert crm.dump("t") == before
    clerk("drop policy p on t; create policy p on t to {0} using (true) with check (n > 1)")
    with pytest.raises(
        SnapshotFailed, match=r"row policies let it, and when it was tried.*row-level security"
    ):
        await crm.write("update t set n = 7")
    with pytest.raises(SnapshotFailed, match="when it was tried"):
        await crm.write("delete from t where id = 1")
    await crm.write("delete from t where id = 2")
    await undo(crm, since=crm.step - 1)
    assert crm.dump("t") == before


@pytest.mark.parametrize("statement", ["update t set n = 2", "delete from t", "insert into t values (2, 2)"])
async def test_a_policy_that_does_more_than_look_is_relied_on_by_nobody(
    crm: Database, clerk: Any, statement: str
) -> None:
    crm.run("create table t (id int primary key, n int); create table marks (n int)")
    crm.run("insert into t values (1, 1); alter table t enable row level security")
    clerk("grant select, insert, update, delete on t to {0}; grant insert on marks to {0}")
    crm.run(
        "create function mark(int) returns int language sql as 'insert into marks values ($1) returning 1'; "
        "create function look(int) returns int language sql stable as 'select 1'; "
        "create policy p on t using (mark(n) > 0)"
    )
    with pytest.raises(SnapshotFailed, match="the volatile function `mark` of its row policies"):
        await crm.write(statement)
    assert crm.dump("marks") == []
    before = crm.dump("t")
    crm.run("alter policy p on t using (look(n) > 0)")
    await crm.write(statement)
    await undo(crm)
    assert crm.dump("t") == before


@pytest.mark.parametrize("where", ["table", "domain"])
async def test_rows_that_their_own_checks_would_not_take_again(crm: Database, where: str) -> None:
    crm.run("create domain positive as int; create table t (id int primary key, n positive)")
    crm.run("insert into t values (1, -1), (2, 2)")
    before = crm.dump("t")
    crm.run(
        "alter table t add constraint c check (n > 0) not valid"
        if where == "table"
        else "alter domain positive add constraint c check (value > 0) not valid"
    )
    for statement in ("delete from t where id = 1", "update t set n = 3"):
        with pytest.raises(SnapshotFailed, match="`c`, which was never validated, and when it was tried"):
            await crm.write(statement)
    await crm.write("delete from t where id = 2")
    await undo(crm)
    assert crm.dump("t") == before


async def test_rows_of_others_are_not_changed_by_a_cascade(crm: Database) -> None:
    crm.run("create table parent (id int primary key, code text unique); insert into parent values (1, 'a')")
    await crm.write("update parent set code = 'b'")
    crm.run(
        "create table child (code text references parent (code) on update cascade); insert into child values ('b')"
    )
    with pytest.raises(Conflict, match="would cascade"):
        await undo(crm)
    assert crm.dump("child") == ["(b)"]


async def test_the_target_is_asked_for_nothing_it_can_not_give(crm: Database) -> None:
    """Nothing of what is put back is left half done where a later table fails."""
    crm.run("create table a (id int primary key, n int); create table b (id int primary key, n int unique)")
    crm.run("insert into a values (1, 1); insert into b values (1, 1)")
    await crm.write("update a set n = 2")
    await crm.write("update b set n = 2")
    crm.run("insert into b values (5, 1)")
    with pytest.raises(CallFailed, match="duplicate key"):
        await undo(crm)
    assert (crm.dump("a"), crm.dump("b")) == (["(1,2)"], ["(1,2)", "(5,1)"])
