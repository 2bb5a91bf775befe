"""A model's host and a server of MCP that do no work, over real HTTP/1.1: what doors are measured beside.

Chat completions, whole or as so many parts as `max_tokens` says, one write each; and the tool `echo` as JSON. A request for the
model `gpt-wait-N` is answered when N such are there, with the moment at which all begin. It prints its port, then each such moment, and ends
with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

LEAD_S = 1.0
"""From the last that came to the moment at which all begin."""
WORD = "word "
TOOL = {"name": "echo", "inputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
GREETING = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "bench", "version": "1"},
}


def reply(words: str) -> bytes:
    """A whole one."""
    choice = {"index": 0, "message": {"role": "assistant", "content": words}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    return json.dumps(
        {"id": "r", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
    ).encode()


def part(delta: dict[str, Any], finish: str | None = None) -> bytes:
    """One of a stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return (
        b"data: "
        + json.dumps(
            {"id": "r", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}
        ).encode()
        + b"\n\n"
    )


WHOLE = reply(WORD * 5)
PART = part({"content": WORD})
END = part({}, "stop") + b"data: [DONE]\n\n"


class Endpoint:
    """All connections."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Future[float]]] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request by request."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(
                    line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line
                )
                body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
                await self._answer(head, json.loads(body or b"{}"), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    async def _answer(self, head: bytes, said: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if head.split(b" ", 2)[1].endswith(b"/mcp"):
            self._tool(head, said, writer)
        elif said["model"].startswith("gpt-wait-"):
            self._whole(writer, reply(str(await self._all(said["model"]))))
        elif said.get("stream"):
            await self._stream(writer, said["max_tokens"])
        else:
            self._whole(writer, WHOLE)

    async def _all(self, model: str) -> float:
        """Wait for all; gives when they begin."""
        there = self._waiting.setdefault(model, [])
        mine: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        there.append(mine)
        if len(there) == int(model.rpartition("-")[2]):
            del self._waiting[model]
            start = time.time() + LEAD_S
            print(json.dumps({"start": start}), flush=True)
            for one in there:
                one.set_result(start)
        return await mine

    async def _stream(self, writer: asyncio.StreamWriter, parts: int) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for _ in range(parts):
            writer.write(b"%x\r\n%s\r\n" % (len(PART), PART))
            await writer.drain()
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(END), END))

    def _tool(self, head: bytes, said: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if not head.startswith(b"POST"):
            writer.write(b"HTTP/1.1 405 No\r\ncontent-length: 0\r\n\r\n")
            return
        if "id" not in said:
            writer.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n")
            return
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": said["id"]}
        match said["method"]:
            case "initialize":
                answer["result"] = GREETING
            case "tools/list":
                answer["result"] = {"tools": [TOOL]}
            case "tools/call":
                n = str(said["params"]["arguments"]["n"])
                answer["result"] = {"content": [{"type": "text", "text": n}]}
            case _:
                answer["error"] = {"code": -32601, "message": "no such method"}
        self._whole(writer, json.dumps(answer).encode())

    @staticmethod
    def _whole(writer: asyncio.StreamWriter, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)


async def main() -> None:
    """Serve until nobody holds the other end of the input."""
    server = await asyncio.start_server(Endpoint().serve, "127.0.0.1", 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
