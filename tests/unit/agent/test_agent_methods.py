"""Each method sends what the table's request message takes, and reads what its response message gives."""

from __future__ import annotations

import base64
import datetime as dt
import inspect
import uuid
from decimal import Decimal
from pathlib import PurePosixPath

import pytest
from google.protobuf import json_format, message_factory
from ringfence import agent
from ringfence.agent import aio_exchange, aio_namespaces, aio_state, exchange, models, namespaces, state
from ringfence.agent.aio import AsyncRingfence
from ringfence.agent.call import rows
from ringfence.agent.runtime import Ringfence


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture
def rf(kernel):
    """A booted library whose every request is held against the table."""
    table = rows()
    before = kernel.intercept

    def check(connection, call) -> bool:
        message = message_factory.GetMessageClass(table[call.action].input_type)()
        json_format.Parse(call.arguments, message)  # refuses fields that the message lacks
        return before(connection, call)

    kernel.intercept = check
    with agent.boot() as booted:
        yield booted


def test_fs(kernel, rf, files):
    kernel.bodies |= files({"notes.md": "grün".encode()})
    assert rf.fs.read_text("notes.md") == "grün"
    assert rf.fs.read_bytes(PurePosixPath("notes.md"), 2, 2) == "ü".encode()
    rf.fs.write_text("a", "x", mode=0o600)
    assert kernel.arguments() == {"path": "a", "data": b64(b"x"), "mode": 0o600}
    assert rf.fs.append_text("a", "yz").size_bytes == 3
    with pytest.raises(agent.NoSuchResource):
        rf.fs.read_text("absent")


def test_fs_lists_and_facts(kernel, rf):
    entry = {
        "path": "/workspace/a", "kind": "link", "size_bytes": 3, "mode": 0o777,
        "modified_at": "2026-01-02T03:04:05Z", "target": "b",
    }  # fmt: skip
    kernel.bodies["fs.list"] = lambda _: {"entries": [entry], "withheld": 2}
    kernel.bodies["fs.stat"] = lambda _: {"info": {"path": "/workspace/a", "kind": "directory"}}
    kernel.bodies["fs.search"] = lambda _: {
        "matches": [{"path": "/workspace/a", "line": 4, "text": "x"}],
        "truncated": True,
    }
    found = rf.fs.list()
    assert kernel.arguments() == {"path": "/workspace"}
    assert found.withheld == 2
    assert (found[0].kind, found[0].target, found[0].modified_at) == (
        "link", "b", dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC),
    )  # fmt: skip
    assert rf.fs.stat("a").modified_at is None
    matches = rf.fs.search("src", glob="**/*.py", text="x", limit=1)
    assert kernel.arguments() == {"path": "src", "glob": "**/*.py", "text": "x", "limit": 1}
    assert (matches.truncated, matches[0].line) == (True, 4)


def test_fs_moves_and_deletes(kernel, rf):
    kernel.bodies["fs.move"] = lambda arguments: {"path": "/workspace/" + arguments["to"]}
    kernel.bodies["fs.delete"] = lambda _: {"removed": 3}
    assert rf.fs.move("a", "b") == "/workspace/b"
    assert rf.fs.delete("d", recursive=True) == 3
    assert kernel.arguments() == {"path": "d", "recursive": True}


def test_a_file_beyond_one_call_is_read_in_parts(kernel, rf, files):
    data = bytes(range(256)) * 10
    kernel.bodies |= files({"big": data}, part=1000)
    assert rf.fs.read_bytes("big") == data
    assert [kernel.arguments(n).get("offset", 0) for n in range(3)] == [0, 1000, 2000]
    assert rf.fs.read_bytes("big", 500, 1200) == data[500:1700]


def test_a_file_that_changes_between_parts_is_read_anew(kernel, rf, files):
    stored = {"big": b"a" * 1500}
    bodies = files(stored, part=1000)

    def read(arguments):
        result = bodies["fs.read"](arguments)
        if len(kernel.calls) == 1:
            stored["big"] = b"b" * 1500
        return result

    kernel.bodies["fs.read"] = read
    assert rf.fs.read_bytes("big") == b"b" * 1500

    def always(arguments):
        stored["big"] = str(len(kernel.calls)).encode() * 2000
        return bodies["fs.read"](arguments)

    kernel.bodies["fs.read"] = always
    with pytest.raises(agent.Conflict, match="changed each time"):
        rf.fs.read_bytes("big")


