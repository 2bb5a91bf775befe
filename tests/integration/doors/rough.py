"""A rough program at its doors: cuts, doesn't read, sends what nobody understands, and comes twice at once."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from typing import Any

KEY = {"Authorization": "Bearer " + os.environ["RINGFENCE_TOKEN"]}
JSON = {**KEY, "Content-Type": "application/json"}
MCP = {**JSON, "Accept": "application/json, text/event-stream"}
INITIALIZE = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "rough", "version": "1"},
}


def say(name: str, what: Any) -> None:
    sys.stdout.write(json.dumps([name, what]) + "\n")
    sys.stdout.flush()


def post(path: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", 7080)
    with contextlib.closing(connection):
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def request(method: str, number: int, **params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode()


def told(body: bytes) -> Any:
    """A message, as JSON or as the one event of a stream."""
    for line in body.splitlines():
        if line.startswith(b"data: {"):
            return json.loads(line[6:])
    return json.loads(body)


def model(name: str, word: str = "hello", **more: Any) -> bytes:
    return json.dumps(
        {"model": f"gpt-{name}", "messages": [{"role": "user", "content": word}], "max_tokens": 9, **more}
    ).encode()


def models() -> None:
    """What becomes of replies that are none."""
    for kind in ("fine", "large", "garbage", "html", "cut"):
        status, _, body = post("/v1/chat/completions", model(kind), JSON)
        said = json.loads(body)
        say(
            kind,
            [status, said["error"]["message"] if "error" in said else said["choices"][0]["finish_reason"]],
        )
    for kind in ("large", "garbage", "html"):
        status, headers, body = post("/v1/chat/completions", model(kind, stream=True), JSON)
        ends = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")] or [
            json.loads(body)
        ]
        say(
            f"{kind} stream",
            [status, headers["content-type"].partition(";")[0], "error" in ends[-1], b"[DONE]" in body],
        )


def slow() -> None:
    """Asks for a long stream and reads it when somebody says so."""
    sent = model("long", stream=True)
    head = "".join(
        f"{name}: {value}\r\n" for name, value in {**JSON, "Content-Length": str(len(sent))}.items()
    )
    with socket.create_connection(("127.0.0.1", 7080)) as link:
        link.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{head}\r\n".encode()
            + sent
        )
        say("asked", True)
        subprocess.run(["rf-call", "messages.receive"], stdout=subprocess.DEVNULL, check=True)
        size, end = 0, b""
        while part := link.recv(1 << 20):
            size, end = size + len(part), (end + part)[-400:]
        say("read", [size > 10 << 20, b"[DONE]" in end, b'"stop"' in end])


def opened() -> dict[str, str]:
    """Headers of a session over HTTP."""
    _, headers, _ = post("/mcp", request("initialize", 1, **INITIALIZE), MCP)
    session = {**MCP, "mcp-session-id": headers["mcp-session-id"], "mcp-protocol-version": "2025-11-25"}
    post("/mcp", b'{"jsonrpc": "2.0", "method": "notifications/initialized"}', session)
    return session


def tools() -> None:
    """Does the same to the server of tools."""
    session = opened()
    for name, body, headers in (
        ("garbage", b'{"jsonrpc": "2.0", "id": 1, "meth', session),
        (
            "surrogate",
            rb'{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "\ud83d"}}',
            session,
        ),
        ("html", b"<html></html>", {**session, "Content-Type": "text/html"}),
        ("large", b" " * (5 << 20), session),
    ):
        status, _, answer = post("/mcp", body, headers)
        with contextlib.suppress(ValueError):
            answer = json.loads(answer)["error"]["code"]
        say(name, [status, answer if isinstance(answer, int) else len(answer)])
    with socket.create_connection(("127.0.0.1", 7080)) as link:
        head = "".join(f"{name}: {value}\r\n" for name, value in {**session, "Content-Length": "100"}.items())
        link.sendall(f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:7080\r\n{head}\r\n".encode() + b'{"jsonrpc"')
    # Reads nothing of a long answer, and goes.
    body = request("tools/call", 2, name="fs_read", arguments={"path": "long.txt"})
    with socket.create_connection(("127.0.0.1", 7080)) as link:
        head = "".join(
            f"{name}: {value}\r\n" for name, value in {**session, "Content-Length": str(len(body))}.items()
        )
        link.sendall(f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:7080\r\n{head}\r\n".encode() + body)
        link.recv(1)
    both = [opened(), opened()]
    found: dict[str, Any] = {}

    def write(nth: int) -> None:
        for turn in range(5):
            arguments = {"path": f"c{nth}", "data_text": f"{turn} "}
            _, _, answer = post(
                "/mcp", request("tools/call", 9, name="fs_append", arguments=arguments), both[nth]
            )
            found[f"{nth}.{turn}"] = told(answer)["result"]["isError"]

    threads = [threading.Thread(target=write, args=(nth,)) for nth in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say("both", sorted(found.values()))


for word in sys.stdin.read().split():
    {"models": models, "slow": slow, "tools": tools}[word]()
