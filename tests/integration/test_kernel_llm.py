"""A real agent that asks a model over real HTTP: what is sent, what is charged, what a cut reply leaves, who waits."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import (
    BudgetExhausted,
    CallFailed,
    Denied,
    InvalidRequest,
    NoSuchResource,
    QuotaExceeded,
    ReplyCut,
    RingfenceError,
)
from ringfence.agent.aio import boot_async
from support.kernels import eventually
from support.model import ModelHost, Turn
from support.scenes import Held, Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

SECRET = "s3cret-model-key"
CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    model:
      type: llm
      base: "{base}"
      models: ["gpt-*"]
      price: {{input: 10, output: 100}}
      max_output: 500
      auth: {{bearer: {{secret: model-key}}}}
    other: {{type: llm, base: "{base}/other", models: ["gpt-5", "own"], limit_key: max_completion_tokens, effect: external}}
    site: {{type: http, base: "{site}", idempotency_header: Idempotency-Key}}
"""
ALLOW = ('llm.complete: {models: ["gpt-*", own]}',)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def host() -> Iterator[ModelHost]:
    host = ModelHost()
    yield host
    host.close()


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str, host: ModelHost) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        scene.operator.ask("SecretSet", name="model-key", value=SECRET.encode())
        scene.kernel.config.write_text(CONFIG.format(base=host.base, site=host.base.replace("/v1", "/site")))
        scene.operator.ask("Reload")
        yield scene


@pytest.fixture(autouse=True)
def fresh(host: ModelHost) -> None:
    host.script()


def row(held: Held) -> dict[str, Any]:
    return next(a for a in held.operator.ask("List", all=True)["agents"] if a["id"] == held.id)


def view(held: Held, name: str) -> dict[str, Any]:
    return next(b for b in held.operator.ask("Show", agent=held.id)["budgets"] if b["name"] == name)


def test_a_reply_comes_back_and_is_settled_by_its_usage(scene: Scene, host: ModelHost) -> None:
    held = scene.hold(allow=ALLOW, more="budgets: {total: {tokens: 10k, usd: 1}}")
    done = held.rf.llm.complete(model="gpt-4o", messages=HELLO, max_tokens=50, temperature=0.5)
    assert (done.text, done.finish_reason, done.model, done.resource) == (
        "Good day.",
        "stop",
        "gpt-4o",
        "model",
    )
    assert (done.prompt_tokens, done.completion_tokens, done.estimated) == (11, 7, False)
    assert done.cost_usd == pytest.approx((11 * 10 + 7 * 100) / 1e6)
    (asked,) = host.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == f"Bearer {SECRET}"
    assert asked.body == {"model": "gpt-4o", "messages": HELLO, "max_tokens": 50, "temperature": 0.5}
    tokens = view(held, "tokens")
    assert (tokens["used"], tokens["reserved"], tokens["left"]) == (18, 0, 9982)
    assert (row(held)["tokens"], row(held)["cost_usd"]) == (18, pytest.approx(0.00081))
    step = held.last()
    assert (step["resource"], step["effect"], step["attempts"]) == ("gpt-4o", "READ", 1)
    assert step["used"] == {"tokens": 18, "usd": pytest.approx(0.00081)}


def test_a_streamed_reply_is_put_together(scene: Scene, host: ModelHost) -> None:
    host.script(Turn(words=("Gr\u00fc\u00df ", "Gott, ", "\u6f22\u5b57"), usage=(5, 9)), Turn(tool=True))
    held = scene.hold(allow=ALLOW)
    done = held.rf.llm.complete(model="gpt-4o", messages=HELLO, stream=True)
    assert (done.text, done.finish_reason) == ("Gr\u00fc\u00df Gott, \u6f22\u5b57", "stop")
    assert (done.prompt_tokens, done.completion_tokens, done.estimated) == (5, 9, False)
    assert host.asked[0].body["stream_options"] == {"include_usage": True}
    assert host.asked[0].body["max_tokens"] == 500
    tools = held.rf.llm.complete(
        model="gpt-4o",
        messages=HELLO,
        stream=True,
        tools=[{"type": "function", "function": {"name": "look"}}],
    )
    assert [call["function"] for call in tools.tool_calls] == [{"name": "look", "arguments": '{"a":1}'}]


