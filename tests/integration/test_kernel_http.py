"""What leaves the system over HTTP: sent once, with one key, to declared targets alone, and recognised after a rollback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ringfence.agent import CallFailed, Denied, InvalidRequest, NoSuchResource
from support.kernels import Refused, eventually
from support.scenes import Held, Scene, scene_of_its_own
from support.target import Target

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    keyed:
      type: http
      base: "{keyed}/v1"
      idempotency_header: Idempotency-Key
      effects: {{"DELETE /**": destroy, "POST /read/*": read}}
    plain: {{type: http, base: "{plain}"}}
"""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, Target]]:
    directory = tmp_path_factory.mktemp("targets")
    both = Target(directory / "keyed"), Target(directory / "plain")
    yield both
    for target in both:
        target.close()


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str, targets: tuple[Target, Target]) -> Iterator[Scene]:
    config = CONFIG.format(keyed=targets[0].base, plain=targets[1].base)
    with scene_of_its_own(postgres_server, template_database, config=config) as scene:
        yield scene


@pytest.fixture(scope="module")
def keyed(targets: tuple[Target, Target]) -> Target:
    return targets[0]


@pytest.fixture(scope="module")
def plain(targets: tuple[Target, Target]) -> Target:
    return targets[1]


def all_http(scene: Scene, *targets: Target, **more: Any) -> Held:
    return scene.hold(
        allow=[*(f'http.*: "{target.base}/**"' for target in targets), 'fs.*: "/workspace/**"'], **more
    )


def test_a_keyed_target_gets_one_key_a_call(scene: Scene, keyed: Target) -> None:
    held = all_http(scene, keyed)
    for _ in range(2):
        assert held.rf.http.post(f"{keyed.base}/v1/keys", json={"pay": 1}).status == 200
    first, second = [d["headers"]["idempotency-key"] for d in keyed.deliveries("/v1/keys")]
    assert first != second  # the same call twice is two calls
    assert [s["effect_id"] for s in held.steps()] == [first, second]
    held.refused(
        InvalidRequest, lambda: held.rf.http.post(f"{keyed.base}/v1/keys", headers={"Idempotency-Key": "x"})
    )
    held.refused(
        InvalidRequest, lambda: held.rf.http.post(f"{keyed.base}/v1/keys", headers={"Authorization": "x"})
    )
    assert len(keyed.deliveries("/v1/keys")) == 2


def refused_by_a_person(held: Held, call: Callable[[], Any]) -> dict[str, Any]:
    """The call asks, and is refused; gives what the person was shown."""
    worker = held.rf.thread(call)
    found: list[dict[str, Any]] = []
    eventually(
        lambda: found.extend(held.operator.ask("Approvals", agent=held.id)["approvals"]) or bool(found),
        "nobody was asked",
    )
    held.operator.ask("Deny", id=found[0]["id"], reason="it would be gone")
    with pytest.raises(Denied):
        worker.result()
    return found[0]


def test_a_destroying_call_without_compensation_is_never_sent_by_a_rule(scene: Scene, keyed: Target) -> None:
    held = all_http(scene, keyed)
    asked = refused_by_a_person(held, lambda: held.rf.http.delete(f"{keyed.base}/v1/volumes/7"))
    assert asked["detail"]["undo"].startswith("can't be undone")
    assert keyed.deliveries("/v1/volumes/7") == []
    step = held.last()
    assert (step["effect"], step["outcome"]) == ("DESTROY", "denied")


def test_redirects_are_shown_and_not_followed(scene: Scene, plain: Target) -> None:
    held = all_http(scene, plain)
    for call in (held.rf.http.get, held.rf.http.post):
        response = call(f"{plain.base}/redirect")
        assert response.status == 302
        assert response.headers["location"].endswith("/elsewhere")
    assert plain.deliveries("/elsewhere") == []


