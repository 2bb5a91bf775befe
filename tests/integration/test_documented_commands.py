"""Every command line of the README and of docs/commands.md does what is said there, typed into a shell at a real kernel.

Each test walks one page in an order that works and says at its end which lines of the page it has not run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.kernels import eventually
from support.reader import TESTED_ELSEWHERE, Reader, lay_out
from support.scenes import short_directory
from support.target import Target

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
COMMANDS = REPOSITORY / "docs" / "commands.md"


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
    a_sandbox_host(me)
    the_rest(me)
    me.all_run()


def the_kernel(me: Reader) -> None:
    me.run("ringfence doctor")
    assert me.run("ringfence doctor --config ringfence.yaml")
    me.run("ringfence policy lint agent.yaml")
    (me.home / "settings.json").write_text('{"permissions": {"allow": ["Bash(git diff *)"]}}')
    text = me.run("ringfence policy import settings.json --name helper")
    (me.home / "imported.yaml").write_text(text)
    assert me.shell("ringfence policy lint imported.yaml").endswith("ok\n")
    assert json.loads(me.run("ringfence policy schema manifest"))["title"] == "Ringfence Agent"
    me.run("ringfence policy lint agent.yaml --against ringfence.yaml --strict", code=1)
    assert "listen" in me.run("ringfence up --config ringfence.yaml --detach")
    me.shell("ringfence status", code=1)  # both secrets are not set yet
    me.run("ringfence secrets set crm-dsn --from dsn.txt")
    me.shell("printf t0ken | ringfence secrets set rates-token")
    assert json.loads(me.run("ringfence status --json"))["config"]["unavailable"] == []
    assert me.run("ringfence secrets ls").split() == ["crm-dsn", "rates-token"]
    me.run("ringfence secrets rm rates-token")
    assert "rates" in me.run("ringfence reload")
    me.run("ringfence mcp ls")
    for words in ("tools github --look", "tools github create_issue", "accept github create_issue"):
        me.run(f"ringfence mcp {words}", code=4)  # there is no such server here
    me.run("ringfence a2a ls")
    for words in ("card clerk --look", "accept clerk"):
        me.run(f"ringfence a2a {words}", code=4)  # nor such an agent


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
    assert "artifacts" in me.run("ringfence layers invoice-bot")
    me.run("ringfence export invoice-bot --layer task -o task.json")
    assert json.loads((me.home / "task.json").read_text())["layer"] == "task"
    assert "20 files" in me.run("ringfence pull invoice-bot out --to ./result")


def its_rights(me: Reader) -> None:
    assert "200,000" in me.run("ringfence budget invoice-bot")
    assert "500,000" in me.run("ringfence budget invoice-bot set tokens 500k")
    assert "20 in 1.0s" in me.run("ringfence budget invoice-bot set http.get 20/s")
    assert "team=billing" in me.run("ringfence budget")
    assert "80 a day" in me.run("ringfence budget --label team=billing set usd 80")
    assert "100,000 a day" in me.run("ringfence budget --fleet")
    grant = me.run("ringfence grant invoice-bot 'fs.write: \"/workspace/out/**\"' --expires 1h").strip()
    assert f"revoked {grant}" in me.run("ringfence revoke invoice-bot g7", g7=grant)
    assert me.run(
        "ringfence grant invoice-bot 'http.post: \"https://pay.example.com/**\"' --deny"
    ).startswith("g")
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
    me.await_state("invoice-bot", "sleeping", "a message")
    me.order({"ask": "By its digest?"})
    me.shell("ringfence send invoice-bot --json order.json")
    asked = me.waiting()
    seen = me.ask(f"approvals show {asked}")["digest"]
    line = "ringfence approvals approve a7 --digest 5d41402abc4b2a76b9719d911017c592ae41e4649b934ca495991b7852b85500"
    me.run(line, a7=asked, **{line.rpartition(" ")[2]: seen})
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
    me.order({"delete": "data/d.csv"})
    me.shell("ringfence send invoice-bot --json order.json")
    lasting = me.waiting()
    me.run("ringfence approvals approve a9 --for 2h", a9=lasting)
    me.run('ringfence approvals end a9 --reason "the import is done"', a9=lasting)
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
    assert "invoice-bot" in me.run("ringfence rollback --all --to 2026-01-31T08:00:00Z --preview")
    assert "invoice-bot-fork" in me.run("ringfence fork invoice-bot --at 17 --start")
    me.await_state("invoice-bot-fork", "sleeping", "a message")
    me.shell("ringfence kill invoice-bot-fork")
    assert "20 stay" in me.run("ringfence points prune invoice-bot --keep 20")
    assert "would go: 0 agents" in me.run("ringfence prune --older-than 30d --dry-run")
    assert "gone: 0 agents" in me.run("ringfence prune invoice-bot --older-than 30d")


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


def a_sandbox_host(me: Reader) -> None:
    me.run("ringfence sandbox-certs certs")
    line = "ringfence sandbox-host --data elsewhere --listen 127.0.0.1:0 --certs certs/host-sandbox-host"
    me.typed.append(line)
    words = ["bash", "-c", f"exec {line}"]
    with subprocess.Popen(words, cwd=me.home, env=me.env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"listens on 127.0.0.1:" in process.stdout.readline()
        process.terminate()
        assert process.wait(60) == 0


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
    assert "sha256:" in me.run("ringfence image build --to base.tar")
    (me.home / "base.tar").unlink()
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
    for name, line in (
        ("a", "ringfence approvals approve a7"),
        ("b", 'ringfence approvals deny a7 --reason "not on a Friday"'),
    ):
        me.order({"delete": f"data/{name}.csv"})
        me.shell("ringfence send invoice-bot --json order.json")
        asked = me.waiting()
        if name == "a":
            assert asked in me.run("ringfence approvals")
            assert "data/a.csv" in me.run("ringfence approvals show a7", a7=asked)
        me.run(line, a7=asked)
        me.await_state("invoice-bot", "sleeping", "a message")
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
