"""Scenes 1 to 3: a kernel and an agent are started, and both are killed in the middle of their work."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from ringfence.console.demo_workspace import AGENT, lay_out, render_template
from ringfence.console.demo_world import World


def start(world: World) -> None:
    """A kernel with its own PostgreSQL, real input, and an agent that works on it."""
    tell = world.tell
    tell.scene("A kernel, and an agent that takes stock of the software installed here")
    found = world.laid_out = lay_out(world.root / "workspace")
    number = len(found.names)
    tell.say(
        f"{number} distributions are installed beside this demo; their METADATA, RECORD and licence files"
    )
    tell.say("are copied into the agent's workspace. The installed files themselves it sees read-only.")
    # One delivery is held while the agent dies, a later one while the kernel dies.
    world.notes["holds"] = holds = (max(2, number // 4), max(4, number // 2))
    world.open_desk(holds)
    _first_config(world)
    status = json.loads(world.must("up", "--detach", "--config", str(world.config), "--json").stdout)
    tell.say(
        f"The kernel (pid {status['pid']}) runs its own PostgreSQL. The operator makes two tables, keeps the"
    )
    tell.say("token of the desk (a separate process that takes notices) as a secret, and declares both.")
    world.run_schema(AGENT / "schema.sql")
    world.must("secrets", "set", "desk-token", "--from", "-", stdin=world.secret.encode())
    render_template("ringfence.yaml", world.config, world.url)
    world.must("reload")
    manifest = render_template("manifest.yaml", world.root / "manifest.yaml", world.url)
    job = world.root / "job.json"
    job.write_text(json.dumps({"desk": world.url, "places": found.places}), encoding="utf-8")
    world.agent = json.loads(world.must("submit", str(manifest), "--input", str(job), "--json").stdout)["id"]
    database = world.call("Status")["database"]
    state = world.show()
    walls = state["sandbox"]["walls"]
    missing = [wall["name"] for wall in walls if not wall["ok"]]
    tell.figures.update(
        distributions=number, hashed_files=found.hashed, postgresql=database["version"], walls=walls
    )
    tell.fact(
        "kernel and agent work",
        "`status`, `show`: database answers, program runs in its own namespaces",
        f"PostgreSQL {database['version']}, {number} distributions, {len(walls) - len(missing)} walls"
        + (f" (not here: {', '.join(missing)})" if missing else ""),
        database["state"] == "ok" and state["state"] == "running" and number > 0,
    )


def _first_config(world: World) -> None:
    """The kernel file without the desk: its token is kept by a running kernel."""
    text = "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  resources:\n    inventory: {type: postgres, embedded: true}\n"
    world.config.write_text(text, encoding="utf-8")


def kill_agent(world: World) -> None:
    """SIGKILL to the agent's process while one of its calls is under way."""
    tell, ordinal = world.tell, world.notes["holds"][0]
    tell.scene("The agent is killed in the middle of a call, and goes on")
    world.reached(f"held-{ordinal}")
    before = world.show()
    tell.say(
        f"Notice {ordinal} has reached the desk and is not answered yet. kill -9 {before['pid']} (the agent):"
    )
    world.kill_9(before["pid"])
    world.signal(f"release-{ordinal}")
    tell.say(
        "its call is finished and recorded without it; then it is started again and goes on from its checkpoint."
    )
    second = world.notes["holds"][1]
    world.reached(f"held-{second}")
    # The other calls of that distribution run beside the one that is held now.
    world.eventually(lambda: len(world.rows("distributions")) == second, "the row beside the held notice")
    world.eventually(lambda: len(_log_lines(world)) == second, "the log line beside the held notice")
    sent, rows, lines = world.deliveries("/notices/"), world.rows("distributions"), _log_lines(world)
    keys = {line["key"] for line in sent}
    restarts = world.show()["restarts"]
    tell.fact(
        "agent killed -9 and resumed: zero repeated effects",
        "a separate process counted deliveries and their keys; rows and log lines read past the kernel",
        f"{len(sent)} deliveries, {len(keys)} keys, {len(rows)} rows, {len(set(lines))} lines; expected {second}; "
        f"{restarts} restart",
        len(sent) == len(keys) == len(rows) == len(lines) == len(set(lines)) == second and restarts == 1,
    )