def test_both_front_ends_ask_the_same(scene: Scene, host: ModelHost, monkeypatch: pytest.MonkeyPatch) -> None:
    held = scene.hold(allow=ALLOW)
    monkeypatch.setenv("RINGFENCE_SOCKET", str(held.socket))
    monkeypatch.setenv("RINGFENCE_TOKEN", held.token)

    async def ask() -> Any:
        async with boot_async() as rf:
            return await rf.llm.complete(model="own", messages=HELLO, resource="other", max_tokens=3)

    assert asyncio.run(ask()).text == "Good day."
    assert host.asked[0].path == "/v1/other/chat/completions"
    assert host.asked[0].body["max_completion_tokens"] == 3
    assert held.last()["effect"] == "EXTERNAL"


def test_what_can_not_be_asked_is_said(scene: Scene, host: ModelHost) -> None:
    held = scene.hold(allow=('llm.complete: "gpt-4*"', "llm.complete: nobody"))
    ask = held.rf.llm.complete
    held.refused(Denied, lambda: ask(model="gpt-5", messages=HELLO, resource="model"))
    assert "name one with `resource`" in str(
        held.refused(InvalidRequest, lambda: ask(model="gpt-5", messages=HELLO))
    )
    held.refused(NoSuchResource, lambda: ask(model="nobody", messages=HELLO))
    held.refused(NoSuchResource, lambda: ask(model="gpt-4o", messages=HELLO, resource="other"))
    held.refused(InvalidRequest, lambda: ask(model="gpt-4o", messages=[]))
    error = held.refused(InvalidRequest, lambda: ask(model="gpt-4o", messages=HELLO, max_tokens=501))
    assert "at most 500" in str(error)
    assert host.asked == []


def test_a_prompt_that_is_too_long_is_never_sent(scene: Scene, host: ModelHost) -> None:
    held = scene.hold(allow=ALLOW, more="budgets: {context: {max_tokens: 100, on_overflow: refuse}}")
    error = held.refused(
        QuotaExceeded,
        lambda: held.rf.llm.complete(model="gpt-4o", messages=[{"role": "user", "content": "word " * 200}]),
    )
    assert error.metadata["limit"] == "100"
    assert int(error.metadata["used"]) > 200
    assert "send fewer or shorter messages" in str(error)
    assert host.asked == []
    assert held.rf.llm.complete(model="gpt-4o", messages=HELLO).text == "Good day."


def test_a_cut_stream_is_charged_by_what_came(scene: Scene, host: ModelHost) -> None:
    words = ("One two three four five. ", "Six seven eight nine ten. ", "never sent")
    host.script(
        Turn(words=words, cut_after=2),
        Turn(words=words, cut_after=3, finish=None, usage=(40, 20)),
        Turn(words=words, last_error=f"overloaded, key {SECRET}"),
        Turn(words=words, finish=None, usage=None),
    )
    held = scene.hold(allow=ALLOW, more="budgets: {total: {tokens: 10k}}")

    def cut() -> RingfenceError:
        return held.refused(
            ReplyCut, lambda: held.rf.llm.complete(model="gpt-4o", messages=HELLO, stream=True)
        )

    torn = cut()
    assert torn.metadata["partial"] == "".join(words[:2])
    counted = int(torn.metadata["tokens"])
    assert 10 < counted < 100
    assert view(held, "tokens")["used"] == counted
    assert "as counted here" in str(torn)
    by_usage = cut()
    assert (by_usage.metadata["tokens"], by_usage.metadata["partial"]) == ("60", "".join(words))
    assert view(held, "tokens")["used"] == counted + 60
    said = cut()
    assert "overloaded" in str(said)
    assert SECRET not in str(said)
    assert cut().metadata["partial"] == "".join(words)
    assert view(held, "tokens")["reserved"] == 0
    assert [s["outcome"] for s in held.steps()] == ["error"] * 4


