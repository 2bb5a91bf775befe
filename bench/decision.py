"""A policy decision, on its own: warm from the cache of an agent's rights, cold through the engine; alone and in a fleet."""

from __future__ import annotations

import hashlib
import importlib
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import casbin
from ringfence.kernel.journal.types import AgentKey, GrantRecord
from ringfence.kernel.rights import Rights
from ringfence.policy.kernel_file import parse_kernel_file
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.types import Verdict
from ringfence.syscalls.base import Question

from bench.host import Bench, median
from bench.report import Section, Target

RULES = (10, 50, 200)
MANIFEST_RULES = 30
FLEET_RULES = 10_000
COLD_US = 50
"""A decision on what was never asked before, p50, with 30 rules in the manifest."""

TOOLKIT = "agent-governance-toolkit-core"


def measure(bench: Bench) -> Section:
    """Each number of rules; then a fleet, and others with all the rules of the fleet."""
    section = Section(name="decision", title="one policy decision, beside SHA-256 of 1 kB and other engines")
    count = 2000 if bench.quick else 10_000
    hashing = _each(hashlib.sha256, [b"x" * 1024] * count)
    for rules in RULES:
        bench.say(f"{rules} rules")
        rights = _rights(rules)
        questions = [_question(n) for n in range(count)]
        _judge(rights, questions[0])
        warm = _each(lambda asked, rights=rights: _judge(rights, asked), questions[:1] * count)
        cold = _each(lambda asked, rights=rights: _judge(rights, asked), questions[1:])
        section.rows.append(_row(f"Ringfence, {rules} rules", warm, cold, hashing))
    fleet = _fleet(bench, count)
    section.rows.append(
        _row(f"Ringfence, {MANIFEST_RULES} rules, {FLEET_RULES} in the fleet", None, fleet, hashing)
    )
    bench.say("pycasbin")
    for held in (MANIFEST_RULES, FLEET_RULES):
        section.rows.append(_row(f"pycasbin, all {held} rules in one enforcer", None, _casbin(held), hashing))
    bench.say("agent-governance-toolkit")
    for held in (MANIFEST_RULES, FLEET_RULES):
        section.rows.append(_row(f"agent-governance-toolkit, {held} rules", None, _toolkit(held), hashing))
    section.targets.append(
        Target(
            name=f"cold, {MANIFEST_RULES} rules, {FLEET_RULES} in the fleet, p50 µs",
            got=fleet * 1e6,
            wanted=COLD_US,
            at_least=False,
        )
    )
    section.notes.append(
        "cold: a resource never asked before under this policy epoch; warm: any later call on it"
    )
    section.notes.append(
        "pycasbin: an agent, `keyMatch` and an action in every rule; the toolkit: one `matches` in every rule; neither keeps answers"
    )
    if section.rows[-1]["cold µs"] is None:
        section.notes.append(f"the toolkit is not installed; `pip install {TOOLKIT}` brings it")
    return section


def _row(what: str, warm: float | None, cold: float | None, hashing: float) -> dict[str, Any]:
    return {
        "engine": what,
        "warm µs": None if warm is None else warm * 1e6,
        "cold µs": None if cold is None else cold * 1e6,
        "SHA-256 µs": hashing * 1e6,
        "cold/SHA-256": None if cold is None else cold / hashing,
    }


def _question(number: int) -> Question:
    return Question(action="fs.read", resource=f"/workspace/d1/{number}")


def _judge(rights: Rights, question: Question) -> None:
    assert rights.judge((question,), "READ").verdict is Verdict.ALLOW


