"""Kill, pause and resume reach every process of the tree; signals are reported as what they are."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Box

sys.path.insert(0, str(Path(__file__).parent))
from sandbox_kit import (
    CONNECT,
    ECHO,
    IGNORING,
    Pipe,
    closing_at_its_end,
    eventually,
    listen,
    says,
    silent,
    talking,
)


def test_kill_ends_setsid_double_fork_and_ignored_signals(box: Box) -> None:
    code = f"""
import os, sys, time
def child(*steps):
    if os.fork() == 0:
        for step in steps: step()
        exec({IGNORING!r})
        print("up", flush=True)
        while True: time.sleep(1000)
fork_again = lambda: os.fork() and os._exit(0)
child(); child(os.setsid); child(fork_again); child(os.setsid, fork_again)
exec({IGNORING!r})
import socket
s = socket.socket(socket.AF_UNIX); s.connect("/run/ringfence/syscall.sock")
while True: time.sleep(1000)
"""
    sockets = box.directory(box.fresh("sockets"))
    server = listen(sockets)
    program = box.python(code, socket_dir=sockets)
    connection, _ = server.accept()
    eventually(lambda: len(box.alive()) >= 5, lambda: f"only {box.alive()} run")
    with closing_at_its_end(connection) as heard:
        program.kill()
        assert box.alive() == []
        assert program.wait() == ("killed", -9)
        assert box.left() == []
        assert heard.result(60) == b""
    program.kill()
    server.close()


def test_pause_freezes_and_resume_thaws(box: Box) -> None:
    sockets = box.directory(box.fresh("sockets"))
    server = listen(sockets)
    # The child does the talking: a pause that only reaches the first process shows.
    code = f"import os\nif os.fork(): os.wait()\nelse:\n  os.setsid()\n  exec({ECHO!r})"
    program = box.python(code, socket_dir=sockets)
    connection, _ = server.accept()
    connection.settimeout(30)
    assert says(connection, b"one") == b"one"
    program.call("pause")
    program.call("pause")
    connection.sendall(b"two")
    connection.settimeout(0.3)
    with pytest.raises(TimeoutError):
        connection.recv(100)
    connection.settimeout(30)
    program.call("resume")
    assert connection.recv(100) == b"two"
    program.call("resume")
    connection.close()
    assert program.wait() == ("exit", 0)
    program.call("pause")
    server.close()


def test_a_program_that_wakes_itself_is_stopped_again_and_can_be_killed(box: Box) -> None:
    sockets = box.directory(box.fresh("sockets"))
    server = listen(sockets)
    code = f"""
import ctypes, signal
class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int), ("pad", ctypes.c_char * 48)]
class Spec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in "abcd"]
libc = ctypes.CDLL(None); timer = ctypes.c_void_p()
assert libc.timer_create(1, ctypes.byref(Event(signo=signal.SIGCONT)), ctypes.byref(timer)) == 0
assert libc.timer_settime(timer, 0, ctypes.byref(Spec(0, 100_000_000, 0, 100_000_000)), None) == 0
exec({ECHO!r})
"""
    program = box.python(code, socket_dir=sockets)
    connection, _ = server.accept()
    connection.settimeout(30)
    assert says(connection, b"one") == b"one"
    program.call("pause")
    if box.kind.frozen:
        # Only a frozen group keeps it from waking for a moment; without one it is stopped again.
        connection.sendall(b"two")
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(100)
    program.call("resume")
    program.call("pause")
    connection.settimeout(60)
    with closing_at_its_end(connection):
        program.kill()
    assert box.alive() == []
    server.close()


def test_what_is_on_its_way_to_thaw_a_program_passes_no_later_order(box: Box) -> None:
    """Its first process is slow to pass signals on; frozen by a group, nothing depends on it."""
    if box.kind.backend != "native":
        pytest.skip("does not apply: the first process can't be stopped from here")
    with talking(box) as (program, connection):
        program.call("pause")
        os.kill(program.pid, signal.SIGSTOP)
        try:
            orders = [program.begin(order) for order in ("resume", "pause")]
            # The orders have arrived, whatever became of them, when what came later is answered.
            box.host.call("forms", program=program.number)
        finally:
            os.kill(program.pid, signal.SIGCONT)
        for _, answered in orders:
            answered.result(30)
        connection.sendall(b"word")
        assert silent(connection)
        program.call("resume")
        assert connection.recv(100) == b"word"
        with closing_at_its_end(connection):
            program.kill()
    assert program.wait() == ("killed", -9)


def test_kill_works_on_a_paused_program(box: Box) -> None:
    sockets = box.directory(box.fresh("sockets"))
    server = listen(sockets)
    program = box.python(ECHO, socket_dir=sockets)
    connection, _ = server.accept()
    program.call("pause")
    with closing_at_its_end(connection):
        program.kill()
    assert box.alive() == []
    assert program.wait() == ("killed", -9)
    server.close()


@pytest.mark.parametrize(
    "name", ["HUP", "INT", "QUIT", "ABRT", "KILL", "USR1", "SEGV", "PIPE", "ALRM", "TERM"]
)
def test_the_signal_that_ended_a_program_is_reported(box: Box, name: str) -> None:
    number = getattr(signal, f"SIG{name}")
    assert box.program(["/bin/sh", "-c", f"kill -{name} $$"]).wait() == ("signal", -number)


def test_a_program_may_handle_signals_of_its_own(box: Box) -> None:
    code = "import os, signal\nsignal.signal(15, lambda *_: print('got', flush=True))\nos.kill(os.getpid(), 15); os.kill(0, 15)"
    program = box.python(code)
    assert program.wait() == ("exit", 0)
    assert program.stdout.read_text() == "got\ngot\n"


STOPPED = """
import os, signal, time
children = []
for n in range(3):
    pid = os.fork()
    if pid == 0:
        if n == 1: os.setsid()
        while True: time.sleep(1000)
    children.append(pid); os.kill(pid, signal.SIGSTOP); os.waitpid(pid, os.WUNTRACED)