def test_a_stream_with_a_part_that_can_not_be_read_is_cut_there(scene: Scene, host: ModelHost) -> None:
    host.script(Turn(words=("One ", "two ", "three"), garbage_after=1, usage=(40, 20)))
    held = scene.hold(allow=ALLOW, more="budgets: {total: {tokens: 10k}}")
    error = held.refused(ReplyCut, lambda: held.rf.llm.complete(model="gpt-4o", messages=HELLO, stream=True))
    assert "can't be read" in str(error)
    assert error.metadata["partial"] == "One "
    assert view(held, "tokens")["used"] == float(error.metadata["tokens"]) > 0
    assert view(held, "tokens")["reserved"] == 0


def test_a_reply_of_which_nothing_came_keeps_its_reservation(scene: Scene, host: ModelHost) -> None:
    host.script(Turn(cut_after=0))
    held = scene.hold(allow=ALLOW, more="budgets: {total: {tokens: 10k}}")
    error = held.refused(
        ReplyCut, lambda: held.rf.llm.complete(model="gpt-4o", messages=HELLO, max_tokens=200)
    )
    assert view(held, "tokens")["used"] == float(error.metadata["tokens"]) > 200
    assert view(held, "tokens")["reserved"] == 0


def test_a_refusal_of_the_host_costs_nothing_and_tells_no_secret(scene: Scene, host: ModelHost) -> None:
    bad = {"error": {"message": f"bad\nkey {SECRET}\u202e", "code": "invalid"}}
    spent = {"error": {"message": "no money", "code": "insufficient_quota"}}
    host.script(
        Turn(status=400, body=bad),
        Turn(status=429, body=spent),
        Turn(body={"no": "reply"}),
        Turn(words=(SECRET,)),
    )
    held = scene.hold(allow=ALLOW, more="budgets: {total: {tokens: 10k}}")
    ask = lambda: held.rf.llm.complete(model="gpt-4o", messages=HELLO)  # noqa: E731
    error = held.refused(CallFailed, ask)
    assert (error.metadata["status"], str(error).count("\n")) == ("400", 0)
    assert SECRET not in str(error)
    assert "\u202e" not in str(error)
    assert "no money" in str(held.refused(CallFailed, ask))
    assert len(host.asked) == 2  # neither was sent again
    assert view(held, "tokens")["used"] == 0
    held.refused(CallFailed, ask)
    assert held.rf.llm.complete(model="gpt-4o", messages=HELLO).text == "[redacted]"
    rows = scene.sql("select count(*) from journal where position(%s::bytea in body) > 0", SECRET.encode())
    assert rows == [(0,)]


def test_eight_at_once_against_one_budget(scene: Scene, host: ModelHost) -> None:
    """C49: each may take 900 of 1 000; one is sent, the others hear what is left and that it does not come back."""
    host.script(Turn(hold=True, usage=(20, 30)))
    held = scene.hold(allow=ALLOW, more="budgets: {total: {tokens: 1000}, on_exhausted: refuse}")
    held.rf.now()
    outcomes: list[Any] = []
    refused = threading.Semaphore(0)

    def ask() -> None:
        # The prompt counts as some tokens more than what is asked for the reply.
        try:
            outcomes.append(held.rf.llm.complete(model="gpt-4o", messages=HELLO, max_tokens=500))
        except BudgetExhausted as error:
            outcomes.append(error)
            refused.release()

    def let_go() -> None:
        for _ in range(7):
            refused.acquire()
        host.go.set()

    watcher = threading.Thread(target=let_go)
    watcher.start()
    held.rf.parallel([ask] * 8, limit=8)
    watcher.join()
    errors = [o for o in outcomes if isinstance(o, BudgetExhausted)]
    assert len(errors) == 7
    assert len(host.asked) == 1
    for error in errors:
        facts = error.metadata
        assert int(facts["left"]) == 1000 - int(facts["reserved"])
        assert int(facts["left"]) < int(facts["asked"])
        assert facts["reset"] == "never"
    assert view(held, "tokens")["used"] == 50
    # What the one did not take is there again.
    assert held.rf.llm.complete(model="gpt-4o", messages=HELLO, max_tokens=500).text == "Good day."


