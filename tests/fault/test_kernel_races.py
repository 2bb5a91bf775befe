"""A program whose tasks race takes the same path again after its kernel was killed, and calls that end together are made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.kernels import eventually, running
from support.target import Target

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


FOUR = """
import sys
from ringfence import agent

base = sys.stdin.read()
with agent.boot() as rf:
    done = rf.checkpoint.restored
    if done is None:
        calls = [lambda nr=nr: rf.http.post(f"{base}/keyed/{nr}", json={}).status for nr in range(4)]
        done = rf.parallel(calls)
        rf.checkpoint.save(done)
    rf.state.put("four", done)
"""

KERNEL = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources: {keyed: {type: http, base: "BASE", idempotency_header: Idempotency-Key}}
"""


def test_calls_that_end_together_and_the_checkpoint_after_them_are_made_once(tmp_path: Path) -> None:
    """C35: the kernel is killed before the four outcomes, and before and after the checkpoint that rests on them."""
    target = Target(tmp_path / "deliveries")
    manifest = MANIFEST.replace("[now,", f'[{{http.post: "{target.base}/**"}}, checkpoint.save,')
    try:
        with running(tmp_path / "d", config=KERNEL.replace("BASE", target.base)) as kernel:
            points = (
                "http.post:before_outcome",
                "checkpoint.save:before_intent",
                "checkpoint.save:after_outcome",
            )
            for point in points:
                kernel.arm(point)
            agent = kernel.operator.submit(manifest, {"agent.py": FOUR}, input_bytes=target.base.encode())
            sent = list[str]()
            for point, standing in zip(points, (4, 1, 1), strict=True):
                path = kernel.failpoints / f"{point}.hit"
                eventually(
                    lambda path=path, standing=standing: (
                        path.exists() and len(path.read_text().split()) >= standing
                    ),
                    f"they do not come to {point}",
                )
                keys = [one["headers"]["idempotency-key"] for one in target.deliveries()]
                assert len(set(keys)) == 4
                if point.startswith("checkpoint"):
                    sent = sent or keys
                    assert keys == sent, "what was recorded is not sent again"
                kernel.kill()
                kernel.disarm(point)
                kernel.start()
            assert kernel.operator.wait(agent)["state"] == "done"
            steps = kernel.operator.steps(agent)
            assert [s["outcome"] for s in steps] == ["ok"] * 6
            assert [s["action"] for s in steps].count("http.post") == 4
            shown = kernel.operator.ask("AuditVerify")
            assert shown["ok"], shown
            assert len({one["headers"]["idempotency-key"] for one in target.deliveries()}) == 4
            assert len(target.deliveries()) == len(sent)
    finally:
        target.close()
