"""The server's directory: what lies where, who owns it, and who may use it at a time.

    <data>/postgres/          this user's; others may pass through it, as the server's own user must
        lock                  held by the kernel that runs the server
        server.lock           held by the server and all it forked, until the last of them has ended
        conf/                 written anew at each start
        data/                 the cluster; the server's user's, as are the next two
        run/                  the socket
        log/                  rotated and pruned

The server finds all of it below descriptor 3, so no directory above needs to be open to its user and no path
is ever too long for its socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from ringfence.kernel.postgres.accounts import SERVER_UID, Identity, account_name
from ringfence.kernel.postgres.errors import PostgresError, from_os_error

PORT = 5432
"""Part of the socket's name, nothing more: the server doesn't listen on TCP."""
_SOCKET = f".s.PGSQL.{PORT}"
_MAX_SOCKET_PATH = 107
_KEPT_LOGS = 10
_PRIVATE = 0o077

_CONF = """\
# Written by Ringfence at each start; changes here are lost.
listen_addresses = ''
port = {port}
unix_socket_directories = '/proc/self/fd/3/run'
unix_socket_permissions = 0700
hba_file = '/proc/self/fd/3/conf/pg_hba.conf'
ident_file = '/proc/self/fd/3/conf/pg_ident.conf'
cluster_name = 'ringfence'
allow_alter_system = off
max_connections = 100
superuser_reserved_connections = 3
shared_buffers = 128MB
dynamic_shared_memory_type = {shared_memory}
# Durability is what the journal stands on.
fsync = on
synchronous_commit = on
full_page_writes = on
data_sync_retry = off
# A new file of the log, 16 MiB of zeros, is made by whoever needs it, and all that commit wait for it, tens of milliseconds. A checkpoint
# hands on the files that it makes free: the first comes early, and none of them is removed again.
max_wal_size = 512MB
min_wal_size = 512MB
wal_level = replica
# A query of a kernel that died ends.
client_connection_check_interval = 1s
# Statements hold users' data: they never reach the log.
log_min_error_statement = panic
log_parameter_max_length = 0
log_statement = none
logging_collector = on
log_directory = '/proc/self/fd/3/log'
log_filename = 'postgres-%Y%m%d-%H%M%S.log'
log_file_mode = 0600
log_rotation_age = 1d
log_rotation_size = 10MB
log_checkpoints = off
log_line_prefix = '%m [%p] %q%u@%d '
log_timezone = 'UTC'
timezone = 'UTC'
datestyle = 'iso, ymd'
lc_messages = 'C'
"""
_HBA = "local all all peer map=ringfence\nlocal replication all peer map=ringfence\n"


class Layout:
    """The directory of one embedded server. Paths only; nothing is touched before `prepare`.

    Attributes:
        root: `<data>/postgres`.
        data: the cluster.
        run: where the socket lies.
        log: where the server logs.
        conf: its configuration.
        start_log: what its programs print before they log.
        server_lock: tells whether any process of a server lives.
    """

    def __init__(self, data_dir: Path) -> None:
        self.home = data_dir.absolute()
        self.root = self.home / "postgres"
        self.data = self.root / "data"
        self.fresh = self.root / "data.new"
        self.run = self.root / "run"
        self.log = self.root / "log"
        self.conf = self.root / "conf"
        self.start_log = self.root / "start.log"
        self.server_lock = self.root / "server.lock"

    def prepare(self) -> None:
        """Makes the directory that holds the rest.

        Raises:
            PostgresError: it can't be made or written, or this user has no name.
        """
        _own_name()
        try:
            self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.root.mkdir(exist_ok=True)
            self.root.chmod(0o711)
            self.conf.mkdir(exist_ok=True)
            self.conf.chmod(0o755)
        except OSError as error:
            raise from_os_error(error, self.home) from None

    def identity(self) -> Identity:
        """Who the server runs as: this user, or, under root, the owner of the cluster.

        Raises:
            PostgresError: the cluster belongs to someone else.
        """
        owner = self.data.stat() if self.data.exists() else None
        me = os.geteuid()
        if me != 0:
            if owner is not None and owner.st_uid != me:
                who = account_name(owner.st_uid) or owner.st_uid
                raise PostgresError(
                    f"`{self.data}` belongs to user `{who}`: run as that user, or choose another --data"
                )
            return Identity(uid=None, gid=None)
        if owner is None:
            return Identity(uid=SERVER_UID, gid=SERVER_UID)
        if owner.st_uid == 0:
            raise PostgresError(
                f"`{self.data}` belongs to root, and PostgreSQL refuses to run as root: "
                f"give it its own user with `chown -R {SERVER_UID}:{SERVER_UID} {self.data}`"
            )
        return Identity(uid=owner.st_uid, gid=owner.st_gid)

    def make_directory(self, path: Path, identity: Identity) -> None:
        """Makes a directory that only the server's user may enter."""
        path.mkdir(exist_ok=True, mode=0o700)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if identity.uid is not None and identity.gid is not None:
                os.fchown(handle, identity.uid, identity.gid)
            os.fchmod(handle, 0o700)
        finally:
            os.close(handle)

    def configure(self) -> None:
        """Writes the configuration and makes the directories of the server's user."""
        identity = self.identity()
        try:
            self.make_directory(self.run, identity)
            self.make_directory(self.log, identity)
            self.prune_logs()
            shared_memory = "posix" if Path("/dev/shm").is_dir() else "mmap"  # noqa: S108
            self._write("postgresql.conf", _CONF.format(port=PORT, shared_memory=shared_memory))
            self._write("pg_hba.conf", _HBA)
            # The kernel's own user may be any role: rights are the roles', reach is the directory's.
            self._write("pg_ident.conf", f'ringfence "{_own_name()}" all\n')
        except OSError as error:
            raise from_os_error(error, self.root) from None

    def _write(self, name: str, text: str) -> None:
        temporary = self.conf / f"{name}.new"
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)
        temporary.replace(self.conf / name)

    def give(self, path: Path, identity: Identity) -> None:
        """Gives a tree to the server's user. Links are not followed."""
        if identity.uid is None or identity.gid is None:
            return
        for _, directories, files, handle in os.fwalk(path, follow_symlinks=False):
            for name in (*directories, *files):
                os.chown(name, identity.uid, identity.gid, dir_fd=handle, follow_symlinks=False)
        os.chown(path, identity.uid, identity.gid, follow_symlinks=False)

    def clear_stale(self) -> None:
        """Removes what a server that died left behind and a new one would trip over.

        INVARIANT: only called under the lock and after `end_leftovers`: no process stands in the cluster.
        A pid file whose number was used anew by another process would keep the server from starting.
        """
        for path in (self.data / "postmaster.pid", self.run / _SOCKET, self.run / f"{_SOCKET}.lock"):
            path.unlink(missing_ok=True)
        if self.fresh.is_dir() and not self.fresh.is_symlink():
            shutil.rmtree(self.fresh)

    def prune_logs(self) -> None:
        """Keeps the newest logs and removes the others."""
        logs = sorted(path.name for path in self.log.iterdir() if path.name.startswith("postgres-"))
        for name in logs[:-_KEPT_LOGS]:
            (self.log / name).unlink(missing_ok=True)

    def server_status(self, pid: int) -> str:
        """What the server with this pid says of itself, as `starting` or `ready`; empty before it says so."""
        try:
            lines = (self.data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return ""
        status_line = 7
        if len(lines) <= status_line or lines[0] != str(pid):
            return ""
        return lines[status_line].strip()

    def last_lines(self, since: float) -> str:
        """The end of what the server printed and logged since a time (Unix seconds), for errors."""
        texts = [_tail(self.start_log)]
        with contextlib.suppress(OSError):
            logs = sorted(path.name for path in self.log.iterdir() if path.stat().st_mtime >= since)
            texts += [_tail(self.log / name) for name in logs[-1:]]
        return "\n".join(texts)

    def socket_directory(self) -> Path:
        """Where clients find the socket: its directory, or a short private link to it.

        Raises:
            PostgresError: the path is too long and there is no private place for a shorter one.
        """
        if len(os.fsencode(self.run / _SOCKET)) <= _MAX_SOCKET_PATH:
            return self.run
        short = _private_directory() / hashlib.sha256(os.fsencode(self.run)).hexdigest()[:16]
        try:
            if short.is_symlink() and short.readlink() == self.run:
                return short
            temporary = short.with_name(f"{short.name}.{os.getpid()}")
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(self.run)
            temporary.replace(short)
        except OSError as error:
            raise from_os_error(error, short.parent) from None
        return short


def _own_name() -> str:
    name = account_name(os.geteuid())
    if name is None:
        raise PostgresError(
            f"user id {os.geteuid()} has no name on this host, and PostgreSQL needs one: "
            "add it to /etc/passwd, or give a server with --dsn"
        )
    return name


def _private_directory() -> Path:
    """A directory with a short path that only this user can enter."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) if runtime and len(runtime) < _MAX_SOCKET_PATH - 60 else Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > _MAX_SOCKET_PATH - 60:
        base = Path("/tmp")  # noqa: S108 - checked below
    private = base / f"ringfence-{os.geteuid()}"
    try:
        private.mkdir(mode=0o700, exist_ok=True)
        facts = private.lstat()
    except OSError as error:
        raise from_os_error(error, private) from None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & _PRIVATE:
        raise PostgresError(
            f"the path of the data directory is too long for a socket, and `{private}`, which would stand in "
            "for it, is not private to this user: remove it, or choose a shorter --data"
        )
    return private


def _tail(path: Path, size: int = 8192) -> str:
    """The last bytes of a file of the server's user, as text; empty when it can't be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        end = os.fstat(handle).st_size
        return os.pread(handle, size, max(0, end - size)).decode("utf-8", "replace")
    finally:
        os.close(handle)


class Lock:
    """The right to run the server of a directory, held while the process lives."""

    def __init__(self, layout: Layout) -> None:
        self._path = layout.root / "lock"
        self._home = layout.home
        self._handle: int | None = None

    def take(self) -> None:
        """Takes the lock.

        Raises:
            PostgresError: another process holds it; the error names it.
        """
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise from_os_error(error, self._home) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            owner = os.pread(handle, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(handle)
            raise PostgresError(
                f"`{self._home}` is in use by process {owner}: stop that with "
                f"`ringfence down --data {self._home}`, or choose another --data"
            ) from None
        except OSError as error:
            os.close(handle)
            raise from_os_error(error, self._home) from None
        self._handle = handle

    def release(self) -> None:
        """Gives it back."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)
