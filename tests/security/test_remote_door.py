"""The one door of a sandbox host: who gets in, who does not, and what those who don't can do to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from ringfence.sandbox.remote import RemoteSandbox, RemoteSettings, issue, tls, wire
from ringfence.sandbox.remote.host import HANDSHAKE_S, STRANGERS_PER_ADDRESS_MAX
from ringfence.sandbox.types import SandboxError, SandboxLostError
from support import elsewhere
from support.elsewhere import Elsewhere
from support.kernels import eventually

pytestmark = pytest.mark.sandbox

OWNER = "0" * 32


@pytest.fixture(scope="module")
def machine(tmp_path_factory: Any) -> Iterator[Elsewhere]:
    with elsewhere.running(tmp_path_factory.mktemp("elsewhere"), lease="2s") as machine:
        yield machine


def certs(
    machine: Elsewhere, place: Path, role: Any = "kernel", name: str = "kernel", days: float = 1
) -> Path:
    """A directory of one end, of the machine's own authority."""
    peer = "kernel" if role == "host" else "sandbox-host"
    issue.issue(machine.place / "certs/ca", place, role, name, peers=(peer,), days=days)
    return place


def of_another(machine: Elsewhere, place: Path) -> Path:
    """The same, of another authority with the same names."""
    issue.make_authority(place / "ca")
    issue.issue(place / "ca", place / "kernel", "kernel", "kernel", peers=("sandbox-host",), days=1)
    return place / "kernel"


def ask(machine: Elsewhere, directory: Path, place: Path) -> list[Any]:
    return list(
        RemoteSandbox(place / "data", RemoteSettings(address=machine.address, certs=directory)).walls()
    )


def serves(machine: Elsewhere, place: Path) -> bool:
    """Whether a kernel that may is served."""
    return ask(machine, machine.certs, place)[0].name == "mutual tls"


