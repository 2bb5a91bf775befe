"""Start, end, kill, pause and limits of programs."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Box

PING = """
import socket, sys
s = socket.socket(socket.AF_UNIX); s.connect("/run/ringfence/syscall.sock")
while data := s.recv(100): s.sendall(data)
"""
FOREVER = "import signal, time\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n  except (OSError, ValueError): pass\n"


def listen(directory: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.settimeout(30)
    server.bind(str(directory / "syscall.sock"))
    (directory / "syscall.sock").chmod(0o777)
    server.listen()
    return server


def says(connection: socket.socket, word: bytes) -> bytes:
    connection.sendall(word)
    return connection.recv(100)


def test_exit_code_output_and_stdin(box: Box) -> None:
    code = "import sys; print(sys.stdin.read() + '!'); print('e', file=sys.stderr); sys.exit(7)"
    program = box.python(code, stdin="hello")
    assert program.wait() == ("exit", 7)
    assert program.stdout.read_text() == "hello!\n"
    assert program.stderr.read_text() == "e\n"
    assert box.left() == []


def test_large_stdin_is_complete_and_read_only(box: Box) -> None:
    code = "import os, sys; print(len(sys.stdin.read()));\ntry: os.write(0, b'x')\nexcept OSError as e: print(e.errno)"
    program = box.python(code, stdin="x" * 3_000_000)
    assert program.wait() == ("exit", 0)
    assert program.stdout.read_text().splitlines()[0] == "3000000"
    assert len(program.stdout.read_text().splitlines()) == 2


def test_signal_is_reported(box: Box) -> None:
    assert box.python("import os; os.kill(os.getpid(), 15)").wait() == ("signal", -15)


def test_wait_may_be_asked_twice_and_after_the_end(box: Box) -> None:
    program = box.python("import sys; sys.stdin.read()")
    _, first = program.begin("wait")
    assert program.wait() == ("exit", 0)
    assert first.result(30)["code"] == 0
    assert program.wait() == ("exit", 0)
    program.kill()


def test_program_is_found_in_the_image_and_on_the_path(box: Box) -> None:
    files = {"tool": "#!/bin/sh\necho image $0 $PWD\n", "sub/tool2": "#!/bin/sh\necho sub\n"}

    def ran(argv: list[str], **more: object) -> str:
        # The image's files are made executable before the start looks at them.
        image = box.directory(box.fresh("tools"), files)
        for name in files:
            (image / name).chmod(0o755)
        logs = box.directory(box.fresh("logs"), owner=box.data.stat().st_uid)
        sockets = box.directory(box.fresh("sockets"))
        reply = box.host.call(
            "start",
            stdout=str(logs / "out"),
            stderr=str(logs / "err"),
            agent="a",
            argv=argv,
            env={"PATH": "/usr/bin:/bin"},
            image=str(image),
            socket_dir=str(sockets),
            uid=box.uid,
        )
        assert box.host.call("wait", program=reply["program"]) == {"reason": "exit", "code": 0}
        return (logs / "out").read_text()

    assert ran(["tool"]) == "image ./tool /program\n"
    assert ran(["sub/tool2"]) == "sub\n"
    assert ran(["sh", "-c", "echo path"]) == "path\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["no-such-program"], ["`no-such-program`", "PATH"]),
        (["./missing.py"], ["`./missing.py`", "is not there"]),
        (["/etc/passwd"], ["can't be executed"]),
        ([], ["command is empty"]),
    ],
)
def test_a_program_that_cannot_be_run_is_an_error(box: Box, argv: list[str], words: list[str]) -> None:
    with pytest.raises(Exception, match=words[0]) as caught:
        box.program(argv)
    assert caught.value.kind == "SandboxError"
    assert all(word in str(caught.value) for word in words)
    assert box.left() == []


def test_kill_ends_setsid_double_fork_and_ignored_signals(box: Box) -> None:
    code = f"""
import os, sys, time
def child(*steps):
    if os.fork() == 0:
        for step in steps: step()
        exec({FOREVER!r})
        print("up", flush=True)
        while True: time.sleep(1000)
fork_again = lambda: os.fork() and os._exit(0)
child(); child(os.setsid); child(fork_again); child(os.setsid, fork_again)
exec({FOREVER!r})
import socket
s = socket.socket(socket.AF_UNIX); s.connect("/run/ringfence/syscall.sock")
while True: time.sleep(1000)
"""
    sockets = box.directory(box.fresh("sockets"))
    server = listen(sockets)
    program = box.python(code, socket_dir=sockets)
    connection, _ = server.accept()
    assert len(box.alive()) >= 5
    program.kill()
    assert box.alive() == []
    assert program.wait() == ("killed", -9)
    assert box.left() == []
    assert connection.recv(1) == b""
    program.kill()
    connection.close()
    server.close()


def test_what_a_program_leaves_behind_ends_with_it(box: Box) -> None:
    code = """
import os, time
r, w = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(w, b"x")
        while True: time.sleep(1000)
    os._exit(0)
