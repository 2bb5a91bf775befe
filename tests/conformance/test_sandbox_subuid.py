"""Sub-uids: whoever an ordinary user's kernel makes programs, so that no two of them, and none and the kernel, are one user."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Box, Host, Running

sys.path.insert(0, str(Path(__file__).parent))
from sandbox_kit import eventually

WAIT = """
import json, os, socket
s = socket.socket(socket.AF_UNIX); s.connect("/run/ringfence/syscall.sock")
maps = {name: open(f"/proc/self/{name}").read().split() for name in ("uid_map", "gid_map")}
s.sendall(json.dumps({"ids": os.getresuid() + os.getresgid(), "groups": os.getgroups(), **maps}).encode())
s.recv(1)
"""


def begin(box: Box, host: Host) -> tuple[Running, socket.socket, dict[str, list[str]]]:
    """A program that waits until its connection ends, and what it says of itself."""
    sockets = box.directory(box.fresh("sockets"))
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(30)
        server.bind(str(sockets / "syscall.sock"))
        (sockets / "syscall.sock").chmod(0o666)
        server.listen()
        program = box.python(WAIT, socket_dir=sockets, host=host)
        connection, _ = server.accept()
    connection.settimeout(30)
    return program, connection, json.loads(connection.recv(4096))


def users_of(box: Box) -> set[tuple[int, int]]:
    """Uid and gid on the host of every process that carries the test's token."""
    return {(facts.st_uid, facts.st_gid) for facts in (Path(f"/proc/{pid}").stat() for pid in box.alive())}


def first_process(program: Running) -> list[str]:
    lines = Path(f"/proc/{program.pid}/status").read_text().splitlines()
    return next(line.split()[1:] for line in lines if line.startswith("Uid:"))


def range_of(table: str) -> range:
    for line in Path(table).read_text().splitlines():
        name, first, count = line.split(":")
        if name == "ringfence-ci":
            return range(int(first), int(first) + int(count))
    raise AssertionError(table)


def test_each_program_has_a_uid_of_its_own_over_all_kernels_of_the_user(box: Box) -> None:
    hosts = [box.host, box.host, box.another_host()]
    begun = [begin(box, host) for host in hosts]
    users = users_of(box)
    assert len(users) == len(begun)
    assert {uid for uid, _ in users} <= set(range_of("/etc/subuid"))
    assert {gid for _, gid in users} <= set(range_of("/etc/subgid"))
    kernel = str(box.kind.kernel_uid)
    for program, _, said in begun:
        assert said["ids"] == [1000] * 6
        assert said["groups"] == []
        # The kernel's user is known inside, as somebody else.
        assert said["uid_map"][:5] == ["0", kernel, "1", "1000", first_process(program)[0]]
        assert len(set(first_process(program))) == 1
    for program, connection, _ in begun:
        connection.close()
        assert program.wait() == ("exit", 0)
    assert box.left() == []


def test_a_killed_kernel_s_uids_are_free_for_the_next(box: Box) -> None:
    host = box.another_host()
    _, connection, said = begin(box, host)
    name = f"@ringfence-sub-uid-{said['uid_map'][4]}"
    held = lambda: name in Path("/proc/net/unix").read_text().split()  # noqa: E731
    assert held()
    host.process.kill()
    host.process.wait()
    assert connection.recv(1) == b""
    connection.close()
    eventually(lambda: not held(), lambda: f"{name} is held")
    eventually(lambda: box.alive() == [], lambda: f"{box.alive()} run")


def test_a_program_is_not_the_owner_of_what_the_kernel_s_user_has(box: Box) -> None:
    code = """
import os, sys
for path in sys.argv[2:]:
    print(os.stat(path).st_uid)
    try: print(open(path).read())
    except OSError as error: print(error.strerror)
"""
    image = box.directory(box.fresh("image"), {"open": "content", "closed": "secret"})
    (image / "closed").chmod(0o600)
    program = box.python(code, "/program/open", "/program/closed", image=str(image))
    assert program.wait() == ("exit", 0), program.stderr.read_text()
    assert program.stdout.read_text().split("\n")[:4] == ["0", "content", "0", "Permission denied"]


def test_an_image_that_is_closed_to_others_is_refused_with_the_fix(box: Box) -> None:
    image = box.directory(box.fresh("image"))
    image.chmod(0o700)
    with pytest.raises(Exception, match=r"not readable for the program's sub-uid; run `chmod a\+rx`"):
        box.python("print(1)", image=str(image))
    assert box.left() == []


def test_what_a_command_leaves_belongs_to_the_kernel_s_user(box: Box) -> None:
    workspace = box.directory(box.fresh("workspace"), {"a": "a"})
    done = box.run("echo b > b; id -u", workspace, require=["uid:sub"])
    assert (done.code, done.out) == (0, "1000\n")
    assert (done.upper / "b").stat().st_uid == box.kind.kernel_uid


def test_doctor_says_that_commands_are_different(box: Box) -> None:
    (wall,) = [wall for wall in box.host.call("walls") if wall["name"] == "uid"]
    assert (wall["ok"], wall["form"], wall["fix"]) == (True, "sub", "")
    assert "sub-uid" in wall["detail"]
    assert "commands run as this user" in wall["detail"]