def raw(
    machine: Elsewhere, key: Path | None, *, newest: ssl.TLSVersion | None = None, source: str = "127.0.0.1"
) -> ssl.SSLSocket:
    """A client without our checks of its own certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(machine.certs / tls.CA_FILE)
    if key is not None:
        context.load_cert_chain(key / tls.KEY_FILE)
    if newest is not None:
        context.maximum_version = newest
    host, _, port = machine.address.rpartition(":")
    plain = socket.create_connection((host, int(port)), 30, source_address=(source, 0))
    try:
        return context.wrap_socket(plain, server_hostname="sandbox-host")
    except BaseException:
        plain.close()
        raise


def answer_to(client: ssl.SSLSocket, data: bytes) -> bytes:
    """What the host says to some bytes, until it closes."""
    said = b""
    with client, contextlib.suppress(ConnectionError):
        client.sendall(data)
        while part := client.recv(65536):
            said += part
    return said


HELLO = wire.encode(wire.Hello(version=wire.VERSION, owner=OWNER, epoch=1, nonce="n"))


def test_a_kernel_that_may_is_served(machine: Elsewhere, tmp_path: Path) -> None:
    wall = ask(machine, machine.certs, tmp_path)[0]
    assert wall.ok
    assert "TLSv1.3 with `sandbox-host`" in wall.detail


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (of_another, "is of another authority"),
        (
            lambda m, p: certs(m, p / "c", days=-1),
            "expired at .*make a new one with `ringfence sandbox-certs`",
        ),
        (lambda m, p: certs(m, p / "c", name="stranger"), "no kernel named `stranger` is expected here"),
        (
            lambda m, p: certs(m, p / "c", role="host", name="kernel"),
            "is not one for a kernel; make a new one",
        ),
        (lambda m, p: p / "nothing", "can't be read: no such file"),
    ],
    ids=["another authority", "expired", "another name", "a host's certificate", "none"],
)
def test_the_wrong_certificate_is_told_why(
    machine: Elsewhere, tmp_path: Path, make: Callable[..., Path], words: str
) -> None:
    with pytest.raises(SandboxError, match=words) as caught:
        ask(machine, make(machine, tmp_path), tmp_path)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, SandboxLostError)
    assert serves(machine, tmp_path)


def test_others_may_not_read_the_key(machine: Elsewhere, tmp_path: Path) -> None:
    place = certs(machine, tmp_path / "c")
    (place / tls.KEY_FILE).chmod(0o640)
    with pytest.raises(SandboxError, match="others can read the key"):
        ask(machine, place, tmp_path)


def test_a_host_that_is_another_is_not_used(machine: Elsewhere, tmp_path: Path) -> None:
    place = certs(machine, tmp_path / "c")
    (place / tls.PEERS_FILE).write_text("another-host\n")
    with pytest.raises(SandboxError, match="is not who is expected"):
        ask(machine, place, tmp_path)


@pytest.mark.parametrize("kind", ["another authority", "expired", "a host's", "none", "tls 1.2"])
def test_the_host_itself_checks(machine: Elsewhere, tmp_path: Path, kind: str) -> None:
    """A client that skips its own checks: TLS ends before a byte of ours is answered."""
    key: Path | None = certs(machine, tmp_path / "c")
    if kind == "another authority":
        key = of_another(machine, tmp_path / "o")
    elif kind == "expired":
        key = certs(machine, tmp_path / "e", days=-1)
    elif kind == "a host's":
        key = certs(machine, tmp_path / "h", role="host", name="kernel")
    elif kind == "none":
        key = None
    try:
        # In TLS 1.3 a client hears of it with the first answer.
        said = answer_to(
            raw(machine, key, newest=ssl.TLSVersion.TLSv1_2 if kind == "tls 1.2" else None), HELLO
        )
    except ssl.SSLError:
        said = b""
    assert said == b""
    assert serves(machine, tmp_path)
    client = raw(machine, certs(machine, tmp_path / "control"))
    client.sendall(HELLO)
    assert client.recv(10) != b""
    client.close()


USAGES: list[tuple[Any, ...]] = [
    (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
    (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH),
]


@pytest.mark.parametrize("usages", USAGES)
def test_a_certificate_for_both_roles_is_for_none(
    machine: Elsewhere, tmp_path: Path, usages: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS itself takes it; the host and the kernel don't."""
    with monkeypatch.context() as patched:
        patched.setattr(tls, "USAGES", dict.fromkeys(tls.USAGES, usages))
        patched.setattr(issue, "USAGES", tls.USAGES)
        both = certs(machine, tmp_path / "kernel")
        host = certs(machine, tmp_path / "host", role="host", name="sandbox-host")
        as_host = tls.Credentials.load(host, "host").context(server=True)
    said = answer_to(raw(machine, both), HELLO)
    assert b"its certificate is not one for a kernel" in said
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with (
                contextlib.suppress(OSError),
                as_host.wrap_socket(listening.accept()[0], server_side=True) as end,
            ):
                end.recv(1)

        server = threading.Thread(target=serve)
        server.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        settings = RemoteSettings(address=address, certs=machine.certs)
        with pytest.raises(SandboxError, match="is not one for a sandbox host"):
            list(RemoteSandbox(tmp_path / "data", settings).walls())
        server.join()
    assert serves(machine, tmp_path)


def test_a_host_with_a_kernel_s_certificate_does_not_start(tmp_path: Path) -> None:
    machine = elsewhere.make(tmp_path / "m")
    certs(machine, machine.place / "certs/host-sandbox-host", role="kernel", name="sandbox-host")
    with pytest.raises(AssertionError, match="is not one for a sandbox host"):
        machine.start()
    machine.close()


