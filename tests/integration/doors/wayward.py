"""Asks a model what to do, in other words at each start; then removes a file by a tool, unless it is told to stay."""

import http.client
import json
import os
import subprocess
import time
from typing import Any
from urllib.parse import urlsplit


def ask(question: str) -> str:
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": question}]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(urlsplit(os.environ["OPENAI_BASE_URL"]).netloc)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return json.load(connection.getresponse())["choices"][0]["message"]["content"]


def tool(name: str, **arguments: Any) -> Any:
    """Calls a tool of the kernel's server, as a client of the protocol does."""
    info = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "w", "version": "1"}}
    with subprocess.Popen(["rf-mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def say(method: str, params: Any, **more: Any) -> None:
            print(
                json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more}),
                file=server.stdin,
                flush=True,
            )

        say("initialize", info, id=1)
        json.loads(server.stdout.readline())
        say("notifications/initialized", {})
        while True:
            say("tools/call", {"name": name, "arguments": arguments}, id=2)
            result = json.loads(server.stdout.readline())["result"]
            if result.get("_meta", {}).get("ringfence/reason") != "Parked":
                server.stdin.close()
                return result


word = ask(f"What is to be done at {time.time_ns()}, in this tree?")
print(json.dumps(["told", word]), flush=True)
if word == "stay":
    time.sleep(1000)
print(json.dumps(["removed", tool("fs_delete", path="a.txt")["isError"]]), flush=True)