def test_exec(kernel, rf):
    result = {
        "exit_code": 3, "stdout": b64(b"out\xff"), "stderr": b64(b"first\nlast line\n"),
        "stdout_bytes": 9000, "stderr_bytes": 16, "changed": ["/workspace/a"], "reason": "exit",
    }  # fmt: skip
    kernel.bodies["exec.run"] = lambda _: result
    command = rf.exec.run(["git", "status"], cwd="src", env={"A": "1"}, stdin="in", timeout=1.5)
    assert kernel.arguments() == {
        "argv": ["git", "status"], "cwd": "src", "env": {"A": "1"}, "stdin": b64(b"in"), "timeout_ms": 1500,
    }  # fmt: skip
    assert (command.exit_code, command.stdout, command.stdout_bytes) == (3, "out�", 9000)
    assert command.changed == ("/workspace/a",)
    with pytest.raises(agent.CommandFailed, match=r"`git status` ended with 3 \(exit\): last line") as caught:
        rf.exec.run(["git", "status"], check=True)
    assert caught.value.result.exit_code == 3
    assert isinstance(caught.value, agent.CallFailed)
    with pytest.raises(agent.InvalidRequest, match="list of words"):
        rf.exec.run("git status")


def test_http(kernel, rf):
    answer = {
        "status": 404,
        "headers": {"content-type": 'text/plain; charset="latin-1"'},
        "body": b64(b'{"a": "\xfc"}'),
    }
    for method in ("get", "head", "post", "put", "patch", "delete"):
        kernel.bodies[f"http.{method}"] = lambda _: answer
    response = rf.http.get("https://h/x", headers={"accept": "text/plain"})
    assert kernel.arguments() == {"url": "https://h/x", "headers": {"accept": "text/plain"}}
    assert (response.status, response.ok, response.text) == (404, False, '{"a": "ü"}')
    with pytest.raises(agent.CallFailed, match="404"):
        response.raise_for_status()
    rf.http.post("https://h/x", json={"n": 1})
    sent = kernel.arguments()
    assert base64.b64decode(sent["body"]) == b'{"n":1}'
    assert sent["headers"] == {"content-type": "application/json"}
    rf.http.put("https://h/x", json=[1], headers={"Content-Type": "application/x+json"})
    assert kernel.arguments()["headers"] == {"Content-Type": "application/x+json"}
    rf.http.patch("https://h/x", data="grün")
    assert base64.b64decode(kernel.arguments()["body"]) == "grün".encode()
    rf.http.delete("https://h/x")
    assert kernel.arguments() == {"url": "https://h/x"}
    rf.http.head("https://h/x")
    assert kernel.calls[-1].action == "http.head"
    with pytest.raises(agent.InvalidRequest, match="one body"):
        rf.http.post("https://h/x", json={}, data=b"")


def test_sql(kernel, rf):
    kernel.bodies["sql.read"] = lambda _: {
        "columns": ["id", "id", "id_2"], "rows": [[1, 2, None], [3, 4, "x"]], "truncated": True,
    }  # fmt: skip
    kernel.bodies["sql.write"] = lambda _: {"row_count": 2, "columns": ["id"], "rows": [[1], [2]]}
    rows = rf.sql.query("crm", "select 1 where a = %s", [7], limit=2)
    assert rows == [{"id": 1, "id_2": 2, "id_2_2": None}, {"id": 3, "id_2": 4, "id_2_2": "x"}]
    assert (rows.columns, rows.truncated) == (["id", "id_2", "id_2_2"], True)
    params = [
        None, True, 1.5, "t", [1, "a"], Decimal("1.10"), uuid.UUID(int=1), dt.date(2026, 1, 2),
        dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC), dt.timedelta(days=1, seconds=2), b"\x00\xff",
    ]  # fmt: skip
    done = rf.sql.execute("crm", "update t set a = %s", params)
    assert (done.row_count, done.rows) == (2, [{"id": 1}, {"id": 2}])
    assert kernel.arguments()["parameters"] == [
        None, True, 1.5, "t", [1, "a"], "1.10", "00000000-0000-0000-0000-000000000001", "2026-01-02",
        "2026-01-02T03:04:00+00:00", "1 days 2 seconds 0 microseconds", "\\x00ff",
    ]  # fmt: skip
    with pytest.raises(agent.InvalidRequest, match="`set`"):
        rf.sql.query("crm", "select %s", [{1}])


