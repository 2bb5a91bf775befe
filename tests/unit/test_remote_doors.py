"""Doors of a program on a sandbox host: nobody gets to a socket that its program was not given."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ringfence.sandbox.remote import pumps, wire
from ringfence.sandbox.remote.backend import RemoteSandbox, _door
from ringfence.sandbox.remote.calls import Calls
from ringfence.sandbox.remote.link import RemoteSettings
from ringfence.sandbox.types import Limits, Loopback, ProgramSpec, SandboxError


class Sent(list[Any]):
    """What a kernel's side said."""

    async def send(self, message: Any) -> None:
        self.append(message)


@pytest.mark.parametrize("known", [True, False])
async def test_a_door_that_was_not_asked_for_is_closed(tmp_path: Path, known: bool) -> None:
    calls, sent = Calls(lambda: None), Sent()
    calls.session.send = sent.send  # type: ignore[method-assign]
    if known:
        calls.expect(1, tmp_path)
    calls._handle(wire.Open(channel=2, program=1, door=True))
    await calls.settle()
    assert sent == [wire.Reset(channel=2)]


async def test_no_path_leads_to_a_door(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)  # longer than a socket's path may be
    deep.mkdir()
    listener, handle = _door(deep)
    try:
        assert list(deep.iterdir()) == []
        reader, writer = await pumps.connect_to(f"/proc/self/fd/{handle}")
        client, _ = listener.accept()
        client.sendall(b"here")
        client.close()
        assert await reader.read() == b"here"
        writer.close()
        await writer.wait_closed()
    finally:
        os.close(handle)
        listener.close()


def test_a_host_that_knows_no_doors_is_refused(tmp_path: Path) -> None:
    sandbox = RemoteSandbox(tmp_path, RemoteSettings(address="there:1", certs=tmp_path))
    one, other = socket.socketpair()
    with one, other:
        spec = ProgramSpec(
            agent="a",
            argv=["true"],
            env={},
            image=tmp_path,
            socket_dir=tmp_path,
            limits=Limits(),
            stdout_fd=1,
            stderr_fd=2,
            loopback=Loopback(port=7080, hand_fd=other.fileno()),
        )
        sandbox._check_doors(spec, {"doors": 7080})
        with pytest.raises(SandboxError, match="can't lend doors; give it this version"):
            sandbox._check_doors(spec, {"identity": "x"})


def test_what_an_earlier_side_says_has_no_doors() -> None:
    earlier = msgspec.to_builtins(wire.Open(channel=2, program=1))[:3]
    assert msgspec.convert(earlier, wire.Open) == wire.Open(channel=2, program=1, door=False)
