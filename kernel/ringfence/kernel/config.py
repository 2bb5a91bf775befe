"""Settings of one kernel process and the layout of its data directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

VERSION = "0.1.0"

INLINE_RESULT_BYTES_MAX = 4096
"""Results above this are artifacts; the journal keeps the pointer."""

ARGUMENT_BYTES_MAX = 4 << 20
"""Longest arguments of one call."""

MESSAGE_BYTES_MAX = 8 << 20
"""Longest gRPC message; above it gRPC itself refuses."""

GRPC_ENVIRONMENT = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "GRPC_EXPERIMENTS": "-event_engine_listener,-event_engine_client",
}
"""How gRPC is to run, for `os.environ` before its first import; what a user has set counts more.

No fork handlers: they can kill the child of a process that serves calls. And no event engine: it hands every message from
thread to thread, which costs a server a quarter of its processor time and a client nearly half.
"""

CALLS_IN_FLIGHT_MAX = 64
"""Calls of one agent that may be under way, over all its streams, before the next is read."""

ARGUMENT_BYTES_IN_FLIGHT_MAX = 16 << 20
"""Bytes of arguments of these calls before the next is read."""

DEADLINE_MS_MAX = 600_000
"""Longest deadline of one call."""

LEASE_S = 10.0
"""How long a kernel owns its agents without a heartbeat."""

HEARTBEAT_S = 2.5
"""How often it renews the lease."""

AGENT_UID_BASE = 200_000
"""First host uid of agents when the kernel is root."""


def default_data_dir() -> Path:
    """The user's data directory: `$XDG_DATA_HOME/ringfence`, else `~/.local/share/ringfence`."""
    base = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")  # noqa: PTH111, PTH118 - HOME may be unset, pathlib raises then
    return Path(base) / "ringfence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `ringfence up` was given.

    Attributes:
        data: the data directory; holds everything but the database of `dsn`.
        dsn: PostgreSQL to use; None: the embedded one.
        store: URL of the store that several nodes share; None: the data directory alone.
        config: `ringfence.yaml`; None: no resources, no ceilings.
        listen: extra TCP address for operators; None: the operator socket alone.
    """

    data: Path
    dsn: str | None = None
    store: str | None = None
    config: Path | None = None
    listen: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where things lie below the data directory. `run` may lie elsewhere: a socket's path has at most 107 bytes."""

    data: Path
    run: Path

    @property
    def operator_socket(self) -> Path:
        """Socket of operators, mode 0600."""
        return self.run / "operator.sock"

    @property
    def kernel_file(self) -> Path:
        """JSON that tells clients where the kernel listens."""
        return self.data / "kernel.json"

    @property
    def lock_file(self) -> Path:
        """Held by the one kernel of this directory."""
        return self.data / "kernel.lock"

    @property
    def blobs(self) -> Path:
        """Artifacts."""
        return self.data / "artifacts"

    def archive(self, declared: str) -> Path:
        """Parts of journals that left the database: where the kernel file says, or here."""
        return Path(declared) if declared else self.data / "archive"

    @property
    def home_file(self) -> Path:
        """What names this data directory, whatever its path and host."""
        return self.data / "home"

    @property
    def secrets(self) -> Path:
        """Secrets."""
        return self.data / "secrets"

    @property
    def anchor_file(self) -> Path:
        """Signed heads of the audit chain, to be shipped elsewhere."""
        return self.data / "anchor" / "heads.jsonl"

    @property
    def anchor_key(self) -> Path:
        """Key that signs them."""
        return self.data / "anchor" / "key.pem"

    @property
    def interpreter(self) -> Path:
        """Names of the kernel's interpreter as agents call it, shown in every sandbox."""
        return self.data / "interpreter"

    def agent(self, agent: str) -> Path:
        """Directory of one agent: `live`, `image`, `logs`, `scratch`."""
        return self.data / "agents" / agent

    def origin(self, agent: str) -> Path:
        """The chain that an imported agent has where it comes from, as its export had it."""
        return self.data / "origins" / agent

    def agents_here(self) -> list[str]:
        """Ids of the agents whose files this data directory has."""
        try:
            return [
                entry.name for entry in (self.data / "agents").iterdir() if not entry.name.startswith(".")
            ]
        except FileNotFoundError:
            return []

    def points(self, agent: str) -> Path:
        """Rollback points of one agent; no sandbox ever mounts it."""
        return self.data / "points" / agent

    def socket_dir(self, key: int) -> Path:
        """Directory with the socket of one agent, mounted into its sandbox."""
        return self.run / f"a{key}"
