"""Scenes 4 to 7: what the agent destroys is kept, what it may not do is refused, what it had is taken away."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

from ringfence.console.demo_world import ENDED, World
from ringfence.console.documents import records

_EARLY = 50
"""How often the loops have written before the right is taken."""


def destroy(world: World) -> None:
    """A `delete from` and directory removals, each behind a verified point."""
    tell = world.tell
    tell.scene("The agent destroys something: rows of a table, and directories")
    world.notes["tree"], world.notes["database"] = world.tree(), world.database()
    tell.say(
        "Bytes, modes and links of its workspace and both tables are written down, past the kernel, for later."
    )
    world.signal("go-clean")
    world.reached("asked-pulse")
    listed = world.must("points", world.agent, "--json").json()
    checked = world.must("points", "verify", world.agent, "--json").json()
    steps = {step["step"]: step for step in world.steps()}
    destroying = [step for step in steps.values() if step["effect"] == "DESTROY" and step["outcome"] == "ok"]
    by_step = {point["step"]: point for point in checked}
    rows = [step for step in destroying if step["action"] == "sql.write"]
    folders = [step for step in destroying if step["action"] == "fs.delete"]
    behind = [by_step[step["step"]] for step in destroying if step["step"] in by_step]
    world.notes["first_point"] = min(behind, key=lambda point: point["step"])["id"] if behind else ""
    gone = [path for path in world.input.stale if not (world.live / path).exists()]
    kept = [path for path in world.input.kept if (world.live / path).exists()]
    left = len(world.rows("files"))
    tell.fact(
        "a `delete from` ran behind a verified point",
        "`points verify` read the copies back; the table counted past the kernel",
        f"{world.input.unhashed} rows gone, {left} left; point {by_step[rows[0]['step']]['id'] if rows else 'none'}",
        len(rows) == 1 and left == world.input.hashed and by_step[rows[0]["step"]]["verified"],
    )
    tell.fact(
        "directory removals ran behind verified points",
        "the same, and the directories looked for on disk",
        f"{len(gone)} stale caches gone, {len(kept)} current ones kept",
        len(folders) == len(gone) == len(world.input.stale)
        and len(kept) == len(world.input.kept)
        and all(step["step"] in by_step for step in folders),
    )
    good = [point for point in checked if point["verified"]]
    tell.fact(
        "every rollback point can be read back",
        "`points verify` reads and hashes every stored byte",
        f"{len(good)} of {len(listed)} points",
        len(good) == len(checked) == len(listed) > 0,
    )


def refuse(world: World) -> None:
    """A call outside policy."""
    tell = world.tell
    tell.scene("The agent tries what no rule allows")
    step = _step(world, "http.post", f"{world.url}/admin/rotate")
    arrived = world.deliveries("/admin")
    tell.say(f"refused with: {step['error']}")
    explained = world.must("policy", "explain", world.agent, str(step["step"]), "--json").json()
    named = "http.post" in str(step["error"]) and "/admin/rotate" in str(step["error"])
    tell.fact(
        "a call outside policy is denied and named",
        "the step's verdict and message; the desk counted what arrived",
        f"step {step['step']}: {step['verdict']}, {len(arrived)} arrived",
        step["outcome"] == "denied"
        and step["verdict"] == "deny"
        and named
        and not arrived
        and bool(explained.get("reason")),
    )


def hide(world: World) -> None:
    """A file with a token that the agent must not see."""
    tell = world.tell
    tell.scene("There is a file with a token in the workspace that the agent must not see")
    home = world.data / "agents" / world.agent
    step = _step(world, "fs.read", "/workspace/.env")
    rules = world.must("policy", "explain", world.agent, str(step["step"]), "--json", show=False).json()[
        "rules"
    ]
    texts = [rule["text"] for rule in rules]
    tell.say(f"refused with: {step['error']}")
    cat = next(s for s in world.steps() if s["action"] == "exec.run" and s["resource"] == "cat .env")
    surroundings = (world.live / "out" / "surroundings.json").read_text(encoding="utf-8")
    tell.fact(
        "a token-bearing file is out of reach",
        "not in the program image; `fs.read` denied by its rule; `cat .env` in a sandbox",
        f"denied by `{texts[0] if texts else 'no rule'}`; cat ended without it (step {cat['step']})",
        not (home / "image" / ".env").exists()
        and (home / "image" / "agent.py").exists()
        and (home / "live" / ".env").exists()
        and step["outcome"] == "denied"
        and any(".env" in text for text in texts)
        and '"cat .env": [\n  1,' in surroundings,
    )


def find_canaries(world: World) -> None:
    """Search everything the agent or the evidence could show for the tokens."""
    tokens = {
        "the token in .env": world.input.canary,
        "the kernel's secret": world.secret,
        "the kernel's environment": world.ambient,
    }
    export = world.root / "canary-search.jsonl"
    world.must("audit", "--export", str(export), show=False)
    home = world.data / "agents" / world.agent
    places = [export, world.data / "kernel.log", home / "logs", home / "live" / "out", home / "image"]
    files = [path for place in places for path in _files(place)]
    texts = {path: path.read_bytes() for path in files}
    texts[Path("steps")] = repr(world.steps()).encode()
    found = [
        f"{what} in {path.name}"
        for what, token in tokens.items()
        for path, data in texts.items()
        if token.encode() in data
    ]
    export.unlink()
    world.tell.fact(
        "tokens appear nowhere: file, secret, kernel's environment",
        "searched: sandbox environments, program image, agent's output and report, audit export, logs",
        f"{len(texts)} files, {sum(map(len, texts.values())):,} bytes; found {len(found)}{': ' + found[0] if found else ''}",
        not found and len(texts) > 5,  # noqa: PLR2004 - a search of nothing proves nothing
    )


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return [path for path in sorted(place.rglob("*")) if path.is_file() and not path.is_symlink()]


def revoke(world: World) -> None:
    """A right is taken away while three loops use it."""
    tell = world.tell
    tell.scene("A right is revoked while the agent uses it in three loops")
    pulse = world.live / "pulse"
    at_start = world.row()["steps"]
    world.signal("go-pulse")
    world.eventually(lambda: world.row()["steps"] > at_start + 2 * _EARLY, "the loops to write")
    rule = 'fs.write: "/workspace/pulse/*"'
    tell.command(f"ringfence revoke {world.agent} '{rule}'")
    called = time.time()
    answer = world.call("Revoke", agent=world.agent, rule_or_grant=rule)
    returned = time.time()
    left = {path.name: path.read_bytes() for path in pulse.iterdir()}
    world.eventually(lambda: world.row()["state"] in ENDED, "the agent to notice and end")
    state = world.row()["state"]
    writes = [s for s in world.steps() if s["resource"].startswith("/workspace/pulse/")]
    written = [s for s in writes if s["outcome"] == "ok"]
    refused = [s for s in writes if s["outcome"] != "ok"]
    late = [s for s in written if _began(s) > returned or _ended(s) > returned + _CLOCK_S]
    first = min((_ended(s) for s in refused), default=0.0)
    affected = records(answer, "affected")
    fates = ", ".join(f"step {item['step']} {item['fate']}" for item in affected) or "none was"
    changed = [name for name, data in left.items() if (pulse / name).read_bytes() != data]
    tell.say(f"{len(written)} writes before; calls under way at that moment: {fates}")
    tell.figures.update(revoke_ms=(returned - called) * 1000, first_denial_ms=(first - called) * 1000)
    tell.fact(
        "a revoked right is gone when `revoke` returns",
        "times in the journal against the call's own; the files' bytes after it returned and at the end",
        f"revoke took {(returned - called) * 1000:.1f} ms, first denial {(first - called) * 1000:.1f} ms after the call; "
        f"{len(late)} later writes of {len(written)}",
        len(written) >= _EARLY
        and len(refused) >= 1
        and not late
        and not changed
        and first > called
        and len(answer["revoked"]) == 1
        and state == "done",
    )
    fated = {"cancelled", "finished", "under way"}
    tell.fact(
        "calls under way at the revoke are accounted for",
        "the fate that `revoke` reported, against each step's outcome in the journal",
        f"{len(affected)} under way: {fates}",
        all(item["fate"] in fated and _fits(item, writes) for item in affected),
    )


_CLOCK_S = 0.002
"""The journal's microseconds are rounded; both clocks are the same."""


def _fits(item: dict[str, Any], writes: list[dict[str, Any]]) -> bool:
    """Whether a call that was said to be cancelled did not succeed."""
    step = next((s for s in writes if s["step"] == item["step"]), None)
    return step is not None and (item["fate"] != "cancelled" or step["outcome"] != "ok")


def _began(step: dict[str, Any]) -> float:
    return datetime.fromisoformat(step["started_at"]).timestamp()


def _ended(step: dict[str, Any]) -> float:
    return _began(step) + float(step["duration_ms"] or 0) / 1000


def _step(world: World, action: str, resource: str) -> dict[str, Any]:
    return next(s for s in world.steps() if s["action"] == action and s["resource"] == resource)
