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
