"""How many of the kernel's file descriptors one agent may make it hold, so that operators and others always find some."""

from __future__ import annotations

import resource

CONNECTIONS_MAX = 64
"""Connections to one agent's socket at a time: as many as a sandbox has processes by default."""

CONNECTIONS_MIN = 4
"""What an agent has for sure; where there is no room for them it is not started."""

SHARE_DIVISOR = 16
"""Beyond them an agent has at most this part of what is left, so that a few greedy ones leave room for the others."""

OWN = 9
"""What an agent costs beside its connections: its socket, two pipes and two files for its output, two directories; and two for a command."""

_RESERVED_PART = 4


class NoDescriptors(Exception):
    """There are too few descriptors for one more agent. `str()` says what to do."""


class Descriptors:
    """The kernel's descriptors, as they are handed to agents.

    INVARIANT: what agents have leaves a quarter of the limit free: for operators, the database, targets and files.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
        self._left = self._limit - self._limit // _RESERVED_PART

    def take(self) -> None:
        """Take what one start of an agent needs; to be given back with `give_back`.

        Raises:
            NoDescriptors: too few are left.
        """
        if self._left < OWN + CONNECTIONS_MIN:
            raise NoDescriptors(
                f"the kernel may open {self._limit} files, which is too few for one more agent; "
                "end other agents, or start the kernel with a higher hard limit (`ulimit -Hn`, LimitNOFILE)"
            )
        self._left -= OWN + CONNECTIONS_MIN

    def connect(self, connections: int) -> bool:
        """Take one more connection for an agent, if it may have it; `disconnect` gives it back.

        Args:
            connections: how many it has.
        """
        if connections < CONNECTIONS_MIN:
            return True
        if connections >= CONNECTIONS_MAX or connections - CONNECTIONS_MIN >= self._left // SHARE_DIVISOR:
            return False
        self._left -= 1
        return True

    def disconnect(self, connections: int) -> None:
        """Give a connection back.

        Args:
            connections: how many the agent had, with this one.
        """
        if connections > CONNECTIONS_MIN:
            self._left += 1

    def give_back(self, connections: int) -> None:
        """Give back what `take` gave, and the connections that an agent still has."""
        self._left += OWN + CONNECTIONS_MIN + max(0, connections - CONNECTIONS_MIN)
