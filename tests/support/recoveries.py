"""A database that is restarted in the middle of many recoveries."""

from __future__ import annotations

import threading
import time
from typing import Any

from support.databases import Server
from support.kernels import eventually
from support.matrix import Result
from support.scenes import Scene

PROGRAM = """
from ringfence import agent

with agent.boot() as rf:
    me = rf.identity.agent
    for number in range(4):
        rf.fs.append_text("count.txt", "x")
        with rf.state.transaction() as tx:
            tx.put("recovered/" + me, (tx.get("recovered/" + me) or 0) + 1)
"""
POINT = "fs.append:before_outcome"


def recover(scene: Scene, database: Server, count: int, after_s: float = 0.2) -> Result:
    """Kill the kernel with `count` agents in mid-call, and the database while the next one takes them over.

    Args:
        scene: a kernel on the database.
        database: what is killed.
        count: agents.
        after_s: how long after the first agent was taken over.
    """
    kernel = scene.kernel
    kernel.arm(POINT)
    rules = ['fs.*: "/workspace/**"', 'state.*: "**"']
    restart = "restart: {policy: on-failure, max: 1000}"
    agents = [scene.submit(PROGRAM, allow=rules, more=restart, files={"count.txt": ""}) for _ in range(count)]
    hit = kernel.failpoints / f"{POINT}.hit"
    eventually(
        lambda: hit.exists() and set(agents) <= set(hit.read_text().split()), "not all came to the point", 300
    )
    kernel.kill()
    kernel.disarm(POINT)
    before = scene.sql("select max(key) from kernels")[0][0]
    killer = threading.Thread(target=_kill_in_recovery, args=(scene, database, before, after_s))
    killer.start()
    kernel.start()
    killer.join()
    return _count(scene, agents)


def _kill_in_recovery(scene: Scene, database: Server, before: int, after_s: float) -> None:
    """As soon as the new kernel has taken agents over, and a moment later."""
    claimed = "select count(*) from agents where owner > %s"
    eventually(lambda: scene.sql(claimed, before)[0][0] > 0, "nobody is taken over")
    # The moment itself is what the case asks for; nothing waits for anything.
    time.sleep(after_s)
    database.kill()


def _count(scene: Scene, agents: list[str]) -> Result:
    result = Result(runs=len(agents))
    for agent in agents:
        ended = scene.operator.ask("Wait", timeout=600, agent=agent)["state"]
        if ended != "done":
            result.stuck.append(f"{agent} is {ended}: {scene.show(agent)['error']}")
            continue
        written = (scene.live(agent) / "count.txt").read_text()
        kept: list[tuple[Any, ...]] = scene.sql(
            "select value from state where key = %s", f"recovered/{agent}"
        )
        for what, times in (("append", len(written)), ("state", int(bytes(kept[0][0])) if kept else 0)):
            if times != 4:
                (result.repeated if times > 4 else result.lost).append(f"{agent} {what}: {times} of 4")
    return result
