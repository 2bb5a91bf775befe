"""Decisions when something is wrong: bad resources, bugs inside, and questions made to grow the kernel."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from ringfence.policy import engine
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.rules import parse_rule
from ringfence.policy.types import Decision, Request, Resource, Verdict


def policy(*allow: str, deny: tuple[str, ...] = ()) -> AgentPolicy:
    grants = [(f"g{n}", parse_rule(text, rule_id=f"r{n}")) for n, text in enumerate(allow, 1)]
    return AgentPolicy(
        "bot", grants, [parse_rule(text, "deny", rule_id=f"d{n}") for n, text in enumerate(deny, 1)]
    )


def decide(made: AgentPolicy, action: str, resource: Resource = "") -> Decision:
    return made.decide(Request(principal="bot", action=action, resource=resource))


@pytest.mark.parametrize(
    ("action", "resource"),
    [
        ("fs.read", "/workspace/../etc/passwd"),
        ("fs.read", "/etc/passwd"),
        ("fs.read", ("/workspace/a",)),
        ("http.get", "https://H.example/"),
        ("http.get", "https://h.example/%2e%2e/"),
        ("exec.run", ()),
        ("exec.run", ("",)),
        ("nothing.known", "x"),
        ("", ""),
    ],
)
def test_resources_that_are_not_canonical_are_denied_even_where_all_is_allowed(
    action: str, resource: Resource
) -> None:
    made = policy('fs.*: "**"', 'http.*: "**"', "exec.run: *")
    assert decide(made, action, resource).verdict is Verdict.DENY


def test_whatever_breaks_inside_is_a_deny_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy('"*": "**"')
    odd: list[Any] = [["a"], {"a": 1}, None, 7, object(), b"x", ("a", 7), ("a", None)]
    for resource in odd:
        for action in ("fs.read", "exec.run", "sql.read", "http.get", "state.get"):
            decision = decide(made, action, resource)
            assert decision.verdict is Verdict.DENY
            assert decision.reason
            assert made.visible(action, resource) is False
    assert made.decide(None).verdict is Verdict.DENY  # pyright: ignore[reportArgumentType]

    def broken(*_: object) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(engine._Row, "matches", broken)
    decision = decide(policy('fs.read: "/workspace/**"'), "fs.read", "/workspace/a")
    assert decision.verdict is Verdict.DENY
    assert "ZeroDivisionError" in decision.reason
    assert decide(policy(deny=("now",)), "now").verdict is Verdict.DENY


def test_another_agents_question_is_denied() -> None:
    made = policy('fs.read: "/workspace/**"')
    assert (
        made.decide(Request(principal="b", action="fs.read", resource="/workspace/a")).verdict is Verdict.DENY
    )


def test_an_allow_rule_can_not_pass_as_a_deny_or_ceiling() -> None:
    with pytest.raises(ValueError, match="allow rule"):
        AgentPolicy("bot", [], [parse_rule('fs.read: "/workspace/a"')])
    with pytest.raises(ValueError, match="allow rule"):
        AgentPolicy("bot", [], [], [parse_rule('fs.read: "/workspace/a"')])


def test_what_was_denied_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("casbin.enforcer").disabled = False
        made = policy('fs.read: "/workspace/a"')
        decide(made, "fs.read", "/workspace/canary-of-a-denied-call")
        decide(made, "fs.read", "/workspace/a")
    assert not [
        record
        for record in caplog.records
        if record.name.startswith("casbin") and "canary" in record.getMessage()
    ]
    assert not [record for record in caplog.records if "Request" in record.getMessage()]


def test_answers_are_kept_and_bounded() -> None:
    made = policy('fs.read: "/workspace/**"')
    request = Request(principal="bot", action="fs.read", resource="/workspace/a")
    assert made.decide(request) is made.decide(request)
    for number in range(5000):
        decide(made, "fs.read", f"/workspace/{number}")
        decide(made, f"x.{number}", "a")
    assert len(made._decided) <= engine._CACHE_ENTRIES
    assert len(made._actions) <= engine._CACHE_ACTIONS
    long = "/workspace/" + "x" * 2000
    assert decide(made, "fs.read", long).verdict is Verdict.ALLOW
    assert ("fs.read", long) not in made._decided


def test_long_and_odd_resources_give_a_bounded_readable_reason() -> None:
    made = policy('fs.read: "/workspace/**"')
    for resource in ("/workspace/" + "x" * 3000, "/workspace/\x1b[31m", "/workspace/a\nb"):
        reason = decide(made, "fs.write", resource).reason
        assert len(reason) < 700
        assert reason.isprintable()


def test_several_threads_get_the_same_answers() -> None:
    made = policy('fs.read: "/workspace/**"', deny=('fs.*: "**/.env"',))
    wrong: list[str] = []

    def work(seed: int) -> None:
        for number in range(300):
            path = f"/workspace/{seed}/{number}" + ("/.env" if number % 3 == 0 else "")
            expected = Verdict.DENY if number % 3 == 0 else Verdict.ALLOW
            if decide(made, "fs.read", path).verdict is not expected:
                wrong.append(path)

    threads = [threading.Thread(target=work, args=(seed % 2,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