def test_a_host_with_an_expired_certificate_does_not_start(tmp_path: Path) -> None:
    machine = elsewhere.make(tmp_path / "m")
    certs(machine, machine.place / "certs/host-sandbox-host", role="host", name="sandbox-host", days=-1)
    with pytest.raises(AssertionError, match="expired at"):
        machine.start()
    machine.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 100_000,
        os.urandom(100_000),
        b"\x16\x03\x01\xff\xff" + b"a" * 70_000,
    ],
    ids=["nothing", "http", "zeros", "noise", "a record"],
)
def test_a_plain_client_gets_nothing(machine: Elsewhere, tmp_path: Path, data: bytes) -> None:
    host, _, port = machine.address.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as client, contextlib.suppress(ConnectionError):
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        said = client.recv(1000)
        assert b"ringfence" not in said.lower()
    assert serves(machine, tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        (5000).to_bytes(4, "big") + b"a" * 5000,
        (10).to_bytes(4, "big") + os.urandom(10),
        (400).to_bytes(4, "big") + b"\x91" * 400,
        wire.encode(wire.Hello(version=9, owner=OWNER, epoch=1, nonce="n")),
        wire.encode(wire.Hello(version=wire.VERSION, owner="../../etc", epoch=1, nonce="n")),
        wire.encode(wire.Order(call=1, body=wire.Bye())),
        HELLO + b"\xff\xff\xff\xff",
        HELLO + (30).to_bytes(4, "big") + os.urandom(30),
        HELLO
        + wire.encode(wire.Data(channel=1, data=b"x"))
        + wire.encode(wire.Ended(program=1, reason="exit", code=0)),
        HELLO + wire.encode(wire.Beat(received=10**6)),
    ],
    ids=[
        "endless",
        "long",
        "noise",
        "deep",
        "version",
        "owner",
        "order",
        "endless later",
        "noise later",
        "a host's word",
        "a lie",
    ],
)
def test_frames_that_make_no_sense_end_the_connection(
    machine: Elsewhere, tmp_path: Path, data: bytes
) -> None:
    client = raw(machine, certs(machine, tmp_path / "c"))
    answer_to(client, data)  # returns because the host closes
    assert serves(machine, tmp_path)
    assert "Traceback" not in machine.log


def test_clients_that_say_nothing_lose_their_place(machine: Elsewhere, tmp_path: Path) -> None:
    host, _, port = machine.address.rpartition(":")
    began = time.monotonic()
    slow = [socket.create_connection((host, int(port)), 30) for _ in range(STRANGERS_PER_ADDRESS_MAX)]
    try:
        for client in slow:
            client.sendall(b"\x16")  # the first byte of a greeting, and then never another

        def full() -> bool:
            with socket.create_connection((host, int(port)), 30) as one_more:
                with contextlib.suppress(ConnectionError):
                    return one_more.recv(1) == b""
                return True

        eventually(full, "there is no bound")
        # Another address has places of its own.
        client = raw(machine, certs(machine, tmp_path / "c"), source="127.0.0.2")
        client.sendall(HELLO)
        assert client.recv(10) != b""
        client.close()
        eventually(lambda: all(ended(client) for client in slow), "they keep their places")
        assert time.monotonic() - began > HANDSHAKE_S / 2
        assert serves(machine, tmp_path)
    finally:
        for client in slow:
            client.close()


def ended(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_of_two_kernels_with_one_data_directory_the_later_is_served(
    machine: Elsewhere, tmp_path: Path
) -> None:
    settings = RemoteSettings(address=machine.address, certs=machine.certs)

    async def run() -> None:
        first = RemoteSandbox(tmp_path / "data", settings)
        calls = await first._link.calls()
        second = RemoteSandbox(tmp_path / "data", settings)
        await second.sweep()
        while calls.session.lost is None:
            await asyncio.sleep(0.05)
        with pytest.raises(SandboxError, match="a later kernel of the same data directory"):
            await first._link.calls()
        assert (await second._link.calls()).session.lost is None
        # A copy that was made before: the same name and epoch, another process.
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
        (tmp_path / "copy/remote/owner.json").write_text(
            (tmp_path / "copy/remote/owner.json").read_text().replace('"epoch": 2', '"epoch": 1')
        )
        copy = RemoteSandbox(tmp_path / "copy", settings)
        with pytest.raises(SandboxError, match="a later kernel of the same data directory"):
            await copy._link.calls()
        await asyncio.gather(first.close(), second.close(), copy.close())

    asyncio.run(run())


def test_a_certificate_counts_while_a_connection_lasts(machine: Elsewhere, tmp_path: Path) -> None:
    place = certs(machine, tmp_path / "c", days=3 / 86400)
    sandbox = RemoteSandbox(tmp_path / "data", RemoteSettings(address=machine.address, certs=place))

    async def run() -> None:
        calls = await sandbox._link.calls()
        while calls.session.connected:
            await asyncio.sleep(0.05)
        certs(machine, place)
        while not calls.session.connected and calls.session.lost is None:
            await asyncio.sleep(0.05)
        if calls.session.lost is None:  # renewed in time: the same session goes on
            assert (await sandbox._link.calls()) is calls
        await sandbox.close()

    asyncio.run(run())
