"""The engine's socket: every call in a thread of its own pool, with a deadline, and with errors that say what to do.

The only module that imports the `docker` package.
"""

from __future__ import annotations

import asyncio
import grp
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

from ringfence.sandbox.types import SandboxError, SandboxLostError

T = TypeVar("T")

DEFAULT_HOST = "unix:///var/run/docker.sock"
PATIENCE_S = 30.0
"""How long the engine may take for an answer; to start and remove containers, twice that."""
_SLOW = 2
_THREADS = 32
_KEPT = 4
"""Connections that are kept open for the next calls; the SDK keeps them by URL, and each container has its own."""
_UNIX = "unix://"
_ANY_API = "1.41"
_NOT_FOUND, _CONFLICT = 404, 409


class EngineError(SandboxError):
    """The engine refuses. `status` is that of its answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def not_found(self) -> bool:
        """What was asked about isn't there."""
        return self.status == _NOT_FOUND

    @property
    def conflict(self) -> bool:
        """It is in another state than was taken for granted."""
        return self.status == _CONFLICT


class EngineGoneError(SandboxLostError):
    """The engine can't be reached, or does not answer. It may come back."""


def usual_host() -> str:
    """The engine where no configuration names one: that of `DOCKER_HOST`, else the usual socket."""
    named = os.environ.get("DOCKER_HOST", "")
    return named if named.startswith(_UNIX) else DEFAULT_HOST


class Engine:
    """One engine.

    Args:
        host: its socket, `unix:///…`.
        patience_s: how long it may take for an answer.
    """

    def __init__(self, host: str, patience_s: float = PATIENCE_S) -> None:
        self.host = host
        self.patience_s = patience_s
        self._lock = threading.Lock()
        self._clients: dict[float, Any] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "ringfence-docker")
        self._answered = False

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return Path(self.host.removeprefix(_UNIX))

    async def call(self, work: Callable[[Any], T], *, slow: bool = False) -> T:
        """Ask the engine without holding up the event loop; `work` gets the SDK's low-level client.

        Raises:
            EngineError: it refuses.
            EngineGoneError: it answered before and does not now.
            SandboxError: it can't be used at all.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: self.ask(work, slow=slow))

    def ask(self, work: Callable[[Any], T], *, slow: bool = False) -> T:
        """The same for callers that may block."""
        if not self.host.startswith(_UNIX):
            raise SandboxError(
                f"`{self.host}` is not the socket of a docker engine on this host; write `host: {DEFAULT_HOST}`"
            )
        if find_spec("docker") is None or find_spec("requests") is None:
            raise SandboxError(
                "the docker backend needs a package that is missing: pip install 'ringfence[docker]'"
            )
        self._knock()
        import requests  # noqa: PLC0415

        import docker.errors  # noqa: PLC0415 # pyright: ignore[reportMissingTypeStubs] - it has none

        api_error = cast("type[Exception]", docker.errors.APIError)
        try:
            result = work(self._client(self.patience_s * (_SLOW if slow else 1)))
        except api_error as error:
            status = int(getattr(getattr(error, "response", None), "status_code", 0) or 0)
            text = str(getattr(error, "explanation", None) or error).strip().splitlines()
            raise EngineError(text[-1] if text else "no reason given", status) from error
        except (
            cast("type[Exception]", docker.errors.DockerException),
            requests.RequestException,
            OSError,
        ) as error:
            raise self._lost(error) from error
        self._answered = True
        return result

    def close(self) -> None:
        """Let go of its connections."""
        self._threads.shutdown(wait=False)
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def _client(self, timeout_s: float) -> Any:
        with self._lock:
            client = self._clients.get(timeout_s)
        if client is None:
            import docker  # noqa: PLC0415 # pyright: ignore[reportMissingTypeStubs] - it has none

            sdk = cast("Any", docker)
            # The SDK's own way to settle the version leaves its connection open where that fails.
            asking = sdk.APIClient(base_url=self.host, version=_ANY_API, timeout=timeout_s)
            try:
                version = asking.version(api_version=False)["ApiVersion"]
            finally:
                asking.close()
            client = sdk.APIClient(
                base_url=self.host, version=version, timeout=timeout_s, num_pools=_KEPT, max_pool_size=_KEPT
            )
            with self._lock:
                kept = self._clients.setdefault(timeout_s, client)
            if kept is not client:  # another thread was faster
                client.close()
            return kept
        return client

    def _knock(self) -> None:
        """See that somebody listens. The SDK says less of what is the matter, and leaves its socket open."""
        place = self.socket
        kind = EngineGoneError if self._answered else SandboxError
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(self.patience_s)
                probe.connect(str(place))
        except FileNotFoundError as error:
            raise kind(
                f"there is no docker engine at `{place}`; install and start it, or name its socket as `sandbox.docker.host`"
            ) from error
        except PermissionError as error:
            raise SandboxError(
                f"the docker engine's socket `{place}` is closed to this user; {_way_in(place)} (who may use it is root on this host)"
            ) from error
        except ConnectionRefusedError as error:
            raise kind(
                f"the docker engine at `{place}` is not running; start it: systemctl start docker"
            ) from error
        except OSError as error:
            raise kind(
                f"the docker engine at `{place}` can't be reached: {error.strerror or error}; start it anew"
            ) from error

    def _lost(self, error: Exception) -> SandboxError:
        """What is the matter with an engine that listens, or did a moment ago."""
        try:
            self._knock()
        except SandboxError as reason:
            return reason
        place = self.socket
        if "timed out" in str(error).lower():
            return EngineGoneError(
                f"the docker engine at `{place}` does not answer within {self.patience_s:g} s; look at its log and start it anew"
            )
        return EngineGoneError(f"the docker engine at `{place}` broke off: {_short(error)}; try again")


def _way_in(place: Path) -> str:
    try:
        group = grp.getgrgid(place.stat().st_gid).gr_name
    except (OSError, KeyError):
        group = "docker"
    return f"let an administrator run `usermod -aG {group} USER`, and log in anew"


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
