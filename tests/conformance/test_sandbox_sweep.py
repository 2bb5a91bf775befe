"""Nothing outlives its kernel, and the next one finds whatever did."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Box, Host, Running

sys.path.insert(0, str(Path(__file__).parent))
from sandbox_kit import eventually

# Records and launchers are how the native backend does it; `test_sandbox_crash.py` asks the same of every backend.
pytestmark = pytest.mark.usefixtures("native_box")

TALK = """
import os, socket, time
for step in range(3):
    if os.fork() == 0:
        os.setsid()
        if step == 2 and os.fork(): os._exit(0)
        while True: time.sleep(1000)
s = socket.socket(socket.AF_UNIX); s.connect("/run/ringfence/syscall.sock")
while data := s.recv(100): s.sendall(data)
"""


def begin(box: Box, host: Host) -> tuple[Running, socket.socket]:
    sockets = box.directory(box.fresh("sockets"))
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(30)
        server.bind(str(sockets / "syscall.sock"))
        (sockets / "syscall.sock").chmod(0o777)
        server.listen()
        program = box.python(TALK, socket_dir=sockets, host=host)
        connection, _ = server.accept()
    connection.settimeout(30)
    return program, connection


def records(box: Box) -> list[Path]:
    return sorted((box.data / "sandboxes").glob("*.json"))


def record_of(box: Box) -> tuple[Path, dict[str, Any]]:
    [path] = records(box)
    return path, json.loads(path.read_text())


def until_dead(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 30)[0]
    finally:
        os.close(descriptor)


def groups_left() -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").glob("**/ringfence/*") if path.is_dir()]


def test_the_record_is_written_before_the_program_runs(box: Box) -> None:
    program, connection = begin(box, box.host)
    _, record = record_of(box)
    assert record["agent"] == "agent-1"
    assert record["init"]["pid"] == program.pid
    assert record["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    program.kill()
    assert records(box) == []
    connection.close()


def test_a_killed_kernel_takes_its_sandboxes_along(box: Box) -> None:
    host = box.another_host()
    program, connection = begin(box, host)
    host.process.kill()
    host.process.wait()
    until_dead(program.pid)
    assert connection.recv(1) == b""
    connection.close()
    box.another_host().call("sweep")
    assert box.alive() == []
    assert records(box) == []


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_sweep_ends_what_survived_its_kernel(box: Box, paused: bool) -> None:
    host = box.another_host()
    program, connection = begin(box, host)
    if paused:
        program.call("pause")
    path, record = record_of(box)
    # A launcher that can't react: only the next kernel can end this.
    os.kill(record["launcher"]["pid"], signal.SIGSTOP)
    host.process.kill()
    host.process.wait()
    assert Path(f"/proc/{program.pid}").exists()
    eventually(lambda: len(box.alive()) >= 4, lambda: f"only {box.alive()} run")
    assert box.another_host().call("sweep") == ["agent-1"]
    assert box.alive() == []
    assert not path.exists()
    assert [group for group in record["groups"] if Path(group).exists()] == []
    assert connection.recv(1) == b""
    connection.close()
    assert box.another_host().call("sweep") == []


def test_sweep_leaves_the_living_kernels_own_alone(box: Box) -> None:
    program, connection = begin(box, box.host)
    assert box.host.call("sweep") == []
    connection.sendall(b"still here")
    assert connection.recv(100) == b"still here"
    program.kill()
    connection.close()


def test_sweep_never_ends_another_process_with_the_same_pid(box: Box) -> None:
    bystander, connection = begin(box, box.host)
    kept, record = record_of(box)
    for name, change in (("reused", {"start": -1}), ("other-boot", {})):
        forged = json.loads(json.dumps(record))
        forged["name"], forged["groups"], forged["freezer"] = name, [], None
        for who in ("init", "launcher"):
            forged[who].update(change)
        if name == "other-boot":
            forged["boot"] = "another"
        path = kept.with_name(f"{name}.json")
        path.write_text(json.dumps(forged))
        os.chown(path, kept.stat().st_uid, kept.stat().st_gid)
    assert box.host.call("sweep") == []
    assert records(box) == [kept]
    connection.sendall(b"alive")
    assert connection.recv(100) == b"alive"
    bystander.kill()
    connection.close()


def test_a_record_that_cannot_be_read_is_an_error(box: Box) -> None:
    path = box.data / "sandboxes" / "damaged.json"
    path.write_text("{")
    os.chown(path, box.data.stat().st_uid, box.data.stat().st_gid)
    with pytest.raises(Exception, match=r"damaged\.json"):
        box.host.call("sweep")
    path.unlink()


def test_a_killed_launcher_takes_the_sandbox_along(box: Box) -> None:
    program, connection = begin(box, box.host)
    _, record = record_of(box)
    os.kill(record["launcher"]["pid"], signal.SIGKILL)
    assert program.wait() == ("killed", -9)
    assert box.alive() == []
    assert records(box) == []
    assert connection.recv(1) == b""
    connection.close()


def test_a_killed_first_process_ends_the_tree(box: Box) -> None:
    program, connection = begin(box, box.host)
    os.kill(program.pid, signal.SIGKILL)
    assert program.wait() == ("signal", -9)
    assert box.alive() == []
    connection.close()


def test_a_killed_kernel_takes_its_command_along(box: Box) -> None:
    host = box.another_host()
    workspace = box.directory(box.fresh("workspace"), {"a": "a"})
    script = "python3 -c 'import time; time.sleep(1000)' $0 & echo up > up; wait"
    spec = box.command_spec(["/bin/sh", "-c", script, box.token], workspace)
    _, future = host.begin("command", **spec)
    while not (Path(spec["scratch"]) / "upper" / "up").exists():
        assert not future.done()
    _, record = record_of(box)
    host.process.kill()
    host.process.wait()
    until_dead(record["init"]["pid"])
    box.another_host().call("sweep")
    assert box.alive() == []
    assert records(box) == []
    assert [group for group in record["groups"] if Path(group).exists()] == []
    assert (workspace / "a").read_text() == "a"
    assert not (workspace / "up").exists()


def test_no_mounts_or_groups_are_left_on_the_host(box: Box) -> None:
    program, connection = begin(box, box.host)
    _, record = record_of(box)
    assert str(box.place) not in Path("/proc/self/mountinfo").read_text()
    program.kill()
    connection.close()
    assert [group for group in record["groups"] if Path(group).exists()] == []
