"""`rf-call` against a real server: requests, answers, exit status."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from ringfence.agent import call
from ringfence.v1 import syscalls_pb2 as pb


def serve(kernel, name: str, function) -> None:
    kernel.stop()
    kernel.unary[name] = function
    kernel.start()


def refuse(context, code: grpc.StatusCode, reason: str, message: str) -> None:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="ringfence", metadata={"rule": "r1"}))
    context.abort_with_status(
        rpc_status.to_status(status_pb2.Status(code=code.value[0], message=message, details=[packed]))
    )


def test_one_call_prints_all_fields(kernel, capsys):
    seen = {}

    def read(data, context):
        seen["request"] = pb.FsReadRequest.FromString(data)
        seen["metadata"] = dict(context.invocation_metadata())
        return pb.FsReadResponse(data=b"\xff", size_bytes=2**40).SerializeToString()

    serve(kernel, "FsRead", read)
    assert call.main(["fs.read", '{"path": "a", "offset": 3}']) == 0
    assert json.loads(capsys.readouterr().out) == {"data": "/w==", "size_bytes": 2**40, "version": ""}
    assert (seen["request"].path, seen["request"].offset) == ("a", 3)
    assert seen["metadata"]["authorization"] == "Bearer token-of-this-start"


def test_values_rows_and_maps_are_plain_json(kernel, capsys):
    answer = pb.SqlReadResponse(columns=["a", "b", "c"])
    for value in (1, 1.5, {"x": [None, True]}):
        answer.rows.add().values.add().struct_value.update({"v": value})
    serve(kernel, "SqlRead", lambda _data, _context: answer.SerializeToString())
    assert call.main(["sql.read", '{"database": "crm", "statement": "select 1"}']) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == [[{"v": 1}], [{"v": 1.5}], [{"v": {"x": [None, True]}}]]
    assert printed["truncated"] is False
    versions = pb.StateTransactionResponse(versions={"b": 2, "a": 1})
    assert call.plain(versions) == {"versions": {"a": 1, "b": 2}}
    assert call.plain(pb.StateGetResponse(found=False)) == {"found": False, "version": 0}


def test_the_request_may_come_from_standard_input(kernel, capsys, monkeypatch):
    serve(kernel, "StatePut", lambda data, _: pb.StatePutResponse(
        version=int(pb.StatePutRequest.FromString(data).value.number_value)
    ).SerializeToString())  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"key": "k", "value": 7}'))
    assert call.main(["state.put", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": 7}


@pytest.mark.parametrize(
    ("code", "reason", "exit_status"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, "Denied", 3),
        (grpc.StatusCode.PERMISSION_DENIED, "Revoked", 3),
        (grpc.StatusCode.NOT_FOUND, "NoSuchResource", 1),
        (grpc.StatusCode.UNAVAILABLE, "JournalUnavailable", 1),
        (grpc.StatusCode.INVALID_ARGUMENT, "InvalidRequest", 2),
    ],
)
def test_refusals_are_named_with_their_facts(kernel, capsys, code, reason, exit_status):
    serve(kernel, "FsRead", lambda _data, context: refuse(context, code, reason, "`a` can't be read; ask"))
    assert call.main(["fs.read", '{"path": "a"}']) == exit_status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"rf-call: {reason}: `a` can't be read; ask\n  rule: r1\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["fs.rede", "{}"], "there is no action `fs.rede`"),
        (["fs.read", "{"], "can't take this JSON"),
        (["fs.read", '{"pth": "a"}'], "its fields: path, offset, limit"),
    ],
)
def test_wrong_usage_is_one_line(kernel, capsys, arguments, text):
    assert call.main(arguments) == 2
    printed = capsys.readouterr().err
    assert text in printed
    assert printed.count("\n") == 1


def test_no_kernel_is_its_own_status(kernel, capsys, monkeypatch):
    kernel.stop()
    assert call.main(["now"]) == 6
    assert "no kernel answers" in capsys.readouterr().err
    monkeypatch.delenv("RINGFENCE_SOCKET")
    assert call.main(["now"]) == 6
    assert "ringfence submit" in capsys.readouterr().err


def test_every_row_of_the_table_can_be_called():
    service = pb.DESCRIPTOR.services_by_name["SyscallService"]
    assert len(call.rows()) == len(service.methods) - 1
    assert call.rows()["exec.run"].name == "ExecRun"


def test_the_installed_command_works(kernel):
    serve(
        kernel, "Now", lambda _data, _context: pb.NowResponse(time="2026-01-02T03:04:05Z").SerializeToString()
    )
    command = Path(sys.executable).with_name("rf-call")
    done = subprocess.run([command, "now"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"time": "2026-01-02T03:04:05Z"})
