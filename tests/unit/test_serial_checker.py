"""The checker of histories finds what is wrong in histories that are known to be, and nothing in others."""

from __future__ import annotations

import random

import pytest
from support.serial import Txn, anomalies


def txn(agent: str, number: int, *ops: tuple[str, str, object], ok: bool = True) -> Txn:
    return Txn(agent=agent, number=number, ops=ops, ok=ok)


BAD = {
    "a lost update": (
        [txn("a", 0, ("r", "x", []), ("a", "x", "1")), txn("b", 0, ("r", "x", []), ("a", "x", "2"))],
        {"x": ["2"]},
        "lost",
    ),
    "two updates from one state": (
        [txn("a", 0, ("r", "x", []), ("a", "x", "1")), txn("b", 0, ("r", "x", []), ("a", "x", "2"))],
        {"x": ["1", "2"]},
        "cycle",
    ),
    "write skew": (
        [
            txn("a", 0, ("r", "x", []), ("r", "y", []), ("a", "x", "1")),
            txn("b", 0, ("r", "x", []), ("r", "y", []), ("a", "y", "2")),
        ],
        {"x": ["1"], "y": ["2"]},
        "cycle",
    ),
    "a reader between two halves": (
        [txn("a", 0, ("a", "x", "1"), ("a", "y", "2")), txn("b", 0, ("r", "x", ["1"]), ("r", "y", []))],
        {"x": ["1"], "y": ["2"]},
        "cycle",
    ),
    "two readers who see two writers in two orders": (
        [
            txn("a", 0, ("a", "x", "1")),
            txn("b", 0, ("a", "y", "2")),
            txn("c", 0, ("r", "x", ["1"]), ("r", "y", [])),
            txn("d", 0, ("r", "x", []), ("r", "y", ["2"])),
        ],
        {"x": ["1"], "y": ["2"]},
        "cycle",
    ),
    "writers who see each other": (
        [
            txn("a", 0, ("r", "y", ["2"]), ("a", "x", "1")),
            txn("b", 0, ("r", "x", ["1"]), ("a", "y", "2")),
        ],
        {"x": ["1"], "y": ["2"]},
        "cycle",
    ),
    "an agent that does not see its own past": (
        [txn("a", 0, ("a", "x", "1")), txn("a", 1, ("r", "x", []))],
        {"x": ["1"]},
        "cycle",
    ),
    "what was aborted is seen": (
        [txn("a", 0, ("a", "x", "1"), ok=False), txn("b", 0, ("r", "x", ["1"]))],
        {"x": []},
        "aborted",
    ),
    "what was half done is seen": (
        [txn("a", 0, ("a", "x", "1"), ("a", "x", "2")), txn("b", 0, ("r", "x", ["1"]))],
        {"x": ["1", "2"]},
        "in between",
    ),
    "an effect that came twice": ([txn("a", 0, ("a", "x", "1"))], {"x": ["1", "1"]}, "repeated"),
    "a value of nobody": ([txn("a", 0, ("r", "x", ["9"]))], {"x": ["9"]}, "from nowhere"),
    "a list that was another one": (
        [txn("a", 0, ("a", "x", "1")), txn("b", 0, ("a", "x", "2")), txn("c", 0, ("r", "x", ["2"]))],
        {"x": ["1", "2"]},
        "another order",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_history_is_found(what: str) -> None:
    history, final, kind = BAD[what]
    found = anomalies(history, final)
    assert any(text.startswith(kind) for text in found), found


@pytest.mark.parametrize("seed", range(20))
def test_what_ran_one_after_the_other_is_good_in_any_order_of_telling(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311 - a history that can be repeated
    lists: dict[str, list[str]] = {key: [] for key in "xyz"}
    history: list[Txn] = []
    for number in range(60):
        ops: list[tuple[str, str, object]] = []
        for place, key in enumerate(dice.choices("xyz", k=dice.randint(1, 4))):
            ops.append(("r", key, list(lists[key])))
            if dice.random() < 0.5:
                value = f"{number}.{place}"
                lists[key].append(value)
                ops.append(("a", key, value))
        history.append(txn(f"agent {dice.randint(0, 3)}", number, *ops))
    dice.shuffle(history)
    assert anomalies(history, lists) == []
