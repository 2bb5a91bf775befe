"""Somebody who types what a page of the documentation says, into a shell, and the agent that those pages speak of."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.kernels import Operator, eventually
from support.target import Target

TESTED_ELSEWHERE = {"ringfence demo": "test_demo.py"}

KERNEL_FILE = """apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    crm: {{type: postgres, dsn: {{secret: crm-dsn}}}}
    rates: {{type: http, base: "{base}/v1", auth: {{bearer: {{secret: rates-token}}}}}}
    plain: {{type: http, base: "{base}/plain"}}
  budgets:
    fleet: {{total: {{calls: 100k/d}}}}
    team=billing: {{total: {{usd: 50/d}}}}
"""
MANIFEST = """apiVersion: ringfence/v1
kind: Agent
metadata: {{name: invoice-bot}}
spec:
  run: {{command: [python, agent.py], workspace: ./workspace, env: {{REGION: us}}}}
  permissions:
    allow:
      - fs.read: "/workspace/**"
      - fs.write: "/workspace/out/**"
      - fs.delete: "/workspace/in/*.csv"
      - http.*: "{base}/**"
      - messages.receive: "*"
    ask:
      - fs.delete: "/workspace/data/**"
  budgets: {{rate: {{http.get: 10/s}}, total: {{calls: 1000, tokens: 200k}}}}
  restart: {{policy: never}}
"""
# It makes 20 steps with a point each, then does what it is told by messages.
PROGRAM = """
import os
from ringfence import agent

def done(what, call):
    try:
        print(what, call(), flush=True)
    except agent.Denied as error:
        print(what, "denied:", error, flush=True)

with agent.boot() as rf:
    for number in range(1, 21):
        rf.fs.write_text(f"out/{number}.txt", str(number))
    while os.environ["REGION"] == "eu":
        message = rf.messages.receive()
        order = message.json or {"text": message.text}
        if "delete" in order:
            done("deleted", lambda: rf.fs.delete(order["delete"]))
        elif "ask" in order:
            done("asked", lambda: rf.ask(order["ask"]))
        elif "post" in order:
            done("posted", lambda: rf.http.post(order["post"], json={}).status)
        else:
            done("told", lambda: order["text"])
"""
NIGHTLY = """apiVersion: ringfence/v1
kind: Agent
metadata: {name: nightly}
spec:
  run: {command: ["true"]}
  permissions: {allow: [{now: "*"}]}
  schedule: {cron: "30 2 * * *", timezone: Europe/Berlin}
"""


def command_lines(page: Path) -> list[str]:
    """Lines in the code blocks of a page that call `ringfence`, also behind a pipe or in a substitution."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [*"\n".join(fenced).splitlines(), *re.findall(r"^ {4}(\S.*)$", text, flags=re.MULTILINE)]
    return [line for line in lines if re.search(r"(^|\| |\$\()(ringfence|rf) ", line)]


class Reader:
    """Somebody who types what a page says, in a directory of their own."""

    def __init__(self, page: Path, home: Path) -> None:
        self.page, self.home = page, home
        self.typed: list[str] = []
        self.env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RINGFENCE_DATA": str(home / "d"),
            "NO_COLOR": "1",
        }

    def run(self, line: str, *, code: int = 0, data: str = "", **swap: object) -> str:
        """Type a line of the page; words of it stand for what is there really. Returns its standard output."""
        self.typed.append(line)
        for word, real in swap.items():
            line, times = re.subn(rf"(?<![\w.]){word.lstrip('_')}(?![\w.])", str(real), line)
            assert times == 1, (word, line)
        return self.shell(line, code=code, data=data)

    def shell(self, line: str, *, code: int = 0, data: str = "") -> str:
        env = {**self.env, "RINGFENCE_DATA": data} if data else self.env
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.home,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, (line, done.returncode, done.stdout[-2000:], done.stderr[-2000:])
        assert "Traceback" not in done.stderr
        return done.stdout

    def ask(self, line: str) -> Any:
        return json.loads(self.shell(f"ringfence {line} --json"))

    @contextlib.contextmanager
    def operator(self) -> Iterator[Operator]:
        """The kernel's own door, for what is asked over and over: each command is a process."""
        operator = Operator(json.loads((self.home / "d" / "kernel.json").read_text())["listen"])
        try:
            yield operator
        finally:
            operator.close()

    def await_state(self, agent: str, state: str, waits: str = "") -> None:
        with self.operator() as operator:

            def there() -> bool:
                shown = operator.ask("Show", agent=agent)
                return shown["state"] == state and (shown["waiting_for"] or "").startswith(waits)

            eventually(there, f"{agent} is not {state}")

    def order(self, document: dict[str, Any]) -> None:
        (self.home / "order.json").write_text(json.dumps(document))

    def waiting(self) -> str:
        """The id of the approval that waits; there is one."""
        found: list[str] = []
        with self.operator() as operator:

            def there() -> bool:
                found[:] = [waits["id"] for waits in operator.ask("Approvals")["approvals"]]
                return len(found) == 1

            eventually(there, "no approval waits")
        return found[0]

    def last_unknown(self) -> int:
        return next(s["step"] for s in self.ask("steps invoice-bot") if s["outcome"] == "unknown")

    def all_run(self) -> None:
        """Nothing of the page was left out, and nothing was run that the page does not have."""
        lines = command_lines(self.page)
        left_out = [line for line in lines if line not in {*self.typed, *TESTED_ELSEWHERE}]
        assert not left_out, f"not run: {left_out}"
        strange = [line for line in self.typed if line not in lines]
        assert not strange, f"not in {self.page.name}: {strange}"

    def end(self, folder: str = "d") -> None:
        """Leave nothing running, whatever failed."""
        told = self.home / folder / "kernel.json"
        if not told.exists():
            return
        pid = json.loads(told.read_text())["pid"]
        down = ["ringfence", "down", "--drain", "0", "--data", str(self.home / folder)]
        subprocess.run(down, env=self.env, capture_output=True, timeout=60, check=False)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def lay_out(home: Path, target: Target) -> None:
    """The files that the pages speak of."""
    workspace = home / "workspace"
    for folder in ("in", "data"):
        (workspace / folder).mkdir(parents=True)
    for name in ("a", "b", "c", "d"):
        (workspace / "data" / f"{name}.csv").write_text(f"{name}\n")
    (workspace / "agent.py").write_text(PROGRAM)
    (home / "agent.yaml").write_text(MANIFEST.format(base=target.base))
    (home / "ringfence.yaml").write_text(KERNEL_FILE.format(base=target.base))
    (home / "nightly.yaml").write_text(NIGHTLY)
    (home / "dsn.txt").write_text("postgresql://nobody@127.0.0.1:1/none\n")
