"""What a program finds inside, and what it must not be able to do there."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Box

CANARY = "host-canary-4711"
ENV = {"ONLY": "this", "LANG": "C.UTF-8"}


@pytest.fixture(scope="module")
def report(module_box: Box) -> dict[str, Any]:
    box = module_box
    name = f"ringfence-abstract-{os.getpid()}-{box.mode}"
    secret = box.place / "host-secret"
    secret.write_text(CANARY)
    secret.chmod(0o644)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen()
        probe = Path(__file__).with_name("wall_probe.py").read_text()
        program = box.program(
            ["/bin/sh", "-c", f"exec python3 /program/wall_probe.py token {name} {secret}"],
            files={"wall_probe.py": probe},
            env={**ENV, "PATH": "/usr/local/bin:/usr/bin:/bin"},
        )
        ended = program.wait()
    assert ended == ("exit", 0), program.stderr.read_text()
    return json.loads(program.stdout.read_text())


def test_environment_is_exactly_what_was_given(report: dict[str, Any], module_box: Box) -> None:
    expected = {**ENV, "PATH": "/usr/local/bin:/usr/bin:/bin"}
    found = {
        name: value
        for name, value in report["environ"].items()
        if name not in ("TOKEN", "PWD", "SHLVL", "_", "OLDPWD")
    }
    assert found == expected
    assert CANARY not in json.dumps(report["environ"])
    assert CANARY not in json.dumps(report["environments"])
    assert report["environments"]["1"] == "EACCES"


def test_only_its_own_processes_are_seen(report: dict[str, Any]) -> None:
    assert report["pids"][0] == 1
    assert len(report["pids"]) <= 3
    assert max(report["pids"]) < 10
    assert report["still_here"]


def test_only_standard_streams_are_open(report: dict[str, Any]) -> None:
    # The fourth is the directory being listed.
    assert len(report["fds"]) == 4


def test_no_rights_are_left(report: dict[str, Any], module_box: Box) -> None:
    status = report["status"]
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    uid = str(module_box.kind.inside_uid)
    assert set(status["Uid"].split()) == {uid}
    assert set(status["Gid"].split()) == {uid}
    # In a user namespace there is no uid 0 at all.
    assert report["setuid"] in ("EPERM", "EINVAL")
    assert report["setgid"] in ("EPERM", "EINVAL")
    assert report["chown"] in ("EPERM", "EINVAL")
    assert report["nice"] in ("EPERM", "EACCES")
    # One byte: zero would still let a core_pattern that is a pipe run on the agent's memory.
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    assert report["core_limit"] == (1 if hard == resource.RLIM_INFINITY else min(1, hard))
    assert report["lower_core_limit"] == "EPERM"
    assert report["lower_other_limit"] == "done"


def test_no_setuid_program_works(report: dict[str, Any], module_box: Box) -> None:
    if module_box.kind.backend == "docker":
        # Engines show directories of the host with its own mount options: there it is no_new_privs alone that holds.
        if os.geteuid() != 0:
            pytest.skip("only root can make a program of root's that is setuid")
        image = module_box.directory(module_box.fresh("setuid"))
        shutil.copy(shutil.which("id") or "", image / "id")
        (image / "id").chmod(0o4755)
        os.chown(image / "id", 0, 0)
        (image / "id").chmod(0o4755)
        program = module_box.program(["./id", "-u"], image=str(image))
        assert program.wait() == ("exit", 0)
        assert program.stdout.read_text() == f"{module_box.kind.inside_uid}\n"
        return
    mounts = [line.split() for line in report["mounts"].removeprefix("read:").splitlines()]
    trees = [line for line in mounts if line[1] in ("/", "/usr", "/program", "/tmp", "/run/ringfence")]
    assert len(trees) == 5
    assert all("nosuid" in line[3] for line in trees)


def test_the_file_system_is_the_sandbox_alone(report: dict[str, Any], module_box: Box) -> None:
    system = {"bin", "lib", "lib32", "lib64", "sbin", "usr"}
    own = module_box.kind.of_its_own
    assert set(report["root"]) - system - own == {"dev", "etc", "proc", "program", "run", "tmp"}
    assert {"passwd", "group"} <= set(report["etc"])
    assert not {"shadow", "gshadow", "machine-id", "resolv.conf", "fstab"} & (set(report["etc"]) - own)
    assert report["passwd"].count("\n") == 1
    assert set(report["dev"]) - own == {
        "fd",
        "full",
        "null",
        "random",
        "shm",
        "stderr",
        "stdin",
        "stdout",
        "urandom",
        "zero",
    }
    assert report["hostname"] != socket.gethostname()
    assert report["cgroup"].removeprefix("read:").strip().endswith(":/")
    assert report["cwd"] == "/program"
    assert str(Path(__file__).parent) not in report["mounts"]


def test_nothing_of_the_host_can_be_read(report: dict[str, Any]) -> None:
    harmless = {"EACCES", "ENOENT", "EPERM", "ENOTDIR", "EIO", "read:"}
    assert {path: got for path, got in report["read"].items() if got not in harmless} == {}


def test_only_tmp_can_be_written(report: dict[str, Any]) -> None:
    refused = {"EACCES", "EROFS", "EPERM", "ENOENT"}
    assert {path: got for path, got in report["write"].items() if got not in refused} == {}
    assert report["tmp"] == "done"


def test_system_calls_that_give_new_ground_are_refused(report: dict[str, Any]) -> None:
    assert set(report["syscalls"].values()) == {"EPERM"}, report["syscalls"]
    assert set(report["clone"].values()) == {"EPERM"}
    assert set(report["unshare"].values()) == {"EPERM"}
    assert report["clone3"] == "ENOSYS"
    assert report["tiocsti"] == "EPERM"
    assert report["block_device"] == report["char_device"] == "EPERM"
    assert report["fifo"] == "done"
    assert report["kill_init"] in ("done", "EPERM")


def test_there_is_no_network(report: dict[str, Any]) -> None:
    assert report["families"].pop("unix") == "done"
    assert set(report["families"].values()) == {"EAFNOSUPPORT"}
    lines = report["interfaces"].removeprefix("read:").splitlines()[2:]
    assert [line.split(":")[0].strip() for line in lines] in ([], ["lo"])
    assert report["abstract"] in ("ECONNREFUSED", "EPERM")


def test_a_foreign_architecture_is_killed(module_box: Box) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("int 0x80 is of x86")
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))  # mov eax, getpid of i386; int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""
    assert module_box.python(code).wait() == ("signal", -31)


def test_two_agents_do_not_see_each_other(module_box: Box) -> None:
    code = """
