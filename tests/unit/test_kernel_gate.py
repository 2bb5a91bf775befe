"""The bounds of one agent's door, and the shares of descriptors, without a kernel."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel.config import ARGUMENT_BYTES_IN_FLIGHT_MAX, CALLS_IN_FLIGHT_MAX
from ringfence.kernel.descriptors import CONNECTIONS_MAX, CONNECTIONS_MIN, OWN, Descriptors, NoDescriptors
from ringfence.kernel.server.gate import Complaints, Gate, Hold


@pytest.mark.parametrize("limit", [256, 1024, 4096, 20_000, 524_288])
def test_agents_leave_a_quarter_of_the_descriptors_whatever_comes(limit: int) -> None:
    descriptors, agents = Descriptors(limit), 0
    with contextlib.suppress(NoDescriptors):
        while True:
            descriptors.take()
            agents += 1
    with pytest.raises(NoDescriptors, match="LimitNOFILE"):
        descriptors.take()
    each = OWN + CONNECTIONS_MIN
    assert limit - limit // 4 - each < agents * each <= limit - limit // 4
    # Nothing is left, and each may have what it was promised.
    assert all(descriptors.connect(had) for had in range(CONNECTIONS_MIN))
    assert not descriptors.connect(CONNECTIONS_MAX)


@given(
    st.sampled_from([256, 1024, 20_000]),
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(["start", "connect", "hang up", "end"])), max_size=300
    ),
)
def test_connections_come_back_and_the_greedy_leave_room(limit: int, moves: list[tuple[int, str]]) -> None:
    descriptors, had = Descriptors(limit), dict[int, int]()
    for agent, move in moves:
        if move == "start" and agent not in had:
            with contextlib.suppress(NoDescriptors):
                descriptors.take()
                had[agent] = 0
        elif agent in had:
            if move == "connect":
                for _ in range(CONNECTIONS_MAX + 1):
                    had[agent] += descriptors.connect(had[agent])
            elif move == "hang up" and had[agent]:
                descriptors.disconnect(had[agent])
                had[agent] -= 1
            elif move == "end":
                descriptors.give_back(had.pop(agent))
        held = sum(OWN + max(CONNECTIONS_MIN, connections) for connections in had.values())
        assert held <= limit - limit // 4
        assert all(connections <= CONNECTIONS_MAX for connections in had.values())
    for connections in had.values():
        descriptors.give_back(connections)
    agents = 0
    with contextlib.suppress(NoDescriptors):
        while True:
            descriptors.take()
            agents += 1
    assert agents == (limit - limit // 4) // (OWN + CONNECTIONS_MIN)


def test_the_gate_closes_by_calls_and_by_bytes() -> None:
    async def run() -> None:
        gate = Gate()
        holds = [Hold(gate, 10) for _ in range(CALLS_IN_FLIGHT_MAX)]
        assert not gate.open
        waiting = asyncio.create_task(gate.wait())
        holds[0].end()
        holds[0].end()
        await waiting
        for hold in holds:
            hold.end()
        large = Hold(gate, ARGUMENT_BYTES_IN_FLIGHT_MAX)
        assert not gate.open
        large.shrink(100)
        assert gate.open
        # What is left counts on: two of them together close it again.
        more = Hold(gate, ARGUMENT_BYTES_IN_FLIGHT_MAX - 100)
        assert not gate.open
        large.end()
        assert gate.open
        more.end()

    asyncio.run(run())


def test_a_door_complains_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr("ringfence.kernel.server.gate.time.monotonic", lambda: now[0])
    complaints = Complaints(logging.getLogger("ringfence.test"), "agent-1")
    for _ in range(100):
        complaints.say("garbage")
    now[0] += 61
    complaints.say("garbage")
    assert [r.getMessage() for r in caplog.records] == [
        "agent-1: garbage",
        "agent-1: garbage (99 more since the last line)",
    ]
