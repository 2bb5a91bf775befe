"""Operations on what lies outside the workspace and the kernel: commands, HTTP targets, databases."""

from __future__ import annotations

import os
import uuid
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from ringfence.agent import values, wire
from ringfence.agent.errors import CommandFailed, InvalidRequest
from ringfence.agent.operations import Json, Operation, StrPath, b64, unb64

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# --- exec


def exec_run(
    argv: Sequence[StrPath],
    *,
    cwd: StrPath,
    env: Mapping[str, str] | None,
    stdin: str | bytes,
    timeout: float | None,
) -> Operation[values.Command]:
    """Run a command."""
    if isinstance(argv, (str, bytes)):
        raise InvalidRequest("`argv` is one text: pass a list of words, such as `['git', 'status']`")
    words = [os.fspath(word) for word in argv]
    arguments: Json = {"argv": words}
    if os.fspath(cwd):
        arguments["cwd"] = os.fspath(cwd)
    if env:
        arguments["env"] = dict(env)
    if stdin:
        arguments["stdin"] = b64(stdin.encode() if isinstance(stdin, str) else stdin)
    if timeout is not None:
        arguments["timeout_ms"] = max(1, round(timeout * 1000))

    return Operation("exec.run", arguments, _command)


def _command(result: Json) -> values.Command:
    return values.Command(
        exit_code=int(result.get("exit_code", 0)),
        stdout=unb64(result.get("stdout", "")).decode(errors="replace"),
        stderr=unb64(result.get("stderr", "")).decode(errors="replace"),
        stdout_bytes=int(result.get("stdout_bytes", 0)),
        stderr_bytes=int(result.get("stderr_bytes", 0)),
        changed=tuple(result.get("changed", ())),
        reason=result.get("reason", "exit"),
        stdout_ref=result.get("stdout_ref", ""),
        stderr_ref=result.get("stderr_ref", ""),
    )


def require_success(argv: Sequence[StrPath], command: values.Command) -> None:
    """Raise `CommandFailed` where a command did not exit with 0."""
    if command.exit_code == 0:
        return
    line = (command.stderr.strip().splitlines() or [""])[-1]
    words = " ".join(os.fspath(word) for word in argv)
    error = CommandFailed(
        f"`{words}` ended with {command.exit_code} ({command.reason}): {line}".rstrip(": "),
        metadata={"exit_code": str(command.exit_code)},
    )
    error.result = command
    raise error


# --- http


def http_call(
    method: str,
    url: str,
    *,
    json: Any = None,
    data: str | bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Operation[values.Response]:
    """One HTTP request. `json` sets the body and its content type, `data` the body alone."""
    sent = dict(headers or {})
    arguments: Json = {"url": url}
    if json is not None and data is not None:
        raise InvalidRequest("both `json` and `data` are given: a request has one body")
    if json is not None:
        wire.check_plain("the request body", json)
        data = wire.encode(f"http.{method}", json)
        if not any(name.lower() == "content-type" for name in sent):
            sent["content-type"] = "application/json"
    if data is not None:
        arguments["body"] = b64(data.encode() if isinstance(data, str) else data)
    if sent:
        arguments["headers"] = sent
    return Operation(
        f"http.{method}",
        arguments,
        lambda r: values.Response(
            status=int(r.get("status", 0)), headers=r.get("headers", {}), body=unb64(r.get("body", ""))
        ),
    )


# --- sql


def _parameter(value: object) -> Any:
    """Give a parameter as JSON; what JSON lacks goes as the text that PostgreSQL reads for it."""
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, (Decimal, uuid.UUID)):
        return str(value)
    if isinstance(value, timedelta):
        return f"{value.days} days {value.seconds} seconds {value.microseconds} microseconds"
    if isinstance(value, (bytes, bytearray)):
        return "\\x" + bytes(value).hex()
    wire.check_plain("a parameter", value)
    return value


def sql_query(database: str, statement: str, params: Sequence[Any], limit: int) -> Operation[values.Rows]:
    """Run one reading statement."""
    arguments: Json = {
        "database": database,
        "statement": statement,
        "parameters": [_parameter(p) for p in params],
    }
    if limit:
        arguments["limit"] = limit
    return Operation(
        "sql.read",
        arguments,
        lambda r: values.Rows(
            r.get("columns", ()), r.get("rows", ()), truncated=bool(r.get("truncated", False))
        ),
    )


def sql_execute(database: str, statement: str, params: Sequence[Any]) -> Operation[values.SqlResult]:
    """Run one changing statement."""
    arguments: Json = {
        "database": database,
        "statement": statement,
        "parameters": [_parameter(p) for p in params],
    }
    return Operation(
        "sql.write",
        arguments,
        lambda r: values.SqlResult(
            row_count=int(r.get("row_count", 0)), rows=values.Rows(r.get("columns", ()), r.get("rows", ()))
        ),
    )
