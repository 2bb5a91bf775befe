"""SIGKILL of the kernel while agents sleep: each wakes once, nothing is done twice, and sleeping costs no process."""

from __future__ import annotations

import contextlib
import json
import signal
from collections import Counter as Count
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.clocks import SKEWED
from support.kernels import KernelProcess, eventually
from support.scenes import Scene, scene_of_its_own, scene_on, short_directory
from support.target import Target

pytestmark = [pytest.mark.fault, pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

LINGER = "approvals: {linger: 100ms}"


@pytest.fixture
def counter(tmp_path: Path) -> Iterator[Target]:
    counter = Target(tmp_path / "deliveries")
    yield counter
    counter.close()


@pytest.fixture
def scene(counter: Target, postgres_server: Any, template_database: str) -> Iterator[Scene]:
    """A kernel whose target takes no key: what is sent twice is counted twice."""
    name = postgres_server.create(template_database)
    config = (
        "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  resources:\n"
        f'    plain: {{type: http, base: "{counter.base}", effects: {{"POST /**": external}}}}\n'
    )
    try:
        with scene_on(postgres_server.dsn(name), config=config) as scene:
            yield scene
    finally:
        postgres_server.drop(name)


def program(counter: Target, wait: str) -> str:
    return f"""
import json
from ringfence import agent
print(json.dumps("start"), flush=True)
with agent.boot() as rf:
    base = {counter.base!r} + "/" + rf.identity.agent
    rf.http.post(base + "/before", json={{}})
    {wait}
    rf.http.post(base + "/after", json={{}})
"""


def submit(scene: Scene, counter: Target, wait: str, more: str = LINGER) -> str:
    rules = [f'http.*: "{counter.base}/**"', 'messages.*: "*"', "sleep"]
    return scene.submit(program(counter, wait), allow=rules, more=more)


def asleep(scene: Scene, agent: str) -> bool:
    shown = scene.show(agent)
    return shown["process"] == "none" and shown["state"] in ("sleeping", "parked")


def starts(scene: Scene, agent: str) -> int:
    return scene.said(agent).count("start")


def sent(counter: Target, agent: str) -> list[str]:
    return [line["path"].rsplit("/", 1)[1] for line in counter.deliveries() if f"/{agent}/" in line["path"]]


def again(scene: Scene) -> None:
    scene.kernel.kill()
    scene.kernel.start()


def test_each_sleeper_wakes_once_after_the_kernel_was_killed(scene: Scene, counter: Target) -> None:
    timers = [submit(scene, counter, "rf.sleep(9)") for _ in range(3)]
    long = submit(scene, counter, "rf.sleep(3600)")
    message = submit(scene, counter, "rf.messages.receive()")
    ask = submit(scene, counter, "rf.ask('May I?')")
    everyone = [*timers, long, message, ask]
    for agent in everyone:
        eventually(lambda agent=agent: asleep(scene, agent), f"{agent} does not sleep: {scene.show(agent)}")
    again(scene)
    for agent in (long, message, ask):
        assert asleep(scene, agent), scene.show(agent)
        assert starts(scene, agent) == 1
    assert scene.show(ask)["state"] == "parked"
    for agent in timers:
        scene.await_end(agent)
    # Killed once more: what is asleep is handed from kernel to kernel.
    again(scene)
    scene.operator.ask("Send", agent=message, text="go")
    (approval,) = scene.operator.ask("Approvals")["approvals"]
    scene.operator.ask("Approve", id=approval["id"], reason="yes")
    scene.await_end(message)
    scene.await_end(ask)
    assert asleep(scene, long)
    for agent in (*timers, message, ask):
        assert sent(counter, agent) == ["before", "after"]
        assert starts(scene, agent) == 2
    assert sent(counter, long) == ["before"]
    scene.operator.ask("Kill", agent=long)


def test_a_kernel_killed_while_it_wakes_somebody(scene: Scene, counter: Target) -> None:
    """Its wake is over, its process starts, and the kernel dies at the next effect: nothing is sent twice."""
    scene.kernel.arm("http.post:before_intent")
    agent = submit(scene, counter, "rf.sleep(2)")
    scene.kernel.await_hit("http.post:before_intent")
    scene.kernel.disarm("http.post:before_intent")
    eventually(lambda: asleep(scene, agent), "it does not sleep")
    scene.kernel.arm("http.post:after_intent")
    scene.kernel.await_hit("http.post:after_intent")
    assert sent(counter, agent) == ["before"]
    scene.kernel.disarm("http.post:after_intent")
    again(scene)
    # The target takes no key, so a person says what became of the second request; the first is not made again.
    eventually(lambda: scene.show(agent)["state"] == "unknown", "it is not unknown")
    step = scene.operator.steps(agent)[-1]["step"]
    scene.operator.ask("Resolve", agent=agent, step=step, outcome="not-done")
    scene.await_end(agent)
    assert sent(counter, agent) == ["before", "after"]


def runs(scene: Scene, agent: str) -> dict[str, Any]:
    rows = scene.operator.ask("ScheduleList")["schedules"]
    return next(row for row in rows if row["agent"] == agent)


def events(scene: Scene, agent: str, action: str) -> list[dict[str, Any]]:
    rows = scene.operator.stream("Audit", agent=agent)
    return [json.loads(row["body"]) for row in rows if row["action"] == action]


def whole(time: datetime) -> datetime:
    """As times of schedules are written."""
    return time.replace(microsecond=0)


def test_fires_that_no_kernel_saw_are_made_up_once(scene: Scene, counter: Target) -> None:
    agent = submit(scene, counter, "pass", "schedule: {every: 2s}")
    paused = submit(scene, counter, "pass", "schedule: {every: 2s}")
    scene.operator.ask("SchedulePause", agent=paused)
    eventually(lambda: runs(scene, agent)["last_outcome"] == "done", "it does not run")
    scene.kernel.kill()
    before = len(sent(counter, agent))
    missed = scene.sql(
        "select next_at from schedules s join agents a on a.key = s.agent where a.id = %s", agent
    )[0][0]
    # Three more times pass while nobody looks.
    eventually(
        lambda: scene.sql("select clock_timestamp() > %s + interval '5 s'", missed)[0][0], "time stands still"
    )
    scene.kernel.start()
    eventually(lambda: len(sent(counter, agent)) >= before + 4, "it does not run again")
    scene.operator.ask("SchedulePause", agent=agent)
    eventually(lambda: runs(scene, agent)["last_outcome"] == "done", "the last run does not end")
    fires = [body["fire"] for body in events(scene, agent, "schedule.run")]
    assert len(fires) == len(set(fires)) == runs(scene, agent)["runs"]
    assert Count(sent(counter, agent)) == {"before": len(fires), "after": len(fires)}
    # The times that passed are made up by one run, which counts as the newest of them and says for how many it stands.
    late = next(
        row
        for row in events(scene, agent, "schedule.run")
        if datetime.fromisoformat(row["fire"]) >= whole(missed)
    )
    stands_for = late["missed"] + 1
    assert datetime.fromisoformat(late["fire"]) == whole(missed) + timedelta(seconds=2 * late["missed"])
    assert stands_for >= 3
    following = fires[fires.index(late["fire"]) + 1]
    assert datetime.fromisoformat(following) > datetime.fromisoformat(late["fire"])
    assert (runs(scene, paused)["paused"], sent(counter, paused)) == (True, [])


def test_each_fire_is_made_up_once_by_kernels_that_are_killed_meanwhile(scene: Scene) -> None:
    text = (
        "from ringfence import agent\n"
        "with agent.boot() as rf:\n"
        "    rf.fs.append_text('runs', rf.identity.thread + ' ')\n"
    )
    agent = scene.submit(
        text, allow=['fs.*: "/workspace/**"'], more="schedule: {every: 2s, missed: all, overlap: queue}"
    )
    first = datetime.fromisoformat(runs(scene, agent)["next_at"])

    def row() -> tuple[int, int, datetime]:
        """Runs that began, times that wait for one, and the last time that was dealt with: of one moment."""
        return scene.sql(
            "select runs, cardinality(queued), settled_at from schedules s join agents a on a.key = s.agent "
            "where a.id = %s",
            agent,
        )[0]

    eventually(lambda: runs(scene, agent)["last_outcome"] == "done", "it does not run")
    scene.kernel.kill()
    missed = row()[2]
    eventually(
        lambda: scene.sql("select clock_timestamp() > %s + interval '9 s'", missed)[0][0], "time stands still"
    )
    scene.kernel.start()
    eventually(lambda: row()[1] > 0, "nothing waits for a run")
    for more in (1, 3):
        before = row()[0]
        again(scene)
        eventually(lambda before=before, more=more: row()[0] >= before + more, "it does not run again")
    # Every time has its run or waits for it, whatever died in between.
    begun, waiting, settled = row()
    assert begun + waiting == (settled - first) // timedelta(seconds=2) + 1
    scene.operator.ask("SchedulePause", agent=agent)
    eventually(lambda: runs(scene, agent)["last_outcome"] == "done", "the last run does not end")
    threads = (scene.live(agent) / "runs").read_text().split()
    assert len(threads) == len(set(threads)) == row()[0]
    fires = [body["fire"] for body in events(scene, agent, "schedule.run")]
    assert fires == sorted(set(fires))


def test_a_kernel_killed_in_a_run_goes_on_with_that_run(scene: Scene, counter: Target) -> None:
    agent = submit(scene, counter, "rf.sleep(4)", f'schedule: {{cron: "0 0 1 1 *"}}\n{LINGER}')
    scene.operator.ask("ScheduleRun", agent=agent)
    eventually(lambda: sent(counter, agent) == ["before"] and asleep(scene, agent), "it does not sleep")
    thread = scene.show(agent)["thread"]
    again(scene)
    eventually(lambda: runs(scene, agent)["last_outcome"] == "done", "the run does not end")
    assert sent(counter, agent) == ["before", "after"]
    assert (scene.show(agent)["thread"], runs(scene, agent)["runs"]) == (thread, 1)
    assert scene.show(agent)["waiting_for"].startswith("schedule 20")


def test_another_kernel_takes_sleepers_over(
    counter: Target, postgres_server: Any, template_database: str
) -> None:
    """The first kernel stands still past its lease; a second one on the same files wakes what the first put to sleep."""
    name = postgres_server.create(template_database)
    config = (
        "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  resources:\n"
        f'    plain: {{type: http, base: "{counter.base}", effects: {{"POST /**": external}}}}\n'
    )
    try:
        with short_directory() as directory:
            first = KernelProcess(directory / "d", dsn=postgres_server.dsn(name), config=config)
            first.start()
            scene = Scene(first)
            agent = submit(scene, counter, "rf.sleep(12)")
            nightly = submit(scene, counter, "pass", 'schedule: {cron: "0 0 1 1 *"}')
            eventually(lambda: asleep(scene, agent), "it does not sleep")
            assert first.process is not None
            first.process.send_signal(signal.SIGSTOP)
            first.operator.close()
            (first.data / "kernel.lock").unlink()
            second = KernelProcess(directory / "d", dsn=postgres_server.dsn(name), config=config)
            try:
                second.start()
                taken = Scene(second)
                assert asleep(taken, agent)
                assert taken.show(nightly)["waiting_for"].startswith("schedule 20")
                # Both are there now, and one of them may no longer do anything.
                first.process.send_signal(signal.SIGCONT)
                taken.await_end(agent)
                assert sent(counter, agent) == ["before", "after"]
                assert first.process.wait(60) == 1
            finally:
                second.stop()
                if first.process.poll() is None:
                    first.process.kill()
                    first.process.wait()
    finally:
        postgres_server.drop(name)


YEAR = 365 * 86400


def test_schedules_and_sleeps_go_on_where_the_clock_was_set_while_no_kernel_ran(
    counter: Target, postgres_server: Any, template_database: str, tmp_path: Path
) -> None:
    """Ahead by a year, and back again: no run is begun twice, and nobody waits for a year."""
    offset = tmp_path / "offset"
    offset.touch()
    env = {"PYTHONPATH": str(SKEWED), "SKEWED_BY": str(offset)}
    with scene_of_its_own(postgres_server, template_database, env=env) as scene:

        def restarted(off_by: int) -> None:
            scene.kernel.kill()
            offset.write_text(str(off_by))
            scene.kernel.start(**env)

        def sleeper() -> str:
            text = "from ringfence import agent\nwith agent.boot() as rf:\n    rf.sleep(6)\n"
            agent = scene.submit(text, allow=["sleep"], more=LINGER)
            eventually(lambda: asleep(scene, agent), f"{agent} does not sleep")
            return agent

        often, yearly = [
            scene.submit("pass", more=f"schedule: {{{when}}}") for when in ("every: 3s", 'cron: "0 0 1 1 *"')
        ]
        first = sleeper()
        restarted(YEAR)
        scene.await_end(first)
        eventually(lambda: runs(scene, yearly)["last_outcome"] == "done", "the new year was passed over")
        second, before = sleeper(), runs(scene, often)["runs"]
        restarted(0)
        scene.await_end(second)
        eventually(lambda: runs(scene, often)["runs"] > before + 1, "the interval stands still")
        upcoming = datetime.fromisoformat(runs(scene, yearly)["next_at"])
        assert timedelta(0) < upcoming - datetime.now(UTC) < timedelta(days=366)
        assert runs(scene, yearly)["runs"] == 1
        for agent in (often, yearly):
            fires = [body["fire"] for body in events(scene, agent, "schedule.run")]
            assert len(fires) == len(set(fires)) == runs(scene, agent)["runs"]
            assert len(events(scene, agent, "schedule.clock")) == 1
        scene.operator.ask("Kill", agent=often)


@pytest.mark.slow
def test_two_hundred_sleeping_agents_hold_no_process(scene: Scene, counter: Target) -> None:
    nightly = [submit(scene, counter, "pass", 'schedule: {cron: "0 0 1 1 *"}') for _ in range(190)]
    sleepers = [submit(scene, counter, "rf.sleep(3600)") for _ in range(10)]
    for agent in sleepers:
        eventually(lambda agent=agent: asleep(scene, agent), f"{agent} does not sleep", 120)

    def held() -> list[str]:
        """First processes of sandboxes, below the one process that watches all of them. A spare's child is no program yet."""
        assert scene.kernel.process is not None
        wardens = [pid for pid in children(scene.kernel.process.pid) if "warden" in command(pid)]
        return [
            command(pid)
            for warden in wardens
            for pid in children(warden)
            if in_another_namespace(pid) and any(command(child) != command(pid) for child in children(pid))
        ]

    eventually(lambda: held() == [], f"the kernel holds {held()}")
    again(scene)
    rows = scene.operator.ask("List")["agents"]
    assert Count((row["state"], row["process"]) for row in rows) == {("sleeping", "none"): 200}
    assert held() == []
    assert {starts(scene, agent) for agent in sleepers} == {1}
    scene.operator.ask("Kill", agent=sleepers[0])
    assert scene.show(nightly[0])["schedule"]["runs"] == 0


def children(pid: int) -> list[int]:
    """Of all its threads."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # threads come and go
            found += [int(name) for name in path.read_text().split()]
    return found


def in_another_namespace(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("NSpid:") and len(line.split()) > 2 for line in lines)


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""
