"""The table against the design, and the checks that stop the boot."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import msgspec
import pytest
from ringfence.syscalls import table
from ringfence.syscalls.base import Effect, Recovery
from ringfence.syscalls.table import TableError, body_name, build_table, check_struct, table_methods
from ringfence.v1 import options_pb2, syscalls_pb2

READ, WRITE, DESTROY, EXTERNAL = Effect.READ, Effect.WRITE, Effect.DESTROY, Effect.EXTERNAL

# action: effect, recovery, intent first, rollback point. Written out: a descriptor is no witness of its own.
DESIGN = {
    "fs.read": (READ, Recovery.REPEAT, False, False),
    "fs.list": (READ, Recovery.REPEAT, False, False),
    "fs.stat": (READ, Recovery.REPEAT, False, False),
    "fs.search": (READ, Recovery.REPEAT, False, False),
    "fs.write": (WRITE, Recovery.RESTORE, True, True),
    "fs.append": (WRITE, Recovery.RESTORE, True, True),
    "fs.move": (WRITE, Recovery.RESTORE, True, True),
    "fs.delete": (DESTROY, Recovery.RESTORE, True, True),
    "exec.run": (WRITE, Recovery.ROLL_FORWARD, True, True),
    "workspace.commit": (WRITE, Recovery.ROLL_FORWARD, True, True),
    "http.get": (READ, Recovery.REPEAT, True, False),
    "http.head": (READ, Recovery.REPEAT, True, False),
    "http.post": (EXTERNAL, Recovery.KEYED, True, False),
    "http.put": (EXTERNAL, Recovery.KEYED, True, False),
    "http.patch": (EXTERNAL, Recovery.KEYED, True, False),
    "http.delete": (EXTERNAL, Recovery.KEYED, True, False),
    "llm.complete": (READ, Recovery.REPEAT, True, False),
    "sql.read": (READ, Recovery.REPEAT, True, False),
    "sql.write": (WRITE, Recovery.ASK_TARGET, True, True),
    "state.get": (READ, Recovery.REPEAT, False, False),
    "state.put": (WRITE, Recovery.ATOMIC, False, True),
    "state.delete": (WRITE, Recovery.ATOMIC, False, True),
    "state.transaction": (WRITE, Recovery.ATOMIC, False, True),
    "claim.take": (WRITE, Recovery.ATOMIC, False, False),
    "claim.renew": (WRITE, Recovery.ATOMIC, False, False),
    "claim.release": (WRITE, Recovery.ATOMIC, False, False),
    "checkpoint.save": (WRITE, Recovery.ATOMIC, False, False),
    "messages.send": (WRITE, Recovery.ATOMIC, False, False),
    "messages.receive": (WRITE, Recovery.ATOMIC, False, False),
    "tasks.update": (EXTERNAL, Recovery.ATOMIC, False, False),
    "spawn": (WRITE, Recovery.ATOMIC, False, False),
    "memory.append": (WRITE, Recovery.ATOMIC, False, False),
    "memory.search": (READ, Recovery.REPEAT, False, False),
    "artifacts.put": (WRITE, Recovery.ATOMIC, False, False),
    "artifacts.get": (READ, Recovery.REPEAT, False, False),
    "object.list": (READ, Recovery.REPEAT, True, False),
    "object.get": (READ, Recovery.REPEAT, True, False),
    "object.put": (WRITE, Recovery.RESTORE, True, True),
    "object.delete": (DESTROY, Recovery.RESTORE, True, True),
    "mcp.call": (Effect.EXTERNAL, Recovery.KEYED, True, False),
    "mcp.tools": (READ, Recovery.REPEAT, True, False),
    "mcp.resources": (READ, Recovery.REPEAT, True, False),
    "mcp.read": (READ, Recovery.REPEAT, True, False),
    "mcp.prompts": (READ, Recovery.REPEAT, True, False),
    "mcp.prompt": (READ, Recovery.REPEAT, True, False),
    "mcp.complete": (READ, Recovery.REPEAT, True, False),
    "a2a.send": (Effect.EXTERNAL, Recovery.KEYED, True, False),
    "a2a.get": (READ, Recovery.REPEAT, True, False),
    "a2a.cancel": (Effect.EXTERNAL, Recovery.KEYED, True, False),
    "a2a.card": (READ, Recovery.REPEAT, True, False),
    "now": (READ, Recovery.REPEAT, False, False),
    "random": (READ, Recovery.REPEAT, False, False),
    "sleep": (READ, Recovery.REPEAT, True, False),
    "ask": (READ, Recovery.REPEAT, False, False),
}


def test_the_table_is_the_one_of_the_design() -> None:
    rows = build_table()
    assert {row.action: (row.effect, row.recovery, row.intent, row.point) for row in rows.values()} == DESIGN


def test_every_unary_method_is_a_row_and_the_stream_is_none() -> None:
    assert [method.name for method in table_methods()] == [row.method for row in build_table().values()]
    assert "Stream" not in {method.name for method in table_methods()}


def test_a_part_of_the_table_can_be_built() -> None:
    assert list(build_table({"now", "state.get"})) == ["state.get", "now"]


def test_an_unknown_action_is_a_problem() -> None:
    with pytest.raises(TableError, match=r"`fs\.chmod`: no such row"):
        build_table({"now", "fs.chmod"})


def test_a_row_without_a_body_stops_the_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "body_name", lambda action: f"ringfence.syscalls.missing_{action}")
    with pytest.raises(TableError) as caught:
        build_table({"now", "random"})
    assert caught.value.problems == (
        "`now`: has no body; write `ringfence.syscalls.missing_now`",
        "`random`: has no body; write `ringfence.syscalls.missing_random`",
    )


def test_an_import_error_inside_a_body_is_not_taken_for_a_missing_body(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "rf_broken_body.py").write_text("import rf_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(table, "body_name", lambda _action: "rf_broken_body")
    with pytest.raises(ModuleNotFoundError, match="rf_not_there"):
        build_table({"now"})


class _PutArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    key: str = ""
    value: Any = None
    if_version: int | None = None
    claims: dict[str, int] = {}


class _PutResult(msgspec.Struct, frozen=True):
    version: int


def _body(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    module = ModuleType("rf_test_body")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "rf_test_body", module)
    monkeypatch.setattr(table, "body_name", lambda _action: "rf_test_body")


def _plan(arguments: Any, env: Any) -> None: ...
def _transaction(arguments: Any) -> None: ...
def _finish(arguments: Any, done: Any) -> None: ...
async def _run(call: Any, arguments: Any) -> None: ...


GOOD = {
    "Arguments": _PutArguments,
    "Result": _PutResult,
    "plan": _plan,
    "transaction": _transaction,
    "finish": _finish,
}


def test_a_complete_body_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    _body(monkeypatch, **GOOD)
    row = build_table({"state.put"})["state.put"]
    assert (row.arguments, row.waits, row.locates) == (_PutArguments, False, False)
    _body(monkeypatch, **GOOD, wait=_run, locate=_run)
    row = build_table({"state.put"})["state.put"]
    assert (row.waits, row.locates) == (True, True)


def test_what_a_body_may_have_besides_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _body(monkeypatch, **GOOD, wait=_finish, locate=_transaction)
    with pytest.raises(TableError) as caught:
        build_table({"state.put"})
    assert caught.value.problems == (
        "`state.put`: `wait` must be async",
        "`state.put`: `locate` must be async",
    )


@pytest.mark.parametrize("missing", ["Arguments", "Result", "plan", "transaction", "finish"])
def test_each_part_of_an_atomic_body_is_needed(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    _body(monkeypatch, **{name: value for name, value in GOOD.items() if name != missing})
    with pytest.raises(TableError, match=missing):
        build_table({"state.put"})


def test_a_body_that_must_recover_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
        path: str = ""
        data: bytes = b""
        mode: int = 0

    class Result(msgspec.Struct, frozen=True):
        size_bytes: int
        version: str

    _body(monkeypatch, Arguments=Arguments, Result=Result, plan=_plan, run=_run)
    with pytest.raises(TableError, match="lacks `recover`"):
        build_table({"fs.write"})


def test_a_run_that_is_not_async_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _body(monkeypatch, **{**GOOD, "plan": _run})
    with pytest.raises(TableError, match="`plan` must not be async"):
        build_table({"state.put"})


def test_arguments_that_let_unknown_fields_through_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lax(msgspec.Struct, frozen=True, omit_defaults=True):
        key: str = ""
        value: Any = None
        if_version: int | None = None
        claims: dict[str, int] = {}

    _body(monkeypatch, **{**GOOD, "Arguments": Lax})
    with pytest.raises(TableError, match="forbid unknown fields"):
        build_table({"state.put"})


def _struct(fields: dict[str, Any]) -> type[msgspec.Struct]:
    return msgspec.defstruct("S", list(fields.items()))


@pytest.mark.parametrize(
    ("message", "fields", "fault"),
    [
        ("StateGetRequest", {"key": bytes}, "has str"),
        ("StateGetRequest", {"name": str}, "has fields"),
        ("StateGetRequest", {"key": str, "extra": str}, "has fields"),
        (
            "StatePutRequest",
            {"key": str, "value": str, "if_version": int | None, "claims": dict[str, int]},
            "any JSON value",
        ),
        (
            "StatePutRequest",
            {"key": str, "value": Any, "if_version": int, "claims": dict[str, int]},
            "optional",
        ),
        ("RandomResponse", {"data": str}, "has bytes"),
        ("StateTransactionResponse", {"versions": dict[str, str]}, "has int"),
        ("StateTransactionResponse", {"versions": list[int]}, "has a map"),
        ("SqlReadResponse", {"columns": list[str], "rows": list[Any], "truncated": bool}, "list of JSON"),
        ("SqlReadResponse", {"columns": str, "rows": list[list[Any]], "truncated": bool}, "repeated"),
        ("FsListResponse", {"entries": list[dict[str, Any]], "withheld": int}, "has `FileInfo`"),
        ("FsListResponse", {"entries": list[_struct({"path": str})], "withheld": int}, "has fields"),
    ],
)
def test_a_struct_that_differs_from_its_message_is_named(
    message: str, fields: dict[str, Any], fault: str
) -> None:
    descriptor = syscalls_pb2.DESCRIPTOR.message_types_by_name[message]
    problems = list(check_struct(_struct(fields), descriptor, "S"))
    assert len(problems) == 1
    assert fault in problems[0]


def test_a_default_that_the_message_does_not_have_is_named() -> None:
    class Arguments(msgspec.Struct):
        size_bytes: int = 16

    descriptor = syscalls_pb2.DESCRIPTOR.message_types_by_name["RandomRequest"]
    assert "default 16" in next(iter(check_struct(Arguments, descriptor, "Arguments")))


def test_an_empty_default_that_would_be_encoded_is_named() -> None:
    class Arguments(msgspec.Struct):
        reads: dict[str, int] = msgspec.field(default_factory=dict[str, int])
        puts: dict[str, Any] = {}
        deletes: list[str] = []
        claims: dict[str, int] = {}

    descriptor = syscalls_pb2.DESCRIPTOR.message_types_by_name["StateTransactionRequest"]
    problems = list(check_struct(Arguments, descriptor, "Arguments"))
    assert len(problems) == 1
    assert "`Arguments.reads` has a default that is always encoded" in problems[0]


def test_options_that_can_not_be_recovered_are_named() -> None:
    method = next(method for method in table_methods() if method.name == "FsWrite")
    row = options_pb2.Row(
        action="fs.write",
        effect=options_pb2.EFFECT_WRITE,
        recovery=options_pb2.RECOVERY_RESTORE,
        resource_field="nowhere",
    )
    problems = list(table._check_options(method, row))
    assert any("without an intent" in problem for problem in problems)
    assert any("no field `nowhere`" in problem for problem in problems)
    assert len(list(table._check_options(method, options_pb2.Row()))) >= 3


def test_body_names_follow_from_actions() -> None:
    assert body_name("fs.read") == "ringfence.syscalls.fs_read"
    assert body_name("now") == "ringfence.syscalls.now"
