"""What a target's errors mean to an agent: typed, and without address, role or anything else of the operator's."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import errors
from ringfence.syscalls.errors import CallFailed, Conflict, Deadline, InvalidRequest, SyscallError
from ringfence.syscalls.redaction import redactor_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from ringfence.syscalls.declared import SqlResource

_log: Final = logging.getLogger("ringfence.syscalls.sql")


def too_long(name: str) -> Deadline:
    """A statement, or the wait for a connection, took longer than the call may."""
    return Deadline(f"`{name}` took too long; ask for less, or give the call a longer deadline")


@contextlib.contextmanager
def target_errors(resource: SqlResource) -> Generator[None]:
    """Turn the driver's errors into typed ones, without address, role or anything else of the operator's."""
    name = resource.name
    try:
        yield
    except errors.QueryCanceled:
        raise too_long(name) from None
    except errors.ReadOnlySqlTransaction:
        raise InvalidRequest("the statement would write; make a sql.write call for it") from None
    except (errors.SerializationFailure, errors.DeadlockDetected):
        raise Conflict(
            f"another transaction in `{name}` changed the same rows; try again", retry="yes"
        ) from None
    except errors.LockNotAvailable:
        raise Conflict(f"another transaction in `{name}` holds a lock; try again later") from None
    except (psycopg.InterfaceError, psycopg.OperationalError) as error:
        raise _unreachable(resource, error) from None
    except psycopg.Error as error:
        raise answered(resource, error) from None
    except UnicodeDecodeError:
        raise CallFailed(
            f"`{name}` answered with a text that is no UTF-8; leave that column out, or encode it in the statement"
        ) from None


def _unreachable(resource: SqlResource, error: psycopg.Error) -> SyscallError:
    if error.sqlstate is not None and not error.sqlstate.startswith(("08", "57P")):
        return answered(resource, error)
    said = redactor_of(resource.secrets).text(" ".join(str(error).split()))
    _log.warning("sql target %s: %s", resource.name, said)
    return CallFailed(
        f"database `{resource.name}` can't be reached, or broke the connection; the operator can check it"
    )


def answered(resource: SqlResource, error: psycopg.Error) -> CallFailed:
    """An error of the statement, in the target's own words on one line, without the target's credential."""
    text = redactor_of(resource.secrets).text(" ".join((error.diag.message_primary or str(error)).split()))
    return CallFailed(f"`{resource.name}` answered: {text}", sqlstate=error.sqlstate or "")
