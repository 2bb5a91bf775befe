"""What is done to a server rather than in the kernel's database: is it there, and is there a database."""

from __future__ import annotations

import re

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from ringfence.kernel.journal.database import KEEPALIVE, journal_errors, statements, unread_dsn
from ringfence.kernel.journal.types import JournalError

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")


def check_dsn(dsn: str) -> None:
    """Reads a connection string without connecting.

    Raises:
        JournalError: it is none.
    """
    try:
        conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        why = unread_dsn(error)
        raise JournalError(f"the DSN can't be read: {why}; write postgresql://USER@HOST/DATABASE") from None


async def ping(dsn: str) -> None:
    """Connects and asks for one row.

    Raises:
        Unavailable: the server can't be reached or doesn't answer.
    """
    with journal_errors():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, **KEEPALIVE) as connection:
            await connection.execute(statements("admin")["ping"])


async def create_database(dsn: str, name: str) -> bool:
    """Creates a database unless it exists.

    Args:
        dsn: of any database of the server, as a role that may create databases.
        name: lower-case letters, digits and underscores, at most 63.

    Returns:
        Whether it was created.

    Raises:
        JournalError: the name can't be used, or the server refuses.
        Unavailable: the server can't be reached.
    """
    if _NAME.fullmatch(name) is None:
        raise JournalError(f"`{name}` can't be a database's name: use lower-case letters, digits and `_`")
    queries = statements("admin")
    with journal_errors():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, **KEEPALIVE) as connection:
            found = await (await connection.execute(queries["database_exists"], (name,))).fetchone()
            if found is not None:
                return False
            try:
                await connection.execute(
                    sql.SQL(queries["create_database"]).format(name=sql.Identifier(name))
                )
            except (psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
                return False  # another kernel was faster
    return True
