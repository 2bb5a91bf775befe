"""What Tab gives: commands, options, and names that the kernel knows; nothing at all where something is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from ringfence.console.cli import root
from ringfence.console.completion import Known

AGENTS = {
    "agents": [
        {"id": "bot-1a2b3", "name": "bot", "state": "running"},
        {"id": "twin-aaaaa", "name": "twin", "state": "done"},
        {"id": "twin-bbbbb", "name": "twin", "state": "running"},
        {"id": "x-1", "name": "$(reboot)", "state": "running"},
    ]
}


@pytest.fixture
def tab(door: Any) -> Any:
    """What the last of some words completes to, as a process of its own, as shells ask."""
    door.answers["List"] = AGENTS

    def press(*words: str) -> list[str]:
        line = ["ringfence", *words]
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; sys.argv[0] = 'ringfence'; from ringfence.console.cli import main; main()",
            ],
            env={
                **os.environ,
                "RINGFENCE_DATA": str(door.data),
                "_RINGFENCE_COMPLETE": "bash_complete",
                "COMP_WORDS": "\n".join(line),
                "COMP_CWORD": str(len(line) - 1),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        return [entry.partition(",")[2] for entry in done.stdout.splitlines() if entry]

    return press


def test_commands_and_options(tab: Any) -> None:
    assert tab("po") == ["points", "policy"]
    assert tab("policy", "ca") == ["can-i"]
    assert tab("submit", "--w") == ["--wait"]
    assert tab("resolve", "bot", "3", "--as", "") == ["done", "not-done"]


def test_names_of_agents(tab: Any) -> None:
    # A name that two have is no name, and one that a shell would run is never written.
    assert tab("show", "") == ["bot", "bot-1a2b3", "twin-aaaaa", "twin-bbbbb", "x-1"]
    assert tab("kill", "twin") == ["twin-bbbbb"]
    assert tab("points", "") == ["verify", "prune", "bot", "bot-1a2b3", "twin-aaaaa", "twin-bbbbb", "x-1"]
    assert tab("points", "verify", "b") == ["bot", "bot-1a2b3"]


def test_names_that_belong_to_an_agent(door: Any, tab: Any) -> None:
    door.answers["Points"] = lambda request: {
        "points": [{"id": f"p{n}", "step": n, "at": request.agent} for n in (3, 17)]
    }
    door.answers["Show"] = {
        "grants": [{"id": "g1", "rule": "now: []", "revoked_at": None}, {"id": "g2", "revoked_at": "x"}]
    }
    door.answers["Approvals"] = {"approvals": [{"id": "a7"}]}
    assert tab("rollback", "bot", "--to", "") == ["p17", "p3"]
    assert tab("revoke", "bot", "") == ["g1"]
    assert tab("approvals", "approve", "") == ["a7"]
    assert {request.agent for name, request in door.requests if name == "Points"} == {"bot"}


def test_what_is_wrong_completes_nothing(door: Any, tab: Any, refusal: Any) -> None:
    door.answers["List"] = refusal("away", 6)
    assert tab("show", "") == []
    assert tab("points", "") == []
    (door.data / "kernel.json").unlink()
    assert tab("show", "b") == []


def test_every_parameter_that_names_an_agent_is_taught() -> None:
    def leaves(group: click.Group) -> list[click.Command]:
        found: list[click.Command] = []
        for command in group.commands.values():
            found += leaves(command) if isinstance(command, click.Group) else [command]
        return found

    named = [p for command in leaves(root) for p in command.params if p.name == "agent"]
    assert len(named) >= 10
    assert all(isinstance(parameter.type, Known) for parameter in named)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_what_their_shell_reads(shell: str, run: Any, tmp_path: Path) -> None:
    done = run("completion", shell)
    assert done.exit_code == 0
    for program in ("ringfence", "rf"):
        assert f"_{program.upper()}_COMPLETE" in done.stdout
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"`{shell}` is not installed")
    script = tmp_path / "script"
    script.write_text(done.stdout)
    read = subprocess.run([found, "-n", str(script)], capture_output=True, text=True, check=False)
    assert (read.returncode, read.stderr) == (0, "")


def test_bash_completes_with_the_script(run: Any, door: Any, tmp_path: Path) -> None:
    door.answers["List"] = AGENTS
    bash = shutil.which("bash")
    assert bash
    program = tmp_path / "ringfence"
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.argv[0]=\'ringfence\'; from ringfence.console.cli import main; main()" "$@"\n'
    )
    program.chmod(0o755)
    script = tmp_path / "script"
    script.write_text(
        run("completion", "bash").stdout
        + f"COMP_WORDS=(ringfence show bo); COMP_CWORD=2; _ringfence_completion {program}\n"
        + 'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    env = {**os.environ, "RINGFENCE_DATA": str(door.data)}
    # Without programmable completion `compopt` and `complete` are not there; a script that was sourced has them.
    done = subprocess.run([bash, str(script)], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.split() == ["bot", "bot-1a2b3"], done.stderr


def test_another_shell_is_refused(run: Any) -> None:
    assert run("completion", "tcsh").exit_code == 2
