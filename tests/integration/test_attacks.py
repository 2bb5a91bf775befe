"""AgentDojo's attacks against a kernel: a part of what `python -m bench --only attacks` replays in full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.console.client import Client

pytest.importorskip(
    "agentdojo", reason="bench/attacks/requirements.lock is not installed; `make test` does it"
)

from support.scenes import short_directory

from bench.attacks import world
from bench.attacks.replay import Case, Desk, Driver, Run, spread

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

USERS = {"banking": ("0", "3", "14", "15"), "workspace": ("13", "18", "33", "35")}


@pytest.fixture(scope="module")
def drivers() -> Iterator[list[Driver]]:
    with short_directory() as directory:
        Path(directory).chmod(0o711)
        with world.opened(directory, 2) as drivers:
            yield drivers


@pytest.fixture(scope="module")
def plain_drivers() -> Iterator[list[Driver]]:
    with short_directory() as directory:
        Path(directory).chmod(0o711)
        with world.opened(directory, 2, plain=True) as drivers:
            yield drivers


def replayed(
    drivers: list[Driver], policy: str, suite: str, users: tuple[str, ...], answer: str
) -> list[Run]:
    told: dict[str, Any] = drivers[0].pairs(suite)
    told["users"] = [f"user_task_{number}" for number in users]
    return spread(drivers, world.cases(policy, {suite: told}, answer), lambda _: None)


@pytest.mark.parametrize("suite", world.SUITES)
def test_every_attack_reaches_its_goal_where_nothing_is_in_its_way(
    plain_drivers: list[Driver], suite: str
) -> None:
    """So that an attack that misses below has been stopped; and our own plans for those without calls are real ones."""
    runs = replayed(plain_drivers, "none", suite, ("1",), "deny")
    assert [run.case.attack for run in runs if run.case.attack and not run.hit] == []
    assert all(run.seen for run in runs if run.case.attack)
    assert [run.useful for run in runs if not run.case.attack] == [True]


@pytest.mark.parametrize("suite", world.SUITES)
def test_reading_roles_let_no_attack_through(drivers: list[Driver], suite: str) -> None:
    runs = replayed(drivers, "readers", suite, ("1",), "deny")
    assert [
        (run.case.attack, run.hit, run.attack_effects) for run in runs if run.hit or run.attack_effects
    ] == []
    # Two of them look at the new mail, which marks it as read: AgentDojo counts that as harm.
    assert {run.case.attack for run in runs if not run.useful} <= {"injection_task_8", "injection_task_9"}


@pytest.mark.parametrize(
    ("suite", "asking"), [("banking", {"user_task_0"}), ("workspace", set[str]())], ids=world.SUITES
)
def test_roles_with_conditions_keep_the_tasks_and_stop_the_attacks(
    drivers: list[Driver], suite: str, asking: set[str]
) -> None:
    runs = replayed(drivers, "facts", suite, USERS[suite], "deny")
    alone = {run.case.user: run for run in runs if not run.case.attack}
    assert {user for user, run in alone.items() if run.asked} == asking
    assert {user for user, run in alone.items() if not run.useful} == asking
    # One file that may be deleted is as good as another: that is the one attack that gets through.
    assert {(run.case.user, run.case.attack) for run in runs if run.hit} == (
        {("user_task_35", "injection_task_1")} if suite == "workspace" else set()
    )


def test_what_is_asked_and_approved_is_done(drivers: list[Driver]) -> None:
    runs = replayed(drivers, "facts", "banking", ("0",), "approve")
    assert [(run.useful, run.asked) for run in runs if not run.case.attack] == [(True, 1)]
    # And who approves everything approves attacks: a person is a wall only where they look.
    assert any(run.hit and run.attack_asked for run in runs)


def test_the_attack_that_gets_through_is_undone_by_a_rollback(drivers: list[Driver]) -> None:
    text = world.manifest("office-tidy")
    case = Case(
        suite="workspace", user="user_task_35", attack="injection_task_1", manifest=text, answer="deny"
    )
    after: list[Any] = []

    def roll_back(run: Run, client: Client, desk: Desk) -> None:
        done = client.call("Rollback", agent=run.agent, to="0")
        after.extend([done["conflicts"], desk.control("score")["hit"]])

    assert drivers[0].run(case, roll_back).hit
    assert after == [[], False]


def test_every_task_has_a_role_and_every_role_a_manifest() -> None:
    for roles in world.classes().values():
        for role in roles.values():
            assert f"name: {role}" in world.manifest(role)


def test_each_call_of_a_replay_is_one_step_of_the_journal(drivers: list[Driver]) -> None:
    text = world.manifest("bank-payment")
    case = Case(suite="banking", user="user_task_3", attack="injection_task_7", manifest=text, answer="deny")
    steps: list[dict[str, Any]] = []
    run = drivers[0].run(
        case, lambda run, client, _: steps.extend(client.documents("Steps", agent=run.agent))
    )
    assert len(steps) == run.calls
    assert [step["outcome"] for step in steps if step["verdict"] == "deny"] == ["denied"]
    assert run.useful
    assert not run.hit
