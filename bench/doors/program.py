"""What asks, bare or in a sandbox: the same program, with Python's own HTTP client. Its input says whom, what, and how long."""

import http.client
import json
import os
import sys
import time
from typing import Any

job: dict[str, Any] = json.load(sys.stdin)
PATH = "/mcp"
HEADERS = {
    "Authorization": "Bearer " + os.environ.get("RINGFENCE_TOKEN", "none"),
    "Content-Type": "application/json",
    "Accept": "application/json, text/event-stream",
}
link = http.client.HTTPConnection("127.0.0.1", job["port"])
made = 0


def post(path: str, body: dict[str, Any], headers: dict[str, str] = HEADERS) -> http.client.HTTPResponse:
    link.request("POST", path, json.dumps(body), headers)
    answer = link.getresponse()
    if answer.status >= 300:
        raise SystemExit(f"{answer.status}: {answer.read()[:300]!r}")
    return answer


def ask(model: str, **more: Any) -> http.client.HTTPResponse:
    # No two are the same, so that none is taken for one that was answered.
    question = [{"role": "user", "content": f"{model} {made} {time.time_ns()}"}]
    return post("/v1/chat/completions", {"model": model, "messages": question, "max_tokens": 5, **more})


def whole() -> int:
    json.loads(ask("gpt-whole").read())
    return 1


def stream() -> int:
    found = 0
    with ask("gpt-stream", stream=True, max_tokens=job["parts"]) as answer:
        for line in answer:
            found += b'"content"' in line
    return found


session = dict(HEADERS)


def greet() -> None:
    info = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "b", "version": "1"}}
    answer = post(PATH, {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": info})
    answer.read()
    session["mcp-protocol-version"] = "2025-11-25"
    if there := answer.getheader("mcp-session-id"):
        session["mcp-session-id"] = there
    post(PATH, {"jsonrpc": "2.0", "method": "notifications/initialized"}, session).read()


def tool() -> int:
    params = {"name": job["tool"], "arguments": {"n": made}}
    said = post(
        PATH, {"jsonrpc": "2.0", "id": made + 1, "method": "tools/call", "params": params}, session
    ).read()
    line = next((line[6:] for line in said.splitlines() if line.startswith(b"data: {")), said)
    found = json.loads(line)["result"]["content"][0]["text"]
    if found != str(made):
        raise SystemExit(f"asked for {made}, told {found}")
    return 1


act = {"whole": whole, "stream": stream, "tool": tool}[job["kind"]]
if job["kind"] == "tool":
    greet()
act()
made += 1
start = float(json.loads(ask(f"gpt-wait-{job['of']}").read())["choices"][0]["message"]["content"])
time.sleep(max(0.0, start - time.time()))
units, calls, took = 0, 0, []
while (began := time.time()) < start + job["seconds"]:
    units += act()
    took.append(time.time() - began)
    made += 1
took.sort()
print(
    json.dumps(
        {
            "start": start,
            "units": units,
            "calls": len(took),
            "seconds": time.time() - start,
            "p50": took[len(took) // 2],
        }
    )
)
