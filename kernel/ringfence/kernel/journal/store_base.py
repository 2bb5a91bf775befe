"""What the parts of the store share: the pool and how statements are run on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from psycopg.rows import BaseRowFactory, tuple_row
from ringfence.kernel.journal.database import Pool, borrowed, statements
from ringfence.kernel.journal.together import (
    Kind,
    Questions,
    Shared,
    Together,
    asked_json,
    kind_of,
    parts_of,
)
from ringfence.kernel.journal.types import (
    AgentKey,
    AgentRecord,
    GrantRecord,
    KernelKey,
    Phase,
    StoredRow,
)

T = TypeVar("T")

Lineage = Sequence[tuple[int, int]]
"""Branches that a branch is made of, each with the last step that counts."""


def stored_row(**values: Any) -> StoredRow:
    """Make a journal row from its columns."""
    values["phase"] = Phase(values["phase"])
    return StoredRow(**values)


def agent_record(**values: Any) -> AgentRecord:
    """Make an agent's record from its columns."""
    values["key"] = AgentKey(values["key"])
    for recurring in ("manifest", "source", "state"):  # a fleet has few of them
        values[recurring] = sys.intern(values[recurring])
    values["owner"] = None if values["owner"] is None else KernelKey(values["owner"])
    return AgentRecord(**values)


def grant_record(key: int, agent: int, **values: Any) -> GrantRecord:
    """Make a grant's record from its columns."""
    return GrantRecord(id=f"g{key}", agent=AgentKey(agent), **values)


def grant_key(grant_id: str) -> int | None:
    """Read a grant's number from its id; None for what is no grant id."""
    number = grant_id[1:]
    return int(number) if grant_id[:1] == "g" and number.isascii() and number.isdigit() else None


def made_by(make: Callable[..., T]) -> BaseRowFactory[T]:
    """Make rows by calling a function with the columns by name."""

    def factory(cursor: Any) -> Callable[[Sequence[Any]], T]:
        names = [column.name for column in cursor.description or ()]
        return lambda values: make(**dict(zip(names, values, strict=True)))

    return factory


class StoreBase:
    """A pool and three ways to run one named statement in autocommit."""

    def __init__(self, pool: Pool, dsn: str) -> None:
        self._pool = pool
        self._dsn = dsn
        self._questions: Questions[Mapping[str, Any], list[Any]] = Questions(self._kind)

    async def _all(self, name: str, make: Callable[..., T], values: Mapping[str, Any]) -> list[T]:
        """Run `file.statement` and make a record of every row. What many ask at once may be asked together."""
        kind = kind_of(name)
        if kind is None:
            return await self._each(name, make, values)
        own, shared = parts_of(kind, values)
        return await self._questions.ask((name, make, shared), own)

    def _kind(self, of: tuple[str, Callable[..., T], Shared]) -> Together[Mapping[str, Any], list[T]]:
        name, make, shared = of
        kind = kind_of(name)
        assert kind is not None  # noqa: S101 - asked by the caller
        return Together(
            lambda own: self._each(name, make, {**own, **dict(shared)}),
            lambda some: self._together(kind, make, some, dict(shared)),
            kind.most,
        )

    async def _together(
        self, kind: Kind, make: Callable[..., T], some: Sequence[Mapping[str, Any]], shared: Mapping[str, Any]
    ) -> list[list[T]]:
        found: list[list[T]] = [list[T]() for _ in some]
        async with (
            borrowed(self._pool) as connection,
            connection.cursor(row_factory=tuple_row, binary=True) as cursor,
        ):
            await cursor.execute(kind.text, {"asked": asked_json(some), **shared})
            names = [column.name for column in cursor.description or ()][1:]
            for row in await cursor.fetchall():
                nr: int = row[0]
                found[nr].append(make(**dict(zip(names, row[1:], strict=True))))
        return found

    async def _each(self, name: str, make: Callable[..., T], values: Mapping[str, Any]) -> list[T]:
        async with (
            borrowed(self._pool) as connection,
            connection.cursor(row_factory=made_by(make), binary=True) as cursor,
        ):
            await cursor.execute(statement(name), values)
            return await cursor.fetchall()

    async def _first(self, name: str, make: Callable[..., T], values: Mapping[str, Any]) -> T | None:
        """Run `file.statement` and make a record of its first row."""
        rows = await self._all(name, make, values)
        return rows[0] if rows else None

    async def _tuple(self, name: str, values: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Run `file.statement` and return its first row as it is."""
        async with borrowed(self._pool) as connection, connection.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(statement(name), values)
            return await cursor.fetchone() if cursor.description else None

    async def _tuples(self, name: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run `file.statement` and return all its rows as they are."""
        async with borrowed(self._pool) as connection, connection.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(statement(name), values)
            return await cursor.fetchall()


def statement(name: str) -> Any:
    """Look up `file.statement`."""
    file, _, key = name.partition(".")
    return statements(file)[key]
