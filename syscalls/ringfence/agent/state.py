"""`rf.state` and `rf.checkpoint` for threads, and what both front ends share of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ringfence.agent import operations, wire
from ringfence.agent.claims import guards
from ringfence.agent.errors import CheckpointUnreadable, Conflict
from ringfence.agent.lanes import check_quiet

if TYPE_CHECKING:
    from ringfence.agent.calls import Caller
    from ringfence.agent.claims import Claims
    from ringfence.agent.operations import Operation
    from ringfence.agent.values import Versioned
    from ringfence.v1.syscalls_pb2 import Welcome

Upgrader: TypeAlias = Callable[[Any], Any]


UPDATE_TRIES: Final = 20
"""How often `update` reads and writes at most."""


def updated(
    key: str, change: Callable[[Any], Any], default: Any, claims: Mapping[str, int], tries: int
) -> operations.Script[Any]:
    """Read, change and write a key, until nobody was faster."""
    for last in range(max(1, tries) - 1, -1, -1):
        found: Versioned = yield operations.state_get(key)
        value = change(found.value if found.found else default)
        try:
            yield operations.state_put(key, value, found.version, claims)
        except Conflict as conflict:
            if not last or conflict.metadata.get("claims", "[]") != "[]":
                raise
        else:
            return value
    raise AssertionError("unreachable")


class Draft:
    """Reads and writes that a transaction has gathered."""

    def __init__(self) -> None:
        self._reads: dict[str, int] = {}
        self._looks = 0
        self._puts: dict[str, Any] = {}
        self._deletes: dict[str, None] = {}

    def put(self, key: str, value: Any) -> None:
        """Write a key at the end of the block."""
        wire.check_plain(f"the value of `{key}`", value)
        self._deletes.pop(key, None)
        self._puts[key] = value

    def delete(self, key: str) -> None:
        """Remove a key at the end of the block."""
        self._puts.pop(key, None)
        self._deletes[key] = None

    def own(self, key: str) -> bool:
        """Whether the block wrote or removed the key itself."""
        return key in self._puts or key in self._deletes

    def written(self, key: str, default: Any) -> Any:
        """Give what the block wrote under a key that is its own."""
        return self._puts.get(key, default)

    def seen(self, key: str, found: Versioned) -> None:
        """Note the version read. The first counts: a later one that differs has to fail the commit."""
        self._reads.setdefault(key, found.version)
        self._looks += 1

    def commit(self, claims: Mapping[str, int]) -> Operation[dict[str, int]] | None:
        """Give the call that commits; None where there is nothing to commit or to compare."""
        # One look was at one moment. Of two the kernel has to say whether what they saw ever stood together.
        if not self._puts and not self._deletes and self._looks <= 1:
            return None
        return operations.state_transaction(self._reads, self._puts, list(self._deletes), claims)


class Transaction(Draft):
    """One block of `with rf.state.transaction() as tx`."""

    def __init__(self, caller: Caller) -> None:
        super().__init__()
        self._caller = caller

    def get(self, key: str, default: Any = None) -> Any:
        """Read a key, as this block will leave it; the commit fails if another changes it meanwhile."""
        if self.own(key):
            return self.written(key, default)
        found = self._caller.run(operations.state_get(key))
        self.seen(key, found)
        return found.value if found.found else default


class State:
    """The shared state: JSON values by key, each with a version."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def get(self, key: str, default: Any = None) -> Any:
        """Read a value; `default` where there is none."""
        found = self.get_versioned(key)
        return found.value if found.found else default

    def get_versioned(self, key: str) -> Versioned:
        """Read a value with its version, for `if_version`."""
        return self._caller.run(operations.state_get(key))

    def put(self, key: str, value: Any, *, if_version: int | None = None, claim: Claims = ()) -> int:
        """Write a value; gives its version.

        Args:
            key: where.
            value: JSON.
            if_version: the version that it replaces; 0: there never was one; None: whatever stands there.
            claim: of `rf.claim`, one or several, that must still be held.

        Raises:
            Conflict: the key isn't at `if_version` any more, or a claim is lost.
        """
        return self._caller.run(operations.state_put(key, value, if_version, guards(claim)))

    def delete(self, key: str, *, if_version: int | None = None, claim: Claims = ()) -> bool:
        """Remove a value; gives whether there was one.

        Raises:
            Conflict: the key isn't at `if_version` any more, or a claim is lost.
        """
        return self._caller.run(operations.state_delete(key, if_version, guards(claim)))

    def update(
        self,
        key: str,
        change: Callable[[Any], Any],
        *,
        default: Any = None,
        claim: Claims = (),
        tries: int = UPDATE_TRIES,
    ) -> Any:
        """Read a value, have `change` make another of it and write that, again where others were faster: no change is lost.

        Args:
            key: where.
            change: gets the value, or `default` where there is none, and gives the new one; it may run several times.
            default: what stands for no value.
            claim: of `rf.claim`, one or several, that must still be held.
            tries: how often at most.

        Returns:
            The value that was written.

        Raises:
            Conflict: a claim is lost, or others were faster each time.
        """
        return self._caller.script(updated(key, change, default, guards(claim), tries))

    @contextmanager
    def transaction(self, *, claim: Claims = ()) -> Generator[Transaction]:
        """Read and write several keys at once: what the block wrote is committed at its end, all or nothing.

        A block that raises commits nothing. One that only reads, more than once, fails as well where a key has changed since:
        what it saw stood there together.

        Args:
            claim: of `rf.claim`, one or several, that must still be held at the end.

        Raises:
            Conflict: at the end of the block, where a key it read has changed since, or a claim is lost; do the block again.
        """
        transaction = Transaction(self._caller)
        yield transaction
        commit = transaction.commit(guards(claim))
        if commit is not None:
            self._caller.run(commit)


