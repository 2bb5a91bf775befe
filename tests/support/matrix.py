"""The kill matrix: one agent for each job waits at the same failpoint, then somebody is killed, and effects are counted.

Who is killed and how the calls came there are the other two sides of the matrix. Effects are counted by separate processes:
an HTTP counter, the target database, the files on disk.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.databases import Server, server
from support.jobs import ACTIONS, ASKED, CONFIG, FIRST, MANIFEST, WORKSPACE, kind_of, passes
from support.kernels import KernelProcess, eventually
from support.model import ModelHost
from support.scenes import short_directory
from support.tallies import Tally
from support.target import Target
from support.victims import kill_all, take_over, wardens

VICTIMS = ("kernel", "agent", "sandboxes", "database")
"""`sandboxes`: the one process above all sandboxes."""
MODES = ("fresh", "replaying", "takeover")
"""`replaying`: the calls came to the point by replay, after the kernel had been killed there before. `takeover`: the kernel
stands still, a second one takes over from it, and then it goes on."""
OVER = ("done", "failed", "killed", "unknown")
UNSURE = ("after_intent", "before_effect", "after_effect", "before_outcome")
"""Between these a kernel can't know what became of a request whose target takes no key."""


class Ground:
    """A database, two counters, and the kernel that stands on them now."""

    def __init__(
        self,
        directory: Path,
        database: Server,
        *,
        mounts: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.server = database
        self.keyed, self.plain = Target(directory / "keyed"), Target(directory / "plain")
        self.target_dsn = database.target("target")
        self.model = ModelHost()
        config = CONFIG.format(
            base=self.keyed.base, plain=self.plain.base, target=self.target_dsn, model=self.model.base
        )
        config += f"  sandbox: {{mounts: {json.dumps(list(mounts))}}}\n" if mounts else ""
        self.kernel = KernelProcess(directory / "d", dsn=database.dsn, config=config)
        self.kernel.env |= env or {}
        self.kernel.start()
        with self.target() as connection:
            connection.execute("create table counted (id serial primary key, agent text not null)")
            connection.execute("create table stock (id serial primary key, agent text not null)")

    def target(self) -> Any:
        """A connection of our own to the target, beside the kernel's."""
        import psycopg

        return psycopg.connect(self.target_dsn, autocommit=True)

    def close(self) -> None:
        self.kernel.stop()
        self.keyed.close()
        self.plain.close()
        self.model.close()


@contextlib.contextmanager
def ground(**more: Any) -> Iterator[Ground]:
    """Everything of it is gone afterwards."""
    with server() as database, short_directory() as directory:
        made = Ground(directory, database, **more)
        try:
            yield made
        finally:
            made.close()


@dataclass(kw_only=True)
class Result:
    """What a column found.

    Attributes:
        runs: agents that were cut.
        repeated: jobs whose effect took place more than once.
        lost: jobs whose effect is missing.
        stuck: agents that did not end as they should, with how they did.
        unknown: unknown outcomes that were reported, and settled by a person who looked at the target.
    """

    runs: int = 0
    repeated: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        return self.runs > 0 and not (self.repeated or self.lost or self.stuck)

    def add(self, other: Result) -> None:
        self.runs += other.runs
        for name in ("repeated", "lost", "stuck", "unknown"):
            getattr(self, name).extend(getattr(other, name))


class Column:
    """All jobs that pass one failpoint: submitted, stopped there, cut, finished, counted."""

    def __init__(self, ground: Ground, victim: str, point: str, mode: str) -> None:
        self.ground = ground
        self.victim, self.point, self.mode = victim, point, mode
        self.names = [name for name in ACTIONS if passes(name, point)]
        tag = f"{point}-{victim}-{mode[:4]}".replace("_", "-")
        self.ids = {name: f"{name}-{tag}" for name in self.names}
        self.agents: dict[str, str] = {}
        self.result = Result(runs=len(self.names))

    @property
    def kernel(self) -> KernelProcess:
        return self.ground.kernel

    def run(self) -> Result:
        """Everything in order."""
        first = [name for name in self.names if name in FIRST]
        for names in filter(None, (first, [name for name in self.names if name not in FIRST])):
            self.submit(names)
            self.await_hits(names)
        if self.mode == "replaying":
            self.cut_and_come_again()
        self.kill()
        if self.mode == "takeover":
            self.ground.kernel = take_over(self.kernel, self.disarm)
        elif self.victim == "kernel":
            self.disarm()
            self.kernel.start()
        else:
            # The kernel lives: it finishes the calls of the dead and answers their successors from the journal.
            self.disarm()
        for name in self.names:
            self.finish(name)
        return self.result

    def submit(self, names: Sequence[str]) -> None:
        base, plain = self.ground.keyed.base, self.ground.plain.base
        with self.ground.target() as connection:
            for name in names:
                if kind_of(name) == "remove":
                    connection.execute(
                        "insert into stock (agent) select %s from generate_series(1, 3)", [self.ids[name]]
                    )
        peer = self.peer() if "send" in names else ""
        for action in {ACTIONS[name] for name in names}:
            self.kernel.arm(f"{action}:{self.point}")
        for name in names:
            manifest = MANIFEST.format(name=self.ids[name], base=base, plain=plain)
            if name in ASKED:
                manifest = manifest.replace("  restart:", f"    ask: [{{{ASKED[name]}}}]\n  restart:")
            job = {"name": name, "id": self.ids[name], "base": base, "plain": plain, "peer": peer}
            self.agents[name] = self.kernel.operator.submit(
                manifest, WORKSPACE, input_bytes=json.dumps(job).encode()
            )
            if name == "receive":
                for text in ("first", "second"):
                    self.kernel.operator.ask("Send", agent=self.agents[name], text=text)

    def peer(self) -> str:
        """An agent that only has a mailbox."""
        text = MANIFEST.replace("[python, agent.py]", "[sleep, '100000']")
        manifest = text.format(name="peer", base=self.ground.keyed.base, plain=self.ground.plain.base)
        return self.kernel.operator.submit(manifest, {})

    # -- the cut ------------------------------------------------------------------------------------------------------

    def await_hits(self, names: Sequence[str]) -> None:
        """Every agent stands at the point: its second call is under way and goes no further."""
        for name in names:
            eventually(lambda name=name: self.standing(name), f"{name} did not come to {self.point}")

    def standing(self, name: str) -> bool:
        self.approve()
        hits = self.kernel.failpoints / f"{ACTIONS[name]}:{self.point}.hit"
        return hits.exists() and str(self.agents[name]) in hits.read_text().split()

    def approve(self) -> None:
        """A person approves whatever waits."""
        for waits in self.kernel.operator.ask("Approvals")["approvals"]:
            self.kernel.operator.ask("Approve", id=waits["id"])

    def cut_and_come_again(self) -> None:
        """Kill the kernel at the point; what is made again comes there again, by replay."""
        self.kernel.kill()
        for action in {ACTIONS[name] for name in self.names}:
            (self.kernel.failpoints / f"{action}:{self.point}.hit").unlink(missing_ok=True)
        self.kernel.start()
        for name in self.names:
            eventually(lambda name=name: self.standing_or_over(name), f"{name} is nowhere after {self.point}")

    def standing_or_over(self, name: str) -> bool:
        # A job of two calls may stand at the second, which is armed for another job.
        if self.standing(name) or self.stands_anywhere(name):
            return True
        state = self.state(name)
        if state == "unknown":
            self.settle(name)
        return state in ("done", "failed", "killed")

    def stands_anywhere(self, name: str) -> bool:
        hits = self.kernel.failpoints.glob(f"*:{self.point}.hit")
        return any(self.agents[name] in path.read_text().split() for path in hits)

    def kill(self) -> None:
        """SIGKILL to the victim, from outside."""
        if self.victim in ("agent", "sandboxes"):
            # One that waited long for a person was put to sleep.
            pids = {name: pid for name in self.names if (pid := self.pid(name))}
            killed = kill_all(pids.values() if self.victim == "agent" else wardens(self.kernel))
            # Whoever comes to the point by replay may find its call recorded, and be over.
            assert killed > 0 or self.mode == "replaying", f"nobody of {self.names} is there to be killed"
            for name, pid in pids.items():
                eventually(lambda name=name, pid=pid: self.pid(name) != pid, f"{name} does not die")
        elif self.victim == "database":
            self.ground.server.kill()
        elif self.mode != "takeover":
            self.kernel.kill()

    def pid(self, name: str) -> int | None:
        return self.kernel.operator.ask("Show", agent=self.agents[name])["pid"]

    def disarm(self) -> None:
        for action in {ACTIONS[name] for name in self.names}:
            self.kernel.disarm(f"{action}:{self.point}")

    # -- what must hold -----------------------------------------------------------------------------------------------

    def finish(self, name: str) -> None:
        where = f"{self.ids[name]}"
        ended = self.ended(name)
        if ended == "unknown":
            self.settle(name)
            ended = self.ended(name)
        if ended != "done":
            why = self.kernel.operator.ask("Show", agent=self.agents[name])["error"]
            self.result.stuck.append(f"{where} is {ended}: {why}" if why else f"{where} is {ended}")
            return
        times = Tally(self.ground, name, self.ids[name], self.agents[name]).times()
        if times > 1:
            self.result.repeated.append(where)
        elif times < 1:
            self.result.lost.append(where)

    def state(self, name: str) -> str:
        return self.kernel.operator.ask("Show", agent=self.agents[name])["state"]

    def ended(self, name: str) -> str:
        """How the agent ends. A call that was killed before it was made asks again."""
        try:
            eventually(lambda: self.approve() or self.state(name) in OVER, "")
        except AssertionError:
            return f"{self.state(name)} still"
        return self.kernel.operator.wait(self.agents[name])["state"]

    def settle(self, name: str) -> None:
        """The operator looks at the target and says what is true there."""
        sent = bool(self.ground.plain.deliveries(f"/plain/{self.ids[name]}"))
        steps = self.kernel.operator.steps(self.agents[name])
        step = next(s["step"] for s in steps if s["outcome"] == "unknown")
        self.kernel.operator.ask(
            "Resolve", agent=self.agents[name], step=step, outcome="done" if sent else "not-done"
        )
        self.result.unknown.append(self.ids[name])
        if kind_of(name) != "unknown" or self.point not in UNSURE or self.certain:
            self.result.stuck.append(
                f"{self.ids[name]} is unknown, though what became of its call can be known"
            )

    @property
    def certain(self) -> bool:
        """Whether the kernel lives through all of it."""
        return self.mode == "fresh" and self.victim != "kernel"
