"""Who the server and its tools run as."""

from __future__ import annotations

import contextlib
import os
import pwd
from dataclasses import dataclass

from ringfence.kernel.postgres.errors import PostgresError

SERVER_UID = 61100
"""Who the server runs as when the kernel is root: a number that neither Debian nor systemd hands out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A user and group to become. None: stay this very user."""

    uid: int | None
    gid: int | None


def account_name(uid: int) -> str | None:
    """The name of a user, or None when the host knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def initdb_identity(server: Identity) -> Identity:
    """Who makes a new cluster for a server.

    initdb wants a user with a name. The server's own number has none, so under root an account that is asleep
    lends its name for the half second it takes; then the cluster is given to its owner.

    Raises:
        PostgresError: every account of the host has running processes.
    """
    if server.uid is None or account_name(server.uid) is not None:
        return server
    busy: set[int] = set()
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(FileNotFoundError):
                    busy.add(entry.stat().st_uid)
    for account in sorted(pwd.getpwall(), key=lambda entry: entry.pw_name != "nobody"):
        if account.pw_uid != 0 and account.pw_uid not in busy:
            return Identity(uid=account.pw_uid, gid=account.pw_gid)
    raise PostgresError(
        f"initdb needs a user with a name: add one with `useradd --system --uid {SERVER_UID} ringfence-db`"
    )
