"""Keys and signatures of the Standard Webhooks scheme, written from its text and not with the kernel's own code."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import secrets
import socket
import time
from typing import Any


def new_key() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


def signature(key: str, message: str, timestamp: str, body: bytes) -> str:
    raw = base64.b64decode(key.removeprefix("whsec_"))
    signed = b".".join((message.encode(), timestamp.encode(), body))
    return "v1," + base64.b64encode(hmac.new(raw, signed, hashlib.sha256).digest()).decode()


def signed(key: str, body: bytes, *, message: str = "", at: float | None = None) -> dict[str, str]:
    """The three headers of a message."""
    message = message or f"msg_{secrets.token_hex(8)}"
    timestamp = str(int(time.time() if at is None else at))
    return {
        "webhook-id": message,
        "webhook-timestamp": timestamp,
        "webhook-signature": signature(key, message, timestamp, body),
    }


def genuine(key: str, delivery: dict[str, Any]) -> bool:
    """Whether a request that a receiver wrote down is signed with a key."""
    said = delivery["headers"]
    wanted = signature(key, said["webhook-id"], said["webhook-timestamp"], delivery["body"].encode())
    return wanted in said["webhook-signature"].split(" ")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def decide(port: int, person: str, key: str, **said: Any) -> tuple[int, dict[str, Any]]:
    """Post a decision; gives the status and the document."""
    body = json.dumps(said).encode()
    return post(port, person, body, signed(key, body))


def post(port: int, person: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """Post whatever it is."""
    return post_to(port, f"/v1/people/{person}/decisions", body, headers)


def post_to(port: int, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """Post whatever it is, wherever."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()
