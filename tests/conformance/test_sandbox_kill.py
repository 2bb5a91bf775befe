"""Processes that do all they can to stay: a kill, and the start of the next kernel, leave none of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Box, Host, Running

sys.path.insert(0, str(Path(__file__).parent))
from sandbox_kit import eventually

ZOO = """
import ctypes, os, signal, socket, sys, threading, time

def stay(what=lambda: None):
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)
    what()
    s.sendall(b"x")
    while True: time.sleep(1000)

def orphan():
    os.setsid()
    if os.fork(): os._exit(0)
    os.setsid()
    if os.fork(): os._exit(0)

def stop_itself():
    s.sendall(b"x")
    os.kill(os.getpid(), signal.SIGSTOP)

def lend_memory():
    # Like vfork: whoever did it can't be interrupted until its child is gone.
    libc = ctypes.CDLL(None)
    s.sendall(b"x")
    libc.syscall(ctypes.c_long({"x86_64": 56, "aarch64": 220}[os.uname().machine]), *[ctypes.c_long(w) for w in (0x4111, 0, 0, 0, 0)])
    while True: time.sleep(1000)

def in_threads():
    for _ in range(5): threading.Thread(target=time.sleep, args=(1000,)).start()

def open_a_pipe():
    os.mkfifo(f"/tmp/{os.getpid()}")
    s.sendall(b"x")
    os.open(f"/tmp/{os.getpid()}", os.O_RDONLY)

def wait_for_a_lock():
    import fcntl
    file = open("/tmp/lock", "w")
    s.sendall(b"x")
    fcntl.flock(file, fcntl.LOCK_EX)

def leave_zombies():
    for _ in range(5):
        if os.fork() == 0: os._exit(0)

def fork_on():
    s.sendall(b"x")
    while True:
        try:
            if os.fork() == 0: continue
            os._exit(0)
        except OSError: pass

s = socket.socket(socket.AF_UNIX); s.connect("/run/ringfence/syscall.sock")
beasts = [orphan, stop_itself, lend_memory, in_threads, open_a_pipe, wait_for_a_lock, wait_for_a_lock, leave_zombies, fork_on]
for beast in beasts:
    if os.fork() == 0: stay(beast)
if os.fork() == 0:
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)", sys.argv[1]])
stay()
"""
HEARD = 9
"""How many have to say that they are there; some say it twice, and some never return from what they do."""


def let_loose(box: Box, host: Host) -> Running:
    sockets = box.directory(box.fresh("sockets"))
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(30)
        server.bind(str(sockets / "syscall.sock"))
        (sockets / "syscall.sock").chmod(0o777)
        server.listen()
        program = box.python(ZOO, socket_dir=sockets, host=host, limits={"pids": 60})
        connection, _ = server.accept()
        connection.settimeout(30)
        heard = 0
        while heard < HEARD:
            heard += len(connection.recv(100))
        connection.close()
    return program


def first_of(program: Running) -> int:
    """The program itself, as the host sees it: the first child of the first process."""
    return int(Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()[0])


@pytest.mark.parametrize("how", ["running", "paused"])
def test_a_kill_leaves_none_of_them(native_box: Box, how: str) -> None:
    box = native_box
    program = let_loose(box, box.host)
    if how == "paused":
        program.call("pause")
    assert len(box.alive()) >= HEARD
    program.kill()
    assert box.left() == []
    assert program.wait() == ("killed", -9)


def test_the_end_of_the_program_takes_them_along(native_box: Box) -> None:
    box = native_box
    program = let_loose(box, box.host)
    os.kill(first_of(program), signal.SIGKILL)
    assert program.wait() == ("signal", -9)
    assert box.left() == []


def test_a_traced_one_dies_too(native_box: Box) -> None:
    box = native_box
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    program = let_loose(box, box.host)
    tracer = subprocess.Popen(
        [strace, "-f", "-o", "/dev/null", "-p", str(first_of(program))], stderr=subprocess.PIPE
    )
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    if b"attached" not in said:
        tracer.kill()
        tracer.communicate()
        program.kill()
        pytest.skip(f"this host lets nobody trace: {said.decode().strip()}")
    program.kill()
    assert box.left() == []
    tracer.communicate(timeout=30)


@pytest.mark.parametrize("how", ["running", "paused"])
def test_the_next_kernel_ends_them_when_nothing_else_can(native_box: Box, how: str) -> None:
    box = native_box
    # Now and then something else is quicker than the signal that stops what would end them: then they are gone, as is well.
    for _ in range(5):
        if outlived(box, how):
            return
    pytest.fail("nothing ever outlived its kernel")


def outlived(box: Box, how: str) -> bool:
    """Whether programs outlived their kernel; either way nothing is left of them."""
    host = box.another_host()
    program = let_loose(box, host)
    if how == "paused":
        program.call("pause")
    record = next((box.data / "sandboxes").glob("*.json")).read_text()
    launcher = int(record.partition('"launcher": {"pid": ')[2].partition(",")[0])
    os.kill(launcher, signal.SIGSTOP)
    try:
        host.end()
        lived = len(box.alive())
        if lived < HEARD:
            # Something else is at it at this very moment, and finishes it.
            eventually(lambda: box.alive() == [], lambda: f"still there: {box.alive()}")
            lived = 0
        assert box.another_host().call("sweep") == (["agent-1"] if lived else [])
        assert box.left() == []
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(launcher, signal.SIGKILL)  # stopped, it would keep them for ever
        raise
    return lived > 0
