"""What a manifest demands of a sandbox and lets it see of the host: held by each sandbox itself."""

from __future__ import annotations

import os
import shutil
import socket
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Box

FORMS = {
    "files": ("landlock", "mounts"),
    "memory": ("cgroup-v2", "cgroup-v1", "measured"),
    "pids": ("cgroup-v2", "cgroup-v1", "rlimit"),
    "cpu": ("cgroup-v2", "cgroup-v1", "shared"),
    "pause": ("cgroup-v2", "cgroup-v1", "signals"),
    "uid": ("own", "sub", "namespace"),
}


def test_a_program_knows_the_form_of_its_walls(native_box: Box) -> None:
    box = native_box
    program = box.python("print(1)", require=["all"])
    assert program.wait() == ("exit", 0)
    found = box.host.call("forms", program=program.number)
    assert set(found) == set(FORMS)
    assert all(form in FORMS[wall] for wall, form in found.items())
    assert found == {wall["name"]: wall["form"] for wall in box.host.call("walls") if wall["form"]}
    assert found["uid"] in box.kind.uid_forms


def test_a_demand_that_is_met_starts(native_box: Box) -> None:
    box = native_box
    held = {wall["name"]: wall["form"] for wall in box.host.call("walls")}
    demands = [f"{name}:{form}" if form else name for name, form in held.items()]
    demands += [f"{name}:cgroup" for name, form in held.items() if form.startswith("cgroup-")]
    assert box.python("print(1)", require=demands).wait() == ("exit", 0)


@pytest.mark.parametrize("wall", sorted(FORMS))
def test_a_form_that_this_sandbox_lacks_stops_the_start(native_box: Box, wall: str) -> None:
    box = native_box
    held = {one["name"]: one for one in box.host.call("walls")}
    other = next(form for form in FORMS[wall] if form != held[wall]["form"])
    workspace = box.directory(box.fresh("workspace"), {"a": "a"})
    for start in (
        lambda: box.python("print(1)", require=[f"{wall}:{other}"]),
        lambda: box.run("rm a", workspace, require=["seccomp", f"{wall}:{other}"]),
    ):
        with pytest.raises(
            Exception, match=f"the wall `{wall}` stands as `{held[wall]['form']}` here"
        ) as caught:
            start()
        assert caught.value.kind == "SandboxError"
        assert ";" in str(caught.value)
    assert (workspace / "a").exists()
    assert box.left() == []


@pytest.mark.parametrize("name", ["moat", "seccomp:strict", "memory:", "", "landlock"])
def test_a_wall_that_no_one_knows_stops_the_start(native_box: Box, name: str) -> None:
    with pytest.raises(Exception, match="has no wall") as caught:
        native_box.python("print(1)", require=[name])
    assert "seccomp" in str(caught.value)


@pytest.fixture
def mounting_box(box: Box) -> Box:
    """A backend whose sandboxes see this host's own directories."""
    if box.kind.backend not in ("native", "docker"):
        pytest.skip("does not apply: its sandboxes are on another host")
    return box


LOOK = """
import os, socket, stat, sys
top = sys.argv[2]
print(open(f"{top}/tool/data").read())
print(sorted(os.listdir(top)), sorted(os.listdir(f"{top}/tool")))
try:
    open(f"{top}/tool/new", "w")
except OSError as error:
    print(error.strerror)
for name in ("door", "pipe"):
    print(stat.S_IFMT(os.lstat(f"{top}/{name}").st_mode))
try:
    socket.socket(socket.AF_UNIX).connect(f"{top}/door")
    print("connected")
except OSError as error:
    print(error.strerror)
pipe = os.open(f"{top}/pipe", os.O_RDONLY | os.O_NONBLOCK)
print(os.read(pipe, 100))
"""


def test_a_mounted_directory_is_read_only_and_leads_to_nothing_on_the_host(mounting_box: Box) -> None:
    box = mounting_box
    top = box.directory(box.fresh("mounted"), {"tool/data": "content"})
    shutil.copy("/bin/sh", top / "tool" / "run")
    (top / "link").symlink_to("tool")
    os.mkfifo(top / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(top / "door"))
        server.listen()
        for name in ("door", "pipe"):
            (top / name).chmod(0o777)
        # Both are open on the host to whoever gets there.
        writer = os.open(top / "pipe", os.O_RDWR)
        os.write(writer, b"for the host only")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(top / "door"))
        server.settimeout(30)
        server.accept()[0].close()
        program = box.python(LOOK, str(top), mounts={str(top): str(top)})
        ended = program.wait()
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
        assert os.read(writer, 100) == b"for the host only"
        os.close(writer)
    assert ended == ("exit", 0), program.stderr.read_text()
    assert program.stdout.read_text().splitlines() == [
        "content",
        "['door', 'link', 'pipe', 'tool'] ['data', 'run']",
        "Read-only file system",
        str(0o140000),
        str(0o010000),
        "Connection refused",
        "b''",
    ]


