"""Planning in a target is bounded: what constants alone make is refused or cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ringfence.syscalls.errors import Deadline, InvalidRequest
from ringfence.syscalls.sql_target import catalog
from ringfence.syscalls.sql_target.session import transaction

if TYPE_CHECKING:
    from conftest import Database

FOLDED = "select length(replace(repeat('x', 1000000), 'x', %s))"


async def test_a_size_that_is_too_large_never_reaches_the_target(crm: Database) -> None:
    with pytest.raises(InvalidRequest, match="more than 1000000 parts"):
        await crm.read("select length(repeat('x', 1000000000))")
    with pytest.raises(InvalidRequest, match="plain number"):
        await crm.read("select length(repeat('x', 1000 * 1000 * 1000))")
    with pytest.raises(InvalidRequest, match="more than 1000000 parts"):
        await crm.read("select length(repeat('x', %s))", 1_000_000_000)
    assert (await crm.read("select lpad('7', 3, '0') as n")).rows == [["007"]]


async def test_planning_has_a_limit_of_its_own(crm: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await crm.read(FOLDED, "y" * 100)).rows == [[100_000_000]]
    monkeypatch.setattr(catalog, "PLAN_TIMEOUT_S", 0.001)
    with pytest.raises(Deadline):
        await crm.read(FOLDED, "y" * 100)


async def test_the_limit_ends_with_the_planning(crm: Database) -> None:
    shown = "select current_setting('statement_timeout')"
    async with transaction(crm.resource, mode="read only", timeout_s=30) as session:
        before = await session.value(shown)
        inside = (await session.at_most(5, shown, ())).rows[0][0]
        assert (before, inside, await session.value(shown)) == ("30s", "5s", "30s")
    async with transaction(crm.resource, mode="read only", timeout_s=2) as session:
        assert (await session.at_most(5, shown, ())).rows == [("2s",)]


async def test_what_the_target_has_planned_outlives_calls(crm: Database) -> None:
    """A rollback has the driver forget it all, and then each look at the catalog is planned anew: most of what a call takes."""
    crm.run("create table stock (id int primary key, n int); insert into stock values (1, 1)")
    await crm.read("select n from stock")
    await crm.write("update stock set n = 2")
    await crm.read("select n from stock")
    async with transaction(crm.resource, mode="read only") as session:
        kept = await session.query("select name from pg_catalog.pg_prepared_statements")
    assert kept.rows