class Restored:
    """The checkpoint this start goes on from, upgraded to the program's version.

    Attributes:
        restored: the state saved last; None where there is none.
        restored_version: version it was saved with, before upgrading; None where there is none.
    """

    def __init__(self, welcome: Welcome, version: int, upgraders: Mapping[int, Upgrader] | None) -> None:
        self.version = version
        self.restored: Any = None
        self.restored_version: int | None = None
        if welcome.restored:
            self.restored_version = welcome.checkpoint_version
            self.restored = _upgraded(welcome, version, upgraders or {})


def _upgraded(welcome: Welcome, version: int, upgraders: Mapping[int, Upgrader]) -> Any:
    try:
        state = json.loads(welcome.checkpoint)
    except ValueError as error:
        raise CheckpointUnreadable(
            f"the checkpoint is not JSON ({error}): roll back to an earlier step with `ringfence rollback`"
        ) from None
    saved = welcome.checkpoint_version
    if saved > version:
        raise CheckpointUnreadable(
            f"the checkpoint has version {saved}, this program reads {version}: start the newer program,"
            " or roll back to before it ran"
        )
    for number in range(saved, version):
        if number not in upgraders:
            raise CheckpointUnreadable(
                f"the checkpoint has version {saved} and no upgrader leads from {number} to {number + 1}:"
                f" pass `upgraders={{{number}: function}}` to `agent.boot`"
            )
        try:
            state = upgraders[number](state)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = (
                f"it has no `{error.args[0]}`" if isinstance(error, KeyError) and error.args else str(error)
            )
            raise CheckpointUnreadable(
                f"the checkpoint has version {saved}, and its upgrader from {number} to {number + 1} can't read it: {what};"
                " mend the upgrader, or roll back to an earlier step with `ringfence rollback`"
            ) from error
    return state


class Checkpoint(Restored):
    """The program's own state, from which a restart continues."""

    def __init__(
        self, caller: Caller, welcome: Welcome, version: int, upgraders: Mapping[int, Upgrader] | None
    ) -> None:
        super().__init__(welcome, version, upgraders)
        self._caller = caller

    def save(self, state: Any, version: int | None = None) -> int:
        """Save the state: a restart gets it back and replays only what follows. Gives the step.

        A restarted program runs from its first line and gets the state in `restored`. The calls it then
        makes have to be those that followed this save, or they are `Diverged`: do set-up calls only where
        `restored` is None, and keep what they gave in the state.

        Only the main task can save, while no other thread of the program has a lane.

        Args:
            state: JSON values.
            version: schema version; None: the one given to `agent.boot`.

        Raises:
            InvalidRequest: other tasks are still running, or the state isn't JSON.
        """
        lane = self._caller.lanes.current()
        check_quiet(lane, self._caller.lanes.running)
        number = self.version if version is None else version
        return self._caller.step(operations.checkpoint_save(state, number, lane.next_child))
