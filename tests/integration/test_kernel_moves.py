"""Export and import between two real kernels with databases of their own: all of it arrives, and nothing that was changed does."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from ringfence.kernel.parcel import canonical
from support.scenes import Scene, console, scene_of_its_own
from support.target import Target

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    bank: {{type: http, base: "{base}"}}
"""

PROGRAM = """
import json
from ringfence import agent

with agent.boot() as rf:
    rf.fs.write_text("one.txt", "one")
    rf.fs.write_text("big", "x" * 300_000)
    rf.fs.delete("old.txt")
    rf.fs.delete("big")
    paid = rf.http.post("%(base)s/pay/once", json={"amount": 1}).text
    rf.memory.append("a thought of its own")
    rf.artifacts.put("report", b"r" * 20_000)
    long = rf.http.get("%(base)s/long").text
    rf.fs.read_text("thick")
    if rf.exec.run(["test", "-e", "go"]).exit_code:
        raise SystemExit(7)
    second = rf.http.post("%(base)s/pay/twice", json={"amount": 2}).text
    found = [m.text for m in rf.memory.search("thought")]
    print(json.dumps([paid, second, found, len(rf.artifacts.get("report")), rf.messages.receive(1).text]))
"""


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(tmp_path_factory.mktemp("bank") / "sent")
    yield target
    target.close()


@pytest.fixture(scope="module")
def kernels(postgres_server: Any, template_database: str, bank: Target) -> Iterator[tuple[Scene, Scene]]:
    config = CONFIG.format(base=bank.base)
    with (
        scene_of_its_own(postgres_server, template_database, config=config) as first,
        scene_of_its_own(postgres_server, template_database, config=config) as second,
    ):
        yield first, second


