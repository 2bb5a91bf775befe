"""Every command line of the README and of docs/commands.md does what is said there, typed into a shell at a real kernel.

Each test walks one page in an order that works and says at its end which lines of the page it has not run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kernels import eventually
from support.scenes import short_directory
from support.target import Target

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
COMMANDS = REPOSITORY / "docs" / "commands.md"
TESTED_ELSEWHERE = {"ringfence demo": "test_demo.py"}

KERNEL_FILE = """apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    crm: {{type: postgres, dsn: {{secret: crm-dsn}}}}
    rates: {{type: http, base: "{base}/v1", auth: {{bearer: {{secret: rates-token}}}}}}
    plain: {{type: http, base: "{base}/plain"}}
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

    def await_state(self, agent: str, state: str, waits: str = "") -> None:
        def there() -> bool:
            shown = self.ask(f"show {agent}")
            return shown["state"] == state and (shown["waiting_for"] or "").startswith(waits)

        eventually(there, f"{agent} is not {state}")

    def order(self, document: dict[str, Any]) -> None:
        (self.home / "order.json").write_text(json.dumps(document))

    def waiting(self) -> str:
        """The id of the approval that waits; there is one."""
        found: list[str] = []

        def there() -> bool:
            found[:] = [waits["id"] for waits in self.ask("approvals ls")]
            return len(found) == 1

        eventually(there, "no approval waits")
        return found[0]

    def last_unknown(self) -> int:
        return next(s["step"] for s in self.ask("steps invoice-bot") if s["outcome"] == "unknown")

    def all_run(self) -> None:
        """Nothing of the page was left out, and nothing was run that the page does not have."""
        lines = command_lines(self.page)
        assert [line for line in lines if line not in {*self.typed, *TESTED_ELSEWHERE}] == []
        assert [line for line in self.typed if line not in lines] == []

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


@pytest.fixture
def home() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


@pytest.fixture
def reader(home: Path) -> Iterator[Callable[[Path], Reader]]:
    made: list[Reader] = []

    def begin(page: Path) -> Reader:
        made.append(Reader(page, home))
        return made[-1]

    yield begin
    for one in made:
        one.end()
        one.end("other")


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    made = Target(tmp_path / "deliveries")
    yield made
    made.close()


def lay_out(home: Path, target: Target) -> None:
    """The files that the pages speak of."""
    workspace = home / "workspace"
    for folder in ("in", "data"):
        (workspace / folder).mkdir(parents=True)
    for name in ("a", "b", "c"):
        (workspace / "data" / f"{name}.csv").write_text(f"{name}\n")
    (workspace / "agent.py").write_text(PROGRAM)
    (home / "agent.yaml").write_text(MANIFEST.format(base=target.base))
    (home / "ringfence.yaml").write_text(KERNEL_FILE.format(base=target.base))
    (home / "nightly.yaml").write_text(NIGHTLY)
    (home / "dsn.txt").write_text("postgresql://nobody@127.0.0.1:1/none\n")


def test_the_commands_document(reader: Callable[[Path], Reader], home: Path, target: Target) -> None:
    lay_out(home, target)
    me = reader(COMMANDS)
    the_kernel(me)
    an_agent_that_ends(me)
    a_live_agent(me)
    its_rights(me)
    its_approvals(me)
    undoing(me)
    a_crash(me, target)
    moving(me)
    the_rest(me)
    me.all_run()


def the_kernel(me: Reader) -> None:
    me.run("ringfence doctor")
    me.run("ringfence policy lint agent.yaml")
    assert "listen" in me.run("ringfence up --config ringfence.yaml --detach")
    me.shell("ringfence status", code=1)  # both secrets are not set yet
    me.run("ringfence secrets set crm-dsn --from dsn.txt")
    me.shell("printf t0ken | ringfence secrets set rates-token")
    assert json.loads(me.run("ringfence status --json"))["config"]["unavailable"] == []
    assert me.run("ringfence secrets ls").split() == ["crm-dsn", "rates-token"]
    me.run("ringfence secrets rm rates-token")
    assert "rates" in me.run("ringfence reload")


def an_agent_that_ends(me: Reader) -> None:
    assert me.run("ringfence submit agent.yaml --wait").startswith("invoice-bot-")
    assert "done" in me.run("ringfence ps --all")
    assert me.run("ringfence steps invoice-bot -f").count("fs.write") == 20
    assert me.run("ringfence logs invoice-bot -f") == ""
    assert "agent.exit" in me.run("ringfence audit invoice-bot --since 1h")
    assert "removed" in me.run("ringfence rm invoice-bot")