def test_a_crash_keeps_the_reservation_and_the_second_attempt_settles_it(
    scene: Scene, host: ModelHost
) -> None:
    program = """
from ringfence import agent
with agent.boot() as rf:
    rf.llm.complete(model="gpt-4o", messages=[{"role": "user", "content": "hello"}], max_tokens=400, stream=True)
"""
    host.script(Turn(hold=True, usage=(20, 30)))
    scene.kernel.arm("llm.complete:mid_stream")
    agent = scene.submit(program, allow=ALLOW, more="budgets: {total: {tokens: 500, usd: 1}}")
    scene.kernel.await_hit("llm.complete:mid_stream")
    scene.kernel.kill()
    scene.kernel.disarm("llm.complete:mid_stream")
    scene.kernel.arm("llm.complete:before_effect")
    scene.kernel.start()
    scene.kernel.await_hit("llm.complete:before_effect")
    tokens = next(b for b in scene.show(agent)["budgets"] if b["name"] == "tokens")
    # 500 would not hold it twice.
    assert (tokens["used"], tokens["reserved"] > 400) == (0, True)
    host.go.set()
    scene.kernel.disarm("llm.complete:before_effect")
    scene.await_end(agent)
    tokens = next(b for b in scene.show(agent)["budgets"] if b["name"] == "tokens")
    assert (tokens["used"], tokens["reserved"]) == (50, 0)
    assert len(host.asked) == 2
    step = next(s for s in scene.operator.steps(agent) if s["action"] == "llm.complete")
    assert (step["outcome"], step["attempts"], step["used"]["tokens"]) == ("ok", 2, 50)
    # The same from the journal alone.
    scene.kernel.kill()
    scene.kernel.start()
    known = next(a for a in scene.operator.ask("List", all=True)["agents"] if a["id"] == agent)
    assert (known["tokens"], known["cost_usd"]) == (50, pytest.approx((20 * 10 + 30 * 100) / 1e6))


def test_arguments_that_look_like_amounts_count_for_nothing(scene: Scene, host: ModelHost) -> None:
    held = scene.hold(allow=ALLOW)
    held.rf.llm.complete(
        model="gpt-4o", messages=[{"role": "user", "content": "x", "used": {"tokens": 9, "usd": 9}}]
    )
    assert row(held)["tokens"] == 18


def test_five_agents_share_one_cool_down(scene: Scene, host: ModelHost) -> None:
    """C50: a storm of 3 s whose answers ask for 2 s; nothing is sent while the upstream is left alone."""
    helds = [scene.hold(allow=ALLOW) for _ in range(5)]
    for held in helds:
        held.rf.now()
    host.script(Turn())
    host.storm_s = 3.0
    ask = lambda held: held.rf.llm.complete(model="gpt-4o", messages=HELLO).text  # noqa: E731
    workers = [helds[0].rf.thread(ask, helds[0])]
    eventually(lambda: 429 in host.statuses(), "the storm did not begin")
    workers += [held.rf.thread(ask, held) for held in helds[1:]]
    assert [worker.result() for worker in workers] == ["Good day."] * 5
    # Alone they would send two each into it; together they send one at a time.
    assert host.statuses().count(429) <= 4
    assert host.statuses().count(200) == 5
    assert all(s["outcome"] == "ok" for held in helds for s in held.steps())


