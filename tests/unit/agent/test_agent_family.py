"""`rf.spawn`: what is sent, and what comes back; the same from both front ends."""

from __future__ import annotations

import asyncio
import base64

import pytest
from ringfence import agent

CHILD = {"id": "kid-abcde", "name": "kid"}


def test_spawn_sends_what_is_given_and_nothing_else(kernel) -> None:
    kernel.bodies["spawn"] = lambda _: CHILD
    with agent.boot() as rf:
        child = rf.spawn("kid", ["python", "kid.py"])
        assert (child.id, child.name) == ("kid-abcde", "kid")
        assert kernel.arguments() == {"name": "kid", "command": ["python", "kid.py"]}
        rf.spawn(
            "kid",
            ["true"],
            workspace="in",
            permissions={"allow": ['fs.read: "/workspace/**"']},
            roles=("worker",),
            delegates=["worker"],
            env={"A": "b"},
            input="hé",
            budgets={"total": {"calls": 5}},
            sandbox={"memory": "64Mi"},
            approvals={"expire": "1h"},
            restart={"policy": "never"},
            labels={"team": "x"},
        )
    assert kernel.arguments() == {
        "name": "kid",
        "command": ["true"],
        "workspace": "in",
        "permissions": {"allow": ['fs.read: "/workspace/**"']},
        "roles": ["worker"],
        "delegates": ["worker"],
        "env": {"A": "b"},
        "input": base64.b64encode("hé".encode()).decode(),
        "budgets": {"total": {"calls": 5}},
        "sandbox": {"memory": "64Mi"},
        "approvals": {"expire": "1h"},
        "restart": {"policy": "never"},
        "labels": {"team": "x"},
    }


def test_a_section_is_plain_values(kernel) -> None:
    kernel.bodies["spawn"] = lambda _: CHILD
    with agent.boot() as rf, pytest.raises(agent.InvalidRequest, match="permissions"):
        rf.spawn("kid", ["true"], permissions={"allow": object()})


def test_spawn_of_asyncio_programs(kernel) -> None:
    kernel.bodies["spawn"] = lambda _: CHILD

    async def program() -> str:
        async with agent.boot_async() as rf:
            return (await rf.spawn("kid", ["true"], input=b"x")).id

    assert asyncio.run(program()) == "kid-abcde"
    assert kernel.arguments() == {"name": "kid", "command": ["true"], "input": "eA=="}
