"""Brings the kernel's database to the schema of this code: numbered files, each applied once."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
from ringfence.kernel.journal.database import KEEPALIVE, SQL_DIRECTORY, journal_errors, one_line, statements
from ringfence.kernel.journal.types import JournalError

if TYPE_CHECKING:
    from pathlib import Path

    from ringfence.kernel.journal.database import Connection

MIGRATIONS = SQL_DIRECTORY / "migrations"
SERVER_MIN = 15
"""The oldest major version of PostgreSQL that the schema is written for."""

_FILE_NAME = re.compile(r"\d{4}_[a-z0-9_]+\.sql")


class MigrationError(JournalError):
    """The database can't be brought to this schema, and was left as it was. `str()` says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One numbered file.

    Attributes:
        name: `NNNN_words`.
        sha256: hex, of the file's bytes.
        text: the statements.
    """

    name: str
    sha256: str
    text: bytes


def load_migrations(directory: Path = MIGRATIONS) -> list[Migration]:
    """Reads the migrations of a directory in their order.

    Raises:
        MigrationError: a name doesn't fit, or the numbers don't run from 1 without a gap.
    """
    found: list[Migration] = []
    for number, path in enumerate(sorted(directory.glob("*.sql")), 1):
        if _FILE_NAME.fullmatch(path.name) is None or int(path.name[:4]) != number:
            raise MigrationError(
                f"`{path.name}` should be migration {number:04d}_name.sql: mend the installation"
            )
        text = path.read_bytes()
        found.append(Migration(name=path.stem, sha256=hashlib.sha256(text).hexdigest(), text=text))
    return found


def _pending(known: list[Migration], applied: dict[str, str]) -> list[Migration]:
    """Compares what is applied with what this code knows and returns what is missing."""
    newer = sorted(applied.keys() - {migration.name for migration in known})
    if newer:
        raise MigrationError(
            f"the database has migration `{newer[-1]}`, which this version doesn't know: "
            "upgrade ringfence, or use another database"
        )
    pending = [migration for migration in known if migration.name not in applied]
    for migration in known[: len(known) - len(pending)]:
        if migration.name not in applied:
            raise MigrationError(
                f"the database lacks migration `{migration.name}` but has later ones: restore a backup"
            )
        if applied[migration.name] != migration.sha256:
            raise MigrationError(
                f"migration `{migration.name}` is not the one that was applied to this database: "
                "reinstall ringfence, or restore the file"
            )
    return pending


async def _apply(connection: Connection, migration: Migration) -> None:
    try:
        async with connection.transaction():
            await connection.execute(migration.text)
            await connection.execute(
                statements("admin")["migration_record"],
                (migration.name, migration.sha256),
            )
    except (psycopg.ProgrammingError, psycopg.IntegrityError, psycopg.NotSupportedError) as error:
        raise MigrationError(
            f"migration `{migration.name}` failed and nothing of it was kept: {one_line(error)}"
        ) from error


async def migrate(dsn: str, directory: Path = MIGRATIONS) -> list[str]:
    """Applies what the database lacks, each migration in a transaction of its own.

    Several kernels may call it at once: one works, the others wait for it and find nothing left to do.

    Args:
        dsn: of the kernel's database, as its owner.
        directory: where the files lie.

    Returns:
        The names of the migrations that this call applied.

    Raises:
        MigrationError: the server is too old, the database is newer than this code or not in UTF-8, an applied
            file has changed, or a statement fails.
        Unavailable: the server can't be reached.
    """
    known = load_migrations(directory)
    queries = statements("admin")
    with journal_errors():
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, **KEEPALIVE) as connection:
            version = connection.info.server_version
            if version < SERVER_MIN * 10_000:
                raise MigrationError(
                    f"the server is PostgreSQL {version // 10_000} and {SERVER_MIN} or later is needed: "
                    "upgrade it, or give another --dsn"
                )
            encoding = connection.info.parameter_status("server_encoding")
            if encoding != "UTF8":
                raise MigrationError(
                    f"the database has the encoding `{encoding}` and UTF8 is needed: make it with "
                    "`createdb --template template0 --encoding UTF8 NAME`, or give another --dsn"
                )
            # A session's lock: closing the connection gives it back, whatever happens here.
            await connection.execute(queries["migrate_lock"])
            await connection.execute(queries["migrations_table"])
            cursor = await connection.execute(queries["migrations_applied"])
            applied = {str(name): str(digest) for name, digest in await cursor.fetchall()}
            pending = _pending(known, applied)
            for migration in pending:
                await _apply(connection, migration)
            await connection.execute(queries["migrate_unlock"])
    return [migration.name for migration in pending]
