"""Keeps a kernel's session with a host over one connection after another."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from ringfence.sandbox.remote import tls, wire
from ringfence.sandbox.remote.calls import Calls
from ringfence.sandbox.types import SandboxError, SandboxLostError

log = logging.getLogger(__name__)

CONNECT_S = 10.0
"""How long one attempt may take, and how long a start waits for a host that can't be reached."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
READER_LIMIT_BYTES = 256 << 10
PLACE = "remote"
"""Where in a data directory that is kept."""
_BROKEN = OSError, asyncio.IncompleteReadError, wire.WireError, asyncio.TimeoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """Where a kernel's sandboxes run.

    Attributes:
        address: `host:port` of the sandbox host.
        certs: directory with this kernel's certificate, as `issue` made it.
    """

    address: str
    certs: Path

    def place(self) -> tuple[str, int]:
        """Host and port.

        Raises:
            SandboxError: the address is none.
        """
        host, _, port = self.address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise SandboxError(f"`{self.address}` is no address of a sandbox host; write `host:port`")
        return host, int(port)


def _damaged(path: Path, error: Exception) -> str:
    what = (error.strerror or str(error)).lower() if isinstance(error, OSError) else "it is damaged"
    return f"`{path}`, which says where sandboxes ran, can't be used: {what}; mend or remove it"


