"""What becomes of sandboxes when the engine is absent, closed, wrong, hanging or started anew, or when somebody meddles."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ringfence.sandbox.docker import DockerSandbox, DockerSettings
from ringfence.sandbox.docker.program import DockerProgram
from ringfence.sandbox.docker.scrub import scrub
from ringfence.sandbox.types import (
    CommandSpec,
    Exit,
    ExitReason,
    Limits,
    ProgramSpec,
    SandboxError,
    SandboxLostError,
)
from support.engines import Front, base_image, engine, front
from support.scenes import short_directory

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.timeout(120),
    # The SDK leaves the socket of a connection that fails to the collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

UID = 247112 if os.geteuid() == 0 else None
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
FOREVER = ["python3", "-I", "-S", "-c", "print('up', flush=True)\nimport time\ntime.sleep(1000)"]
KILLED = Exit(reason=ExitReason.KILLED, code=-9)


@dataclass
class Bench:
    """A backend and the files of its sandboxes."""

    place: Path
    box: DockerSandbox
    others: list[DockerSandbox] = field(default_factory=list[DockerSandbox])

    async def start(self, argv: list[str] = FOREVER, box: DockerSandbox | None = None) -> DockerProgram:
        out = os.open(self.place / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        err = os.open(self.place / "err", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return await (box or self.box).start(
                ProgramSpec(
                    agent="a",
                    argv=argv,
                    env=ENV,
                    image=self.place / "image",
                    socket_dir=self.place / "sockets",
                    uid=UID,
                    stdout_fd=out,
                    stderr_fd=err,
                )
            )
        finally:
            os.close(out)
            os.close(err)

    def last_words(self) -> str:
        return (self.place / "err").read_text()

    def left(self) -> list[str]:
        """Containers and volumes of this data directory on the engine."""
        wanted = {"label": f"io.ringfence.data={self.box._places.data()}"}
        found = engine().ask(lambda api: api.containers(all=True, filters=wanted))
        more = engine().ask(lambda api: api.volumes(filters=wanted))["Volumes"] or []
        return [*(one["Id"] for one in found), *(one["Name"] for one in more)]

    async def nothing_left(self) -> None:
        for _ in range(200):
            if not self.left():
                return
            await asyncio.sleep(0.1)
        raise AssertionError(self.left())

    def another(self, **settings: Any) -> DockerSandbox:
        made = DockerSandbox(self.place / "data", DockerSettings(**{"image": base_image(), **settings}))
        self.others.append(made)
        return made

    async def close(self) -> None:
        for box in (self.box, *self.others):
            await box.close()


@pytest.fixture
def place() -> Iterator[Path]:
    with short_directory() as directory:
        directory.chmod(0o755)
        for name in ("image", "sockets", "workspace", "scratch"):
            (directory / name).mkdir()
        if UID is not None:
            os.chown(directory / "workspace", UID, UID)
        yield directory


@pytest.fixture
async def bench(place: Path) -> AsyncIterator[Bench]:
    made = Bench(place, DockerSandbox(place / "data", DockerSettings(image=base_image())))
    yield made
    await made.close()


@pytest.fixture
async def fronted(place: Path) -> AsyncIterator[tuple[Bench, Front]]:
    with front(place) as before:
        settings = DockerSettings(image=base_image(), host=before.host, patience_s=1.0)
        made = Bench(place, DockerSandbox(place / "data", settings))
        yield made, before
        await made.close()


async def test_without_an_engine_nothing_starts(bench: Bench) -> None:
    absent = bench.another(host=f"unix://{bench.place}/none.sock")
    with pytest.raises(
        SandboxError, match=r"there is no docker engine at `.*none\.sock`; install and start it"
    ) as caught:
        await bench.start(box=absent)
    assert not isinstance(caught.value, SandboxLostError)
    [wall] = await asyncio.to_thread(absent.walls)
    assert (wall.name, wall.ok, wall.required) == ("docker engine", False, True)
    assert "install and start it" in wall.fix
    # A socket that nobody listens on: the engine was there.
    path = bench.place / "stale.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    with pytest.raises(SandboxError, match=r"is not running; start it: systemctl start docker"):
        await bench.start(box=bench.another(host=f"unix://{path}"))


@pytest.mark.parametrize("host", ["tcp://127.0.0.1:2375", "ssh://somewhere", "npipe:////./pipe/x"])
async def test_an_engine_elsewhere_is_refused(bench: Bench, host: str) -> None:
    with pytest.raises(SandboxError, match="is not the socket of a docker engine on this host"):
        await bench.start(box=bench.another(host=host))


CLOSED = """
import docker.errors, os, requests, sys
from ringfence.sandbox.docker.engine import Engine
from ringfence.sandbox.types import SandboxError
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
try:
    Engine(sys.argv[1]).ask(lambda api: api.version())
