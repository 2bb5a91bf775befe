"""Requests that no client would send, and ways that lead nowhere."""

import http.client
import json
import os
import socket
from typing import Any

KEY = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
JSON = {**KEY, "Content-Type": "application/json"}
CHAT = "/v1/chat/completions"


def say(name: str, what: Any) -> None:
    print(json.dumps([name, what]))


def ask(name: str, path: str, body: bytes, headers: dict[str, str], method: str = "POST") -> None:
    connection = http.client.HTTPConnection("127.0.0.1", 7080)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    say(name, [answer.status, json.loads(answer.read())["error"]["type"]])
    connection.close()


ask("no json", CHAT, b"{not json", JSON)
ask("no object", CHAT, b"[]", JSON)
ask("form", CHAT, b"model=gpt-4o", {**KEY, "Content-Type": "application/x-www-form-urlencoded"})
ask("gzip", CHAT, b"{}", {**JSON, "Content-Encoding": "gzip"})
ask("no model", CHAT, b"{}", JSON)
ask("deep", CHAT, b'{"model": "gpt-4o", "messages": ' + b"[" * 200 + b"]" * 200 + b"}", JSON)
ask("no path", "/v1/embeddings", b"{}", JSON)
ask("no method", CHAT, b"", JSON, "GET")
ask("long", CHAT, b" " * (5 << 20), JSON)
ask("key", "/v1/messages", b"{}", {"x-api-key": "sk-mine", "Content-Type": "application/json"})

with socket.create_connection(("127.0.0.1", 7080)) as raw:
    raw.sendall(b"\x16\x03\x01 what is this\r\n\r\n")
    say("no http", int(raw.recv(100).split()[1]))


def tried(make: Any) -> str:
    try:
        make().close()
    except OSError:
        return "refused"
    return "done"


def reached(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), timeout=5)


say(
    "elsewhere",
    [
        tried(lambda h=h, p=p: reached(h, p))
        for h, p in (("127.0.0.1", 5432), ("10.0.0.1", 80), ("1.1.1.1", 443))
    ],
)
kinds = (
    (socket.AF_INET, socket.SOCK_DGRAM),
    (socket.AF_INET6, socket.SOCK_STREAM),
    (socket.AF_INET, socket.SOCK_RAW),
    (16, socket.SOCK_RAW),
)
say("other sockets", [tried(lambda f=f, k=k: socket.socket(f, k)) for f, k in kinds])