@pytest.fixture(scope="module")
def parcel(
    kernels: tuple[Scene, Scene], bank: Target, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """An agent that stopped half-way, and its export."""
    scene = kernels[0]
    allow = [
        'fs.*: "/workspace/**"',
        'exec.run: "**"',
        'memory.*: "**"',
        'artifacts.*: "**"',
        'messages.*: "**"',
    ]
    agent = scene.submit(
        PROGRAM % {"base": bank.base},
        name="mover",
        allow=[*allow, f'http.*: "{bank.base}/**"', 'state.*: "**"'],
        files={"old.txt": "old", "run.sh": (0o755, "#!/bin/sh\n"), "thick": "t" * 20_000},
        more="restart: {policy: never}",
    )
    scene.await_end(agent, "failed")
    granted = scene.operator.ask("Grant", agent=agent, rule='fs.read: "/workspace/granted"', uses=3)
    scene.operator.ask("Revoke", agent=agent, rule_or_grant='state.*: "**"')
    assert granted["uses_left"] == 3
    file = tmp_path_factory.mktemp("parcel") / "mover.rfx"
    done = console("export", agent, "--to", str(file), "--data", str(scene.kernel.data), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"file": str(file), "size_bytes": file.stat().st_size}
    assert file.stat().st_mode & 0o777 == 0o600
    return agent, file


def imported(scene: Scene, file: Path, *words: str) -> Any:
    return console("import", str(file), "--data", str(scene.kernel.data), "--json", *words)


def picture(root: Path) -> dict[str, Any]:
    return {
        str(p.relative_to(root)): (oct(p.stat().st_mode), p.read_bytes() if p.is_file() else None)
        for p in sorted(root.rglob("*"))
    }


def traces(scene: Scene) -> Any:
    homes = {
        kind: sorted(p.name for p in (scene.kernel.data / kind).glob("*"))
        for kind in ("agents", "points", "origins", "artifacts")
    }
    return homes, scene.sql("select count(*) from agents")


def layer(scene: Scene, agent: str, name: str) -> dict[str, Any]:
    done = console("export", agent, "--layer", name, "--data", str(scene.kernel.data))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def items(scene: Scene, agent: str, name: str) -> list[dict[str, Any]]:
    """Items of a layer without their ids, which are those of their database."""
    found = layer(scene, agent, name)["items"]
    return [{key: value for key, value in item.items() if key != "id"} for item in found]


def test_each_layer_stands_for_itself_and_has_the_size_that_is_said(
    kernels: tuple[Scene, Scene], parcel: tuple[str, Path], tmp_path: Path
) -> None:
    scene, agent = kernels[0], parcel[0]
    listed = scene.operator.ask("Layers", agent=agent)
    for one in listed["layers"]:
        file = tmp_path / one["layer"]
        done = console(
            "export", agent, "--layer", one["layer"], "-o", str(file), "--data", str(scene.kernel.data)
        )
        assert done.returncode == 0, done.stderr
        document = json.loads(file.read_bytes())
        assert (document["format"], document["version"], document["layer"]) == (
            "ringfence-layer",
            1,
            one["layer"],
        )
        assert len(document["items"]) == one["items"] > 0
        assert file.stat().st_size == one["size_bytes"]
        assert document["at_step"] == listed["at_step"]
    kept = {entry["text"] for entry in layer(scene, agent, "memory")["items"] if entry["kind"] == "entry"}
    assert kept == {"a thought of its own"}
    results = layer(scene, agent, "results")["items"]
    (written,) = [one for one in results if one["resource"] == "/workspace/one.txt"]
    assert (written["arguments"]["path"], written["outcome"]) == ("one.txt", "ok")
    # A long result stands in the document itself, with its pointer.
    (long,) = [one for one in results if one["resource"].endswith("/thick")]
    assert base64.b64decode(long["result"]["data"]) == b"t" * 20_000
    assert len(long["result_ref"]) == 64
    (made,) = layer(scene, agent, "artifacts")["items"]
    data = base64.b64decode(made["data"])
    assert (data, hashlib.sha256(data).hexdigest()) == (b"r" * 20_000, made["ref"])
    around = layer(scene, agent, "environment")["items"]
    assert {"kernel", "program", "sandbox", "tool", "resource", "rule", "grant"} <= {
        one["kind"] for one in around
    }
    assert 'state.*: "**"' not in {one["rule"] for one in around if one["kind"] == "grant"}
    wrong = console("export", agent, "--layer", "soul", "--data", str(scene.kernel.data))
    assert (wrong.returncode, "no layer `soul`; there are memory, task" in wrong.stderr) == (2, True)
    nowhere = console("export", agent, "--data", str(scene.kernel.data))
    assert (nowhere.returncode, "say where to" in nowhere.stderr) == (2, True)


def test_an_agent_goes_on_elsewhere_and_repeats_no_payment(
    kernels: tuple[Scene, Scene], parcel: tuple[str, Path], bank: Target
) -> None:
    first, second = kernels
    agent, file = parcel
    key = first.kernel.data / "anchor" / "key.pub"
    done = imported(second, file, "--signed-by", str(key))
    assert done.returncode == 0, done.stderr
    moved = json.loads(done.stdout)
    assert (moved["state"], moved["source"]) == ("paused", agent)
    here = moved["id"]
    assert picture(second.live(here)) == picture(first.live(agent))
    there, now = first.show(agent), second.show(here)
    assert now["thread"] == there["thread"]
    active = {(g["rule"], g["uses_left"], g["origin"]) for g in there["grants"] if g["revoked_at"] is None}
    assert {(g["rule"], g["uses_left"], g["origin"]) for g in now["grants"]} == active
    assert 'state.*: "**"' not in {g["rule"] for g in now["grants"]}
    for name in ("memory", "results", "artifacts"):
        assert items(second, here, name) == items(first, agent, name)
    left = ("id", "rule")
    old = [{k: v for k, v in s.items() if k not in left} for s in first.operator.steps(agent)]
    assert [{k: v for k, v in s.items() if k not in left} for s in second.operator.steps(here)] == old
    # The old chain stays verifiable here, and the new one is.
    assert console("audit", "verify", moved["origin"]).returncode == 0
    exported = [json.loads(line) for line in Path(moved["origin"]).read_text().splitlines()]
    assert exported == first.operator.stream("Audit", agent=agent)
    assert second.operator.ask("AuditVerify")["ok"]
    assert all(p["verified"] for p in second.operator.ask("Points", agent=here, verify=True)["points"])
    second.operator.ask("Send", agent=here, text="welcome")
    (second.live(here) / "go").touch()
    second.operator.ask("Rollback", agent=here, to=str(old[-2]["step"]))  # the test for `go` is asked anew
    (second.live(here) / "go").touch()
    second.operator.ask("Start", agent=here)
    second.await_end(here)
    assert len(bank.deliveries("/pay/once")) == 1
    assert len(bank.deliveries("/pay/twice")) == 1
    (said,) = second.said(here)
    assert said[2:] == [["a thought of its own"], 20_000, "welcome"]
    # Its files can still be put back: the content came along.
    second.operator.ask("Rollback", agent=here, to="3")
    assert (second.live(here) / "big").stat().st_size == 300_000
    assert (second.live(here) / "big").stat().st_uid == (second.live(here) / "one.txt").stat().st_uid


def test_a_running_agent_is_exported_as_it_stands_at_one_moment(
    kernels: tuple[Scene, Scene], tmp_path: Path
) -> None:
    first, second = kernels
    held = first.hold(allow=['fs.*: "/workspace/**"'])
    held.rf.fs.write_text("a", "1")
    held.rf.checkpoint.save({"at": 1})
    held.operator.ask("Send", agent=held.id, text="not read yet")
    file = tmp_path / "running.rfx"
    done = console("export", held.id, "--to", str(file), "--data", str(first.kernel.data))
    assert done.returncode == 0, done.stderr
    held.rf.fs.write_text("a", "2")  # it goes on
    assert first.show(held.id)["process"] == "live"
    moved = json.loads(imported(second, file, "--name", "elsewhere").stdout)
    assert moved["name"] == "elsewhere"
    assert (second.live(moved["id"]) / "a").read_text() == "1"
    assert second.show(moved["id"])["checkpoint"]["step"] == 2
    key = second.key_of(moved["id"])
    waiting = "select body, sender from messages where recipient = %s and taken_step is null"
    ((body, sender),) = second.sql(waiting, key)
    assert body == "not read yet"
    assert sender.startswith("operator:")
    # Also beside the original, as a second agent.
    beside = json.loads(imported(first, file, "--name", "beside").stdout)["id"]
    assert (first.live(beside) / "a").read_text() == "1"
    assert first.show(beside)["thread"] == first.show(held.id)["thread"]
    assert first.operator.ask("AuditVerify")["ok"]


def edited(file: Path, target: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """The same archive with some members changed or left out."""
    with (
        gzip.open(file) as source,
        tarfile.open(fileobj=source) as old,
        gzip.open(target, "wb") as out,
        tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as new,
    ):
        for info in old:
            stream = old.extractfile(info)
            assert stream is not None
            data = change(info.name, stream.read())
            if data is not None:
                info.size = len(data)
                new.addfile(info, io.BytesIO(data))
    return target


def resealed(file: Path, target: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """An export with another `agent.json`, sealed again by somebody who has a key of his own."""
    members: dict[str, str] = {}

    def change(name: str, data: bytes) -> bytes:
        if name == "agent.json":
            data = canonical(edit(json.loads(data)))
        if name == "seal.json":
            key = Ed25519PrivateKey.generate()
            public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
            signature = key.sign(canonical(members)).hex()
            return canonical({"members": members, "public_key": public, "signature": signature})
        members[name] = hashlib.sha256(data).hexdigest()
        return data

    return edited(file, target, change)


def in_journal(edit: Callable[[list[bytes]], list[bytes]]) -> Callable[[str, bytes], bytes]:
    return lambda name, data: b"".join(edit(data.splitlines(True))) if name == "journal.jsonl" else data


CHANGES: dict[str, tuple[Callable[[str, bytes], bytes | None], str]] = {
    "a body": (
        in_journal(lambda rows: [*rows[:4], rows[4].replace(b"workspace", b"workspacf"), *rows[5:]]),
        "record 5 ",
    ),
    "a record taken out": (in_journal(lambda rows: rows[:6] + rows[7:]), "record 7 "),
    "the last record": (in_journal(lambda rows: rows[:-1]), "record "),
    "two records swapped": (in_journal(lambda rows: [*rows[:2], rows[3], rows[2], *rows[4:]]), "record 3 "),
    "the workspace": (
        lambda name, data: data.replace(b"one", b"two") if name == "live.tar" else data,
        "`live.tar`",
    ),
    "a long result": (lambda name, data: data[:-1] + b"!" if name.startswith("blobs/") else data, "`blobs/"),
    "a point's content": (
        lambda name, data: data[:-1] + b"!" if name.startswith("points/blobs/") else data,
        "`points/blobs/",
    ),
    "a point left out": (lambda name, data: None if name == "points/p1.json" else data, "`points/p1.json`"),
    "rights": (
        lambda name, data: data.replace(b'"allow"', b'"ask"') if name == "agent.json" else data,
        "`agent.json`",
    ),
    "the seal": (
        lambda name, data: (
            data.replace(b'"signature":"', b'"signature":"00') if name == "seal.json" else data
        ),
        "seal",
    ),
    "no seal": (lambda name, data: None if name == "seal.json" else data, "`seal.json` is missing"),
    "a later version": (
        lambda name, data: data.replace(b'"version":1', b'"version":2') if name == "format.json" else data,
        "version 2",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_file_is_refused_and_leaves_nothing(
    what: str, kernels: tuple[Scene, Scene], parcel: tuple[str, Path], tmp_path: Path
) -> None:
    second = kernels[1]
    change, named = CHANGES[what]
    before = traces(second)
    done = imported(second, edited(parcel[1], tmp_path / "changed.rfx", change))
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert named in done.stderr
    assert done.stderr.count("\n") == 1
    assert traces(second) == before


def test_an_import_that_a_crash_cut_short_never_runs(
    kernels: tuple[Scene, Scene], parcel: tuple[str, Path]
) -> None:
    second = kernels[1]
    second.kernel.arm("import:filled")
    lost = threading.Thread(target=imported, args=(second, parcel[1], "--name", "half"))
    lost.start()
    second.kernel.await_hit("import:filled")
    second.kernel.kill()
    lost.join()
    second.kernel.disarm("import:filled")
    second.kernel.start()
    (half,) = [a for a in second.operator.ask("List", all=True)["agents"] if a["name"] == "half"]
    assert (half["state"], half["process"]) == ("failed", "none")
    second.operator.ask("Remove", agent="half")
    assert not list((second.kernel.data / "agents").glob(".incoming-*"))
    assert second.operator.ask("AuditVerify")["ok"]
    assert imported(second, parcel[1], "--name", "half").returncode == 0


def test_what_is_no_export_is_refused(
    kernels: tuple[Scene, Scene], parcel: tuple[str, Path], tmp_path: Path
) -> None:
    second = kernels[1]
    before, listed = traces(second), second.sql("select count(*) from agents where state <> 'failed'")
    whole = parcel[1].read_bytes()
    for name, data in (
        ("empty", b""),
        ("text", b"hello"),
        ("half", whole[: len(whole) // 2]),
        ("cut", whole[:-20]),
    ):
        (tmp_path / name).write_bytes(data)
        done = imported(second, tmp_path / name)
        assert done.returncode == 1, (name, done.stderr)
    # Sealed by somebody, and yet no agent: refused, and nothing of it is to be seen.
    forged = resealed(
        parcel[1], tmp_path / "forged", lambda facts: {**facts, "branches": [{"branch": "one"}]}
    )
    done = imported(second, forged)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "bug" not in done.stderr
    other = second.kernel.data / "anchor" / "key.pub"
    assert imported(second, parcel[1], "--signed-by", str(other)).returncode == 1
    assert imported(second, tmp_path / "missing").returncode == 2
    assert imported(second, parcel[1], "--name", "no name").returncode == 2
    homes, _ = traces(second)
    assert homes == before[0]
    assert second.sql("select count(*) from agents where state <> 'failed'") == listed
