"""Where A2A clients are heard: one HTTP door of the kernel, on which each agent that serves has a path of its own.

    /agents/NAME/.well-known/agent-card.json    the card, for anybody: who writes `serve` publishes it
    /agents/NAME                                JSON-RPC
    /agents/NAME/message:send, /tasks/…         HTTP+JSON

The SDK and its web server are imported when the kernel file declares this, and not before: they are heavy.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any, Final

from ringfence.kernel.server.gate import Complaints

if TYPE_CHECKING:
    from ringfence.kernel.a2a.web import Web
    from ringfence.kernel.operations.kernel import Kernel
    from ringfence.policy.serving import A2aDecl

log = logging.getLogger(__name__)

BACKLOG: Final = 64


class A2aDoor:
    """Listens where the kernel file says, and not at all where it says nothing."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._declared: A2aDecl | None = None
        self._problem = ""
        self._web: Web | None = None
        self._complaints = Complaints(log, "a2a")

    async def apply(self) -> None:
        """Take over what the kernel file says now. What stands in the way is told by `report`, and tried again then."""
        wanted = self._kernel.ownership.resources.file.a2a
        at = None if self._declared is None else (self._declared.host, self._declared.port)
        if self._web is not None and wanted is not None and at == (wanted.host, wanted.port):
            self._declared = self._web.declared = wanted
            return
        await self.close()
        self._declared, self._problem = wanted, ""
        if wanted is None:
            return
        try:
            web = await asyncio.to_thread(_imported)
        except ImportError as error:
            self._wrong(
                f"a2a needs a package that is not here ({error.name}): pip install 'ringfence[a2a]', and restart"
            )
            return
        try:
            listener = _listener(wanted.host, wanted.port)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            self._wrong(
                f"a2a can't listen at `{wanted.host}:{wanted.port}`: {why}; free it, or change it, and reload"
            )
            return
        self._web = web(self._kernel, wanted, self._complaints)
        self._web.start(listener)

    def _wrong(self, problem: str) -> None:
        self._problem = problem
        log.warning("%s", problem)

    async def close(self) -> None:
        """Stop listening. What was asked is in mailboxes by then; whoever waits is cut off and can ask again."""
        if self._web is not None:
            await self._web.stop()
            self._web = None

    def report(self) -> dict[str, Any] | None:
        """Where it listens, for `status`; None: nowhere."""
        if self._declared is None:
            return None
        return {
            "listen": listen_url(self._declared),
            "url": self._declared.url or listen_url(self._declared),
            "clients": sorted(self._declared.clients),
            "problem": self._problem or None,
        }


def listen_url(declared: A2aDecl) -> str:
    """The address as a URL."""
    host = f"[{declared.host}]" if ":" in declared.host else declared.host
    return f"http://{host}:{declared.port}"


def _imported() -> type[Web]:
    from ringfence.kernel.a2a.web import Web  # noqa: PLC0415 - heavy, and in a thread for that

    return Web


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
