"""Start, end, kill, pause and limits of programs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Box


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


def test_the_first_starts_of_a_kernel_may_come_at_once(box: Box) -> None:
    if box.kind.fences:
        pytest.skip("does not apply: the machine elsewhere knows one data directory")
    data = box.directory(box.fresh("data"), owner=box.kind.kernel_uid)
    host = box.another_host(data=data)
    spec = {
        "agent": "agent-1",
        "argv": ["/bin/sh", "-c", "exit 7"],
        "env": {"PATH": "/usr/bin:/bin"},
        "image": str(box.directory(box.fresh("image"))),
        "socket_dir": str(box.directory(box.fresh("sockets"))),
        "uid": box.uid,
        "stdout": "/dev/null",
        "stderr": "/dev/null",
    }
    starts = [host.begin("start", **spec)[1] for _ in range(8)]
    for start in starts:
        assert host.call("wait", program=start.result(60)["program"]) == {"reason": "exit", "code": 7}
    assert host.call("sweep") == []
