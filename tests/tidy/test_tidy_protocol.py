"""The committed stubs and the documented table agree with the protocol files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ringfence.v1 import options_pb2, syscalls_pb2

REPOSITORY = Path(__file__).parents[2]
PROTO = REPOSITORY / "proto"


def actions() -> list[str]:
    """The actions of the table, from its descriptor."""
    service = syscalls_pb2.DESCRIPTOR.services_by_name["SyscallService"]
    rows = [method.GetOptions().Extensions[options_pb2.row] for method in service.methods]
    return [row.action for row in rows if row.action]


def test_stubs_regenerate_unchanged(tmp_path):
    tools = Path(sys.executable).parent
    protos = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    argv = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", f"--python_out={tmp_path}"]
    env = {**os.environ, "PATH": f"{tools}:{os.environ.get('PATH', '')}"}
    subprocess.run([*argv, f"--mypy_out=quiet:{tmp_path}", *protos], cwd=PROTO, env=env, check=True)
    made = {
        path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*") if path.is_file()
    }
    committed = {
        path.relative_to(PROTO): path.read_text()
        for path in PROTO.rglob("*_pb2.py*")
        if path.suffix in (".py", ".pyi")
    }
    assert len(made) == 2 * len(protos)
    assert made == committed, "run `make proto`"


def test_the_protocol_is_clean():
    buf = Path(sys.executable).with_name("buf")
    done = subprocess.run([str(buf), "lint"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_documentation_names_every_action():
    pages = sorted((REPOSITORY / "docs").glob("*.md"))
    if not pages:
        pytest.skip("docs/ has no page yet")
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    assert [action for action in actions() if f"`{action}`" not in text] == []
