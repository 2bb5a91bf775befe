"""Scenes with a second and a third agent: a model is asked, a person is asked, a budget holds, a schedule wakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ringfence.console.demo_workspace import EXAMPLE_URL
from ringfence.console.demo_world import World

PRESS = Path(__file__).with_name("demo_press")
WATCH = Path(__file__).with_name("demo_watch")
_LIMIT = 40
_RAISED = 200
_PROOFS = 60


def _submit(world: World, source: Path, files: dict[str, bytes], job: dict[str, Any]) -> str:
    """Lay out a small workspace and submit its agent."""
    name = source.name.removeprefix("demo_")
    place = world.root / name
    place.mkdir()
    shutil.copy(source / "agent.py", place / "agent.py")
    for path, data in files.items():
        (place / path).write_bytes(data)
    manifest = world.root / f"{name}.yaml"
    text = (source / "manifest.yaml").read_text(encoding="utf-8")
    manifest.write_text(text.replace(EXAMPLE_URL, world.url), encoding="utf-8")
    document = json.dumps(job).encode()
    return world.must("submit", str(manifest), "--input", "-", "--json", stdin=document).json()["id"]


def _row(world: World, agent: str) -> dict[str, Any]:
    return next(row for row in world.call("List", all=True)["agents"] if row["id"] == agent)


def _steps(world: World, agent: str) -> list[dict[str, Any]]:
    return world.documents("Steps", agent=agent)


def _inbox(world: World) -> list[dict[str, Any]]:
    return world.call("Approvals")["approvals"]


def ask_model(world: World) -> None:
    """A model is asked through the kernel: its tokens are paid from a budget, its key stays outside."""
    tell = world.tell
    tell.scene("A second agent asks a model, through the kernel")
    report = (world.live / "out" / "report.md").read_bytes()
    world.notes["press"] = agent = _submit(world, PRESS, {"report.md": report}, {"desk": world.url})
    world.eventually(lambda: len(_inbox(world)) == 1, "the press note to be asked about")
    asked = world.deliveries("/v1/chat/completions")
    usage: dict[str, int] = asked[0]["usage"] if asked else {}
    row = _row(world, agent)
    tokens, dollars = int(row["tokens"]), float(row["cost_usd"])
    cost = (usage.get("prompt_tokens", 0) * 1.25 + usage.get("completion_tokens", 0) * 10) / 1_000_000
    tell.say("the model's host is scripted and speaks over real HTTP; it counts its tokens itself")
    tell.fact(
        "a model's tokens and dollars are counted as its host counts them",
        "`ps` against the usage that the host wrote down",
        f"{tokens} tokens, {dollars:.6f} USD; the host says {sum(usage.values())}, {cost:.6f}",
        len(asked) == 1
        and tokens == sum(usage.values())
        and abs(dollars - cost) < 1e-6  # noqa: PLR2004 - `ps` shows six places
        and asked[0]["authorization"] == f"Bearer {world.secret}",
    )


def approve(world: World) -> None:
    """A call waits for a person; the kernel is killed meanwhile; it is approved and runs once."""
    tell, agent = world.tell, str(world.notes["press"])
    tell.scene("A rule asks a person; the kernel is killed while the call waits")
    world.eventually(
        lambda: _row(world, agent)["process"] == "none", "the waiting agent's process to be put to sleep"
    )
    (waits,) = _inbox(world)
    row = _row(world, agent)
    tell.say(
        f"{waits['id']}: {waits['action']} {waits['resource']}; the agent is {row['state']}, its process is ended"
    )
    pid = int(world.call("Status")["pid"])
    tell.say(f"kill -9 {pid} (the kernel):")
    world.hang_up()
    world.kill_9(pid)
    world.must("up", "--detach", "--config", str(world.config))
    (again,) = _inbox(world)
    sent = world.deliveries("/press")
    world.must("approvals", "show", again["id"])
    world.must("approvals", "approve", again["id"])
    world.eventually(lambda: len(world.deliveries("/press")) > 0, "the approved call to reach the desk")
    second = world.run("approvals", "approve", again["id"])
    step = next(s for s in _steps(world, agent) if s["action"] == "http.post")
    tell.fact(
        "a parked call outlives its kernel and runs once when approved",
        "the inbox before and after kill -9; the desk's count; a second approval (exit 5)",
        f"{waits['id']}: {len(sent)} delivery before, {len(world.deliveries('/press'))} after; again: exit {second.code}",
        waits["id"] == again["id"]
        and row["state"] == "parked"
        and not sent
        and len(world.deliveries("/press")) == 1
        and second.code == 5  # noqa: PLR2004 - conflict, as documented
        and "already approved by" in second.stderr
        and step["verdict"] == "ask",
    )


def stop_runaway(world: World) -> None:
    """A budget stops a loop before the spend; raised, it goes on where it stood."""
    tell, agent = world.tell, str(world.notes["press"])
    tell.scene("A loop runs away and meets its budget")
    world.eventually(lambda: "budget" in str(_row(world, agent)["waiting_for"]), "the budget to be spent")
    row = _row(world, agent)
    steps = _steps(world, agent)
    ran = [s for s in steps if s["outcome"] == "ok"]
    refused = [s for s in steps if s["outcome"] == "refused"]
    tell.say(f"{row['state']}, waits for {row['waiting_for']}: {refused[-1]['error'] if refused else ''}")
    world.must("budget", agent, "set", "calls", str(_RAISED))
    world.eventually(lambda: _row(world, agent)["state"] == "done", "the agent to go on to its end")
    proofs = [s for s in _steps(world, agent) if s["action"] == "state.put" and s["outcome"] == "ok"]
    tell.fact(
        "a spent budget parks a runaway before the next call, and raised lets it go on",
        "calls in the journal when it was parked; what it had written when it was done",
        f"{len(ran)} of {_LIMIT} calls, then parked; {len(proofs)} proofs after `budget set calls {_RAISED}`",
        row["state"] == "parked" and len(ran) == _LIMIT and len(refused) == 1 and len(proofs) == _PROOFS,
    )


def wake(world: World) -> None:
    """A scheduled agent sleeps without a process and is woken by the clock."""
    tell = world.tell
    tell.scene("A third agent sleeps and is woken by its schedule")
    agent = _submit(world, WATCH, {}, {})
    asleep = _row(world, agent)
    tell.say(f"submitted: {asleep['state']}, process {asleep['process']}, waits for {asleep['waiting_for']}")
    log = world.data / "agents" / agent / "live" / "log.txt"
    world.eventually(
        lambda: log.exists() and len(log.read_text("utf-8").splitlines()) > 1, "two scheduled runs"
    )
    world.must("schedule", "pause", agent)
    world.eventually(lambda: _row(world, agent)["process"] == "none", "its run to end")
    lines = log.read_text("utf-8").splitlines()
    appended = [s for s in _steps(world, agent) if s["action"] == "fs.append" and s["outcome"] == "ok"]
    tell.fact(
        "a scheduled agent holds no process until its time",
        "`ps` after submission; its log read past the kernel, against the journal's runs",
        f"{asleep['state']}, process {asleep['process']}; {len(lines)} runs by the clock",
        asleep["state"] == "sleeping" and asleep["process"] == "none" and len(lines) == len(appended) > 1,
    )