def test_a_mounted_interpreter_runs_the_program_and_commands(mounting_box: Box) -> None:
    box = mounting_box
    top = box.directory(box.fresh("mounted"), {"bin/x": ""})
    shutil.copy("/bin/sh", top / "bin" / "mine")
    at = {str(top): str(top), "/opt/elsewhere": str(top)}
    for name in at:
        program = box.program([f"{name}/bin/mine", "-c", "echo $0"], mounts=at)
        assert program.wait() == ("exit", 0), program.stderr.read_text()
        assert program.stdout.read_text() == f"{name}/bin/mine\n"
        workspace = box.directory(box.fresh("workspace"), {"a": "a"})
        done = box.run("", workspace, argv=[f"{name}/bin/mine", "-c", "cat a"], mounts=at)
        assert (done.code, done.out) == (0, "a")


def test_a_mounted_directory_is_as_closed_as_it_is_on_the_host(native_box: Box) -> None:
    box = native_box
    if box.uid is None:
        pytest.skip("here a sandbox has the rights of the kernel's user")
    top = box.directory(box.fresh("mounted"), {"a": "a", "in/b": "b"}, owner=0)
    top.chmod(0o700)
    with pytest.raises(Exception, match="chmod -R a") as caught:
        box.python("print(1)", mounts={str(top): str(top)})
    assert str(top) in str(caught.value)
    top.chmod(0o751)
    code = f"import os\nprint(oct(os.stat('{top}').st_mode & 0o7777))"
    with pytest.raises(Exception, match="chmod -R a"):
        box.python(code, mounts={str(top): str(top)})
    top.chmod(0o755)
    program = box.python(code, mounts={str(top): str(top)})
    assert program.wait() == ("exit", 0)
    assert program.stdout.read_text() == "0o755\n"


def test_devices_and_setuid_mean_nothing_in_a_mounted_directory(mounting_box: Box) -> None:
    box = mounting_box
    top = box.directory(box.fresh("mounted"), {"a": "a"})
    code = (
        f"import os\nfor line in open('/proc/self/mounts'):\n  if ' {top} ' in line: print(line.split()[3])"
    )
    program = box.python(code, mounts={str(top): str(top)})
    assert program.wait() == ("exit", 0)
    options = program.stdout.read_text().strip().split(",")
    assert {"ro", "nosuid", "nodev"} <= set(options)
    if box.kind.backend == "docker":
        return  # an engine tells where it lies on the host
    assert not [word for word in options if word.startswith(("lowerdir", "upperdir")) and str(top) in word]


def test_what_is_made_on_the_host_later_leads_nowhere_either(mounting_box: Box) -> None:
    box = mounting_box
    top = box.directory(box.fresh("mounted"), {"a": "a"})
    sockets = box.directory(box.fresh("sockets"))
    code = f"""
import os, socket
go = socket.socket(socket.AF_UNIX); go.connect("/run/ringfence/go"); go.recv(1)
try:
    socket.socket(socket.AF_UNIX).connect("{top}/later")
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""
    with socket.socket(socket.AF_UNIX) as go, socket.socket(socket.AF_UNIX) as later:
        go.bind(str(sockets / "go"))
        (sockets / "go").chmod(0o777)
        go.listen()
        go.settimeout(30)
        program = box.python(code, mounts={str(top): str(top)}, socket_dir=sockets)
        connection, _ = go.accept()
        later.bind(str(top / "later"))
        (top / "later").chmod(0o777)
        later.listen()
        connection.sendall(b"x")
        assert program.wait() == ("exit", 0), program.stderr.read_text()
        connection.close()
    assert program.stdout.read_text() in ("ConnectionRefusedError\n", "FileNotFoundError\n")


@pytest.mark.parametrize(
    "at", ["/", "/proc", "/etc/x", "/run/ringfence/x", "/workspace", "relative", "/a/../b"]
)
def test_mounts_that_make_no_sense_are_refused(mounting_box: Box, at: str) -> None:
    top = mounting_box.directory(mounting_box.fresh("mounted"), {"a": "a"})
    with pytest.raises(Exception, match="can be mounted at"):
        mounting_box.python("print(1)", mounts={at: str(top)})


def test_a_mount_that_is_not_there_stops_the_start(mounting_box: Box) -> None:
    with pytest.raises(Exception, match=r"wall `mount /opt/x`"):
        mounting_box.python("print(1)", mounts={"/opt/x": str(mounting_box.place / "absent")})