def kill_kernel(world: World) -> None:
    """SIGKILL to the kernel while calls are under way."""
    tell, ordinal = world.tell, world.notes["holds"][1]
    tell.scene("The kernel is killed in the middle of a call, started again, and the agent goes on")
    before = world.steps()
    under_way = [step for step in before if step["outcome"] is None]
    pid = int(world.call("Status")["pid"])
    tell.say(f"Notice {ordinal} has reached the desk and is not answered. kill -9 {pid} (the kernel):")
    world.hang_up()
    world.kill_9(pid)
    world.signal(f"release-{ordinal}")
    world.must("up", "--detach", "--config", str(world.config))
    world.reached("asked-clean")
    after = {step["step"]: step for step in world.steps()}
    answered = [step for step in before if step["outcome"] is not None]
    lost = [step["step"] for step in answered if not _same(step, after.get(step["step"]))]
    seen = _checkpoints(world)
    lost += [step for step in seen if step not in after]
    tell.fact(
        "kernel killed -9: every answered call is in the journal",
        "steps read just before the kill, and checkpoints the agent had printed, looked up afterwards",
        f"{len(answered)} answered, {len(under_way)} under way at the kill, {len(lost)} lost",
        not lost and len(under_way) > 0 and len(answered) > 0,
    )
    _count_after_kernel(world)


def _count_after_kernel(world: World) -> None:
    expected = len(world.input.names)
    sent, rows, lines = world.deliveries("/notices/"), world.rows("distributions"), _log_lines(world)
    by_key = Counter(line["key"] for line in sent)
    again = [line["path"] for line in sent if by_key[line["key"]] > 1]
    files = world.rows("files")
    wanted = world.input.hashed + world.input.unhashed
    world.tell.figures.update(deliveries=len(sent), effects=len(by_key), expected_effects=expected)
    world.tell.fact(
        "kernel killed -9 and resumed: zero repeated effects",
        "the desk's count by idempotency key; tables and log read past the kernel",
        f"{len(by_key)} effects, {len(rows)} rows, {len(set(lines))} lines; expected {expected}; {len(files)} file rows",
        len(by_key) == len(rows) == len(lines) == len(set(lines)) == expected
        and None not in by_key
        and len(files) == wanted,
    )
    # The one that was under way came a second time with its first key, so that the desk could tell.
    world.tell.fact(
        "the notice that was under way came again under the same key",
        "raw deliveries at the desk",
        f"{len(sent)} deliveries of {len(by_key)} notices: {len(set(again))} came twice",
        len(sent) - len(by_key) == 1 and len(set(again)) == 1,
    )
    bearer = {line["authorization"] for line in world.deliveries()}
    world.tell.fact(
        "the desk's token is added by the kernel, outside the sandbox",
        "authorization header of every delivery at the desk",
        f"{len(world.deliveries())} deliveries with it",
        bearer == {f"Bearer {world.secret}"},
    )


def _same(old: dict[str, Any], new: dict[str, Any] | None) -> bool:
    return new is not None and all(
        old[key] == new[key] for key in ("action", "resource", "outcome", "effect_id")
    )


def _log_lines(world: World) -> list[str]:
    path = world.live / "out" / "progress.log"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _checkpoints(world: World) -> list[int]:
    """Steps that the agent itself was told."""
    text = (world.data / "agents" / world.agent / "logs" / "stdout.log").read_text(encoding="utf-8")
    return [int(step) for step in re.findall(r"^checkpoint at step (\d+)", text, re.MULTILINE)]
