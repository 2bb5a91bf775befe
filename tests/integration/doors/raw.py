"""Asks without any vendor's client: as its standard input says, a word for each request, and all at once where two stand together."""

import http.client
import json
import os
import socket
import sys
import threading
from typing import Any

HEADERS = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}


def body(word: str, **more: Any) -> bytes:
    return json.dumps({"model": "gpt-4o", "messages": [{"role": "user", "content": word}], **more}).encode()


def say(*what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def ask(word: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", 7080)
    connection.request("POST", "/v1/chat/completions", body(word), HEADERS)
    answer = connection.getresponse()
    said = json.load(answer)
    say(
        word,
        answer.status,
        said["choices"][0]["message"]["content"] if answer.status == 200 else said["error"]["code"],
    )


def leave(word: str) -> None:
    """Asks, and does not wait for the answer."""
    sent = body(word)
    head = "".join(
        f"{name}: {value}\r\n" for name, value in {**HEADERS, "Content-Length": str(len(sent))}.items()
    )
    with socket.create_connection(("127.0.0.1", 7080)) as link:
        link.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{head}\r\n".encode() + sent)
        link.settimeout(0.5)
        try:
            link.recv(1)
        except TimeoutError:
            say(word, "left")


def stream(word: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", 7080)
    connection.request("POST", "/v1/chat/completions", body(word, stream=True), HEADERS)
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            said = json.loads(line[6:])
            say(
                word, said["error"]["code"] if "error" in said else said["choices"][0]["delta"].get("content")
            )


for line in sys.stdin.read().split():
    threads = [
        threading.Thread(target={"-": leave, "~": stream}.get(word[0], ask), args=(word.lstrip("-~"),))
        for word in line.split("+")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
