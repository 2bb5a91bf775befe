"""`rf-mcp` before there is a kernel: usage, and where it looks for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ringfence.agent import mcp_bridge

COMMAND = str(Path(sys.executable).with_name("rf-mcp"))
NAMES = mcp_bridge.NAMES


def bare() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in NAMES}


def test_it_says_what_it_is_for():
    done = subprocess.run([COMMAND, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "usage: rf-mcp")
    done = subprocess.run([COMMAND, "x"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


def test_without_a_kernel_it_ends_with_6():
    done = subprocess.run(
        [COMMAND], env=bare(), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 6
    assert done.stderr.startswith("rf-mcp: KernelGone: `RINGFENCE_SOCKET` is not set")
    gone = {**bare(), NAMES[0]: "/nowhere/socket", NAMES[1]: "t"}
    done = subprocess.run(
        [COMMAND], env=gone, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 6
    assert "/nowhere/socket" in done.stderr


def test_it_finds_the_kernel_of_a_client_that_passes_nothing_on():
    code = "from ringfence.agent.mcp_bridge import environment as e; print(e()['RINGFENCE_SOCKET'], e()['RINGFENCE_TOKEN'])"
    inner = f'env -u RINGFENCE_SOCKET -u RINGFENCE_TOKEN {sys.executable} -c "{code}"; true'
    env = {**bare(), NAMES[0]: "/the/socket", NAMES[1]: "the=token"}
    done = subprocess.run(["sh", "-c", inner], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "/the/socket the=token\n"