os.read(r, 1)
"""
    program = box.python(code)
    assert program.wait() == ("exit", 0)
    assert box.alive() == []


def test_pause_freezes_and_resume_thaws(box: Box) -> None:
    sockets = box.directory(box.fresh("sockets"))
    server = listen(sockets)
    # The child does the talking: a pause that only reaches the first process shows.
    code = f"import os\nif os.fork(): os.wait()\nelse:\n  os.setsid()\n  exec({PING!r})"
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
exec({PING!r})
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
    program.kill()
    assert box.alive() == []
    connection.close()
    server.close()


def test_kill_works_on_a_paused_program(box: Box) -> None:
    sockets = box.directory(box.fresh("sockets"))
    server = listen(sockets)
    program = box.python(PING, socket_dir=sockets)
    connection, _ = server.accept()
    program.call("pause")
    program.kill()
    assert box.alive() == []
    assert program.wait() == ("killed", -9)
    connection.close()
    server.close()


def test_timeout_ends_the_tree(box: Box) -> None:
    program = box.python(
        FOREVER + "import os\nos.fork()\nwhile True: time.sleep(1000)", limits={"timeout_s": 0.5}
    )
    assert program.wait() == ("timeout", -9)
    assert box.alive() == []


EATERS = {
    "private": "x = bytearray(400 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1",
    "in a child": "import os\nif os.fork() == 0:\n  x = b'x' * (400 << 20)\n  os._exit(0)\nsys.exit(os.waitstatus_to_exitcode(os.wait()[1]) and 137)",
    "many children": "import os, time\nfor n in range(12):\n  if os.fork() == 0:\n    x = b'x' * (20 << 20)\n    time.sleep(1000)\nos.wait(); sys.exit(137)",
    "tmp and private": "f = open('/tmp/x', 'wb')\nfor n in range(30): f.write(b'x' << 20 if False else bytes(1 << 20))\nf.flush()\nx = b'x' * (400 << 20)",
    "shared": "import mmap\nm = mmap.mmap(-1, 400 << 20)\nfor n in range(400):\n  m.seek(n << 20); m.write(b'x' * (1 << 20)); m.madvise(mmap.MADV_DONTNEED)\nimport time; time.sleep(1000)",
}


@pytest.mark.parametrize("eater", EATERS)
def test_memory_limit(box: Box, eater: str) -> None:
    program = box.python("import sys\n" + EATERS[eater], limits={"memory_bytes": 96 << 20, "timeout_s": 30})
    assert program.wait()[0] == "memory"
    assert box.alive() == []


def test_memory_without_a_process_is_refused_or_counted(box: Box) -> None:
    code = "import os\nf = os.memfd_create('x')\nfor n in range(400): os.write(f, bytes(1 << 20))\nimport time; time.sleep(1000)"
    program = box.python(code, limits={"memory_bytes": 96 << 20, "timeout_s": 30})
    reason, _ = program.wait()
    assert reason == "memory" or "OSError" in program.stderr.read_text()


def test_memory_below_the_limit_is_let_alone(box: Box) -> None:
    code = "import os\nx = b'x' * (40 << 20)\nfor n in range(6): os.fork()\nprint(len(x))"
    program = box.python(code, limits={"memory_bytes": 160 << 20, "pids": 128})
    assert program.wait() == ("exit", 0)


def test_process_limit(box: Box) -> None:
    code = """
import os, time
made = 0
try:
    while made < 200:
        if os.fork() == 0: time.sleep(1000)
        made += 1
except BlockingIOError: pass
print(made)
"""
    program = box.python(code, limits={"pids": 12})
    assert program.wait() == ("exit", 0)
    assert 5 <= int(program.stdout.read_text()) <= 12
    assert box.alive() == []


def test_tmp_is_bounded(box: Box) -> None:
    code = "f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()"
    program = box.python(code, limits={"disk_bytes": 4 << 20})
    assert program.wait()[0] == "exit" or program.wait() == ("signal", -25)
    assert program.wait()[1] != 0


def test_readonly_directories_are_seen_at_their_own_path(box: Box) -> None:
    library = box.directory("lib/of".replace("/", "-"), {"a/b.txt": "content"})
    code = f"print(open({str(library / 'a/b.txt')!r}).read())\nopen({str(library / 'new')!r}, 'w')"
    program = box.python(code, readonly=[str(library)])
    assert program.wait() == ("exit", 1)
    assert program.stdout.read_text() == "content\n"
    assert (
        "Read-only file system" in program.stderr.read_text()
        or "Permission denied" in program.stderr.read_text()
    )


def test_directories_can_be_seen_at_another_path(native_box: Box) -> None:
    box = native_box
    library = box.directory("elsewhere", {"a/b.txt": "content"})
    code = "print(open('/opt/nowhere/a/b.txt').read())\nopen('/opt/nowhere/new', 'w')"
    program = box.python(code, binds={"/opt/nowhere": str(library)})
    assert program.wait() == ("exit", 1)
    assert program.stdout.read_text() == "content\n"


def test_a_readonly_directory_that_the_agent_cannot_read_is_refused(box: Box) -> None:
    if box.uid is None:
        pytest.skip("here a sandbox has the rights of the kernel's user")
    library = box.directory("closed", {"a/b.txt": "content"}, owner=0)
    (library / "a").chmod(0o700)
    with pytest.raises(Exception, match="chmod -R a") as caught:
        box.python("print(1)", readonly=[str(library)])
    assert str(library / "a") in str(caught.value)


def test_an_interpreter_below_a_closed_home_works_for_another_uid(native_box: Box, tmp_path: Path) -> None:
    if native_box.uid is None:
        pytest.skip("needs a directory that only root can enter")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "bin").mkdir()
    subprocess.run(["cp", "/bin/echo", str(home / "bin" / "say")], check=True)
    home.chmod(0o700)
    program = native_box.program([str(home / "bin/say"), "hello"], readonly=[str(home / "bin")])
    assert program.wait() == ("exit", 0)
    assert program.stdout.read_text() == "hello\n"


@pytest.mark.parametrize("path", ["/", "/proc", "/etc", "/sys/fs", "relative"])
def test_some_directories_are_never_shown(box: Box, path: str) -> None:
    with pytest.raises(Exception, match="can't be shown"):
        box.python("print(1)", readonly=[path])
