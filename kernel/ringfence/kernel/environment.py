"""What the kernel lends to the bodies of one agent's calls (the `Env` protocol)."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.kernel.journal.store import Store
from ringfence.kernel.mailboxes import Mailbox, Mailboxes
from ringfence.kernel.mounts import MountRefused
from ringfence.kernel.nursery import AgentNursery
from ringfence.kernel.rights import Rights
from ringfence.kernel.shelves import AgentArtifacts, AgentMemory
from ringfence.policy.facts import NOTHING_KNOWN, Facts
from ringfence.sandbox.direct import DirectLayer
from ringfence.sandbox.shared_points import SharedSnapshots
from ringfence.sandbox.snapshots import SnapshotError, SnapshotStore
from ringfence.sandbox.types import Limits, Sandbox, SandboxError
from ringfence.sandbox.usage import Meter, Usage
from ringfence.sandbox.workspace import Workspace
from ringfence.syscalls.base import Question, StateValue
from ringfence.syscalls.declared import (
    A2aResource,
    HttpResource,
    LlmResource,
    McpResource,
    ObjectResource,
    SqlResource,
)
from ringfence.syscalls.fs_common import in_thread
from ringfence.syscalls.lent import A2aCards, McpServers

if TYPE_CHECKING:
    from ringfence.kernel.resting import Remake

log = logging.getLogger(__name__)

PROGRAM_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
"""Of agents' own programs, beside that of commands: images are read-only, and logs are followed."""
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/sbin")


def outside_prefix() -> tuple[Path, ...]:
    """Import directories of this interpreter that a fresh one would not find by itself, such as a user's own packages."""
    if sys.prefix != sys.base_prefix:
        return ()
    own = (Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("platstdlib")))
    found = [Path(entry) for entry in sys.path if entry and Path(entry).is_dir()]
    return tuple(p for p in found if not any(p == o or p == o / "lib-dynload" for o in own))


@functools.cache
def interpreter_directories() -> tuple[Path, ...]:
    """Host directories a sandbox needs to run this interpreter with this library; those under /usr are there anyway."""
    import ringfence.agent  # noqa: PLC0415 - only its place matters
    import ringfence.v1  # noqa: PLC0415

    wanted = [Path(sys.prefix), Path(sys.base_prefix), Path(sysconfig.get_path("purelib")), *outside_prefix()]
    wanted += [
        Path(place).parent.parent for package in (ringfence.agent, ringfence.v1) for place in package.__path__
    ]
    found: list[Path] = []
    for path in sorted({p.resolve() for p in wanted} | set(wanted), key=lambda p: len(p.parts)):
        if any(path.is_relative_to(root) for root in (*_SYSTEM, *found)):
            continue
        found.append(path)
    return tuple(found)


def interpreter_environment(names: Path) -> dict[str, str]:
    """PATH and PYTHONPATH inside: this interpreter first, under the names `python` and `python3`, then the system's.

    Args:
        names: a directory to keep those names in; it is shown inside at the same place.
    """
    names.mkdir(mode=0o755, parents=True, exist_ok=True)
    names.chmod(0o755)  # whatever the umask: agents may run as other users
    for name in ("python", "python3"):
        link = names / name
        if not link.is_symlink() or link.readlink() != Path(sys.executable):
            link.unlink(missing_ok=True)
            link.symlink_to(sys.executable)
    own = [str(Path(sys.prefix) / "bin"), str(names), str(Path(sys.base_prefix) / "bin")]
    path = ":".join(dict.fromkeys([*own, "/usr/local/bin", "/usr/bin", "/bin"]))
    more = ":".join(str(p) for p in outside_prefix())
    return {"PATH": path, "PYTHONPATH": more} if more else {"PATH": path}


def command_environment(names: Path) -> dict[str, str]:
    """The environment of every command and program, before what its manifest says. Arguments as for `interpreter_environment`."""
    return {**interpreter_environment(names), "HOME": "/tmp", "LANG": "C.UTF-8"}  # noqa: S108 - inside the sandbox


def warm_environment(names: Path) -> dict[str, str]:
    """What decides how an agent's Python starts, as long as its manifest says nothing else."""
    usual = {**PROGRAM_ENVIRONMENT, **command_environment(names)}
    return {name: value for name, value in usual.items() if name not in ("PATH", "HOME")}


