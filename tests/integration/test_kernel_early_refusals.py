"""What a client or a command line says is checked before anything is made: names, addresses, connection strings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kernels import KernelProcess, Refused

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: ok}
spec: {run: {command: [python, -c, pass]}}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelProcess]:
    process = KernelProcess(tmp_path_factory.mktemp("n") / "data")
    process.start()
    yield process
    process.stop()


@pytest.mark.parametrize("name", ["../../outside", "a/b", ".", "..", "a\nb", "x" * 64, "-a", "a-"])
def test_a_name_that_could_leave_the_directory_is_refused(kernel: KernelProcess, name: str) -> None:
    with pytest.raises(Refused) as refused:
        kernel.operator.submit(MANIFEST, {}, name=name)
    assert refused.value.exit_code == 2
    assert kernel.operator.ask("List", all=True)["agents"] == []
    assert list(Path(kernel.data / "agents").glob("*")) == []


def test_a_tcp_address_is_refused_before_anything_starts(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "ringfence.console",
        "up",
        "--data",
        str(tmp_path / "d"),
        "--listen",
        "127.0.0.1:0",
    ]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--listen" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "d").exists()


def test_a_dsn_that_is_none_is_a_mistake_in_usage(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "ringfence.console",
        "up",
        "--data",
        str(tmp_path / "d"),
        "--dsn",
        "nonsense",
    ]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "write postgresql://" in ended.stderr
    assert ended.stderr.count("\n") == 1
