"""Does what a model says, command by command, and tells it what came of each; counts them with a tool of the kernel's."""

import http.client
import json
import os
import subprocess
import time
from typing import Any
from urllib.parse import urlsplit

HEADERS = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}


def ask(messages: list[Any]) -> str:
    connection = http.client.HTTPConnection(urlsplit(os.environ["OPENAI_BASE_URL"]).netloc)
    body = json.dumps({"model": "gpt-4o", "messages": messages, "user": str(time.time_ns())})
    connection.request("POST", "/v1/chat/completions", body, HEADERS)
    return json.load(connection.getresponse())["choices"][0]["message"]["content"]


def tool(name: str, **arguments: Any) -> Any:
    info = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    with subprocess.Popen(["rf-mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for number, (method, params) in enumerate(
            (("initialize", info), ("tools/call", {"name": name, "arguments": arguments}))
        ):
            print(
                json.dumps({"jsonrpc": "2.0", "method": method, "params": params, "id": number}),
                file=server.stdin,
                flush=True,
            )
            answer = json.loads(server.stdout.readline())
            if method == "initialize":
                print(
                    '{"jsonrpc": "2.0", "method": "notifications/initialized"}', file=server.stdin, flush=True
                )
        server.stdin.close()
    return answer["result"]


said: list[Any] = [{"role": "user", "content": f"It is {time.time_ns()}. Mend a.txt."}]
while (word := ask(said)) != "done":
    done = subprocess.run(["sh", "-c", word], capture_output=True, text=True, check=False)
    tool("state_put", key=f"coder/{len(said)}", value=done.returncode)
    print(json.dumps([word, done.returncode, done.stdout, done.stderr]), flush=True)
    said += [{"role": "assistant", "content": word}, {"role": "user", "content": done.stdout + done.stderr}]
