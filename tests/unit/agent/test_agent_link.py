"""The socket of a call, at a kernel that does not do its part."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ringfence.agent.link import Link
from ringfence.agent.status import Ended
from ringfence.agent.wire import Settings


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with tempfile.TemporaryDirectory(prefix="rf-") as home, socket.socket(socket.AF_UNIX) as found:
        found.bind(str(Path(home) / "s"))
        found.listen()
        yield found


def settings(listener: socket.socket) -> Settings:
    return Settings(socket=listener.getsockname(), token="")


def until_it_ends(link: Link) -> None:
    with pytest.raises(Ended):
        link.receive()


def test_who_sends_never_waits_and_what_is_left_goes_out_with_who_reads(listener: socket.socket) -> None:
    link = Link(settings(listener), "/s/M")
    kernel, _ = listener.accept()
    with kernel:
        # Settings with a window of 64 MB for the stream, and as much for the connection.
        room = "00000604000000000000040400000000000408000000000004000000"
        kernel.sendall(bytes.fromhex(room))
        with pytest.raises(TimeoutError):
            link.receive(0.05)
        link.send(bytes(8 << 20), last=True)
        reader = threading.Thread(target=until_it_ends, args=(link,))
        reader.start()
        got = 0
        while got < 8 << 20:
            got += len(kernel.recv(1 << 20))
    reader.join()
    link.close()


def test_a_call_is_given_up_from_another_thread(listener: socket.socket) -> None:
    link = Link(settings(listener), "/s/M")
    ended: list[str] = []

    def read() -> None:
        with pytest.raises(Ended) as caught:
            link.receive()
        ended.append(caught.value.code)

    reader = threading.Thread(target=read)
    reader.start()
    link.close()
    reader.join()
    link.close()
    link.send(b"late")
    with pytest.raises(Ended):
        link.receive()
    assert ended == ["CANCELLED"]


def test_a_kernel_that_vanishes_ends_the_call_after_what_it_said(listener: socket.socket) -> None:
    link = Link(settings(listener), "/s/M")
    kernel, _ = listener.accept()
    kernel.sendall(bytes.fromhex("000000040000000000" + "000001010400000001" + "88"))
    kernel.sendall(bytes.fromhex("000007000000000001" + "0000000002" + "6869"))
    kernel.close()
    link.send(bytes(1 << 20))
    assert link.receive() == b"hi"
    with pytest.raises(Ended) as caught:
        link.receive()
    assert caught.value.code == "UNAVAILABLE"
    link.close()


def test_nobody_there_is_told_with_the_path(listener: socket.socket) -> None:
    gone = Settings(socket=listener.getsockname() + ".gone", token="")
    with pytest.raises(Ended, match="No such file") as caught:
        Link(gone, "/s/M")
    assert caught.value.code == "UNAVAILABLE"
