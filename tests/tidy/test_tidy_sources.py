"""The shape of the sources: what people agreed on, held by a test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
# Where the work happens, not the project: homes and work trees of machines, addresses of registries and mirrors.
FOREIGN = re.compile(
    rb"(?<![\w.])/(?:root|home/(?!ringfence-ci\b|user\b|me\b|ada\b)\w+|work|opt/(?:pypi|wheels))/"
    rb"|pypi\.org|pythonhosted\.org|registry\.npmjs|--(?:extra-)?index-url\s+\S*://"
)


def committed(*patterns: str) -> list[Path]:
    """Files of the repository, new ones that are not yet added included."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    names = subprocess.run(argv, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    return [path for name in names.split("\0") if name and (path := REPOSITORY / name).is_file()]


def sources() -> list[Path]:
    """First-party Python that ships or is run by people: not generated, not tests."""
    tests = REPOSITORY / "tests"
    return [
        path for path in committed("*.py") if not path.name.endswith("_pb2.py") and tests not in path.parents
    ]


def label(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def test_there_are_sources():
    portions = {label(path).split("/")[0] for path in sources()}
    assert {"kernel", "policy", "sandbox", "syscalls"} <= portions


@pytest.mark.parametrize("path", sources(), ids=label)
def test_files_and_functions_can_be_read_in_one_sitting(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= FILE_LINES_MAX
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = {
        f"{node.name} (line {node.lineno})": lines
        for node in ast.walk(ast.parse(text))
        if isinstance(node, functions)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert long == {}


def test_nothing_names_a_machine_or_a_registry():
    this = Path(__file__)
    found = {
        label(path): match[0].decode()
        for path in committed()
        if path != this and (match := FOREIGN.search(path.read_bytes())) is not None
    }
    assert found == {}


def test_nobody_imports_below_the_namespace():
    """A file there would turn the namespace into the package of one portion and hide the others."""
    assert [label(path) for path in committed("*/ringfence/__init__.py")] == []


def test_layers_and_fences_hold():
    """Upper layers import lower ones only; grpc, psycopg and casbin stay in their rooms."""
    argv = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = re.search(r"Contracts: (\d+) kept, 0 broken", done.stdout)
    assert kept is not None
    assert int(kept[1]) >= 5


def test_a_broken_fence_is_seen(tmp_path):
    """The same contracts, over a policy that imports the kernel, fail."""
    package = tmp_path / "ringfence"
    for name in ("kernel", "console", "policy", "sandbox", "syscalls", "agent", "v1"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").touch()
    (package / "kernel" / "journal.py").touch()
    (package / "policy" / "engine.py").write_text("import casbin, ringfence.kernel.journal\n")
    config = tmp_path / "pyproject.toml"
    config.write_bytes((REPOSITORY / "pyproject.toml").read_bytes())
    argv = [sys.executable, "-I", "-c", _LINT, str(tmp_path), str(config)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"ringfence\.policy is not allowed to import ringfence\.kernel", done.stdout)


_LINT = """
import sys
sys.path.insert(0, sys.argv[1])
import ringfence
ringfence.__path__ = [sys.argv[1] + "/ringfence"]
from importlinter.cli import lint_imports
sys.exit(lint_imports(config_filename=sys.argv[2], no_cache=True, limit_to_contracts=()))
"""