def test_time_and_chance(kernel, rf):
    kernel.bodies["random"] = lambda arguments: {"data": b64(b"\xff" * (arguments["size_bytes"] or 16))}
    kernel.bodies["sleep"] = lambda _: {"time": "2026-01-02T03:04:05Z"}
    assert rf.random() == 1.0 - 2.0**-53
    assert rf.uuid().version == 4
    assert len(rf.random_bytes(5000)) == 5000
    assert [kernel.arguments(n)["size_bytes"] for n in (-2, -1)] == [4096, 904]
    assert rf.random_bytes(0) == b""
    with pytest.raises(agent.InvalidRequest):
        rf.random_bytes(-1)
    assert rf.sleep(1.5).tzinfo is not None
    assert kernel.arguments() == {"duration_ms": 1500}


def test_a_result_an_operator_gave_may_be_anything(kernel, rf):
    kernel.bodies["http.post"] = lambda _: None
    assert rf.http.post("https://h/x").status == 0


PAIRS = [
    (namespaces.Files, aio_namespaces.AsyncFiles),
    (namespaces.Exec, aio_namespaces.AsyncExec),
    (namespaces.Http, aio_namespaces.AsyncHttp),
    (namespaces.Sql, aio_namespaces.AsyncSql),
    (models.Models, models.AsyncModels),
    (state.State, aio_state.AsyncState),
    (exchange.Messages, aio_exchange.AsyncMessages),
    (exchange.Tasks, aio_exchange.AsyncTasks),
    (exchange.Memory, aio_exchange.AsyncMemory),
    (exchange.Artifacts, aio_exchange.AsyncArtifacts),
    (state.Checkpoint, aio_state.AsyncCheckpoint),
    (state.Transaction, aio_state.AsyncTransaction),
    (Ringfence, AsyncRingfence),
]
THREADS_ONLY = {"thread", "parallel", "join"}


def methods(kind: type) -> dict[str, list[tuple[str, object, object]]]:
    return {
        name: [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in THREADS_ONLY
    }


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS, ids=lambda kind: kind.__name__)
def test_both_front_ends_have_the_same_methods(sync, asynchronous):
    assert methods(sync) == methods(asynchronous)


def test_a_model_is_asked_and_its_reply_read(kernel, rf):
    tool = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    kernel.bodies["llm.complete"] = lambda _: {
        "text": "hi", "message": {"role": "assistant", "content": "hi", "tool_calls": [tool]},
        "finish_reason": "stop", "model": "m", "resource": "host", "prompt_tokens": 3, "completion_tokens": 2,
        "cost_usd": 0.5,
    }  # fmt: skip
    done = rf.llm.complete(model="m", messages=({"role": "user", "content": "x"},), max_tokens=5, stop=("a",))
    assert kernel.arguments() == {
        "model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stop": ["a"],
    }  # fmt: skip
    assert (done.text, done.tool_calls, done.estimated, done.cost_usd) == ("hi", (tool,), False, 0.5)
    with pytest.raises(agent.InvalidRequest):
        rf.llm.complete(model="m", messages=[{"role": "user", "content": {1}}])


async def test_the_asyncio_methods_answer_alike(kernel, files, values):
    kernel.bodies |= files({"a": b"abc"}, part=2) | values({"k": (1, 4)})
    kernel.bodies["exec.run"] = lambda _: {"exit_code": 1, "reason": "exit"}
    kernel.bodies["random"] = lambda arguments: {"data": b64(bytes(arguments["size_bytes"]))}
    kernel.bodies["http.get"] = lambda _: {"status": 200, "body": b64(b"[1]")}
    kernel.bodies["sql.read"] = lambda _: {"columns": ["a"], "rows": [[1]]}
    async with agent.boot_async() as rf:
        assert await rf.fs.read_text("a") == "abc"
        await rf.fs.write_text("b", "x")
        await rf.fs.append_text("b", "y")
        assert await rf.fs.read_bytes("b") == b"xy"
        with pytest.raises(agent.CommandFailed):
            await rf.exec.run(["false"], check=True)
        assert (await rf.http.get("https://h/")).json() == [1]
        assert await rf.sql.query("crm", "select 1") == [{"a": 1}]
        assert await rf.random_bytes(5000) == bytes(5000)
        assert await rf.random() == 0.0
        assert (await rf.uuid()).version == 4
        assert await rf.state.get("k") == 1
        assert await rf.state.get("absent", 9) == 9
        async with rf.state.transaction() as tx:
            tx.put("k", await tx.get("k") + 1)
            assert await tx.get("k") == 2
    assert kernel.arguments() == {"reads": {"k": 4}, "puts": {"k": 2}, "deletes": []}
