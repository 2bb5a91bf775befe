"""tree, and kill with descendants."""

from __future__ import annotations

import json

CHILDLESS = {"process": "none", "waiting_for": None, "spawned_at_step": 3, "children": []}
TREE = [
    {
        "id": "top-aaaaa",
        "name": "top",
        "state": "running",
        "process": "live",
        "waiting_for": None,
        "spawned_at_step": None,
        "children": [
            {
                **CHILDLESS,
                "id": "one-bbbbb",
                "name": "one",
                "state": "sleeping",
                "waiting_for": "a message\x1b[31m",
                "children": [{**CHILDLESS, "id": "low-ccccc", "name": "low", "state": "done"}],
            },
            {**CHILDLESS, "id": "two-ddddd", "name": "two", "state": "killed"},
        ],
    }
]


def test_a_tree_as_people_see_it(door, run) -> None:
    door.answers["Tree"] = {"agents": TREE}
    result = run("tree", "top")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "top-aaaaa  running",
        "├─ one-bbbbb  sleeping  (a message\\x1b[31m)",
        "│  └─ low-ccccc  done",
        "└─ two-ddddd  killed",
    ]
    assert (door.asked("Tree").agent, door.asked("Tree").all) == ("top", False)


def test_a_tree_as_json_is_the_array(door, run) -> None:
    door.answers["Tree"] = {"agents": TREE}
    assert json.loads(run("tree", "--all", "--json").stdout) == TREE
    assert (door.asked("Tree").agent, door.asked("Tree").all) == ("", True)


def test_no_tree_is_said(door, run) -> None:
    door.answers["Tree"] = {"agents": []}
    result = run("tree")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "ringfence tree --all" in result.stderr


def test_kill_names_whom_it_took_along(door, run) -> None:
    below = [{"id": "one-bbbbb", "state": "killed", "was": "running"}]
    door.answers["Kill"] = {"id": "top-aaaaa", "state": "killed", "process": "none", "descendants": below}
    result = run("kill", "top")
    assert result.stdout.splitlines() == ["top-aaaaa: killed", "one-bbbbb: killed"]
    assert not door.asked("Kill").only


def test_kill_of_one_alone(door, run) -> None:
    door.answers["Kill"] = {"id": "top-aaaaa", "state": "killed", "process": "none", "descendants": []}
    assert run("kill", "top", "--only").exit_code == 0
    assert door.asked("Kill").only