def settings_used(data: Path) -> RemoteSettings | None:
    """Where the kernels of a data directory had their sandboxes run; None: never elsewhere.

    Raises:
        SandboxError: what is kept of it can't be read.
    """
    path = data / PLACE / "owner.json"
    try:
        known = json.loads(path.read_bytes())
        return RemoteSettings(address=str(known["address"]), certs=Path(known["certs"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SandboxError(_damaged(path, error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """This kernel, among all that ran on its data directory."""

    name: str
    epoch: int
    nonce: str

    @classmethod
    def begin(cls, directory: Path, settings: RemoteSettings) -> Owner:
        """Count this kernel, and remember which host it uses. Durable before it returns.

        Args:
            directory: of the data directory; it is made.
            settings: of the host, for the sweep of a later kernel.

        Raises:
            SandboxError: what is kept there can't be read or written.
        """
        path = directory / "owner.json"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (directory / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                known = {"name": secrets.token_hex(16), "epoch": 0}
                with contextlib.suppress(FileNotFoundError):
                    known = json.loads(path.read_bytes())
                owner = cls(
                    name=str(known["name"]), epoch=int(known["epoch"]) + 1, nonce=secrets.token_hex(8)
                )
                fresh = path.with_suffix(".new")
                with fresh.open("w", encoding="ascii") as file:
                    host = {"address": settings.address, "certs": str(settings.certs)}
                    file.write(json.dumps({"name": owner.name, "epoch": owner.epoch, **host}))
                    file.flush()
                    os.fsync(file.fileno())
                fresh.rename(path)
                return owner
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SandboxError(_damaged(path, error)) from error


async def connect(settings: RemoteSettings) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
    """Connect, each end proving who it is; answers the host's name too.

    Raises:
        SandboxError: a certificate is at fault, which trying again won't mend.
        SandboxLostError: the host can't be reached.
    """
    if not settings.address:
        raise SandboxError(
            'no sandbox host is named; write `sandbox: {remote: {address: "HOST:PORT", certs: DIR}}` in the kernel file'
        )
    host, port = settings.place()
    peer = f"the sandbox host `{settings.address}`"
    try:
        credentials = tls.Credentials.load(settings.certs, "kernel")
        context = credentials.context(server=False)
    except tls.CertificateError as error:
        raise SandboxError(str(error)) from error
    if len(credentials.peers) != 1:
        raise SandboxError(
            f"`{settings.certs / tls.PEERS_FILE}` must name the sandbox host at `{settings.address}` and no other"
        )
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=context, server_hostname=credentials.peers[0], limit=READER_LIMIT_BYTES
            )
    except TimeoutError as error:
        raise SandboxLostError(f"{peer} can't be reached: it does not answer; start it") from error
    except OSError as error:
        raise _refusal(error, peer) from error
    if not tls.has_role(writer.get_extra_info("ssl_object").getpeercert(True), "host"):
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        raise SandboxError(
            f"the certificate of {peer} is not one for a sandbox host; make a new one with `ringfence sandbox-certs`"
        )
    with contextlib.suppress(OSError, AttributeError):
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return reader, writer, credentials.peers[0]


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, word: wire.Greeting, peer: str
) -> wire.Welcome | wire.Walls:
    """Say the first word and hear the answer.

    Raises:
        SandboxError: the host refuses this kernel.
        SandboxLostError: it does not answer.
    """
    try:
        async with asyncio.timeout(CONNECT_S if isinstance(word, wire.Hello) else 6 * CONNECT_S):
            writer.write(wire.encode(word))
            reply = await wire.read_reply(reader)
    except _BROKEN as error:
        raise _refusal(error, peer) from error
    if isinstance(reply, wire.Refused):
        raise SandboxError(f"{peer} refuses this kernel: {reply.message}")
    return reply


def _refusal(error: BaseException, peer: str) -> SandboxError:
    """What TLS refuses won't get better by trying again; a connection that broke may."""
    kind = SandboxError if isinstance(error, ssl.SSLError) else SandboxLostError
    return kind(tls.in_words(error, peer))


class Link:
    """The one session of a kernel with its host.

    Args:
        settings: where the host is.
        directory: of the data directory, for what is kept of this kernel.
    """

    def __init__(self, settings: RemoteSettings, directory: Path) -> None:
        self.settings = settings
        self.host = ""
        self.ended_before: set[str] = set()
        self._directory = directory
        self._owner: Owner | None = None
        self._calls: Calls | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._making = asyncio.Lock()

    async def calls(self, patience_s: float = CONNECT_S) -> Calls:
        """The session, a new one where there is none.

        Args:
            patience_s: how long to try again where the host can't be reached.

        Raises:
            SandboxError: a certificate is at fault, or the host refuses this kernel.
            SandboxLostError: the host can't be reached.
        """
        async with self._making:
            if self._calls is not None:
                return self._calls
            give_up = asyncio.get_running_loop().time() + patience_s
            pause = FIRST_PAUSE_S
            while True:
                try:
                    return await self._begin()
                except SandboxLostError:
                    if asyncio.get_running_loop().time() + pause > give_up:
                        raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    async def close(self) -> None:
        """End the session and all its sandboxes, if the host can be told."""
        calls, keeper = self._calls, self._keeper
        if calls is not None and calls.session.connected:
            with contextlib.suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await calls.order(wire.Bye())
        if calls is not None:
            calls.lose("the kernel stops")
            await calls.settle()
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _begin(self) -> Calls:
        if self._owner is None:
            self._owner = await asyncio.to_thread(Owner.begin, self._directory, self.settings)
        calls = Calls(self._lost)
        reader, writer, welcome = await self._greet(self._owner, calls)
        calls.name, calls.provides = welcome.session, tuple(welcome.provides)
        self.ended_before |= set(welcome.ended)
        self._calls = calls
        self._keeper = asyncio.create_task(self._keep(self._owner, calls, reader, writer, welcome.lease_s))
        return calls

    def _lost(self) -> None:
        self._calls = None

    async def _greet(
        self, owner: Owner, calls: Calls
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, wire.Welcome]:
        reader, writer, self.host = await connect(self.settings)
        hello = wire.Hello(
            version=wire.VERSION,
            owner=owner.name,
            epoch=owner.epoch,
            nonce=owner.nonce,
            session=calls.name,
            received=calls.session.received,
        )
        peer = f"the sandbox host `{self.settings.address}`"
        try:
            reply = await ask(reader, writer, hello, peer)
        except BaseException:
            writer.transport.abort()
            raise
        if not isinstance(reply, wire.Welcome):
            writer.transport.abort()
            raise SandboxError(f"{peer} gave an answer to another question; look at its version")
        return reader, writer, reply

    async def _keep(
        self,
        owner: Owner,
        calls: Calls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        lease_s: float,
    ) -> None:
        """Use one connection after another until the session is lost.

        Nothing has to be agreed on about time: a host ends the sandboxes of a session that it gave up, and a kernel
        that gave one up first can begin another only at that host, which then ends what is left of the first.
        """
        received = 0
        why = ""
        while calls.session.lost is None:
            why = await calls.session.run(reader, writer, received_there=received, silence_s=lease_s / 2)
            if calls.session.lost is not None:
                break
            log.warning("the connection to the sandbox host `%s` ended: %s", self.settings.address, why)
            found = await self._again(owner, calls, lease_s)
            if isinstance(found, str):
                why = found
                break
            reader, writer, received = found
        log.warning("the session with the sandbox host `%s` is lost: %s", self.settings.address, why)
        calls.lose(
            f"the sandbox host `{self.settings.address}` was lost ({why}), and with it all that it ran"
        )

    async def _again(
        self, owner: Owner, calls: Calls, lease_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int] | str:
        """Go on with the session over a new connection, or say why that can't be."""
        loop = asyncio.get_running_loop()
        give_up, pause = loop.time() + lease_s, FIRST_PAUSE_S
        while True:
            try:
                reader, writer, welcome = await self._greet(owner, calls)
            except SandboxError as error:
                if not isinstance(error, SandboxLostError) or loop.time() + pause > give_up:
                    return str(error)
            else:
                if welcome.resumed:
                    return reader, writer, welcome.received
                # The host has begun a new session for this, of which nobody makes use.
                writer.transport.abort()
                return "it was started anew, or had given this kernel up"
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
