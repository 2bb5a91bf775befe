"""Whether a history of transactions on lists could have come from running them one after the other.

Each transaction reads whole lists and appends values, each value once in all the history. So every list tells the order of its
writers, and every read tells between which of them it stands. A cycle among these orders, and each agent's own, is a proof that
there is no serial order. The checker knows nothing of how the kernel does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Txn:
    """One transaction that was tried.

    Attributes:
        agent: who.
        number: in the agent's own order.
        ops: `("r", key, values)` as read, `("a", key, value)` as appended.
        ok: whether it committed; else nobody may ever see what it appended.
    """

    agent: str
    number: int
    ops: Sequence[tuple[str, str, Any]]
    ok: bool = True

    def appends(self) -> list[tuple[str, str]]:
        return [(key, value) for kind, key, value in self.ops if kind == "a"]

    def reads(self) -> list[tuple[str, list[str]]]:
        """What it saw of others: a list without what it appended itself."""
        own = {value for _, value in self.appends()}
        return [(key, [v for v in seen if v not in own]) for kind, key, seen in self.ops if kind == "r"]


def anomalies(history: Iterable[Txn], final: Mapping[str, list[str]]) -> list[str]:
    """What no serial order explains; nothing: there is one.

    Args:
        history: every transaction that was tried.
        final: every list at the end.
    """
    history = list(history)
    done = [txn for txn in history if txn.ok]
    return [
        *_contents(history, done, final),
        *_prefixes(done, final),
        *_between(done),
        *_cycles(done, _edges(done, final)),
    ]


def _contents(history: list[Txn], done: list[Txn], final: Mapping[str, list[str]]) -> list[str]:
    """Each committed append is there once, and no other."""
    there = Counter((key, value) for key, values in final.items() for value in values)
    kept = {append for txn in done for append in txn.appends()}
    undone = {append for txn in history if not txn.ok for append in txn.appends()}
    seen = {(key, value) for txn in done for key, values in txn.reads() for value in values}
    return [
        *(f"lost: {key} {value}" for key, value in sorted(kept) if not there[key, value]),
        *(f"repeated: {key} {value}" for (key, value), times in sorted(there.items()) if times > 1),
        *(f"aborted, and there: {key} {value}" for key, value in sorted((seen | set(there)) & undone - kept)),
        *(f"from nowhere: {key} {value}" for key, value in sorted((seen | set(there)) - kept - undone)),
    ]


def _prefixes(done: list[Txn], final: Mapping[str, list[str]]) -> list[str]:
    """Every list that was read is a beginning of the last one."""
    return [
        f"another order: {txn.agent} {txn.number} read {key} as {seen}"
        for txn in done
        for key, seen in txn.reads()
        if seen != final.get(key, [])[: len(seen)]
    ]


def _between(done: list[Txn]) -> list[str]:
    """Nobody reads what another transaction had appended so far, when it appended more."""
    inner = {value for txn in done for _, values in _groups(txn) for value in values[:-1]}
    return [
        f"in between: {txn.agent} {txn.number} read {key} up to {seen[-1]}"
        for txn in done
        for key, seen in txn.reads()
        if seen and seen[-1] in inner
    ]


def _groups(txn: Txn) -> list[tuple[str, list[str]]]:
    """What a transaction appended, by key."""
    by_key: dict[str, list[str]] = {}
    for key, value in txn.appends():
        by_key.setdefault(key, []).append(value)
    return list(by_key.items())


def _edges(done: list[Txn], final: Mapping[str, list[str]]) -> dict[int, set[int]]:
    """Who comes before whom."""
    after: dict[int, set[int]] = {at: set() for at in range(len(done))}
    for first, second in (*_by_lists(done, final), *_by_reads(done, final), *_by_agents(done)):
        if first != second:
            after[first].add(second)
    return after


def _writers(done: list[Txn]) -> dict[str, int]:
    return {value: at for at, txn in enumerate(done) for _, value in txn.appends()}


def _by_lists(done: list[Txn], final: Mapping[str, list[str]]) -> Iterator[tuple[int, int]]:
    """Writers of one list."""
    writer = _writers(done)
    for values in final.values():
        yield from pairwise(writer[value] for value in values if value in writer)


def _by_reads(done: list[Txn], final: Mapping[str, list[str]]) -> Iterator[tuple[int, int]]:
    """A reader comes after the writer of the last value it saw, and before the writer of the first that it did not."""
    writer = _writers(done)
    for at, txn in enumerate(done):
        for key, seen in txn.reads():
            if seen and seen[-1] in writer:
                yield writer[seen[-1]], at
            rest = (writer[value] for value in final.get(key, [])[len(seen) :] if value in writer)
            yield from ((at, other) for other in islice((o for o in rest if o != at), 1))


def _by_agents(done: list[Txn]) -> Iterator[tuple[int, int]]:
    """An agent's own transactions."""
    by_agent: dict[str, list[int]] = {}
    for at, txn in sorted(enumerate(done), key=lambda pair: pair[1].number):
        by_agent.setdefault(txn.agent, []).append(at)
    for own in by_agent.values():
        yield from pairwise(own)


def _cycles(done: list[Txn], after: dict[int, set[int]]) -> list[str]:
    """One cycle, if there is any: take away whoever nobody comes before, until nothing or a cycle is left."""
    into = Counter(second for following in after.values() for second in following)
    free = [at for at in after if not into[at]]
    left = dict(after)
    while free:
        at = free.pop()
        for second in left.pop(at):
            into[second] -= 1
            if not into[second]:
                free.append(second)
    if not left:
        return []
    # Everybody left has somebody before it who is left: going back comes around.
    previous = {second: first for first, following in left.items() for second in following if second in left}
    path = [next(iter(left))]
    while previous[path[-1]] not in path:
        path.append(previous[path[-1]])
    around = path[path.index(previous[path[-1]]) :]
    return ["cycle: " + " < ".join(f"{done[at].agent} {done[at].number}" for at in reversed(around))]
