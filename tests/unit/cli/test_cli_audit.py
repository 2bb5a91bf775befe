from __future__ import annotations

import json
from dataclasses import replace

import pytest
from ringfence.kernel.journal.audit import document_of
from ringfence.kernel.journal.chain import genesis, link, stored_image
from ringfence.kernel.journal.types import Phase, StoredRow

RECORD = {
    "chain": 1,
    "pos": 2,
    "time": "2026-01-31T08:00:00.000000Z",
    "kind": "outcome",
    "action": "fs.write",
    "resource": "/workspace/a\u202e",
    "step": 3,
    "verdict": "allow",
    "outcome": "ok",
    "rule": "r1",
    "hash": "ab",
    "body": {"n": 1},
}


def test_audit(door, run) -> None:
    door.answers["Audit"] = lambda _: [RECORD]
    line = run("audit", "bot").stdout.splitlines()[1]
    assert line.split() == [
        "2026-01-31T08:00:00",
        "3",
        "outcome",
        "fs.write",
        "allow",
        "ok",
        "/workspace/a\\u202e",
    ]
    assert json.loads(run("audit", "--json").stdout) == [RECORD]
    assert [request.agent for _, request in door.requests] == ["bot", ""]


def test_since(door, run) -> None:
    door.answers["Audit"] = lambda _: []
    assert run("audit", "--since", "2026-01-31T10:00:00+02:00").exit_code == 0
    assert door.asked("Audit").since == "2026-01-31T08:00:00.000000Z"
    assert run("audit", "--since", "lately").exit_code == 2


def test_export(door, run, tmp_path) -> None:
    door.answers["Audit"] = lambda _: [RECORD, {**RECORD, "pos": 3}]
    target = tmp_path / "evidence.jsonl"
    result = run("audit", "bot", "--export", target)
    assert (result.exit_code, result.stdout) == (0, f"2 records in {target}\n")
    assert [json.loads(line) for line in target.read_text().splitlines()] == [RECORD, {**RECORD, "pos": 3}]
    assert target.stat().st_mode & 0o777 == 0o600
    assert json.loads(run("audit", "--export", target, "--json").stdout) == {"file": str(target), "rows": 2}


def test_an_export_that_breaks_leaves_the_old_file(door, run, refusal, tmp_path) -> None:
    target = tmp_path / "evidence.jsonl"
    target.write_text("old")
    door.answers["Audit"] = lambda _: [RECORD, refusal("the database can't be used", 6)]
    assert run("audit", "--export", target).exit_code == 6
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["evidence.jsonl"]
    assert target.read_text() == "old"


def test_an_export_to_nowhere(door, run, tmp_path) -> None:
    door.answers["Audit"] = lambda _: [RECORD]
    result = run("audit", "--export", tmp_path / "no" / "file")
    assert result.exit_code == 1
    assert "no such file or directory" in result.stderr


@pytest.mark.parametrize("flags", [(), ("--json",)])
@pytest.mark.parametrize(("ok", "exit_code"), [(True, 0), (False, 1), (None, 1), ("yes", 1)])
def test_verify(ok, exit_code, flags, door, run) -> None:
    report = {
        "ok": ok,
        "rows": 9,
        "chains": 2,
        "anchors": 1,
        "first_bad": {"chain": 1, "pos": 4, "why": "hash"},
    }
    door.answers["AuditVerify"] = report
    result = run("audit", "verify", *flags)
    assert result.exit_code == exit_code
    if flags:
        assert json.loads(result.stdout) == report
    elif exit_code:
        assert (
            "broken: chain 1, record 4: hash; checked 9 rows, 2 chains, 1 anchor; keep the database"
            in result.stderr
        )
    else:
        assert result.stdout == "ok: 9 rows, 2 chains, 1 anchor\n"


def stored(pos: int, before: bytes, body: bytes = b"{}") -> StoredRow:
    row = StoredRow(
        chain=1, pos=pos, phase=Phase.EVENT, step=0, branch=0, lane="", lane_step=0, action="agent.start", resource="", effect="",
        verdict="", outcome="", digest=b"", effect_id="", started_us=1_769_846_400_000_000, duration_us=0, body=body, hash=b"",
    )  # fmt: skip
    return replace(row, hash=link(before, stored_image(row)))


@pytest.fixture
def records() -> list[dict[str, object]]:
    first = stored(1, genesis(1), '{"who": "\u202e\x7f"}'.encode())
    return [document_of(first), document_of(stored(2, first.hash))]


def test_an_export_verifies_offline(records, door, run, tmp_path) -> None:
    door.answers["Audit"] = lambda _: records
    target = tmp_path / "evidence.jsonl"
    assert run("audit", "--export", target).exit_code == 0
    result = run("audit", "verify", target, "--data", tmp_path)
    assert (result.exit_code, result.stdout) == (0, "ok: 2 rows, 1 chain, 0 anchors\n"), result.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("agent.start", "agent.stop", 1), "record 1"),
        (lambda text: text[text.index("\n") + 1 :], "record 1: the record is missing"),
        (lambda _text: "", "no records"),
        (lambda _text: "nonsense\n", "line 1"),
    ],
)
def test_a_changed_export_is_found(change, said, records, door, run, tmp_path) -> None:
    door.answers["Audit"] = lambda _: records
    target = tmp_path / "evidence.jsonl"
    run("audit", "--export", target)
    target.write_text(change(target.read_text()))
    result = run("audit", "verify", target)
    assert result.exit_code == 1
    assert result.stderr.startswith("ringfence: the audit chain is broken: ")
    assert said in result.stderr
    assert json.loads(run("audit", "verify", target, "--json").stdout)["ok"] is False


@pytest.mark.parametrize(
    "words", [("a", "b"), ("verify", "a", "b"), ("verify", "--since", "1h"), ("verify", "/nonexistent")]
)
def test_audit_usage(words, door, run) -> None:
    assert run("audit", *words).exit_code == 2
    assert door.requests == []
