"""A program whose tasks race takes the same path again after its kernel was killed: replies come in their recorded order."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.kernels import eventually, running

pytestmark = [pytest.mark.fault, pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: racer}
spec:
  run: {command: [python, agent.py]}
  permissions: {allow: [now, {messages.receive: "*"}, {state.*: "**"}]}
"""

PROGRAM = """
import asyncio, random, time
from ringfence import agent

async def main():
    async with agent.boot_async() as rf:
        won = []

        async def race(name):
            for _ in range(6):
                for _ in range(random.randrange(4)):
                    await asyncio.sleep(0)  # when it asks is chance, and another one each time
                await rf.now()
                won.append(name)

        await asyncio.gather(*(race(name) for name in "abcd"))
        # Another order would be another call, and end in a divergence.
        await rf.state.put("won", "".join(won))
        came = []
        both = [asyncio.create_task(rf.now()), asyncio.create_task(rf.state.get("won"))]
        for nr, task in enumerate(both):
            task.add_done_callback(lambda _, nr=nr: came.append(nr))
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        await rf.state.put("first", str(came[0]))
        await asyncio.gather(*both)
        await rf.messages.receive()
        await rf.state.put("end", 1)

asyncio.run(main())
"""


def test_races_come_out_the_same_after_a_kill(tmp_path: Path) -> None:
    with running(tmp_path / "d") as kernel:
        agent = kernel.operator.submit(MANIFEST, {"agent.py": PROGRAM})

        def waits() -> bool:
            shown = kernel.operator.ask("Show", agent=agent)
            assert shown["divergence"] is None, shown["divergence"]
            return "message" in (shown["waiting_for"] or "")

        eventually(waits, "it did not come to its end")
        steps = kernel.operator.steps(agent)
        for _ in range(2):
            kernel.kill()
            kernel.start()
            eventually(waits, "it did not come back")
            assert [s["step"] for s in kernel.operator.steps(agent)][: len(steps) - 1] == [
                s["step"] for s in steps[:-1]
            ]
        kernel.operator.ask("Send", agent=agent, text="go on")
        assert kernel.operator.wait(agent)["state"] == "done"
