"""The sandbox host: accepts kernels over mutual TLS and runs their sandboxes with the native backend."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ringfence.sandbox.native import NativeSandbox
from ringfence.sandbox.remote import tls, wire
from ringfence.sandbox.remote.lodging import Lodging, Uids, mapped
from ringfence.sandbox.remote.stay import Stay
from ringfence.sandbox.types import Sandbox, SandboxError

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""How long a client may take for TLS, and then for its first word."""
STRANGERS_MAX, STRANGERS_PER_ADDRESS_MAX = 256, 16
"""Connections that have not proved who they are yet, in all and of one address; more are closed at once."""
OWNERS_MAX = 64
READER_LIMIT_BYTES = 256 << 10
_OWNER = re.compile(r"[0-9a-f]{32}").fullmatch
_FIRST_WORD = asyncio.TimeoutError, OSError, ssl.SSLError, asyncio.IncompleteReadError, wire.WireError


class RefusedError(Exception):
    """A client is not served; the message is sent to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """How a host runs.

    Attributes:
        certs: directory with this host's certificate, as `issue` made it.
        data: directory of its own.
        lease_s: how long sandboxes outlive their kernel's last connection.
        provides: directories that sandboxes find here at the same path, so that a kernel need not send its own.
        first_uid: of the users that agents run as where this host is root.
        uids: how many of them there are.
        cache_bytes: how much content is kept for each kernel.
    """

    certs: Path
    data: Path
    lease_s: float = 30.0
    provides: tuple[Path, ...] = ()
    first_uid: int = 400_000
    uids: int = 65_536
    cache_bytes: int = 8 << 30


@dataclass(slots=True, eq=False)
class _Tenant:
    """A kernel's data directory, over all kernels that ran there."""

    lodging: Lodging
    epochs: Path
    provides: tuple[Path, ...]
    epoch: int = 0
    nonce: str = ""
    stay: Stay | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def load(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            known = json.loads(self.epochs.read_bytes())
            self.epoch, self.nonce = int(known["epoch"]), str(known["nonce"])

    def store(self, epoch: int, nonce: str) -> None:
        """INVARIANT: on disk before the new kernel is served, so that no restart of the host lets an older one back in."""
        fresh = self.epochs.with_suffix(".new")
        with fresh.open("w", encoding="ascii") as file:
            file.write(json.dumps({"epoch": epoch, "nonce": nonce}))
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self.epochs)
        self.epoch, self.nonce = epoch, nonce

    async def greet(
        self, hello: wire.Hello, writer: asyncio.StreamWriter, lease_s: float
    ) -> tuple[Stay, wire.Welcome]:
        """The session that a kernel goes on with, or a new one; the latter ends all that was there.

        It counts as connected by `writer` from now on.

        Raises:
            RefusedError: a later kernel of this data directory was here.
        """
        newer = (hello.epoch, hello.nonce) != (self.epoch, self.nonce)
        if hello.epoch < self.epoch or (newer and hello.epoch == self.epoch):
            raise RefusedError(
                "a later kernel of the same data directory uses this sandbox host; end this one, or give a copy of a "
                "data directory a name of its own by removing its `remote/owner.json`"
            )
        stay = self.stay
        if not newer and stay is not None and stay.name == hello.session and stay.session.lost is None:
            await stay.cut()
            if stay.session.lost is None:
                stay.attach(writer)
                return stay, self._welcome(stay, resumed=True)
        swept: list[str] = []
        if stay is not None:
            await stay.cut()
            try:
                await stay.end("another session has begun")
            except SandboxError as error:
                raise RefusedError(f"{error}; look at the sandbox host's log, then try again") from error
            swept = stay.swept
        await self.lodging.clear()
        if newer:
            self.store(hello.epoch, hello.nonce)
        self.stay = Stay(lodging=self.lodging, lease_s=lease_s)
        self.stay.attach(writer)
        return self.stay, self._welcome(self.stay, ended=swept)

    def _welcome(self, stay: Stay, *, resumed: bool = False, ended: Sequence[str] = ()) -> wire.Welcome:
        return wire.Welcome(
            session=stay.name,
            resumed=resumed,
            received=stay.session.received,
            lease_s=stay.lease_s,
            ended=list(ended),
            provides=[str(path) for path in self.provides],
        )


