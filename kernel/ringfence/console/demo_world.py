"""The world of the demo: its directories, its kernel, its desk, and how they are looked at from outside."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringfence.console.client import CallError, Client
from ringfence.console.demo_desk import DELIVERIES
from ringfence.console.demo_report import Narrator
from ringfence.console.demo_warden import Warden
from ringfence.console.demo_workspace import EXAMPLE_URL, Input
from ringfence.console.errors import ConsoleError
from ringfence.kernel.journal.targets import run_script, table_lines
from ringfence.kernel.postgres import EmbeddedPostgres

PATIENCE_S = 120.0
"""Longest wait for any single thing; nothing here takes long, but the machine may be busy."""
_POLL_S = 0.02
ENDED = frozenset({"failed", "killed", "done", "unknown", "parked"})
DATABASE = "inventory"


class DemoError(Exception):
    """The story can't go on."""


@dataclass(slots=True, kw_only=True)
class Command:
    """A finished command of ours."""

    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """What it printed as JSON.

        Raises:
            DemoError: it printed none.
        """
        try:
            return json.loads(self.stdout)
        except ValueError:
            raise DemoError(f"a command ended with {self.code}: {self.stderr.strip()[-500:]}") from None


@dataclass(slots=True, kw_only=True)
class World:
    """Everything the scenes share."""

    root: Path
    tell: Narrator
    warden: Warden
    secret: str
    ambient: str
    agent: str = ""
    laid_out: Input | None = None
    desk: subprocess.Popen[bytes] | None = None
    port: int = 0
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    _client: Client | None = None
    _live: Path | None = None

    # -- places ---------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Path:
        """The kernel's data directory."""
        return self.root / "data"

    @property
    def desk_directory(self) -> Path:
        """Where the desk counts."""
        return self.root / "desk"

    @property
    def config(self) -> Path:
        """The kernel file."""
        return self.root / "ringfence.yaml"

    @property
    def url(self) -> str:
        """Where the desk listens."""
        return EXAMPLE_URL.replace("9000", str(self.port))

    @property
    def input(self) -> Input:
        """What the agent works on.

        Raises:
            DemoError: it isn't laid out yet.
        """
        if self.laid_out is None:
            raise DemoError("the workspace is not laid out yet")
        return self.laid_out

    # -- commands and calls ---------------------------------------------------------------------------------------

    def run(self, *words: str, stdin: bytes = b"", show: bool = True) -> Command:
        """Run a command of ours as a user would, in a process of its own."""
        if show:
            self.tell.command("ringfence " + " ".join(words))
        environment = {
            **os.environ,
            "RINGFENCE_DATA": str(self.data),
            "DEMO_AMBIENT_TOKEN": self.ambient,
            "NO_COLOR": "1",
        }
        environment.pop("RINGFENCE_DSN", None)
        child = self.warden.popen(
            [sys.executable, "-P", "-m", "ringfence.console", *words],
            cwd=self.root,
            env=environment,
        )
        out, err = child.communicate(stdin)
        return Command(
            code=child.returncode, stdout=out.decode(errors="replace"), stderr=err.decode(errors="replace")
        )

    def must(self, *words: str, stdin: bytes = b"", show: bool = True) -> Command:
        """Run a command that has to work.

        Raises:
            DemoError: it didn't.
        """
        done = self.run(*words, stdin=stdin, show=show)
        if done.code != 0:
            raise DemoError(
                f"`ringfence {' '.join(words)}` ended with {done.code}: {done.stderr.strip()[-800:]}"
            )
        return done

    def call(self, method: str, **fields: Any) -> dict[str, Any]:
        """One call to the kernel over a connection that is kept.

        Raises:
            ConsoleError: the kernel refused or is gone.
        """
        if self._client is None:
            address = json.loads((self.data / "kernel.json").read_bytes())["listen"]
            self._client = Client(address)
        return self._client.call(method, PATIENCE_S, **fields)

    def hang_up(self) -> None:
        """Forget the connection, for a kernel that is gone."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def show(self) -> dict[str, Any]:
        """The agent as `ringfence show` has it."""
        return self.call("Show", agent=self.agent)

    def row(self) -> dict[str, Any]:
        """The agent as `ringfence ps` has it: cheaper than `show`."""
        return self.call("List", all=True)["agents"][0]

    def documents(self, method: str, **fields: Any) -> list[dict[str, Any]]:
        """A call whose answer is many documents."""
        self.call("Status")
        assert self._client is not None  # noqa: S101 - `call` opened it
        return list(self._client.documents(method, **fields))

    def steps(self) -> list[dict[str, Any]]:
        """The agent's journal."""
        return self.documents("Steps", agent=self.agent)

    @property
    def live(self) -> Path:
        """The agent's live workspace on this host."""
        if self._live is None:
            self._live = Path(self.show()["workspace"])
        return self._live

    def eventually(self, true: Callable[[], bool], what: str) -> None:
        """Look until something is true: another process has no other way to tell.

        Raises:
            DemoError: it doesn't come true.
        """
        until = time.monotonic() + PATIENCE_S
        while not true():
            if time.monotonic() > until:
                raise DemoError(f"waited {PATIENCE_S:.0f} s for {what}{self._why()}")
            time.sleep(_POLL_S)

    def _why(self) -> str:
        with contextlib.suppress(CallError, ConsoleError, OSError, ValueError):
            shown = self.show()
            return f"; the agent is {shown['state']}: {shown['error'] or shown['waiting_for']}"
        return ""

    def reached(self, marker: str) -> None:
        """Wait for a marker of the desk, and notice an agent that ends before it.

        Raises:
            DemoError: the agent ended, or nothing came.
        """
        looked = time.monotonic()

        def there() -> bool:
            nonlocal looked
            if (self.desk_directory / marker).exists():
                return True
            if time.monotonic() - looked > 1.0:
                looked = time.monotonic()
                if self.row()["state"] in ENDED:
                    raise DemoError(f"the agent ended before the desk's marker `{marker}`{self._why()}")
            return False

        self.eventually(there, f"the desk's marker `{marker}`")

    def signal(self, marker: str) -> None:
        """Leave a marker for the desk."""
        (self.desk_directory / marker).touch()

    # -- processes ------------------------------------------------------------------------------------------------

    def open_desk(self, holds: tuple[int, ...]) -> None:
        """Start the counting process."""
        self.desk_directory.mkdir()
        words = [
            sys.executable,
            "-P",
            "-m",
            "ringfence.console.demo_desk",
            str(self.desk_directory),
            *map(str, holds),
        ]
        self.desk = self.warden.popen(words, stdin=subprocess.DEVNULL, stderr=None)
        assert self.desk.stdout is not None  # noqa: S101 - asked for above
        self.port = int(self.desk.stdout.readline())

    def close_desk(self) -> None:
        """End the counting process."""
        if self.desk is not None:
            self.desk.kill()
            self.desk.wait()
            if self.desk.stdout is not None:
                self.desk.stdout.close()
            self.desk = None

    def kill_9(self, pid: int) -> None:
        """Send SIGKILL to a process and wait until it is gone."""
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
        self.eventually(lambda: not _alive(pid), f"process {pid} to die")

    # -- evidence -------------------------------------------------------------------------------------------------

    def deliveries(self, below: str = "/") -> list[dict[str, Any]]:
        """What reached the desk, as it wrote it down."""
        lines = (self.desk_directory / DELIVERIES).read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        return [line for line in found if line["path"].startswith(below)]

    def dsn(self) -> str:
        """The operator's own way into the agent's database."""
        return EmbeddedPostgres(self.data).dsn(DATABASE, DATABASE)

    def run_schema(self, path: Path) -> None:
        """Make the tables, as the operator."""
        asyncio.run(run_script(self.dsn(), path.read_text(encoding="utf-8")))

    def rows(self, table: str) -> list[str]:
        """A whole table, sorted, past the kernel."""
        return asyncio.run(table_lines(self.dsn(), table))

    def tree(self) -> dict[str, str]:
        """Every path of the live workspace, past the kernel: kind, mode, owner, time, and bytes or link target."""
        return dict(_tree(self.live))

    def database(self) -> dict[str, list[str]]:
        """Both tables, whole."""
        return {table: self.rows(table) for table in ("distributions", "files")}


def _alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


def _tree(root: Path) -> Iterator[tuple[str, str]]:
    pending = [root]
    while pending:
        for entry in sorted(pending.pop().iterdir()):
            facts = entry.lstat()
            name = str(entry.relative_to(root))
            common = f"{stat.filemode(facts.st_mode)} {facts.st_uid}"
            if stat.S_ISDIR(facts.st_mode):
                pending.append(entry)
                yield name, common
            elif stat.S_ISLNK(facts.st_mode):
                yield name, f"{common} -> {os.readlink(entry)}"  # noqa: PTH115 - a Path would tidy the target up
            else:
                digest = hashlib.sha256(entry.read_bytes()).hexdigest()
                yield name, f"{common} {facts.st_mtime_ns} {digest}"
