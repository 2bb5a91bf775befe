"""Budgets of bytes: what a call carries is reserved before it runs, counted exactly, and never more than what is left is given out."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from ringfence.agent import (
    BudgetExhausted,
    CallFailed,
    Denied,
    InvalidRequest,
    ReplyCut,
    RingfenceError,
)
from support.model import ModelHost, Turn
from support.scenes import Held, Scene, console, scene_of_its_own
from support.target import Target

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    web: {{type: http, base: "{web}"}}
    shop: {{type: postgres, dsn: "{shop}"}}
    model: {{type: llm, base: "{model}", models: ["m"], max_output: 50000}}
  ceilings: {{budgets: {{total: {{bytes: 1GiB}}}}}}
"""
FILES = ('fs.*: "/workspace/**"', 'exec.run: "*"', 'state.*: "**"')
AROUND = 256


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(tmp_path_factory.mktemp("web") / "web")
    yield target
    target.close()


@pytest.fixture(scope="module")
def model() -> Iterator[ModelHost]:
    host = ModelHost()
    yield host
    host.close()


@pytest.fixture(scope="module")
def shop(postgres_server: Any) -> Iterator[str]:
    name = postgres_server.create()
    dsn = postgres_server.dsn(name)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table wares (id integer primary key, name text)")
        connection.execute("insert into wares select n, repeat('x', 100) from generate_series(1, 500) n")
    yield dsn
    postgres_server.drop(name)


@pytest.fixture(scope="module")
def scene(
    postgres_server: Any, template_database: str, web: Target, model: ModelHost, shop: str
) -> Iterator[Scene]:
    config = CONFIG.format(web=web.base, model=model.base, shop=shop)
    with scene_of_its_own(postgres_server, template_database, config=config) as scene:
        yield scene


def limited(scene: Scene, limit: str, *more: str, allow: tuple[str, ...] = FILES, **kinds: Any) -> Held:
    lines = "\n".join((f"budgets: {{total: {{bytes: {limit}}}, on_exhausted: refuse}}", *more))
    return scene.hold(allow=allow, more=lines, **kinds)


def used(held: Held) -> tuple[float, float]:
    """Bytes used and held."""
    (view,) = (b for b in held.operator.ask("Budget", agent=held.id)["budgets"] if b["name"] == "bytes")
    return view["used"], view["reserved"]