def a_live_agent(me: Reader) -> None:
    me.run(
        "ringfence submit agent.yaml --set spec.run.env.REGION=eu --set 'spec.budgets.rate.\"http.get\"=5/s'"
    )
    me.await_state("invoice-bot", "sleeping", "a message")
    assert "invoice-bot" in me.run("ringfence tree")
    assert "sleeping" in me.run("ringfence tree invoice-bot")
    assert "CALLS/S" in me.run("ringfence top")
    assert "1 sleeping" in me.run("ringfence top --once --sort state")
    assert "fs.write" in me.run("ringfence show invoice-bot")
    me.run("ringfence send invoice-bot 'the July invoices are in'")
    eventually(lambda: "July" in me.shell("ringfence logs invoice-bot"), "the message did not come")
    assert "paused" in me.run("ringfence pause invoice-bot")
    assert "sleeping" in me.run("ringfence resume invoice-bot")
    assert "20 files" in me.run("ringfence pull invoice-bot out --to ./result")


def its_rights(me: Reader) -> None:
    assert "200,000" in me.run("ringfence budget invoice-bot")
    assert "500,000" in me.run("ringfence budget invoice-bot set tokens 500k")
    assert "20 in 1.0s" in me.run("ringfence budget invoice-bot set http.get 20/s")
    grant = me.run("ringfence grant invoice-bot 'fs.write: \"/workspace/out/**\"' --expires 1h").strip()
    assert f"revoked {grant}" in me.run("ringfence revoke invoice-bot g7", g7=grant)
    assert "fs.delete" in me.run("ringfence policy show invoice-bot")
    assert "allow" in me.run("ringfence policy can-i invoice-bot fs.write /workspace/out/report.md")
    assert "p17" not in me.run("ringfence policy explain invoice-bot 17")
    me.run("ringfence policy learn invoice-bot --denied")


def its_approvals(me: Reader) -> None:
    me.order({"delete": "data/a.csv"})
    me.run("ringfence send invoice-bot --json order.json")
    asked = me.waiting()
    assert asked in me.run("ringfence approvals ls")
    assert asked in me.run("ringfence approvals ls --all --agent invoice-bot")
    assert "data/a.csv" in me.run("ringfence approvals show a7", a7=asked)
    me.run("ringfence approvals approve a7", a7=asked)
    (me.home / "arguments.json").write_text('{"path": "data/c.csv"}')
    for order, line in (
        ({"delete": "data/b.csv"}, "ringfence approvals approve a7 --edit arguments.json"),
        ({"delete": "data/b.csv"}, 'ringfence approvals deny a7 --reason "not on a Friday"'),
        ({"ask": "May I?"}, 'ringfence approvals approve a8 --reason "yes, but only for March"'),
    ):
        me.await_state("invoice-bot", "sleeping", "a message")
        me.order(order)
        me.shell("ringfence send invoice-bot --json order.json")
        me.run(line, **{"a8" if "a8" in line else "a7": me.waiting()})
    me.await_state("invoice-bot", "sleeping", "a message")
    said = me.shell("ringfence logs invoice-bot")
    assert "not on a Friday" in said
    assert "only for March" in said
    live = Path(me.ask("show invoice-bot")["workspace"])
    assert [path.name for path in (live / "data").iterdir()] == ["b.csv"]


def undoing(me: Reader) -> None:
    assert "p17" in me.run("ringfence points invoice-bot")
    assert "no" not in me.run("ringfence points verify").split()
    assert "out/17.txt" not in me.run("ringfence diff invoice-bot --from p3 --to p17")
    assert "/workspace/out/17.txt" in me.run("ringfence rollback invoice-bot --to p17 --preview")
    assert "invoice-bot-fork" in me.run("ringfence fork invoice-bot --at 17 --start")
    me.await_state("invoice-bot-fork", "sleeping", "a message")
    me.shell("ringfence kill invoice-bot-fork")
    assert "20 stay" in me.run("ringfence points prune invoice-bot --keep 20")


def a_crash(me: Reader, target: Target) -> None:
    """A request whose answer never came, until an operator says what became of it."""
    me.order({"post": f"{target.base}/plain/drop"})
    me.shell("ringfence send invoice-bot --json order.json")
    me.await_state("invoice-bot", "unknown")
    result = "ringfence resolve invoice-bot 17 --as done --result '{\"status\": 200}'"
    assert ": ok" in me.run(result, _17=me.last_unknown())
    if me.ask("show invoice-bot")["process"] == "none":
        me.shell("ringfence start invoice-bot")
    eventually(lambda: "posted 200" in me.shell("ringfence logs invoice-bot"), "the result did not come")
    assert len(target.deliveries("/plain/drop")) == 1
    assert "killed" in me.run("ringfence kill invoice-bot")
    me.run("ringfence start invoice-bot")
    me.await_state("invoice-bot", "sleeping", "a message")


def moving(me: Reader) -> None:
    me.run("ringfence export invoice-bot --to invoice-bot.rfx")
    shutil.copy(me.home / "d" / "anchor" / "key.pub", me.home / "key.pub")
    other = str(me.home / "other")
    me.shell("ringfence up --detach", data=other)
    assert "paused" in me.run("ringfence import invoice-bot.rfx --signed-by key.pub", data=other)
    me.shell("ringfence start invoice-bot", data=other)
    me.shell("ringfence down", data=other)


