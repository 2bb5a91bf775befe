"""Every example does what its README says, by the commands a reader would type."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from support.kernels import eventually
from support.model import ModelHost
from support.scenes import Scene, console, scene_of_its_own
from support.signed import free_port

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def typed(scene: Scene, *words: str, code: int = 0) -> str:
    """A command line of the README; its exit code is looked at."""
    done = console(*words, "--data", str(scene.kernel.data), cwd=EXAMPLES.parent)
    assert done.returncode == code, done.stderr
    return done.stdout


def submitted(scene: Scene, name: str, *more: str) -> str:
    document = typed(scene, "submit", f"examples/{name}/manifest.yaml", *more, "--json")
    return json.loads(document)["id"]


def test_every_example_has_a_readme_and_a_manifest() -> None:
    found = [path for path in EXAMPLES.iterdir() if path.is_dir()]
    assert len(found) >= 5
    for path in found:
        assert (path / "README.md").is_file(), path
        assert (path / "manifest.yaml").is_file(), path


def test_the_ledger_adds_up_whatever_is_killed(scene: Scene) -> None:
    agent = submitted(scene, "ledger")
    report = scene.live(agent) / "out/report.md"
    for months in (2, 5):
        eventually(
            lambda wanted=months: report.exists() and report.read_text().count("| 2026-") >= wanted,
            "the report does not grow",
        )
        with contextlib.suppress(ProcessLookupError, TypeError):  # it may just be between two starts
            os.kill(scene.show(agent)["pid"], signal.SIGKILL)
    scene.await_end(agent)
    rows = re.findall(r"^\| (2026-\d\d) \| \w+ \| ([\d.]+) \|$", report.read_text(), re.MULTILINE)
    assert [month for month, _ in rows] == [f"2026-{m:02d}" for m in range(1, 13)]
    assert f"The year: {sum(Decimal(amount) for _, amount in rows)}" in report.read_text()


def test_the_clerks_never_sell_what_is_gone(scene: Scene) -> None:
    agents = [submitted(scene, "stock", "--name", name) for name in ("anna", "ben")]
    for agent in agents:
        scene.await_end(agent)
    said = [typed(scene, "logs", name) for name in ("anna", "ben")]
    assert sum(int(re.match(r"sold (\d+) of 15", text)[1]) for text in said) == 20
    (row,) = scene.sql("select value from state where key = 'stock/kettles'")
    assert json.loads(bytes(row[0])) == 0


def test_the_cleanup_removes_what_a_person_approves(scene: Scene) -> None:
    agent = submitted(scene, "cleanup")

    def waiting() -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = json.loads(typed(scene, "approvals", "--json"))
            return bool(found)

        eventually(there, "nothing waits")
        return found[0]

    question = waiting()
    assert "3 uploads" in typed(scene, "approvals", "show", question["id"])
    typed(scene, "approvals", "approve", question["id"], "--reason", "yes, but keep contracts")
    for _ in range(3):
        asked = waiting()
        if "contract" in asked["resource"]:
            typed(scene, "approvals", "deny", asked["id"], "--reason", "somebody still needs it")
        else:
            typed(scene, "approvals", "approve", asked["id"])
        eventually(
            lambda seen=asked["id"]: all(
                a["id"] != seen for a in json.loads(typed(scene, "approvals", "--json"))
            ),
            "the approval does not go",
        )
    scene.await_end(agent)
    assert sorted(p.name for p in (scene.live(agent) / "uploads").iterdir()) == [
        "contract.txt",
        "invoice-0042.pdf.part",
    ]
    assert "somebody still needs it" in typed(scene, "logs", "cleanup")


def test_the_nightly_agent_runs_when_it_is_told_to(scene: Scene) -> None:
    agent = submitted(scene, "nightly")
    shown = scene.show(agent)
    assert (shown["state"], shown["process"]) == ("sleeping", "none")
    log = scene.live(agent) / "out/log.md"
    for runs in (1, 2):
        typed(scene, "schedule", "run", "nightly")
        eventually(
            lambda wanted=runs: log.exists() and len(log.read_text().splitlines()) == wanted,
            "no run was made",
        )
        eventually(lambda: scene.show(agent)["state"] == "sleeping", "the run does not end")
    first, second = log.read_text().splitlines()
    assert first.endswith("2 new or changed, 0 gone")
    assert second.endswith("0 new or changed, 0 gone")
    typed(scene, "schedule", "pause", "nightly")
    assert "nightly" in typed(scene, "schedule", "ls")


def test_the_summary_is_paid_as_the_host_counts(postgres_server: Any, template_database: str) -> None:
    with contextlib.closing(ModelHost()) as host:
        declared = (EXAMPLES / "summary/ringfence.yaml").read_text()
        config = declared.replace("http://127.0.0.1:8080/v1", host.base)
        with scene_of_its_own(postgres_server, template_database, config=config) as scene:
            agent = submitted(scene, "summary")
            scene.await_end(agent)
            text = (scene.live(agent) / "out/summary.md").read_text()
            assert text == "## quince.txt\n\nGood day.\n\n## snug.txt\n\nGood day.\n\n"
            (row,) = json.loads(typed(scene, "ps", "--all", "--json"))
            assert row["tokens"] == 2 * (11 + 7)
            assert "whistles in D flat" in json.dumps(host.asked[0].body)


def test_an_agent_adds_up_what_a_client_sends(postgres_server: Any, template_database: str) -> None:
    port, token = free_port(), secrets.token_urlsafe(24)
    declared = (EXAMPLES / "tasks/ringfence.yaml").read_text().replace("8770", str(port))
    with scene_of_its_own(postgres_server, template_database, config=declared) as scene:
        scene.operator.ask("SecretSet", name="shop-token", value=token.encode())
        submitted(scene, "tasks")

        def asked(text: str) -> list[str]:
            url = f"http://127.0.0.1:{port}/agents/adder"
            done = subprocess.run(
                [sys.executable, str(EXAMPLES / "tasks/ask.py"), url, text],
                env={**os.environ, "TOKEN": token},
                capture_output=True,
                text=True,
                timeout=100,
                check=True,
            )
            return done.stdout.splitlines()

        assert asked("tea 2 3.50\ncups 4 1.25")[-2:] == ["total: 12.00", "TASK_STATE_COMPLETED"]
        assert asked("how are you")[-1].startswith(
            "TASK_STATE_INPUT_REQUIRED I can't read the line `how are you`"
        )


def test_an_unmodified_script_is_judged_by_what_it_left(scene: Scene) -> None:
    agent = submitted(scene, "unmodified")
    found: list[dict[str, Any]] = []

    def asked() -> bool:
        found[:] = json.loads(typed(scene, "approvals", "--json"))
        return bool(found)

    eventually(asked, "nobody is asked")
    live = scene.live(agent)
    assert "/workspace/notes/fruit.md" in typed(scene, "approvals", "show", found[0]["id"])
    assert not (live / "INDEX.md").exists()
    typed(scene, "approvals", "approve", found[0]["id"])
    scene.await_end(agent)
    assert (
        live / "INDEX.md"
    ).read_text() == "# Notes\n- [fruit](notes/fruit.md)\n- [tools](notes/tools.md)\n"
    assert typed(scene, "logs", "unmodified") == "2 notes\n"
    assert "workspace.commit" in typed(scene, "steps", "unmodified")
    typed(scene, "rollback", "unmodified", "--to", "0")
    assert sorted(path.name for path in (live / "notes/drafts").iterdir()) == ["fruit.md", "tools.md"]
    assert (live / "notes/private/diary.md").exists()


def test_a_program_that_nobody_wrote_for_it_asks_models_through_the_gateway(
    postgres_server: Any, template_database: str
) -> None:
    with contextlib.closing(ModelHost()) as host:
        declared = (EXAMPLES / "gateway/ringfence.yaml").read_text()
        config = declared.replace("http://127.0.0.1:8080/v1", host.base)
        with scene_of_its_own(postgres_server, template_database, config=config) as scene:
            agent = submitted(scene, "gateway")
            scene.await_end(agent)
            assert typed(scene, "logs", "gateway").splitlines() == ["Good day."] * 2
            assert "llm.complete" in typed(scene, "steps", "gateway")
            assert [asked.body["model"] for asked in host.asked] == ["small-1"] * 2
