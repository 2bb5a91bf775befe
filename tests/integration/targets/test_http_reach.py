"""Where a request goes: to an address that was looked at, of a name that is resolved once, and with the name's certificate."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.networks import is_public
from ringfence.syscalls import http_client, http_get
from ringfence.syscalls.declared import HttpResource
from ringfence.syscalls.errors import CallFailed

if TYPE_CHECKING:
    from conftest import Call, Upstream

ANY = "0.0.0.0"  # noqa: S104 - what a name leads to; nothing binds to it


class Names:
    """A resolver whose answers the test decides, one list for each question."""

    def __init__(self) -> None:
        self.answers: list[list[str]] = []
        self.asked: list[tuple[str, int]] = []

    async def getaddrinfo(self, host: str, port: int, **_more: Any) -> list[Any]:
        self.asked.append((host, port))
        if not self.answers:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        found = self.answers.pop(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
    return names


@pytest.fixture
def get(make_call: Callable[..., Call]) -> Callable[..., Any]:
    async def get(base: str, path: str = "/x", **fields: Any) -> Any:
        resource = HttpResource(
            name="api", base=base, headers={}, effects=(), idempotency_header=None, **fields
        )
        env: Any = SimpleNamespace(
            agent="agent", http={"api": resource}, llm={}, sql={}, objects={}, mcp={}, a2a={}
        )
        verb: Any = http_get
        made = verb.Arguments(url=base + path)
        call = make_call(env=env, plan=verb.plan(made, env), policy=AgentPolicy("agent", [], [], []))
        return await verb.run(call, made)

    return get


def port_of(upstream: Upstream) -> int:
    return int(upstream.server.server_port)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "168.63.129.16", ANY])
async def test_a_name_leads_to_no_address_of_the_house(
    get: Any, names: Names, upstream: Upstream, address: str
) -> None:
    names.answers = [[address]]
    with pytest.raises(CallFailed, match=f"leads to `{address}`") as caught:
        await get(f"http://api.test:{port_of(upstream)}/v1")
    assert caught.value.metadata["sent"] == "no"
    assert upstream.received == []


async def test_it_does_where_the_operator_declared_it(get: Any, names: Names, upstream: Upstream) -> None:
    names.answers = [["127.0.0.1"]]
    base = f"http://api.test:{port_of(upstream)}/v1"
    answer = await get(base, addresses=("127.0.0.0/8",))
    assert answer.status == 200
    (request,) = upstream.received
    # The target is told the name that was asked for.
    assert request.headers["host"] == f"api.test:{port_of(upstream)}"
    assert names.asked == [("api.test", port_of(upstream))]


async def test_a_name_is_resolved_once_so_that_it_can_not_lead_elsewhere_in_between(
    get: Any, names: Names, upstream: Upstream
) -> None:
    # What answers a second question differently, as a rebinding does, is never asked one.
    names.answers = [["127.0.0.1"], ["10.0.0.1"], ["127.0.0.1"]]
    base = f"http://api.test:{port_of(upstream)}/v1"
    await get(base, addresses=("127.0.0.1/32",))
    assert (len(names.asked), len(upstream.received)) == (1, 1)
    # The next call asks anew, and is held against what it finds then, whatever connection is still open.
    with pytest.raises(CallFailed, match=r"10\.0\.0\.1"):
        await get(base, addresses=("127.0.0.1/32",))
    assert len(upstream.received) == 1


async def test_of_several_addresses_only_those_that_may_be_are_used_in_turn(
    get: Any, names: Names, upstream: Upstream
) -> None:
    # Nobody listens at the first; the second is of the house and not declared.
    names.answers = [["127.0.0.2", "10.255.255.1", "127.0.0.1"]]
    await get(f"http://api.test:{port_of(upstream)}/v1", addresses=("127.0.0.0/8",))
    assert len(upstream.received) == 1


async def test_an_unknown_name_is_told(get: Any, names: Names, upstream: Upstream) -> None:
    with pytest.raises(CallFailed, match=r"`nowhere\.test` is not known"):
        await get(f"http://nowhere.test:{port_of(upstream)}")
    assert names.asked


async def test_an_address_and_localhost_are_declared_by_writing_them(
    get: Any, names: Names, upstream: Upstream
) -> None:
    await get(f"http://127.0.0.1:{port_of(upstream)}/v1")
    assert names.asked == []
    names.answers = [["127.0.0.1"]]
    await get(f"http://localhost:{port_of(upstream)}/v1")
    names.answers = [["10.0.0.1"]]
    with pytest.raises(CallFailed, match=r"10\.0\.0\.1"):
        await get(f"http://localhost:{port_of(upstream)}/v1")
    assert len(upstream.received) == 2


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("127.255.0.1", False),
        (ANY, False),
        ("10.0.0.1", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("100.100.100.200", False),
        ("169.254.169.254", False),
        ("168.63.129.16", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1", False),
        ("fd00:ec2::254", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True),
        ("2002:7f00:1::", False),
    ],
)
def test_what_is_public(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


# -- certificates -----------------------------------------------------------------------------------------------------


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A TLS server with a certificate for `api.test` alone, which clients trust; gives its port."""
    pem = _certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=str(pem))
    monkeypatch.setattr(http_client, "_tls", lambda: trusted)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as stream:
                stream.recv(65536)
                stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1]
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def _certificate(directory: Path) -> Path:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "api.test")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("api.test")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = directory / "server.pem"
    form = serialization.Encoding.PEM
    private = key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    pem.write_bytes(private + made.public_bytes(form))
    return pem


async def test_the_certificate_is_that_of_the_name(get: Any, names: Names, secure: int) -> None:
    names.answers = [["127.0.0.1"]]
    answer = await get(f"https://api.test:{secure}", addresses=("127.0.0.1",))
    assert (answer.status, answer.body) == (200, b"ok")
    # Another name at the same address: no connection of the first one serves it, and the certificate is not its.
    names.answers = [["127.0.0.1"]]
    with pytest.raises(CallFailed, match="can't be reached"):
        await get(f"https://other.test:{secure}", addresses=("127.0.0.1",))
    await http_client.close_clients()