import os, sys
open("/tmp/shared", "w").write(sys.argv[2])
print(sorted(os.listdir("/tmp")), len([p for p in os.listdir("/proc") if p.isdigit()]), flush=True)
sys.stdin.read()
import socket
s = socket.socket(socket.AF_UNIX)
if sys.argv[2] == "a":
    s.bind("\\0between-agents"); s.listen()
    t = socket.socket(socket.AF_UNIX); t.connect("/run/ringfence/syscall.sock"); t.recv(1)
else:
    try: s.connect("\\0between-agents")
    except OSError as error: print(error.errno)
"""
    sockets = module_box.directory(module_box.fresh("sockets"))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(sockets / "syscall.sock"))
        (sockets / "syscall.sock").chmod(0o777)
        server.listen()
        first = module_box.python(code, "a", socket_dir=sockets)
        connection, _ = server.accept()
        second = module_box.python(code, "b")
        assert second.wait() == ("exit", 0)
        assert second.stdout.read_text().split() == ["['shared']", "2", str(__import__("errno").ECONNREFUSED)]
        connection.close()
        assert first.wait() == ("exit", 0)


def test_walls_of_this_host_stand(module_box: Box) -> None:
    walls = module_box.host.call("walls")
    names = {wall["name"] for wall in walls}
    assert module_box.kind.walls <= names
    assert [wall for wall in walls if wall["required"] and not wall["ok"]] == []
    assert all(wall["fix"] for wall in walls if not wall["ok"])


def test_where_the_limit_of_user_namespaces_is_zero_nothing_starts(module_box: Box, native_box: Box) -> None:
    """As on hosts that switch them off: what `sysctl user.max_user_namespaces=0` does, in a namespace of the test's own."""
    if module_box.uid is not None:
        pytest.skip("a kernel that is root needs no user namespace")
    host = module_box.another_host()
    host.call("use_up_namespaces")
    with pytest.raises(
        Exception, match=r"wall `user namespace` can't be raised: .*max_user_namespaces"
    ) as caught:
        module_box.python("print('weaker')", host=host)
    assert caught.value.kind == "SandboxError"
    walls = {wall["name"]: wall for wall in host.call("walls")}
    assert not walls["user namespaces"]["ok"]
    assert "max_user_namespaces" in walls["user namespaces"]["fix"]
    assert {name for name, wall in walls.items() if wall["required"] and wall["ok"]} == {"architecture"}
    assert module_box.left() == []


def test_without_namespaces_nothing_starts(module_box: Box, native_box: Box) -> None:
    """A kernel's own host has to have them only where its sandboxes run there."""
    host = module_box.another_host()
    host.call("lock_down")
    with pytest.raises(Exception, match=r"wall `(user|pid) namespace") as caught:
        module_box.python("print('weaker')", host=host)
    assert caught.value.kind == "SandboxError"
    assert ";" in str(caught.value)
    workspace = module_box.directory(module_box.fresh("workspace"), {"a": "a"})
    with pytest.raises(Exception, match=r"wall `(user|pid) namespace"):
        host.call("command", **module_box.command_spec(["/bin/rm", "a"], workspace))
    assert (workspace / "a").exists()
    walls = {wall["name"]: wall for wall in host.call("walls")}
    missing = [wall for wall in walls.values() if wall["required"] and not wall["ok"]]
    assert missing
    assert all(wall["fix"] for wall in missing)
    assert module_box.left() == []
