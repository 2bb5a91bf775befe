"""How many of the kernel's file descriptors one agent may make it hold, so that operators and others always find some."""

from __future__ import annotations

import resource

CONNECTIONS_MAX = 64
"""Connections to one agent's socket at a time: as many as a sandbox has processes by default."""

CONNECTIONS_MIN = 4
"""What an agent gets when descriptors are scarce; with less it is not started."""

SHARE_DIVISOR = 128
"""An agent gets at most this part of what is left, so that the many share what the first would have taken."""

OWN = 16
"""What an agent costs beside its connections: its socket, its logs, its launcher, a command that runs."""

_RESERVED_PART = 4


class NoDescriptors(Exception):
    """There are too few descriptors for one more agent. `str()` says what to do."""


class Descriptors:
    """The kernel's descriptors, handed to agents in shares.

    INVARIANT: all shares together leave a quarter of the limit free: for operators, the database, targets and files.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
        self._left = self._limit - self._limit // _RESERVED_PART

    def take(self) -> int:
        """Take a share for one start of an agent.

        Returns:
            How many connections its socket may have; to be given back with `give_back`.

        Raises:
            NoDescriptors: too few are left.
        """
        connections = max(CONNECTIONS_MIN, min(CONNECTIONS_MAX, self._left // SHARE_DIVISOR))
        if OWN + connections > self._left:
            raise NoDescriptors(
                f"the kernel may open {self._limit} files, which is too few for one more agent; "
                "end other agents, or start the kernel with a higher hard limit (`ulimit -Hn`, LimitNOFILE)"
            )
        self._left -= OWN + connections
        return connections

    def give_back(self, connections: int) -> None:
        """Give back what `take` gave."""
        self._left += OWN + connections