def _fleet(bench: Bench, count: int) -> float:
    """As many agents as have all the rules together, asked in turn, each time for something new."""
    bench.say("a fleet")
    agents = [_rights(MANIFEST_RULES) for _ in range(-(-FLEET_RULES // MANIFEST_RULES))]
    for rights in agents:
        _judge(rights, _question(0))
    asked = [(agents[n % len(agents)], _question(n)) for n in range(1, count)]
    return _each(lambda one: _judge(*one), asked)


CASBIN_MODEL = """
[request_definition]
r = sub, obj, act
[policy_definition]
p = sub, obj, act, eft
[policy_effect]
e = some(where (p.eft == allow)) && !some(where (p.eft == deny))
[matchers]
m = r.sub == p.sub && keyMatch(r.obj, p.obj) && r.act == p.act
"""


def _casbin(held: int) -> float:
    enforcer: Any = casbin.Enforcer(casbin.Enforcer.new_model(text=CASBIN_MODEL))
    rows = [
        [f"agent{n // MANIFEST_RULES}", f"/workspace/d{n % MANIFEST_RULES}/*", "fs.read", "allow"]
        for n in range(held)
    ]
    enforcer.model.add_policies("p", "p", rows)
    last = rows[-1][0]

    def judge(number: int) -> None:
        assert enforcer.enforce(last, f"/workspace/d1/{number}", "fs.read")

    return _each(judge, range(2000 if held < FLEET_RULES else 30))


def _toolkit(held: int) -> float | None:
    """Agent-governance-toolkit's evaluator of policies; None where it isn't installed."""
    try:
        schema: Any = importlib.import_module("agent_os.policies.schema")
        evaluator: Any = importlib.import_module("agent_os.policies.evaluator")
    except ImportError:
        return None
    rules = [
        schema.PolicyRule(
            name=f"r{n}",
            condition=schema.PolicyCondition(
                field="asked",
                operator="matches",
                value=f"^agent{n // MANIFEST_RULES} fs.read /workspace/d{n % MANIFEST_RULES}/",
            ),
            action="allow",
        )
        for n in range(held)
    ]
    document = schema.PolicyDocument(name="fleet", rules=rules)
    engine = evaluator.PolicyEvaluator([document])
    last = f"agent{(held - 1) // MANIFEST_RULES}"

    def judge(number: int) -> None:
        assert engine.evaluate({"asked": f"{last} fs.read /workspace/d1/{number}"}).allowed

    return _each(judge, range(2000 if held < FLEET_RULES else 30))


def _each(work: Callable[[Any], object], items: Sequence[Any]) -> float:
    """Median seconds of one of many, what the clock itself takes off."""
    clock = time.perf_counter
    taken: list[float] = []
    nothing: list[float] = []
    for item in items:
        began = clock()
        work(item)
        done = clock()
        taken.append(done - began)
        nothing.append(clock() - done)
    return max(0.0, median(taken) - median(nothing))


def _rights(rules: int) -> Rights:
    allow = "\n".join(f'      - fs.read: "/workspace/d{n}/**"' for n in range(rules - 1))
    text = (
        "apiVersion: ringfence/v1\nkind: Agent\nmetadata: {name: bench}\nspec:\n  run: {command: [bench]}\n"
        f'  permissions:\n    allow:\n{allow}\n    deny:\n      - fs.*: "**/.env"\n'
    )
    manifest = parse_manifest(text, "bench.yaml")
    grants = [
        _grant(number, rule.text)
        for number, rule in enumerate(manifest.rules)
        if rule.verdict is Verdict.ALLOW
    ]
    kernel_file = parse_kernel_file("apiVersion: ringfence/v1\nkind: Kernel\nspec: {}\n", "ringfence.yaml")
    return Rights(agent="bench", manifest=manifest, kernel_file=kernel_file, grants=grants, epoch=1)


def _grant(number: int, rule: str) -> GrantRecord:
    return GrantRecord(
        id=f"g{number}",
        agent=AgentKey(1),
        origin="manifest",
        verdict="allow",
        rule=rule,
        created_at=datetime.now(UTC),
        created_by="bench",
        expires_at=None,
        uses_left=None,
        revoked_at=None,
    )