except SandboxError as error:
    print(error)
"""


def test_a_closed_socket_says_who_opens_it(place: Path) -> None:
    if UID is None:
        pytest.skip("only root can become somebody else")
    with front(place) as before:
        before.path.chmod(0o660)
        done = subprocess.run(
            [sys.executable, "-c", CLOSED, before.host], capture_output=True, text=True, check=False
        )
    assert done.stdout.startswith(f"the docker engine's socket `{before.path}` is closed to this user; "), (
        done.stderr
    )
    assert "usermod -aG root USER" in done.stdout


async def test_an_image_that_is_not_there(bench: Bench) -> None:
    with pytest.raises(SandboxError, match=r"the kernel file names no image .* `ringfence image build`"):
        await bench.start(box=bench.another(image=""))
    missing = bench.another(image=f"sha256:{'0' * 64}")
    with pytest.raises(
        SandboxError, match=r"the image `sha256:0+` is not on the docker engine; run `ringfence image build`"
    ):
        await bench.start(box=missing)
    walls = {wall.name: wall for wall in await asyncio.to_thread(missing.walls)}
    assert not walls["docker image"].ok
    assert "ringfence image build" in walls["docker image"].fix


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "has no `python3`, which its first process needs"),
        (["VOLUME /data"], r"it declares volumes \(/data\)"),
    ],
)
async def test_an_image_that_is_of_no_use(bench: Bench, changes: list[str], said: str) -> None:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    name = f"ringfence-test-{os.getpid()}"
    engine().ask(
        lambda api: api.import_image_from_data(layer.getvalue(), repository=name, tag="x", changes=changes)
    )
    made = engine().ask(lambda api: api.inspect_image(f"{name}:x"))["Id"]
    try:
        with pytest.raises(SandboxError, match=said):
            await bench.start(box=bench.another(image=made))
    finally:
        engine().ask(lambda api: api.remove_image(made, force=True))
    await bench.nothing_left()


async def test_a_runtime_that_the_engine_lacks(bench: Bench) -> None:
    known = engine().ask(lambda api: api.info())["Runtimes"]
    if "runsc" in known:
        pytest.skip("does not apply: the engine has runsc")
    with pytest.raises(
        SandboxError, match=r"wall `docker runtime` can't be raised: runsc of .*; install `runsc`"
    ):
        await bench.start(box=bench.another(runtime="runsc"))


@pytest.mark.parametrize(
    ("verb", "said"),
    [("remove", "its container was removed"), ("kill", "its container was ended from outside")],
)
async def test_somebody_meddles_with_a_container(bench: Bench, verb: str, said: str) -> None:
    program = await bench.start()
    if verb == "remove":
        engine().ask(lambda api: api.remove_container(program.container, force=True))
    else:
        engine().ask(lambda api: api.kill(program.container))
    assert await program.wait() == KILLED
    assert f"ringfence: {said}" in bench.last_words()
    await program.kill()
    await program.pause()
    await program.resume()
    await bench.nothing_left()


async def test_a_command_whose_container_is_removed_applies_nothing(bench: Bench) -> None:
    spec = CommandSpec(
        agent="a",
        argv=["sh", "-c", "echo x > new; sleep 1000"],
        env=ENV,
        lower=bench.place / "workspace",
        scratch=bench.place / "scratch",
        uid=UID,
    )
    running = asyncio.create_task(bench.box.run_command(spec))
    while not (bench.place / "scratch" / "upper" / "new").exists():
        assert not running.done(), await running
        await asyncio.sleep(0.02)
    wanted = {"label": "io.ringfence.kind=command"}
    # All of them: the program may run before the engine says that its container does.
    for one in engine().ask(lambda api: api.containers(all=True, filters=wanted)):
        if one["Id"] in bench.left():
            engine().ask(lambda api, made=one["Id"]: api.remove_container(made, force=True))
    assert (await running).exit == KILLED
    assert list((bench.place / "workspace").iterdir()) == []
    await bench.nothing_left()


async def test_the_engine_goes_away_and_comes_back(fronted: tuple[Bench, Front]) -> None:
    bench, before = fronted
    program, paused = await bench.start(), await bench.start()
    before.close()
    # What runs goes on without it, and can be ended: the first process listens to the kernel.
    with pytest.raises(SandboxError, match="there is no docker engine at"):
        await paused.pause()
    with pytest.raises(SandboxLostError, match="there is no docker engine at"):
        await bench.start()
    await program.kill()
    assert (await program.wait()).reason is ExitReason.KILLED
    engine().ask(lambda api: api.kill(paused.container))
    assert await paused.wait() == KILLED
    assert "ringfence: there is no docker engine at" in bench.last_words()
    assert len(bench.left()) == 2
    before.open()
    await bench.nothing_left()
    again = await bench.start(["true"])
    assert await again.wait() == Exit(reason=ExitReason.EXIT, code=0)


async def test_an_engine_that_hangs_holds_up_nobody(fronted: tuple[Bench, Front]) -> None:
    bench, before = fronted
    program, frozen = await bench.start(), await bench.start()
    await frozen.pause()
    before.hanging.set()
    hangs = r"does not answer within 1 s; look at its log and start it anew"
    with pytest.raises(SandboxLostError, match=hangs):
        await bench.start()
    with pytest.raises(SandboxLostError, match=hangs):
        await program.pause()
    await program.kill()
    with pytest.raises(
        SandboxError, match=r"can't be ended: the docker engine .* does not answer; start it anew"
    ):
        await frozen.kill()
    before.hanging.clear()
    assert await frozen.wait() == KILLED
    await bench.nothing_left()


async def test_sweep_ends_its_own_alone(bench: Bench) -> None:
    program = await bench.start()
    foreign = engine().ask(
        lambda api: api.create_container_from_config(
            {"Image": base_image(), "Cmd": ["true"]}, f"ringfence-test-{os.getpid()}"
        )
    )["Id"]
    elsewhere = DockerSandbox(bench.place / "elsewhere", DockerSettings(image=base_image()))
    try:
        assert await bench.box.sweep() == []
        assert await elsewhere.sweep() == []
        await elsewhere._prepare()
        assert await elsewhere.sweep() == []
        assert program.container in bench.left()
        # A later kernel of the same directory finds it, and only it.
        assert await bench.another().sweep() == ["a"]
        assert bench.left() == []
        assert engine().ask(lambda api: api.inspect_container(foreign))["State"]["Status"] == "created"
        assert await program.wait() == KILLED
    finally:
        engine().ask(lambda api: api.remove_container(foreign, force=True))
        await elsewhere.close()


async def test_a_gigabyte_of_output_takes_no_memory(bench: Bench) -> None:
    read, write = os.pipe()
    spec = ProgramSpec(
        agent="a",
        argv=["sh", "-c", "yes 0123456789 | head -c 1073741824"],
        env=ENV,
        image=bench.place / "image",
        socket_dir=bench.place / "sockets",
        uid=UID,
        limits=Limits(memory_bytes=64 << 20),
        stdout_fd=write,
        stderr_fd=write,
    )
    program = await bench.box.start(spec)
    os.close(write)

    def drain() -> int:
        total = 0
        while data := os.read(read, 1 << 20):
            total += len(data)
        os.close(read)
        return total

    assert await asyncio.to_thread(drain) == 1 << 30
    assert await program.wait() == Exit(reason=ExitReason.EXIT, code=0)


async def test_what_only_root_may_remove_is_removed_in_a_container(bench: Bench) -> None:
    work = bench.place / "work"
    for name in ("work/#1", "incompat/volatile"):
        (work / name).mkdir(parents=True)
    (work / "work" / "#2").write_text("x")
    for name in ("work", "incompat"):
        (work / name).chmod(0)
    await bench.box._prepare()
    await scrub(engine(), base_image(), bench.box._places.labels("a", "command"), work)
    assert list(work.iterdir()) == []
    await bench.nothing_left()