def test_agents_take_turns_at_the_rate_of_a_resource(scene: Scene, host: ModelHost) -> None:
    base = host.base.replace("/v1", "/paced")
    more = f'    paced: {{type: http, base: "{base}", rate: 3/s}}\n'
    scene.kernel.config.write_text(
        CONFIG.format(base=host.base, site=host.base.replace("/v1", "/site")) + more
    )
    scene.operator.ask("Reload")
    busy, quiet = (scene.hold(allow=(f'http.get: "{base}/**"',)) for _ in range(2))
    quiet.rf.now()
    get = [functools.partial(busy.rf.http.get, f"{base}/busy") for _ in range(12)]
    worker = busy.rf.thread(busy.rf.parallel, get)
    eventually(lambda: len(host.asked) >= 3, "nothing was asked")
    quiet.rf.http.get(f"{base}/quiet")
    worker.result()
    places = [asked.path.rpartition("/")[2] for asked in host.asked]
    assert (places.count("busy"), places.count("quiet")) == (12, 1)
    # Nine of the other were in the line before it.
    assert places.index("quiet") < 9, places


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Retry-After": "3600"}, {}),
        ({"Retry-After": "Wed, 21 Oct 2015 08:28:00 GMT", "Date": "Wed, 21 Oct 2015 07:28:00 GMT"}, {}),
        ({}, {"error": {"message": "Rate limit reached. Please try again in 1h0m0s."}}),
    ],
)
def test_a_wait_that_is_too_long_is_told_at_once(
    scene: Scene, host: ModelHost, headers: dict[str, str], body: Any
) -> None:
    # A path of its own for each: the cool-down is the upstream's, and lasts.
    name = f"long{abs(hash(str(headers) + str(body)))}"
    host.script(Turn(status=429, headers=headers, body=body))
    text = CONFIG.format(base=host.base, site=host.base.replace("/v1", f"/{name}"))
    scene.kernel.config.write_text(text)
    scene.operator.ask("Reload")
    base = host.base.replace("/v1", f"/{name}")
    held, other = (scene.hold(allow=(f'http.*: "{base}/**"',)) for _ in range(2))
    error = held.refused(QuotaExceeded, lambda: held.rf.http.get(f"{base}/a"))
    assert 3_590_000 < int(error.metadata["retry_after_ms"]) <= 3_600_001
    # Another agent does not ask at all, whatever its verb.
    other.refused(QuotaExceeded, lambda: other.rf.http.post(f"{base}/b", json={}))
    assert len(host.asked) == 1
    assert [s["outcome"] for s in held.steps() + other.steps()] == ["refused", "refused"]


def test_a_call_that_is_larger_than_the_whole_total_is_refused_and_parks_nobody(
    scene: Scene, host: ModelHost
) -> None:
    host.script(Turn(usage=(20, 30)))
    held = scene.hold(allow=ALLOW, more="budgets: {total: {tokens: 300}}")
    error = held.refused(
        BudgetExhausted, lambda: held.rf.llm.complete(model="gpt-4o", messages=HELLO, max_tokens=400)
    )
    assert (error.metadata["limit"], error.metadata["left"]) == ("300", "300")
    assert "is too small for this" in str(error)
    assert host.asked == []
    assert held.rf.llm.complete(model="gpt-4o", messages=HELLO, max_tokens=200).text == "Good day."
    assert scene.show(held.id)["process"] == "live"


def test_an_agent_that_would_be_parked_waits_for_calls_under_way(scene: Scene, host: ModelHost) -> None:
    program = """
from ringfence import agent
with agent.boot() as rf:
    ask = lambda: rf.llm.complete(model="gpt-4o", messages=[{"role": "user", "content": "hello"}], max_tokens=400)
    rf.parallel([ask, ask])
    rf.llm.complete(model="gpt-4o", messages=[{"role": "user", "content": "hello"}], max_tokens=500)
"""
    host.script(Turn(hold=True, usage=(20, 30)), Turn(usage=(20, 30)))
    agent = scene.submit(program, allow=ALLOW, more="budgets: {total: {tokens: 600}}")
    assert host.holding.wait(60)
    eventually(lambda: len(scene.operator.steps(agent)) >= 1, "nothing is under way")
    assert len(host.asked) == 1
    assert scene.show(agent)["state"] == "running"
    host.go.set()
    # Both are settled for 50; the third asks for more than what is left of 600, which no call gives back.
    scene.await_end(agent, "parked")
    assert [s["outcome"] for s in scene.operator.steps(agent)] == ["ok", "ok", "refused"]
    shown = scene.operator.ask("Budget", agent=agent)
    assert (shown["waiting_for"], shown["used"]["tokens"]) == ("budget `tokens`", 100)
    scene.operator.ask("Budget", agent=agent, name="tokens", value="1k")
    scene.await_end(agent)
    assert len(host.asked) == 3