class SandboxHost:
    """One host process.

    Args:
        settings: how it runs.
        sandbox: the backend; the native one of `settings.data` if left out.
    """

    def __init__(self, settings: HostSettings, sandbox: Sandbox | None = None) -> None:
        self._settings = settings
        self._sandbox = sandbox or NativeSandbox(settings.data, sub_uids=False)
        root = os.geteuid() == 0 and mapped(settings.first_uid, settings.uids)
        self._uids = Uids(settings.first_uid if root else None, settings.uids)
        self._tenants: dict[tuple[str, str], _Tenant] = {}
        self._strangers: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._credentials: tuple[tuple[int, ...], tls.Credentials, ssl.SSLContext] | None = None
        self._probing = asyncio.Lock()

    async def serve(self, listener: socket.socket, started: Callable[[], None]) -> None:
        """Serve kernels until cancelled; then every sandbox is ended.

        Args:
            listener: a listening TCP socket.
            started: called once it serves.

        Raises:
            CertificateError: this host's own certificate can't be used.
            SandboxError: sandboxes of an earlier host can't be ended, or another one uses the data directory.
        """
        self._context()
        self._settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self._settings.data):
            await self._serve(listener, started)

    async def _serve(self, listener: socket.socket, started: Callable[[], None]) -> None:
        ended = await self._sandbox.sweep()
        if ended:
            log.info("ended what an earlier host left: %s", ", ".join(ended))
        listener.setblocking(False)
        try:
            started()
            await self._accept(listener)
        finally:
            for task in list(self._tasks):
                task.cancel()
            stays = [tenant.stay for tenant in self._tenants.values() if tenant.stay is not None]
            ends = await asyncio.gather(
                *(stay.end("the sandbox host stops") for stay in stays), return_exceptions=True
            )
            for problem in ends:
                if problem is not None:
                    log.error("not all could be ended: %s", problem)
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._sandbox.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, place = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("a connection could not be accepted: %s", error.strerror)
                await asyncio.sleep(0.1)
                continue
            address = _address(place)
            known = self._strangers[address]
            if known >= STRANGERS_PER_ADDRESS_MAX or self._strangers.total() >= STRANGERS_MAX:
                client.close()
                continue
            self._strangers[address] += 1
            task = asyncio.create_task(self._client(client, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _client(self, client: socket.socket, address: str) -> None:
        writer: asyncio.StreamWriter | None = None
        expiry: asyncio.TimerHandle | None = None
        try:
            try:
                reader, writer = await self._secure(client)
                async with asyncio.timeout(HANDSHAKE_S):
                    peer, left = self._peer(writer)
                    # A certificate counts while a connection lasts, too; over the next one a kernel goes on with a new one.
                    expiry = asyncio.get_running_loop().call_later(left, writer.transport.abort)
                    word = await wire.read_greeting(reader)
            finally:
                self._strangers[address] -= 1
                self._strangers += Counter()  # forget addresses without any
            await self._greeted(peer, word, reader, writer)
        except RefusedError as refusal:
            log.warning("a client at %s is refused: %s", address, refusal)
            await _say(writer, wire.Refused(message=str(refusal)))
        except tls.CertificateError as error:
            log.error("no kernel can be served: %s", error)  # noqa: TRY400 - the line says all
        except _FIRST_WORD as error:
            log.warning("a client at %s did not get in: %s", address, tls.in_words(error, "it"))
        finally:
            if expiry is not None:
                expiry.cancel()
            if writer is not None:
                writer.transport.abort()
            client.close()

    async def _secure(self, client: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = asyncio.StreamReader(limit=READER_LIMIT_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, client, ssl=self._context(), ssl_handshake_timeout=HANDSHAKE_S
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    def _context(self) -> ssl.SSLContext:
        """Certificates are read again when they were replaced."""
        files = (tls.KEY_FILE, tls.CA_FILE, tls.PEERS_FILE)
        try:
            version = tuple((self._settings.certs / name).stat().st_mtime_ns for name in files)
        except OSError:
            version = ()
        if self._credentials is None or self._credentials[0] != version:
            credentials = tls.Credentials.load(self._settings.certs, "host")
            self._credentials = (version, credentials, credentials.context(server=True))
        return self._credentials[2]

    def _peer(self, writer: asyncio.StreamWriter) -> tuple[str, float]:
        """The name of a client's certificate, if it is one that is pinned, and how many seconds it still counts."""
        certificate = writer.get_extra_info("peercert")
        if not tls.has_role(writer.get_extra_info("ssl_object").getpeercert(True), "kernel"):
            raise RefusedError(
                "its certificate is not one for a kernel; make one with `ringfence sandbox-certs`"
            )
        names = tls.names_of(certificate)
        accepted = self._credentials[1].peers if self._credentials is not None else ()
        found = next((name for name in names if name in accepted), None)
        if found is None:
            raise RefusedError(
                f"no kernel named {', '.join(f'`{name}`' for name in names)} is expected here; "
                f"add it to the file `{tls.PEERS_FILE}` among the sandbox host's certificates"
            )
        return found, min(max(tls.seconds_left(certificate), 0.0), 1 << 20)

    async def _greeted(
        self,
        peer: str,
        word: wire.Greeting,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if word.version != wire.VERSION:
            raise RefusedError(
                f"a kernel of protocol {word.version} can't use a sandbox host of protocol {wire.VERSION}; "
                "use one version of Ringfence for both"
            )
        if isinstance(word, wire.Probe):
            await _say(writer, wire.Walls(walls=await self._walls()))
            return
        tenant = self._tenant(peer, word.owner)
        async with tenant.lock:
            stay, welcome = await tenant.greet(word, writer, self._settings.lease_s)
        await _say(writer, welcome)
        log.info("kernel `%s` %s", peer, "goes on" if welcome.resumed else "begins")
        await stay.serve(reader, writer, word.received if welcome.resumed else 0)

    def _tenant(self, peer: str, owner: str) -> _Tenant:
        if not _OWNER(owner):
            raise RefusedError("the name of a data directory makes no sense")
        tenant = self._tenants.get((peer, owner))
        if tenant is None:
            if sum(name == peer for name, _ in self._tenants) >= OWNERS_MAX:
                raise RefusedError(f"kernel `{peer}` has more than {OWNERS_MAX} data directories here")
            root = self._settings.data / "kernels" / peer / owner
            lodging = Lodging(
                kernel=peer,
                owner=owner,
                root=root,
                sandbox=self._sandbox,
                uids=self._uids,
                cache_bytes=self._settings.cache_bytes,
            )
            tenant = _Tenant(lodging, root / "epoch.json", self._settings.provides)
            tenant.load()
            self._tenants[peer, owner] = tenant
        return tenant

    async def _walls(self) -> list[dict[str, Any]]:
        async with self._probing:
            try:
                return [asdict(wall) for wall in await asyncio.to_thread(self._sandbox.walls)]
            except SandboxError as error:
                raise RefusedError(str(error)) from error


@contextlib.contextmanager
def _locked(data: Path) -> Generator[None]:
    # INVARIANT: what is found in the directory at a start was left behind: no other host that lives uses it.
    with (data / "host.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SandboxError(
                f"the data directory `{data}` is in use by another sandbox host; stop it, or choose another --data"
            ) from None
        yield


async def _say(writer: asyncio.StreamWriter | None, message: wire.Reply) -> None:
    if writer is not None:
        with contextlib.suppress(OSError, RuntimeError, asyncio.TimeoutError):
            async with asyncio.timeout(HANDSHAKE_S):
                writer.write(wire.encode(message))
                await writer.drain()
                if not isinstance(message, wire.Welcome):
                    writer.close()
                    await writer.wait_closed()


def _address(place: Any) -> str:
    """The address of a peer without its port."""
    match place:
        case (str(address), *_):
            return address
        case _:
            return ""