def the_rest(me: Reader) -> None:
    me.shell("ringfence submit nightly.yaml")
    assert "30 2 * * *" in me.run("ringfence schedule ls")
    assert "paused" in me.run("ringfence schedule pause nightly")
    assert "next" in me.run("ringfence schedule resume nightly")
    me.run("ringfence schedule run nightly")
    eventually(lambda: me.ask("schedule ls")[0]["last_outcome"] == "done", "the run does not end")
    assert "records" in me.run("ringfence audit --export evidence.jsonl")
    assert me.run("ringfence audit verify evidence.jsonl").startswith("ok")
    assert "invoice-bot" in me.run("printf 'ps\\napprovals\\n' | ringfence console")
    me.run('eval "$(ringfence completion bash)"')
    me.run("ringfence down --drain 30s")
    elsewhere = {
        Path(__file__).with_name(name).read_text().count('"demo"') for name in TESTED_ELSEWHERE.values()
    }
    assert 0 not in elsewhere


def test_the_readme(reader: Callable[[Path], Reader], home: Path, target: Target) -> None:
    me = reader(README)
    a_first_run(me)
    for path in home.iterdir():
        if path.name != "d":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    lay_out(home, target)
    me.shell("ringfence up --config ringfence.yaml --detach")
    one_that_misbehaves(me, target)
    me.all_run()


def a_first_run(me: Reader) -> None:
    """From the first file to the stopped kernel, all of it as it is written."""
    text = README.read_text(encoding="utf-8")
    for language, name in (("yaml", "agent.yaml"), ("python", "workspace/agent.py")):
        (found,) = re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        path = me.home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(found)
    assert me.run("ringfence doctor")
    start = text.index("Give it something to do")
    blocks = re.findall(
        r"^```\n(.*?)^```", text[start : text.index("[examples/hello]")], flags=re.DOTALL | re.MULTILINE
    )
    said = {}
    for line in "\n".join(blocks).splitlines():
        if line:
            said[line] = me.run(line) if line.startswith("ringfence ") else me.shell(line)
    assert said["ringfence logs totals"] == "2 files added up\n"
    assert "february.csv: 977.20" in (me.home / "result/totals.txt").read_text()
    assert sorted(path.name for path in (me.home / "back").iterdir()) == ["february.csv", "january.csv"]


def one_that_misbehaves(me: Reader, target: Target) -> None:
    bot = {"AGENT": "invoice-bot"}
    me.shell("ringfence submit agent.yaml --set spec.run.env.REGION=eu")
    me.await_state("invoice-bot", "sleeping", "a message")
    assert "invoice-bot" in me.run("ringfence ps")
    assert "fs.write" in me.run("ringfence show AGENT", **bot)
    assert "out/17.txt" in me.run("ringfence policy explain AGENT 17", **bot)
    me.run("ringfence logs AGENT --stderr", **bot)
    me.run("ringfence budget AGENT", **bot)
    me.run("ringfence budget AGENT set tokens 500k", **bot)
    assert "p17" in me.run("ringfence points AGENT", **bot)
    assert "created" in me.run("ringfence diff AGENT", **bot)
    for times, outcome in enumerate(("done --result '{\"status\": 200}'", "not-done"), 1):
        me.order({"post": f"{target.base}/plain/drop"})
        me.shell("ringfence send invoice-bot --json order.json")
        me.await_state("invoice-bot", "unknown")
        me.run(f"ringfence resolve AGENT 17 --as {outcome}", _17=me.last_unknown(), **bot)
        if outcome == "not-done":
            break
        assert len(target.deliveries("/plain/drop")) == times
        if me.ask("show invoice-bot")["process"] == "none":
            me.shell("ringfence start invoice-bot")
        me.await_state("invoice-bot", "sleeping", "a message")
    assert "paused" in me.run("ringfence pause AGENT", **bot)
    assert "revoked" in me.run("ringfence revoke AGENT 'fs.delete: \"/workspace/in/*.csv\"'", **bot)
    assert "no later call" in me.run("ringfence revoke AGENT --all", **bot)
    assert "killed" in me.run("ringfence kill AGENT", **bot)
    assert "fs.write" in me.run("ringfence steps AGENT -f", **bot)
    assert "would go back to step 16" in me.run("ringfence rollback AGENT --to p17 --preview", **bot)
    assert "paused" in me.run("ringfence rollback AGENT --to p17", **bot)
    me.run("ringfence start AGENT", **bot)
    assert me.run("ringfence audit verify").startswith("ok")
    assert "rollback" in me.run("ringfence audit AGENT --since 1h", **bot)
    assert "records" in me.run("ringfence audit --export evidence.jsonl")


def test_a_line_that_nobody_typed_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("    ringfence ps\n\n```\necho 1 | rf console\n```\n")
    me = Reader(page, tmp_path)
    me.typed.append("ringfence ps")
    with pytest.raises(AssertionError, match="rf console"):
        me.all_run()
    me.typed.append("echo 1 | rf console")
    me.all_run()
    me.typed.append("ringfence tree")
    with pytest.raises(AssertionError, match="ringfence tree"):
        me.all_run()
