"""Databases of the embedded server that the operator's kernel file declares with `embedded: true`."""

from __future__ import annotations

import psycopg
from psycopg import sql
from ringfence.kernel.journal.admin import create_database
from ringfence.kernel.journal.database import KEEPALIVE, journal_errors, statements


async def ensure_target(admin_dsn: str, name: str) -> None:
    """Makes the role and the database `name`, owned by it, unless they exist. The role has no rights elsewhere.

    Args:
        admin_dsn: of the server's own database, as its superuser.
        name: lower-case letters, digits and underscores.

    Raises:
        JournalError: the name can't be used, or the server refuses.
        Unavailable: the server can't be reached.
    """
    queries = statements("admin")
    made = await create_database(admin_dsn, name)
    with journal_errors():
        async with await psycopg.AsyncConnection.connect(
            admin_dsn, autocommit=True, **KEEPALIVE
        ) as connection:
            if await (await connection.execute(queries["role_exists"], (name,))).fetchone() is None:
                await connection.execute(sql.SQL(queries["create_role"]).format(name=sql.Identifier(name)))
            if made:
                for query in ("own_database", "close_database"):
                    await connection.execute(sql.SQL(queries[query]).format(name=sql.Identifier(name)))


async def run_script(dsn: str, script: str) -> None:
    """Runs an operator's script of statements in one transaction: a schema, for example, which no agent may change.

    Args:
        dsn: of the target's database, as its owner.
        script: statements without parameters.

    Raises:
        JournalError: the database refuses it; nothing of it was done.
        Unavailable: the server can't be reached.
    """
    with journal_errors():
        async with await psycopg.AsyncConnection.connect(dsn, **KEEPALIVE) as connection:
            await connection.execute(script.encode())


async def table_lines(dsn: str, table: str) -> list[str]:
    """All rows of a table as PostgreSQL writes them, sorted: equal lists are equal tables.

    Args:
        dsn: of the target's database.
        table: its name in the schema `public`.

    Raises:
        JournalError: there is no such table, or the database refuses.
        Unavailable: the server can't be reached.
    """
    query = sql.SQL(statements("admin")["table_lines"]).format(table=sql.Identifier("public", table))
    with journal_errors():
        async with await psycopg.AsyncConnection.connect(dsn, **KEEPALIVE) as connection:
            return [str(row[0]) for row in await (await connection.execute(query)).fetchall()]
