"""A policy decision, on its own: warm from the cache of an agent's rights, cold through the engine."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from ringfence.kernel.journal.types import AgentKey, GrantRecord
from ringfence.kernel.rights import Rights
from ringfence.policy.kernel_file import parse_kernel_file
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.types import Verdict
from ringfence.syscalls.base import Question

from bench.host import Bench, median
from bench.report import Section

RULES = (10, 50, 200)


def measure(bench: Bench) -> Section:
    """Each number of rules; the reference is SHA-256 of one kilobyte."""
    section = Section(name="decision", title="one policy decision, beside SHA-256 of 1 kB")
    count = 2000 if bench.quick else 10_000
    hashing = _each(hashlib.sha256, [b"x" * 1024] * count)
    for rules in RULES:
        rights = _rights(rules)

        def judge(question: Question, rights: Rights = rights) -> None:
            assert rights.judge((question,), "READ").verdict is Verdict.ALLOW

        questions = [Question(action="fs.read", resource=f"/workspace/d1/{n}") for n in range(count)]
        judge(questions[0])
        warm, cold = _each(judge, questions[:1] * count), _each(judge, questions[1:])
        section.rows.append(
            {
                "rules": rules,
                "warm µs": warm * 1e6,
                "cold µs": cold * 1e6,
                "SHA-256 µs": hashing * 1e6,
                "warm/SHA-256": warm / hashing,
                "cold/SHA-256": cold / hashing,
            }
        )
    section.notes.append(
        "cold: a resource never asked before under this policy epoch; warm: any later call on it"
    )
    return section


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