def test_each_hop_of_a_redirect_is_a_call_of_its_own(scene: Scene, keyed: Target, plain: Target) -> None:
    held = scene.hold(
        allow=[
            f'http.*: "{plain.base}/hop/**"',
            f'http.get: "{keyed.base}/v1/end"',
            f'http.*: "{keyed.base}/v1/jobs/*"',
        ]
    )
    get, post = held.rf.http.get, held.rf.http.post
    first = f"{plain.base}/hop/302?{keyed.base}/v1/end"
    assert get(first, headers={"X-Mine": "a"}, follow=3).json() == {"ok": True}
    hops = held.steps()[-2:]
    assert [(one["action"], one["resource"], one["outcome"]) for one in hops] == [
        ("http.get", first, "ok"),
        ("http.get", f"{keyed.base}/v1/end", "ok"),
    ]
    (arrived,) = keyed.deliveries("/v1/end")
    assert "x-mine" not in arrived["headers"]
    # Where nothing allows it, or nothing is declared, a hop is refused like any call.
    held.refused(Denied, lambda: get(f"{plain.base}/hop/301?{plain.base}/elsewhere/secret", follow=3))
    held.refused(Denied, lambda: post(f"{plain.base}/hop/307?{keyed.base}/v1/end", json={}, follow=3))
    for there in (
        "http://127.0.0.1:9/x",
        "http://169.254.169.254/latest",
        f"http://localhost:{plain.port}/hop/x",
    ):
        held.refused(NoSuchResource, lambda there=there: get(f"{plain.base}/hop/308?{there}", follow=3))
    held.refused(InvalidRequest, lambda: get(f"{plain.base}/hop/302?file:///etc/passwd", follow=3))
    # A destruction is not sent elsewhere because a server says so: its own resource decides about it.
    moved = f"{plain.base}/hop/307?{keyed.base}/v1/jobs/7"
    refused_by_a_person(held, lambda: held.rf.http.delete(moved, follow=3))
    assert held.rf.http.delete(f"{plain.base}/hop/302?{keyed.base}/v1/jobs/7", follow=3).status == 302
    assert plain.deliveries("/elsewhere/secret") == keyed.deliveries("/v1/jobs/7") == []
    # 303 and a moved POST are looked at, not sent again; a loop ends.
    assert post(f"{plain.base}/hop/303?{keyed.base}/v1/end", json={"n": 1}, follow=1).json() == {"ok": True}
    assert (keyed.deliveries("/v1/end")[-1]["method"], keyed.deliveries("/v1/end")[-1]["body"]) == ("GET", "")
    before = len(plain.deliveries("/hop/302"))
    assert get(f"{plain.base}/hop/302?302", follow=4).status == 302
    assert len(plain.deliveries("/hop/302")) <= before + 5


def test_only_what_is_declared_and_allowed_is_reached(scene: Scene, keyed: Target, plain: Target) -> None:
    held = scene.hold(allow=['http.*: "**"'])
    for url in (
        f"{keyed.base}/other",
        f"{keyed.base}/v1x",
        "http://127.0.0.1:9/",
        "http://example.com/",
        f"http://localhost:{plain.port}/x",
        f"https://127.0.0.1:{plain.port}/x",
    ):
        held.refused(NoSuchResource, lambda url=url: held.rf.http.get(url))
    for url in (
        f"http://user:pass@127.0.0.1:{plain.port}/x",
        f"{plain.base}/a/../b",
        f"{plain.base}/a/%2e%2e/b",
        f"{plain.base}/a%2fb",
        f"{plain.base}//x",
        f"http://0x7f000001:{plain.port}/x",
        "file:///etc/passwd",
        "http://[::1",
        "",
    ):
        with pytest.raises((InvalidRequest, NoSuchResource)):
            held.rf.http.get(url)
    some = scene.hold(allow=[f'http.get: "{plain.base}/v1/*"'])
    assert some.rf.http.get(f"{plain.base}/v1/items").status == 200
    for path in ("/v1/admin/secrets", "/V1/items", "/v1", "/items"):
        some.refused(Denied, lambda path=path: some.rf.http.get(plain.base + path))
    some.refused(Denied, lambda: some.rf.http.post(f"{plain.base}/v1/items"))
    assert {d["path"] for d in plain.deliveries()} & {
        "/x",
        "/b",
        "/a/b",
        "/v1/admin/secrets",
        "/V1/items",
    } == set()


def test_one_agents_cookies_are_nobody_elses(scene: Scene, plain: Target) -> None:
    first, second = all_http(scene, plain), all_http(scene, plain)
    response = first.rf.http.get(f"{plain.base}/cookies/echo")
    assert "set-cookie" not in response.headers
    second.rf.http.get(f"{plain.base}/cookies/echo")
    first.rf.http.get(f"{plain.base}/cookies/echo")
    assert [d["headers"].get("cookie") for d in plain.deliveries("/cookies/echo")] == [None] * 3


def test_what_was_sent_is_recognised_on_another_branch(scene: Scene, keyed: Target, plain: Target) -> None:
    program = """
import json, sys
from ringfence import agent
job = json.load(sys.stdin)
with agent.boot() as rf:
    rf.fs.append_text("log.txt", "x")
    for base in (job["keyed"], job["plain"]):
        rf.http.post(base + job["path"], json={"pay": 1})
        rf.http.post(base + job["path"], json={"pay": 1})
    rf.fs.append_text("log.txt", "y")
"""
    import json

    job = {"keyed": f"{keyed.base}/v1", "plain": plain.base, "path": "/once"}
    agent = scene.run(
        program,
        input_bytes=json.dumps(job).encode(),
        allow=[f'http.*: "{keyed.base}/**"', f'http.*: "{plain.base}/**"', 'fs.*: "/workspace/**"'],
    )
    sent = (len(keyed.deliveries("/v1/once")), len(plain.deliveries("/once")))
    assert sent == (2, 2)
    preview = scene.operator.ask("Rollback", agent=agent, to="0", preview=True)
    assert [(e["action"], e["effect"]) for e in preview["not_undoable"]] == [("http.post", "EXTERNAL")] * 4
    done = scene.operator.ask("Rollback", agent=agent, to="0", start=True)
    assert done["branch"] == 1
    scene.await_end(agent)
    # Redone on the new branch, recognised, not sent again.
    assert (len(keyed.deliveries("/v1/once")), len(plain.deliveries("/once"))) == (2, 2)
    redone = [s for s in scene.operator.steps(agent) if s["branch"] == 1 and s["action"] == "http.post"]
    assert [s["recognised"] is not None for s in redone] == [True] * 4
    assert (scene.live(agent) / "log.txt").read_text() == "xy"
    assert scene.operator.ask("AuditVerify")["ok"]