def recorded(held: Held) -> int:
    """What the bodies of the journal come to by hand: arguments and result of every call that ran, content as it is."""
    size = 0
    for (body,) in held.scene.sql(
        "select body from journal where chain = %s and phase in (0, 1) and outcome in ('', 'ok') and step > 0",
        held.scene.key_of(held.id),
    ):
        document = json.loads(bytes(body))
        for part in (document[name] for name in ("arguments", "result") if name in document):
            size += len(json.dumps(part, separators=(",", ":"), ensure_ascii=False).encode())
            for name in ("data", "stdout", "stderr", "stdin"):
                text = part.get(name) or ""
                size -= len(text) - (len(text) // 4 * 3 - text.count("="))
    return size


def test_what_calls_carry_is_what_the_journal_holds_of_them(scene: Scene) -> None:
    held = limited(scene, "100KiB", files={"in.txt": "x" * 100})
    held.rf.fs.read_text("in.txt")
    held.rf.state.put("bytes/a", {"ü": [1, 2.5, None]})
    held.rf.state.get("bytes/a")
    held.rf.now()
    held.rf.exec.run(["sh", "-c", "printf hello; printf oops >&2"])
    assert used(held) == (recorded(held), 0)
    assert held.operator.ask("Budget", agent=held.id)["used"]["bytes"] == recorded(held)
    step = next(s for s in held.steps() if s["action"] == "fs.read")
    assert 100 < step["used"]["bytes"] < 300
    before = used(held)[0]
    held.rf.fs.write_text("out.txt", "y" * 1000)
    assert 1000 < used(held)[0] - before < 1000 + AROUND
    after = used(held)
    # What was denied carries nothing.
    held.refused(Denied, lambda: held.rf.messages.send("nobody", "z" * 1000))
    assert used(held) == after


def test_a_file_that_is_larger_than_what_is_left_is_refused_with_limit_use_and_reset(scene: Scene) -> None:
    held = limited(scene, "10KiB", files={"large": "x" * 9000, "small": "x" * 2000})
    held.rf.fs.read_text("small")
    spent = used(held)[0]
    error = held.refused(BudgetExhausted, lambda: held.rf.fs.read_text("large"))
    facts = error.metadata
    assert (facts["budget"], facts["limit"], facts["used"], facts["reset"]) == (
        "bytes",
        "10240",
        f"{spent:g}",
        "never",
    )
    assert int(facts["asked"]) > 9000
    assert f"ringfence budget {held.id} set bytes " in str(error)
    assert used(held) == (spent, 0)
    shown = console("budget", held.id, "set", "bytes", "64KiB", "--data", str(scene.kernel.data), "--json")
    assert shown.returncode == 0, shown.stderr
    assert len(held.rf.fs.read_text("large")) == 9000
    wrong = console("budget", held.id, "set", "bytes", "many", "--data", str(scene.kernel.data))
    assert (wrong.returncode, "`10MiB`" in wrong.stderr) == (2, True)


def test_an_answer_of_a_host_is_cut_off_at_what_is_left(scene: Scene, web: Target) -> None:
    held = limited(scene, "300KiB", allow=(f'http.*: "{web.base}/**"',))
    assert len(held.rf.http.get(f"{web.base}/a/big?100000").body) == 100000
    spent = used(held)[0]
    assert 100000 < spent < 101000
    held.refused(BudgetExhausted, lambda: held.rf.http.get(f"{web.base}/b/big?400000"))
    now, busy = used(held)
    # Of what was refused the host had sent some, and no more than there was room for.
    assert (spent < now <= 300 << 10, busy) == (True, 0)


def test_a_request_that_was_carried_out_is_never_refused_as_if_it_had_not_been(
    scene: Scene, web: Target
) -> None:
    held = limited(scene, "300KiB", allow=(f'http.*: "{web.base}/**"',))
    error = held.refused(CallFailed, lambda: held.rf.http.post(f"{web.base}/c/big?400000", data=b"pay"))
    assert (error.metadata["sent"], error.metadata["budget"]) == ("yes", "bytes")
    assert "the request was carried out" in str(error)
    assert len(web.deliveries("/c/big")) == 1
    # Where there is no room for an answer at all nothing is sent.
    held.refused(BudgetExhausted, lambda: held.rf.http.post(f"{web.base}/d/big?1", data=b"pay"))
    assert web.deliveries("/d/big") == []


def test_of_an_answer_that_breaks_off_counts_what_came(scene: Scene, web: Target, model: ModelHost) -> None:
    held = limited(scene, "1MiB", allow=(f'http.*: "{web.base}/**"', "llm.complete: m"))
    held.refused(CallFailed, lambda: held.rf.http.get(f"{web.base}/e/cut?50000"))
    spent = used(held)
    assert (50000 < spent[0] < 51000, spent[1]) == (True, 0)
    model.script(Turn(words=("x" * 500,) * 4, cut_after=3))
    asked = functools.partial(
        held.rf.llm.complete,
        model="m",
        messages=[{"role": "user", "content": "go"}],
        max_tokens=50,
        stream=True,
    )
    held.refused(ReplyCut, asked)
    now = used(held)
    assert (1500 <= now[0] - spent[0] < 1500 + AROUND, now[1]) == (True, 0)
    # A reply that can be longer than what is left isn't asked for.
    asked = len(model.asked)
    text = functools.partial(held.rf.llm.complete, model="m", messages=[{"role": "user", "content": "go"}])
    error = held.refused(BudgetExhausted, lambda: text(max_tokens=20_000))
    assert (error.metadata["budget"], len(model.asked)) == ("bytes", asked)


def test_rows_and_output_that_do_not_fit_change_nothing(scene: Scene, shop: str) -> None:
    sql = ("sql.read: {database: shop, tables: [wares]}", "sql.write: {database: shop, tables: [wares]}")
    held = limited(scene, "20KiB", allow=(*FILES, *sql), files={"kept": "k"})
    assert len(held.rf.sql.query("shop", "select * from wares where id <= 20")) == 20
    spent = used(held)
    assert spent == (recorded(held), 0)
    shell = ["sh", "-c", "rm kept; head -c 30000 /dev/zero | tr '\\0' x"]
    held.refused(BudgetExhausted, lambda: held.rf.exec.run(shell))
    assert (held.live / "kept").exists()
    change = "update wares set name = 'y' returning name, repeat('z', 200)"
    held.refused(BudgetExhausted, lambda: held.rf.sql.execute("shop", change))
    with psycopg.connect(shop, autocommit=True) as connection:
        assert connection.execute("select count(*) from wares where name = 'y'").fetchone() == (0,)
    assert used(held) == spent
    held.refused(BudgetExhausted, lambda: held.rf.sql.query("shop", "select * from wares"))
    # What the target had sent by then came from outside.
    assert spent[0] < used(held)[0] <= 20 << 10


def test_parallel_calls_never_carry_more_than_the_limit(scene: Scene) -> None:
    held = limited(scene, "40KiB", files={f"f{nr}": "x" * 5000 for nr in range(16)})
    words: list[str] = []

    def one(number: int) -> None:
        try:
            words.append(f"ok {len(held.rf.fs.read_text(f'f{number}'))}")
        except RingfenceError as error:
            words.append(error.reason)

    held.rf.parallel([functools.partial(one, number) for number in range(16)])
    now, busy = used(held)
    assert set(words) <= {"ok 5000", "BudgetExhausted"}
    assert busy == 0
    assert now <= 40 << 10
    # What is left would not hold another one.
    assert (40 << 10) - now < 5000 + AROUND + 100
    assert words.count("ok 5000") == 8


def test_an_agent_is_parked_for_bytes_and_goes_on_when_they_are_raised(scene: Scene) -> None:
    program = (
        "from ringfence import agent\nwith agent.boot() as rf:\n"
        " for n in range(4): rf.fs.write_text(f'out{n}', 'x' * 3000)\n"
    )
    agent = scene.submit(program, allow=FILES, more="budgets: {total: {bytes: 10k}}")
    ended = scene.operator.wait(agent)
    assert (ended["state"], ended["waiting_for"]) == ("parked", "budget `bytes`")
    assert not (scene.live(agent) / "out3").exists()
    scene.operator.ask("Budget", agent=agent, name="bytes", value="1MiB")
    scene.await_end(agent)
    assert (scene.live(agent) / "out3").exists()


def test_a_child_gets_its_bytes_from_its_parent(scene: Scene) -> None:
    held = limited(scene, "1MiB", allow=(*FILES, 'spawn: "*"'))
    command = ["sh", "-c", "true"]
    held.refused(InvalidRequest, lambda: held.rf.spawn("kid", command))
    held.rf.spawn("kid", command, budgets={"total": {"bytes": "600KiB"}})
    spent = used(held)[0]
    assert 600 << 10 < spent < 602 << 10
    held.refused(
        BudgetExhausted, lambda: held.rf.spawn("kid", command, budgets={"total": {"bytes": "600KiB"}})
    )
    assert used(held) == (spent, 0)


def test_a_condition_asks_how_many_bytes_are_used(scene: Scene) -> None:
    when = "when: [{action: fs.delete, if: {budget: {total: bytes, over: 50%}}, then: deny}]"
    held = limited(scene, "10KiB", when, files={"a": "a", "b": "b"})
    held.rf.fs.delete("a")
    held.rf.fs.write_text("c", "x" * 6000)
    error = held.refused(Denied, lambda: held.rf.fs.delete("b"))
    assert "of the budget `bytes` is used" in str(error)


def test_messages_are_counted_when_they_come_and_held_by_nobody_who_waits(scene: Scene) -> None:
    held = limited(scene, "4MiB", allow=(*FILES, 'messages.receive: "*"'))
    waits = held.rf.thread(held.rf.messages.receive)
    assert held.rf.state.get("nobody/x") is None
    assert used(held)[1] < 1000
    scene.operator.ask("Send", agent=held.id, text="x" * 7000)
    came = waits.result()
    assert came is not None
    assert came.text == "x" * 7000
    assert used(held) == (recorded(held), 0)
