"""What programs and commands read and write: all of it, in bounded memory, whoever is slow."""

from __future__ import annotations

import hashlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Box

sys.path.insert(0, str(Path(__file__).parent))
from sandbox_kit import CONNECT, Pipe, closing_at_its_end, peaks, silent, talking
from workspace_kit import workspace_of

GB = 1 << 30
MB = 1 << 20
GROWTH_MOST = 32 * MB

POUR = """
import os, sys
block = bytes(range(256)) * 4096
for n in range(int(sys.argv[2])): os.write(1, block)
"""


def test_a_gigabyte_of_a_program_in_bounded_memory(box: Box) -> None:
    expected = hashlib.blake2b()
    for _ in range(GB // MB):
        expected.update(bytes(range(256)) * 4096)
    found, size = hashlib.blake2b(), 0
    with Pipe(box) as pipe, peaks(box) as peak:
        program = box.python(POUR, str(GB // MB), stdout=pipe.path)
        for part in pipe.parts():
            found.update(part)
            size += len(part)
        assert program.wait() == ("exit", 0)
        assert size == GB
        assert found.digest() == expected.digest()
        assert peak() < GROWTH_MOST


def test_a_gigabyte_of_a_command_in_bounded_memory(box: Box) -> None:
    with peaks(box) as peak:
        script = "echo first; head -c 1073741824 /dev/zero; echo; echo the error is here >&2; echo last"
        done = box.run(script, workspace_of(box), limits={"disk_bytes": 16 * MB})
        assert (done.reason, done.code) == ("exit", 0)
        assert done.facts["stdout_bytes"] == GB + len("first\n\nlast\n")
        assert done.err == "the error is here\n"
        assert done.out.startswith("first\n\0\0")
        assert done.out.endswith("\0\nlast\n")
        assert Path(done.facts["stdout"]).stat().st_size < 5 * MB
        assert peak() < GROWTH_MOST


def test_one_line_of_fifty_megabytes(box: Box) -> None:
    line = 50 * MB
    code = f"import sys; sys.stdout.write('x' * {line}); print(); print('done', file=sys.stderr)"
    with Pipe(box) as pipe, peaks(box) as peak:
        program = box.python(code, stdout=pipe.path)
        size = sum(len(part) for part in pipe.parts())
        assert (size, program.wait()) == (line + 1, ("exit", 0))
        assert peak() < GROWTH_MOST
    assert program.stderr.read_text() == "done\n"


def test_a_slow_reader_holds_up_the_program_and_no_one_else(box: Box) -> None:
    code = CONNECT + POUR + "s.sendall(b'written')"
    with Pipe(box) as pipe:
        with talking(box, code, "8", stdout=pipe.path) as (program, connection):
            assert silent(connection)
            # Nobody reads: others run to their end all the same.
            assert box.python("print('other')").wait() == ("exit", 0)
            assert box.run("echo other", workspace_of(box)).out == "other\n"
            assert silent(connection)
            first = pipe.read(1000)
            assert first == (bytes(range(256)) * 4)[: len(first)]
            size = len(first)
            for part in pipe.parts(4096):
                size += len(part)
            assert connection.recv(100) == b"written"
        assert size == 8 * MB
        assert program.wait() == ("exit", 0)


def test_a_program_that_waits_for_its_reader_can_be_killed(box: Box) -> None:
    with Pipe(box) as pipe:
        with talking(box, CONNECT + POUR + "s.sendall(b'written')", "8", stdout=pipe.path) as (
            program,
            connection,
        ):
            assert silent(connection)
            with closing_at_its_end(connection):
                program.kill()
            assert program.wait() == ("killed", -9)
        assert box.alive() == []
        assert sum(len(part) for part in pipe.parts()) < 8 * MB


def test_a_reader_that_goes_away_ends_its_writer(box: Box) -> None:
    with Pipe(box) as pipe:
        program = box.program(["/bin/sh", "-c", "exec yes", box.token], stdout=pipe.path)
        assert pipe.read(2) == b"y\n"
        pipe.close()
        assert program.wait() == ("signal", -signal.SIGPIPE)


def test_binary_output_arrives_as_it_is(box: Box) -> None:
    code = "import os; os.write(1, bytes(range(256)) * 300); os.write(2, b'\\xff\\x00\\r\\n')"
    program = box.python(code)
    assert program.wait() == ("exit", 0)
    assert program.stdout.read_bytes() == bytes(range(256)) * 300
    assert program.stderr.read_bytes() == b"\xff\x00\r\n"
    done = box.run("", workspace_of(box), argv=["python3", "-c", code])
    assert Path(done.facts["stdout"]).read_bytes() == bytes(range(256)) * 300
    assert Path(done.facts["stderr"]).read_bytes() == b"\xff\x00\r\n"


def test_closed_streams_are_no_end(box: Box) -> None:
    code = "import os, time\nfor n in (0, 1, 2): os.close(n)\n" + CONNECT + "s.recv(1); os._exit(4)"
    with Pipe(box) as pipe, talking(box, code, stdout=pipe.path) as (program, connection):
        _, ended = program.begin("wait")
        assert silent(connection)
        assert not ended.done()
        connection.sendall(b"x")
        assert program.wait() == ("exit", 4)
    done = box.run("exec <&- >&- 2>&-; exit 6", workspace_of(box))
    assert (done.reason, done.code, done.out, done.err) == ("exit", 6, "", "")


LATE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    while True: time.sleep(1000); os.write(1, b"late")
sys.stdout.write("x" * 50_000 + "end")
"""


def test_what_is_left_behind_holds_no_stream_open(box: Box) -> None:
    with Pipe(box) as pipe:
        program = box.python(LATE, stdout=pipe.path)
        assert program.wait() == ("exit", 0)
        assert b"".join(pipe.parts()) == b"x" * 50_000 + b"end"
    done = box.run("", workspace_of(box), argv=["python3", "-c", LATE, box.token])
    assert (done.reason, done.code, done.out) == ("exit", 0, "x" * 50_000 + "end")
    assert box.left() == []


def test_all_output_is_there_when_the_wait_returns(box: Box) -> None:
    for number in range(5):
        size = 60_000 + number
        program = box.program(["/bin/sh", "-c", f"head -c {size} /dev/zero; head -c {size} /dev/zero >&2"])
        assert program.wait() == ("exit", 0)
        assert (program.stdout.stat().st_size, program.stderr.stat().st_size) == (size, size)
        done = box.run(f"head -c {size} /dev/zero; head -c {size} /dev/zero >&2", workspace_of(box))
        assert (len(done.out), len(done.err)) == (size, size)


DIGEST = (
    "import hashlib, sys\ndata = sys.stdin.buffer.read(); print(len(data), hashlib.sha256(data).hexdigest())"
)


@pytest.mark.parametrize("size", [0, 1, MB, 16 * MB], ids=["0", "1", "1MB", "16MB"])
def test_standard_input_is_complete(box: Box, size: int) -> None:
    data = (b"\x00\xff\r\n" * (size // 4 + 1))[:size]
    path = box.place / box.fresh("stdin")
    path.write_bytes(data)
    path.chmod(0o644)
    expected = f"{size} {hashlib.sha256(data).hexdigest()}\n"
    program = box.python(DIGEST, stdin_path=str(path))
    assert program.wait() == ("exit", 0)
    assert program.stdout.read_text() == expected
    done = box.run("", workspace_of(box), argv=["python3", "-c", DIGEST], stdin_path=str(path))
    assert done.out == expected


def test_standard_input_need_not_be_read(box: Box) -> None:
    path = box.place / box.fresh("stdin")
    path.write_bytes(b"word\n" + bytes(4 * MB))
    path.chmod(0o644)
    assert box.program(["/bin/true"], stdin_path=str(path)).wait() == ("exit", 0)
    program = box.program(["/bin/sh", "-c", "read word; echo $word"], stdin_path=str(path))
    assert program.wait() == ("exit", 0)
    assert program.stdout.read_text() == "word\n"
    assert box.run("exit 3", workspace_of(box), stdin_path=str(path)).code == 3
    done = box.run("sleep 1000 & exec <&-; echo up", workspace_of(box), stdin_path=str(path))
    assert (done.code, done.out) == (0, "up\n")
    assert box.left() == []


def test_two_streams_may_be_one(box: Box) -> None:
    path = box.directory(box.fresh("logs"), owner=box.kind.kernel_uid) / "both"
    program = box.program(["/bin/sh", "-c", "echo o; echo e >&2; echo p"], stdout=path, stderr=path)
    assert program.wait() == ("exit", 0)
    assert sorted(path.read_text().split()) == ["e", "o", "p"]
    assert path.stat().st_size == 6