def test_a_call_that_may_have_arrived_waits_for_a_person(scene: Scene, plain: Target) -> None:
    program = """
import json, sys
from ringfence import agent
base = sys.stdin.read()
with agent.boot() as rf:
    rf.fs.append_text("log.txt", "x")
    print(json.dumps(rf.http.post(base + "/cut/drop", json={"pay": 1}).status), flush=True)
    rf.fs.append_text("log.txt", "y")
"""
    for outcome, result, expected in (("done", '{"status": 201}', "201"), ("not-done", "", None)):
        before = len(plain.deliveries("/cut/drop"))
        agent = scene.submit(
            program,
            input_bytes=plain.base.encode(),
            allow=[f'http.*: "{plain.base}/**"', 'fs.*: "/workspace/**"'],
            more="restart: {policy: never}",
        )
        ended = scene.operator.wait(agent)
        assert ended["state"] == "unknown"
        assert len(plain.deliveries("/cut/drop")) == before + 1
        step = next(s["step"] for s in scene.operator.steps(agent) if s["outcome"] == "unknown")
        with pytest.raises(Refused) as refused:
            scene.operator.ask("Start", agent=agent)
        assert refused.value.exit_code == 5
        assert scene.show(agent)["waiting_for"] == f"the outcome of step {step}"
        with pytest.raises(Refused) as refused:
            scene.operator.ask("Resolve", agent=agent, step=step, outcome="maybe")
        assert refused.value.exit_code == 2
        scene.operator.ask("Resolve", agent=agent, step=step, outcome=outcome, result=result)
        if expected is not None:
            scene.await_end(agent)
            assert scene.output(agent).split() == [expected]
            assert len(plain.deliveries("/cut/drop")) == before + 1
            assert (scene.live(agent) / "log.txt").read_text() == "xy"
            with pytest.raises(Refused) as refused:
                scene.operator.ask("Resolve", agent=agent, step=step, outcome="done")
            assert refused.value.exit_code in (4, 5)
        else:
            # Made again, as the operator said, once; and unknown once more, for the target hangs up again.
            eventually(
                lambda before=before: len(plain.deliveries("/cut/drop")) == before + 2,
                "it was not made again",
            )
            eventually(lambda agent=agent: scene.show(agent)["state"] == "unknown", "it is not unknown again")
            scene.operator.ask("Kill", agent=agent)


def test_a_failing_target_is_an_answer(scene: Scene, plain: Target, keyed: Target) -> None:
    held = all_http(scene, plain, keyed)
    assert held.rf.http.get(f"{plain.base}/fail").status == 500
    assert held.rf.http.post(f"{keyed.base}/v1/fail").status == 500
    assert [s["outcome"] for s in held.steps()] == ["ok", "ok"]


def test_a_call_that_failed_on_the_way_keeps_its_key(scene: Scene, keyed: Target) -> None:
    held = all_http(scene, keyed)
    for _ in range(2):
        error = held.refused(
            CallFailed, lambda: held.rf.http.post(f"{keyed.base}/v1/pay/drop", json={"n": 1})
        )
        assert error.metadata["sent"] == "maybe"
    # The next start of the program, which replays the two failures, and tries a third time.
    held.operator.ask("Kill", agent=held.id)
    held.operator.ask("Start", agent=held.id)
    held.again()
    for _ in range(3):
        held.refused(CallFailed, lambda: held.rf.http.post(f"{keyed.base}/v1/pay/drop", json={"n": 1}))
    keys = [d["headers"]["idempotency-key"] for d in keyed.deliveries("/v1/pay/drop")]
    # The first failure is answered from the record; the last one of the lane is made afresh.
    assert len(keys) == 4
    assert len(set(keys)) == 1, keys


def test_a_read_carries_no_key(scene: Scene, keyed: Target) -> None:
    held = all_http(scene, keyed)
    assert held.rf.http.get(f"{keyed.base}/v1/none").status == 200
    assert held.rf.http.head(f"{keyed.base}/v1/none").status == 200
    assert held.rf.http.post(f"{keyed.base}/v1/none").status == 200
    sent = [d["headers"].get("idempotency-key") for d in keyed.deliveries("/v1/none")]
    assert sent[:2] == [None, None]
    assert sent[2]