class SharedState:
    """Reads `state.*` for bodies."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def get(self, key: str) -> StateValue:
        """Read one key."""
        found = await self._store.state_read(key)
        if found is None:
            return StateValue(value=None, version=0)
        return StateValue(
            value=found.value, version=found.version, tainted_by=found.agent if found.tainted else ""
        )


class WorkspaceLock(asyncio.Lock):
    """Held by whoever changes the workspace. What changes left is in the store that others share before the next one begins.

    Where that store is away the change stands, and is brought there later: the next change is refused until it is.
    """

    def __init__(self, snapshots: SnapshotStore) -> None:
        super().__init__()
        self._snapshots = snapshots

    async def __aexit__(self, *exc: object) -> None:
        """Bring what changed to the shared store, then let others in."""
        try:
            if isinstance(self._snapshots, SharedSnapshots) and self._snapshots.pending:
                await in_thread(self._snapshots.push)
        except SnapshotError as error:
            log.warning(
                "what a change left is not in the shared store: %s; the next change brings it there", error
            )
        finally:
            self.release()


class AgentEnvironment:
    """One agent's environment. Everything but the rights and the masks is fixed."""

    def __init__(
        self,
        *,
        agent: str,
        name: str,
        mailbox: Mailbox,
        peers: Mailboxes,
        memory: AgentMemory,
        artifacts: AgentArtifacts,
        nursery: AgentNursery,
        workspace: Workspace,
        snapshots: SnapshotStore,
        sandbox: Sandbox,
        limits: Limits,
        command_env: Mapping[str, str],
        readonly: Sequence[Path],
        mounts: Callable[[], Mapping[Path, Path]],
        require: Sequence[str],
        uid: int | None,
        scratch_root: Path,
        direct: DirectLayer | None,
        state: SharedState,
        http: Mapping[str, HttpResource],
        sql: Mapping[str, SqlResource],
        llm: Mapping[str, LlmResource],
        objects: Mapping[str, ObjectResource],
        servers: McpServers,
        cards: A2aCards,
        rights: Rights,
    ) -> None:
        self.agent = agent
        self.name = name
        self.mailbox = mailbox
        self.peers = peers
        self.memory = memory
        self.artifacts = artifacts
        self.nursery = nursery
        self.workspace = workspace
        self.snapshots = snapshots
        self.sandbox = sandbox
        self.limits = limits
        self.command_env = command_env
        self.readonly = readonly
        self.require = require
        self._mounts = mounts
        self.uid = uid
        self.scratch_root = scratch_root
        self.direct = direct
        self.state = state
        self.http = http
        self.sql = sql
        self.llm = llm
        self.objects = objects
        self.servers = servers
        self.cards = cards
        self.meter = Meter(workspace, limits.disk_bytes)
        self._rights = rights
        self.known: Callable[[], Facts] = lambda: NOTHING_KNOWN  # set once there is a thread
        self._masks: set[str] | None = None
        self._lock = WorkspaceLock(snapshots)
        self.remake: Remake | None = None  # makes it again; set once it is made

    @property
    def mounts(self) -> Mapping[Path, Path]:
        """What the manifest names of the host, by path inside, as the kernel file in force allows it.

        Raises:
            SandboxError: it no longer does, or a directory is gone.
        """
        try:
            return self._mounts()
        except MountRefused as error:
            raise SandboxError(str(error)) from error

    def visible(self, action: str, path: str) -> bool:
        """Whether policy lets this agent do `action` on a canonical path."""
        if self._rights.conditional:
            return self._rights.visible(action, path, self.known())
        return self._rights.visible(action, path)

    @property
    def mcp(self) -> Mapping[str, McpResource]:
        """MCP servers by name."""
        return self.servers.declared

    @property
    def a2a(self) -> Mapping[str, A2aResource]:
        """Agents elsewhere by name."""
        return self.cards.declared

    def may(self, question: Question) -> bool:
        """Whether no rule stands against a question, or somebody only has to be asked."""
        return self._rights.reaches(question)

    def may_any(self, family: str) -> bool:
        """Whether a rule speaks for some action of a family, or of that name."""
        return self._rights.reaches_some(family)

    def lock(self) -> asyncio.Lock:
        """The workspace's lock."""
        return self._lock

    @property
    def busy(self) -> bool:
        """Whether somebody changes the workspace, or a child is being made."""
        return self._lock.locked() or bool(self.nursery.cradles)

    @property
    def masks(self) -> set[str] | None:
        """What commands must not see, where that is known."""
        return self._masks

    def carry_on(self, used: Usage | None, masks: set[str] | None) -> None:
        """Take over what an environment of the same workspace knew."""
        self.meter.carry_on(used)
        self._masks = masks

    # -- masks ----------------------------------------------------------------------------------------------------

    def masked(self) -> Sequence[str]:
        """Canonical paths of the live workspace that commands must not see, outermost first.

        The tree is read once for a policy epoch; after that only paths that calls touch are looked at.
        """
        if self._masks is None:
            self._masks = set(self._rights.masks(info.path for info in self.workspace.walk()))
        outermost: list[str] = []
        for path in sorted(self._masks):
            if not outermost or not path.startswith(outermost[-1] + "/"):
                outermost.append(path)
        return [path for path in outermost if self.workspace.holds(path)]

    def touched(self, paths: Iterable[str]) -> None:
        """Look at paths that a call made, so that commands never see a denied one that came later."""
        if self._masks is not None:
            self._masks.update(self._rights.masks(paths))

    def forget_masks(self) -> None:
        """The tree changed in ways not listed: read it again."""
        self._masks = None
        self.meter.forget()

    def rights_changed(self, rights: Rights) -> None:
        """Decide visibility and masks under new rights from now on."""
        self._rights = rights
        self._masks = None
