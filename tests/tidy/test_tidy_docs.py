"""What the documentation says is what the project does."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import click
import pytest
from ringfence.console.cli import build
from ringfence.policy.manifest import parse_manifest
from ringfence.syscalls.table import build_table

REPOSITORY = Path(__file__).parents[2]
ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
README = REPOSITORY / "README.md"

UNITS = {"": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "s": 1}
RECOVERY_NAMES = {"ROLL_FORWARD": "ROLL-FORWARD", "ASK_TARGET": "ASK-TARGET"}


def pages() -> list[Path]:
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(argv, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    return sorted({REPOSITORY / name for name in names.split("\0") if name})


def label(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def prose(path: Path) -> str:
    """A page without its code blocks, fenced or indented."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


def fenced(path: Path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def rows_of(path: Path) -> list[list[str]]:
    """Rows of all tables of a page, cells stripped."""
    lines = [line for line in prose(path).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_architecture_shows_the_table_as_it_is():
    documented = {
        cells[0].strip("`"): tuple(cells[1:6])
        for cells in rows_of(ARCHITECTURE)
        if len(cells) == 7 and re.fullmatch(r"`[a-z0-9.]+`", cells[0])
    }
    real = {
        row.action: (
            row.effect.name,
            RECOVERY_NAMES.get(row.recovery.name, row.recovery.name),
            "yes" if row.intent else "no",
            "yes" if row.point else "no",
            f"`{row.resource_field}`" if row.resource_field else "-",
        )
        for row in build_table().values()
    }
    assert documented == real


# -- links ------------------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Names of a page's headings as GitHub makes them."""
    heads = re.findall(r"^#+ +(.+?) *$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", pages(), ids=label)
def test_relative_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        known = place.exists() and (not fragment or place.suffix != ".md" or fragment in anchors(place))
        if not known:
            broken.append(target)
    assert broken == []


# -- commands ---------------------------------------------------------------------------------------------------------


def command_lines(page: Path) -> list[str]:
    """Lines in code blocks that call `ringfence` or `rf`."""
    text = page.read_text(encoding="utf-8")
    inside = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    indented = re.findall(r"^ {4}(\S.*)$", text, flags=re.MULTILINE)
    return [line for line in [*inside.splitlines(), *indented] if re.match(r"(ringfence|rf) ", line)]


def problem_of(line: str) -> str | None:
    """Why a line is no command of the CLI; None where it is one. Nothing is carried out."""
    words = shlex.split(line, comments=True)[1:]
    command: click.Command = build()
    context = click.Context(command, info_name="ringfence")
    while isinstance(command, click.Group) and words:
        found = command.get_command(context, words[0])
        if found is None:
            return f"no command `{words[0]}`"
        command, words = found, words[1:]
    try:
        command.make_context(command.name, words)
    except click.ClickException as error:
        return error.format_message()
    return None


PAGES_WITH_COMMANDS = [page for page in pages() if command_lines(page)]


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=label)
def test_documented_commands_exist(page):
    problems = {line: why for line in command_lines(page) if (why := problem_of(line)) is not None}
    assert problems == {}


def test_a_wrong_command_line_is_seen():
    assert README in PAGES_WITH_COMMANDS
    assert problem_of("ringfence undo AGENT") is not None
    assert problem_of("ringfence rollback AGENT --back-to 3") is not None
    assert problem_of("ringfence resolve AGENT 3 --as perhaps") is not None


# -- the example ------------------------------------------------------------------------------------------------------


def test_the_readme_example_is_a_manifest_and_a_program():
    (manifest,) = [parse_manifest(text, "README.md") for text in fenced(README, "yaml")]
    assert manifest.unsupported() == []
    assert manifest.run.command == ("python", "agent.py")
    (program,) = fenced(README, "python")
    assert program.count("\n") <= 20
    compile(program, "README.md", "exec")


# -- the glossary -----------------------------------------------------------------------------------------------------


def test_the_glossary_defines_each_word_once():
    words = [cells[0].strip("*").lower() for cells in rows_of(REPOSITORY / "docs" / "glossary.md")]
    words = [word for word in words if word not in {"word", ""} and not set(word) <= {"-"}]
    assert len(words) >= 20
    assert [word for word, count in Counter(words).items() if count > 1] == []


# -- limits -----------------------------------------------------------------------------------------------------------


def limits() -> list[tuple[str, str]]:
    rows = [cells for cells in rows_of(REPOSITORY / "docs" / "limits.md") if len(cells) == 3]
    return [(cells[2].strip("`"), cells[1]) for cells in rows if "." in cells[2]]


@pytest.mark.parametrize(("name", "shown"), limits(), ids=lambda value: value)
def test_documented_limits_are_those_of_the_code(name, shown):
    module, _, constant = name.rpartition(".")
    real = getattr(importlib.import_module(f"ringfence.{module}"), constant)
    number, _, unit = shown.partition(" ")
    scale = 1000 if constant.endswith("_MS") or "_MS_" in constant else 1
    assert float(number) * UNITS[unit] * scale == real


def test_there_are_limits():
    assert len(limits()) >= 40