"""


def test_kill_ends_stopped_children(box: Box) -> None:
    with talking(box, STOPPED + ECHO) as (program, connection):
        assert says(connection, b"ready") == b"ready"
        eventually(lambda: len(box.alive()) >= 4, lambda: f"only {box.alive()} run")
        with closing_at_its_end(connection):
            program.kill()
        assert box.alive() == []
        assert program.wait() == ("killed", -9)


def test_a_program_that_stopped_itself_can_be_killed(box: Box) -> None:
    with talking(box, CONNECT + "import os\ns.sendall(b'x'); os.kill(os.getpid(), 19); s.sendall(b'y')") as (
        program,
        connection,
    ):
        assert connection.recv(1) == b"x"
        assert silent(connection)
        with closing_at_its_end(connection):
            program.kill()
        assert program.wait() == ("killed", -9)
    assert box.alive() == []


def test_stopped_children_end_with_the_program(box: Box) -> None:
    assert box.python(STOPPED).wait() == ("exit", 0)
    assert box.alive() == []


FLOW = "import os\nwhile True: os.write(1, b'0123456789' * 100)\n"


def test_pause_while_output_flows(box: Box) -> None:
    with Pipe(box) as pipe:
        program = box.python(FLOW, stdout=pipe.path)
        for _ in range(3):
            assert pipe.read() != b""
            program.call("pause")
            pipe.drain()
            # Nothing but what was in the pipe already: it has run dry and stays so.
            assert not pipe.has_more(0.2)
            program.call("resume")
            assert sum(len(pipe.read()) for _ in range(20)) > 0
        program.call("pause")
        program.kill()
        _, ended = program.begin("wait")
        assert b"".join(pipe.parts()) is not None
        assert ended.result(60) == {"reason": "killed", "code": -9}
    assert box.left() == []


def test_pause_pause_resume_resume(box: Box) -> None:
    with talking(box) as (program, connection):
        for _ in range(3):
            program.call("pause")
        connection.sendall(b"one")
        assert silent(connection)
        program.call("resume")
        assert connection.recv(100) == b"one"
        program.call("resume")
        assert says(connection, b"two") == b"two"
        # Many at once end in the order they were given.
        orders = [program.begin("pause" if n % 2 == 0 else "resume")[1] for n in range(20)]
        for order in orders:
            order.result(60)
        assert says(connection, b"three") == b"three"
        with closing_at_its_end(connection):
            program.kill()


def test_orders_to_a_program_that_has_ended_do_nothing(box: Box) -> None:
    program = box.program(["/bin/true"])
    assert program.wait() == ("exit", 0)
    for order in ("pause", "resume", "kill", "pause", "kill"):
        program.call(order)
    assert program.wait() == ("exit", 0)


def test_others_run_on_while_one_is_paused(box: Box) -> None:
    with talking(box) as (first, one), talking(box) as (second, two):
        first.call("pause")
        assert says(two, b"here") == b"here"
        second.call("pause")
        first.call("resume")
        assert says(one, b"there") == b"there"
        two.sendall(b"late")
        assert silent(two)
        with closing_at_its_end(one), closing_at_its_end(two):
            first.kill()
            second.kill()
        assert first.wait() == second.wait() == ("killed", -9)
    assert box.left() == []
