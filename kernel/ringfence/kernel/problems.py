"""What an operator's request can run into. Each carries the exit code of the command that asked."""

from __future__ import annotations


class Problem(Exception):
    """An operator's request that can't be carried out.

    Attributes:
        message: one line for people: what, why, what to type next.
        exit_code: 1 not well, 2 usage, 3 denied, 4 no such thing, 5 conflict, 6 no kernel.
        reason: stable name.
    """

    def __init__(self, message: str, *, exit_code: int, reason: str) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
        self.reason = reason


class StoreAway(Problem):
    """The store that several nodes share can't be used now."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=6, reason="StoreUnavailable")


class StoreLacks(Problem):
    """The store that several nodes share has not all that an agent did."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=5, reason="StoreLacks")


def no_such_agent(name: str) -> Problem:
    """The agent is not in the database."""
    return Problem(f"no agent `{name}`; see: ringfence ps --all", exit_code=4, reason="NoSuchAgent")


def was_removed(agent: str) -> Problem:
    """The agent is no more; its evidence stays."""
    text = f"`{agent}` was removed; its evidence is there: ringfence audit {agent}"
    return Problem(text, exit_code=4, reason="NoSuchAgent")


def not_here(agent: str) -> Problem:
    """Another kernel owns the agent, or has its files."""
    text = f"`{agent}` belongs to another kernel of this database; connect to that one"
    return Problem(text, exit_code=5, reason="Conflict")


def lost_files(directory: object) -> str:
    """Why an agent can't go on whose files are gone."""
    return f"its files are gone: `{directory}` was removed; submit it again, or put it back from a backup and restart the kernel"


def files_gone(agent: str, directory: object) -> Problem:
    """The agent's directory was removed from outside."""
    return Problem(f"`{agent}` can't do this: {lost_files(directory)}", exit_code=4, reason="FilesGone")


def conflict(message: str) -> Problem:
    """The state of things does not allow it now."""
    return Problem(message, exit_code=5, reason="Conflict")


def bad_usage(message: str, reason: str = "BadUsage") -> Problem:
    """The request itself is wrong."""
    return Problem(message, exit_code=2, reason=reason)
