"""The bounds of one agent's door, and the shares of descriptors, without a kernel."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from ringfence.kernel.config import ARGUMENT_BYTES_IN_FLIGHT_MAX, CALLS_IN_FLIGHT_MAX
from ringfence.kernel.descriptors import CONNECTIONS_MAX, CONNECTIONS_MIN, OWN, Descriptors, NoDescriptors
from ringfence.kernel.server.gate import Complaints, Gate, Hold


@pytest.mark.parametrize("limit", [256, 1024, 4096, 20_000, 524_288])
def test_shares_leave_a_quarter_whatever_comes(limit: int) -> None:
    descriptors = Descriptors(limit)
    taken: list[int] = []
    with contextlib.suppress(NoDescriptors):
        while True:
            taken.append(descriptors.take())
    with pytest.raises(NoDescriptors, match="LimitNOFILE"):
        descriptors.take()
    assert sum(taken) + OWN * len(taken) <= limit - limit // 4
    assert all(CONNECTIONS_MIN <= share <= CONNECTIONS_MAX for share in taken)
    assert len(taken) >= limit // 110
    for share in taken:
        descriptors.give_back(share)
    assert descriptors.take() == taken[0]


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
