"""Rules learned from a journal: the same agent under them does the same, and no more."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from ringfence.agent import Denied
from ringfence.kernel.postgres import EmbeddedPostgres
from support.kernels import eventually
from support.scenes import Held, Scene, console, scene_on
from support.target import Target

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    shop: {{type: postgres, embedded: true}}
    web: {{type: http, base: "{base}"}}
"""

FILES: dict[str, Any] = {
    "in/a": "a",
    "in/b": "b",
    "in/c": "c",
    "tree/x": "x",
    "tree/deep/y": "y",
    "old": "old",
}
WIDE = ['fs.*: "/workspace/**"', 'exec.run: "**"', 'state.*: "**"', "sql.*: {database: shop}", 'http.*: "**"']


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(tmp_path_factory.mktemp("web") / "sent")
    yield target
    target.close()


@pytest.fixture(scope="module")
def scene(web: Target) -> Iterator[Scene]:
    with scene_on(None, config=CONFIG.format(base=web.base)) as scene:
        dsn = EmbeddedPostgres(scene.kernel.data).dsn("shop", "shop")
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("create table stock (id int primary key, name text)")
            connection.execute("create table secrets (id int primary key)")
        yield scene


def work(held: Held, base: str) -> None:
    rf = held.rf
    for name in ("a", "b", "c"):
        rf.fs.read_text(f"in/{name}")
        rf.http.get(f"{base}/v1/{name}")
    rf.fs.stat("in/a")
    rf.fs.list("in")
    rf.fs.write_text("out.txt", "out")
    rf.fs.move("old", "moved/new")
    rf.fs.delete("tree", recursive=True)
    rf.exec.run(["sh", "-c", "echo made > made.txt; rm in/c"])
    rf.sql.query("shop", "select s.name from stock s")
    rf.sql.execute("shop", "insert into stock (id, name) values (%s, 'x')", [held.id.__hash__() % 1_000_000])
    with rf.state.transaction() as t:
        t.put("learn/one", (t.get("learn/two") or 0) + 1)
    rf.random()
    held.refused(Denied, lambda: rf.fs.read_text(".env"))
    held.refused(Denied, lambda: rf.sql.query("shop", "select id from secrets"))


def test_an_agent_does_the_same_under_the_rules_it_taught(scene: Scene, web: Target) -> None:
    deny = ['fs.*: "/workspace/.env"', "sql.*: {database: shop, tables: [secrets]}"]
    files = {**FILES, ".env": "hidden"}
    held = scene.hold(allow=WIDE, deny=deny, files=files)
    work(held, web.base)
    found = held.operator.ask("PolicyLearn", agent=held.id, denied=True)
    assert found["uncovered"] == []
    assert {f'http.get: "{web.base}/v1/*"', 'fs.read: "/workspace/in/*"'} <= set(found["allow"])
    assert "**" not in found["yaml"]
    assert '#   - fs.read: "/workspace/.env"' in found["yaml"]
    assert set(found["denied"]) == {
        'fs.read: "/workspace/.env"',
        "sql.read: {database: shop, tables: [secrets]}",
    }
    # Allowing these would change nothing while the denies stand, and it says so.
    assert {one["rule"] for one in found["barred"]} == set(found["denied"])
    assert all("of the manifest" in one["by"] for one in found["barred"])
    assert "stands against these" in found["yaml"]
    head = "apiVersion: ringfence/v1\nkind: Agent\nmetadata: {name: taught}\nspec:\n  run: {command: [sleep, '9']}\n"
    text = head + textwrap.indent(found["yaml"], "  ")
    manifest = scene.kernel.data.parent / "taught.yaml"
    manifest.write_text(text)
    assert console("policy", "lint", str(manifest)).returncode == 0
    taught = scene.hold(allow=found["allow"], ask=found["ask"], files=files)
    work(taught, web.base)
    taught.refused(Denied, lambda: taught.rf.fs.write_text("deep/other.txt", "x"))
    taught.refused(Denied, lambda: taught.rf.exec.run(["sh", "-c", "true"]))
    again = taught.operator.ask("PolicyLearn", agent=taught.id)
    assert set(again["allow"]) == set(found["allow"])


def test_what_was_asked_about_is_asked_about(scene: Scene) -> None:
    program = """
from ringfence import agent
with agent.boot() as rf:
    rf.fs.write_text("asked", "1")
    rf.fs.read_text("asked")
"""
    agent = scene.submit(program, allow=['fs.read: "/workspace/**"'], ask=['fs.write: "/workspace/**"'])
    operator = scene.operator
    eventually(lambda: bool(operator.ask("Approvals")["approvals"]), "no approval came")
    (approval,) = operator.ask("Approvals")["approvals"]
    operator.ask("Approve", id=approval["id"])
    scene.await_end(agent)
    found = operator.ask("PolicyLearn", agent=agent)
    assert (found["allow"], found["ask"]) == (
        ['fs.read: "/workspace/asked"'],
        ['fs.write: "/workspace/asked"'],
    )
