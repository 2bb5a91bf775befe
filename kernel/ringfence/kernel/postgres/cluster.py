"""One cluster on disk: made when it isn't there, checked when it is, and served by a fresh process."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from ringfence.kernel.postgres import binaries, leftovers, process
from ringfence.kernel.postgres.accounts import initdb_identity
from ringfence.kernel.postgres.errors import PostgresError, from_output

if TYPE_CHECKING:
    from pathlib import Path

    from ringfence.kernel.postgres.accounts import Identity
    from ringfence.kernel.postgres.layout import Layout
    from ringfence.kernel.postgres.process import Child

ROLE = "ringfence"
"""The server's superuser, and the owner of the kernel's database."""

_BELOW = "/proc/self/fd/3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A layout together with the programs that serve it. The caller holds the layout's lock and closes it.

    Attributes:
        programs: the directory of `postgres` and `initdb`.
        version: the server's, as `18.6`.
        root: descriptor of the layout's root.
    """

    layout: Layout
    programs: Path
    version: str
    root: int

    @classmethod
    async def open(cls, layout: Layout) -> Cluster:
        """Finds the programs for a layout.

        Raises:
            PostgresError: they are missing, or the cluster belongs to someone else.
        """
        root = os.open(layout.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            programs, version = await binaries.expose(layout.identity(), root, layout.root)
        except BaseException:
            os.close(root)
            raise
        return cls(layout=layout, programs=programs, version=version, root=root)

    def close(self) -> None:
        """Gives the descriptor back."""
        os.close(self.root)

    async def clear(self) -> None:
        """Ends what a dead kernel or a dead postmaster left running, and removes what it left lying."""
        await leftovers.end_leftovers(self.layout.data, self.layout.server_lock)
        self.layout.clear_stale()

    async def ensure(self) -> None:
        """Makes the cluster when there is none, whole or not at all.

        Raises:
            PostgresError: it can't be made, or the one there is of another version.
        """
        layout = self.layout
        if layout.data.is_dir():
            _check_major(layout)
            return
        identity = layout.identity()
        maker = initdb_identity(identity)
        layout.make_directory(layout.fresh, maker)
        code, text = await self._run_initdb(maker)
        layout.start_log.write_text(text, encoding="utf-8")
        if code != 0:
            shutil.rmtree(layout.fresh, ignore_errors=True)
            raise from_output(text, "initdb", layout.home, layout.start_log)
        layout.give(layout.fresh, identity)
        layout.fresh.rename(layout.data)
        _fsync_directory(layout.root)

    async def _run_initdb(self, maker: Identity) -> tuple[int | None, str]:
        argv = [
            str(self.programs / "initdb"),
            *("-D", f"{_BELOW}/data.new", "-U", ROLE, "--auth-local=peer", "--auth-host=reject"),
            *("--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
            *("--no-instructions", "--data-checksums"),
        ]
        with tempfile.TemporaryFile() as output:
            child = self._spawn(argv, maker, output, signal.SIGTERM)
            try:
                code = await child.wait()
            except BaseException:
                child.kill_group()
                raise
            output.seek(0)
            return code, output.read().decode("utf-8", "replace")

    def spawn_server(self) -> Child:
        """Starts the server; it doesn't answer yet.

        Raises:
            PostgresError: its directories or its configuration can't be written.
        """
        layout = self.layout
        layout.configure()
        argv = [
            str(self.programs / "postgres"),
            *("-D", f"{_BELOW}/data", "-c", f"config_file={_BELOW}/conf/postgresql.conf"),
        ]
        with layout.start_log.open("wb") as output:
            # When the kernel dies, the server is to stop as it does when it is asked to.
            return self._spawn(argv, layout.identity(), output, signal.SIGINT)

    def _spawn(
        self, argv: list[str], identity: Identity, output: IO[bytes], on_death: signal.Signals
    ) -> Child:
        lock = leftovers.take_server_lock(self.layout.server_lock)
        try:
            return process.spawn(
                argv,
                directory=self.root,
                lock=lock,
                identity=identity,
                output=output,
                death_signal=on_death,
            )
        finally:
            os.close(lock)  # the child has its own


def _fsync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_major(layout: Layout) -> None:
    try:
        found = (layout.data / "PG_VERSION").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise PostgresError(
            f"`{layout.data}` is not a PostgreSQL cluster (it has no PG_VERSION): restore it, or move it away"
        ) from None
    if found != str(binaries.MAJOR):
        raise PostgresError(
            f"`{layout.data}` was made by PostgreSQL {found} and this is {binaries.MAJOR}: dump it with the "
            f"ringfence that made it (`pg_dumpall -h {layout.run} -U {ROLE}`), move it away, start once, and "
            "load the dump with `psql`"
        )
