"""Scenes 8 to 10: everything is put back, the evidence is checked and found out when changed, and all ends."""

from __future__ import annotations

import json
from pathlib import Path

from ringfence.console.demo_warden import describe, mounts_below, remove, sockets_below
from ringfence.console.demo_world import ENDED, World
from ringfence.console.documents import items, record
from ringfence.kernel.leftovers import short_run_dir


def roll_back(world: World) -> None:
    """Everything since the first destruction is undone."""
    tell, point = world.tell, str(world.notes["first_point"])
    tell.scene("Everything the agent did since its first destructive call is rolled back")
    words = ("rollback", world.agent, "--to", point)
    preview = world.must(*words, "--preview", "--json").json()
    tell.say(f"the preview lists {len(preview['changes'])} changes, and what can't be undone:")
    for item in preview["not_undoable"]:
        tell.say(f"  step {item['step']}: {item['action']} {item['resource']}")
    done = world.must(*words, "--yes", "--json").json()
    tree, database = world.tree(), world.database()
    _compare(world, tree, database)
    published = [item for item in preview["not_undoable"] if item["resource"] == f"{world.url}/published"]
    tell.fact(
        "the preview said what would happen, and what can't be undone",
        "changes of `--preview` against those of the rollback; the notice sent after the point",
        f"{len(preview['changes'])} changes, {len(preview['conflicts'])} conflicts; not undoable: "
        f"{len(preview['not_undoable'])}",
        preview["changes"] == done["changes"]
        and not items(done, "conflicts")
        and len(published) == 1
        and done["state"] == "paused",
    )
    world.notes["branch"] = done["branch"]


def _compare(world: World, tree: dict[str, str], database: dict[str, list[str]]) -> None:
    old_tree, old_database = world.notes["tree"], world.notes["database"]
    differ = sorted(path for path in old_tree.keys() | tree.keys() if old_tree.get(path) != tree.get(path))
    kinds = [value[0] for value in tree.values()]
    folders = [path for path, value in tree.items() if value.startswith("d")]
    empty = [path for path in folders if not any(other.startswith(path + "/") for other in tree)]
    figure = (
        f"{kinds.count('-')} files, {len(folders)} directories ({len(empty)} empty), {kinds.count('l')} links"
    )
    if differ:
        world.tell.say(f"differs: {differ[0]}: {old_tree.get(differ[0])} became {tree.get(differ[0])}")
    world.tell.fact(
        "files are back: bytes, modes, owners, times, links, empty directories",
        "the live tree read past the kernel, before and after",
        f"{figure}; {len(differ)} differ",
        not differ and kinds.count("l") > 0 and len(empty) > 0,
    )
    lost = sum(len(set(old_database[table]) ^ set(rows)) for table, rows in database.items())
    rows = sum(len(rows) for rows in database.values())
    world.tell.fact(
        "rows are back byte for byte",
        "both tables dumped past the kernel, before and after",
        f"{rows} rows; {lost} differ",
        database == old_database and rows > 0,
    )


def go_on(world: World) -> None:
    """Rights and sent notices are not rolled back."""
    tell = world.tell
    tell.scene("Rights and what left the system did not come back with it: the agent does its work again")
    can = world.run("policy", "can-i", world.agent, "fs.write", "/workspace/pulse/0.txt", "--json")
    before = world.deliveries("/published")
    world.must("start", world.agent)
    world.eventually(lambda: world.row()["state"] in ENDED, "the agent to end again")
    again = [
        s
        for s in world.steps()
        if s["branch"] == world.notes["branch"] and s["resource"] == f"{world.url}/published"
    ]
    written = [
        s
        for s in world.steps()
        if s["branch"] == world.notes["branch"]
        and s["resource"].startswith("/workspace/pulse/")
        and s["outcome"] == "ok"
    ]
    tell.fact(
        "a revoked right stays revoked after the rollback",
        "`policy can-i` (exit 3), and the loops tried again on the new branch",
        f"{can.json()['verdict']}, exit {can.code}; {len(written)} writes",
        can.code == 3 and can.json()["verdict"] == "deny" and not written and world.row()["state"] == "done",  # noqa: PLR2004 - denied, as documented
    )
    after = world.deliveries("/published")
    tell.fact(
        "a notice that was sent is recognised as sent",
        "the agent published again on the new branch; the desk's count",
        f"{len(before)} delivery before, {len(after)} after",
        len(before) == len(after) == 1 and len(again) == 1 and again[0]["outcome"] == "ok",
    )


def prove(world: World) -> None:
    """The chain of evidence holds, and shows a single changed byte."""
    tell = world.tell
    tell.scene("The evidence is checked, then a copy of it is falsified")
    verified = world.run("audit", "verify", "--json")
    report = verified.json()
    tell.figures["audit"] = report
    tell.fact(
        "`audit verify` holds",
        "every record's hash, every chain's order, every signed head",
        f"{report['rows']} records, {report['chains']} chains, {report['anchors']} anchors",
        verified.code == 0 and report["ok"] is True and report["rows"] > 0,
    )
    export = world.root / "evidence.jsonl"
    world.must("audit", "--export", str(export))
    whole = world.run("audit", "verify", str(export), "--json")
    place = _falsify(export)
    tell.say(f"one byte of record {place[1]} of chain {place[0]} is changed in the file")
    changed = world.run("audit", "verify", str(export), "--json")
    bad = record(changed.json(), "first_bad")
    tell.fact(
        "one changed byte of an exported file is found and named",
        "`audit verify FILE` before (exit 0) and after the change (exit 1)",
        f"first bad: chain {bad.get('chain')}, record {bad.get('pos')}: {bad.get('why')}",
        whole.code == 0 and changed.code == 1 and (bad.get("chain"), bad.get("pos")) == place,
    )


def _falsify(export: Path) -> tuple[int, int]:
    """Turn a denied call into an allowed one in the file, at the same length; gives chain and position of the record."""
    lines = export.read_bytes().splitlines(keepends=True)
    number, document = next(
        (number, json.loads(line))
        for number, line in enumerate(lines)
        if (found := json.loads(line))["action"] == "fs.read" and found["outcome"] == "denied"
    )
    old = b'"/workspace/.env"'
    at = lines[number].index(old) + len(old) - 2
    changed = bytearray(lines[number])
    changed[at] ^= 1
    lines[number] = bytes(changed)
    export.write_bytes(b"".join(lines))
    return document["chain"], document["pos"]


def end(world: World) -> None:
    """Down, and nothing is left."""
    tell = world.tell
    tell.scene("The kernel is stopped, and nothing is left running")
    world.hang_up()
    stopped = world.run("down")
    world.close_desk()
    left = world.warden.descendants()
    run_directory = short_run_dir(world.data)
    mounts = mounts_below(world.root)
    sockets = sockets_below(world.root, run_directory)
    for pid in left:
        tell.say(f"still there: {pid} {describe(pid)}")
    remove(world.root)
    remains = [path for path in (world.root, run_directory) if path.exists() and any(path.iterdir())]
    tell.fact(
        "nothing is left running, and no file",
        "every descendant of this process, mounts, sockets; the directory is removed",
        f"{len(left)} processes, {len(mounts)} mounts, {len(sockets)} sockets, {len(remains)} directories",
        stopped.code == 0 and not (left or mounts or sockets or remains),
    )
