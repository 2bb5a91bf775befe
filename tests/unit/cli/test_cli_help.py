"""Every command explains itself, and the documents name every command and option."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from ringfence.console.cli import _SECTIONS, root
from ringfence.console.session import Leaf

DOCS = Path(__file__).parents[3] / "docs"


def commands(group: click.Group = root, prefix: str = "") -> list[tuple[str, click.Command]]:
    found: list[tuple[str, click.Command]] = []
    for name, command in group.commands.items():
        path = f"{prefix}{name}"
        found += commands(command, f"{path} ") if isinstance(command, click.Group) else [(path, command)]
    return found


EVERY = commands()
CONTRACT = [
    "up",
    "reload",
    "down",
    "status",
    "doctor",
    "submit",
    "ps",
    "tree",
    "top",
    "console",
    "completion",
    "show",
    "logs",
    "steps",
    "send",
    "pause",
    "resume",
    "start",
    "kill",
    "rm",
    "export",
    "layers",
    "import",
    "pull",
    "budget",
    "fork",
    "grant",
    "revoke",
    "points",
    "rollback",
    "diff",
    "resolve",
    "audit",
    "demo",
    "sandbox-host",
    "sandbox-certs",
    "approvals ls",
    "approvals show",
    "approvals approve",
    "approvals deny",
    "approvals end",
    "image build",
    "prune",
    "policy lint",
    "policy show",
    "policy can-i",
    "policy explain",
    "policy learn",
    "policy import",
    "policy schema",
    "secrets set",
    "secrets ls",
    "secrets rm",
    "mcp ls",
    "mcp tools",
    "mcp accept",
    "a2a ls",
    "a2a card",
    "a2a accept",
    "schedule ls",
    "schedule pause",
    "schedule resume",
    "schedule run",
]


def test_every_command_of_the_contract_is_there() -> None:
    assert sorted(path for path, _ in EVERY) == sorted(CONTRACT)


def test_the_help_lists_every_command(run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert {name for names in _SECTIONS.values() for name in names} == set(root.commands)
    for name in root.commands:
        assert f"\n  {name} " in result.stdout
    assert "..." not in result.stdout.partition("The kernel:")[2]


def test_no_words_show_the_help(run) -> None:
    assert run().stdout == run("--help").stdout


@pytest.mark.parametrize(("path", "command"), EVERY)
def test_help_has_an_example_that_parses(path: str, command: click.Command, run) -> None:
    result = run(*path.split(), "--help")
    assert result.exit_code == 0
    assert f"Usage: ringfence {path}" in result.stdout
    assert isinstance(command, Leaf)
    assert command.examples
    for example in command.examples:
        assert f"ringfence {path}" in example
        assert f"  {example}\n" in result.stdout
    for name in ("--data", "--connect", "--json"):
        assert name in result.stdout


@pytest.mark.parametrize(("path", "command"), EVERY)
def test_commands_document_lists_it(path: str, command: click.Command) -> None:
    text = (DOCS / "commands.md").read_text()
    _, heading, rest = text.partition(f"\n### ringfence {path}\n")
    assert heading, f"docs/commands.md has no section `ringfence {path}`"
    section = rest.partition("\n### ")[0].partition("\n## ")[0]
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name not in (
            "data",
            "connect",
            "as_json",
            "help",
        ):
            assert any(f"`{name}" in section for name in parameter.opts), f"{path}: {parameter.opts}"


def test_commands_document_lists_nothing_else() -> None:
    text = (DOCS / "commands.md").read_text()
    headings = [
        line.removeprefix("### ringfence ") for line in text.splitlines() if line.startswith("### ringfence ")
    ]
    assert sorted(headings) == sorted(CONTRACT)


def test_json_document_has_a_section_for_every_command() -> None:
    text = (DOCS / "json.md").read_text()
    missing = [path for path, _ in EVERY if f"`{path}`" not in text]
    assert missing == []


@pytest.mark.parametrize(
    "words",
    [("--data", "{}", "ps", "--json"), ("ps", "--json", "--data", "{}"), ("--json", "ps", "--data", "{}")],
)
def test_global_options_stand_before_and_after(words, door, run, monkeypatch) -> None:
    monkeypatch.setenv("RINGFENCE_DATA", "/nonexistent")
    door.answers["List"] = {"agents": []}
    result = run(*(word.format(door.data) for word in words))
    assert (result.exit_code, result.stdout) == (0, "[]\n")


def test_global_options_stand_behind_a_group(door, run, monkeypatch) -> None:
    monkeypatch.setenv("RINGFENCE_DATA", "/nonexistent")
    door.answers["SecretList"] = {"secrets": ["a"]}
    result = run("secrets", "--data", door.data, "ls")
    assert (result.exit_code, result.stdout) == (0, "a\n")


def test_the_nearest_address_counts(door, run, monkeypatch) -> None:
    monkeypatch.setenv("RINGFENCE_DATA", "/nonexistent")
    door.answers["List"] = {"agents": []}
    assert run("--connect", "unix:/nonexistent/a", "ps", "--data", door.data, "--json").exit_code == 0
    assert run("--data", "/nonexistent", "ps", "--connect", f"unix:{door.data}/door.sock").exit_code == 0
    assert run("--data", door.data, "ps", "--connect", "unix:/nonexistent/a").exit_code == 6


def test_version(run) -> None:
    assert run("--version").stdout.startswith("ringfence 0.")
