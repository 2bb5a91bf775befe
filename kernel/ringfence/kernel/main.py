"""Composition root of the kernel: wires the parts once, runs until it is told to stop, stops in order."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import json
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import uvloop
from ringfence.kernel.config import LEASE_S, VERSION, Layout, Settings
from ringfence.kernel.core import Core
from ringfence.kernel.dispatch import Dispatcher
from ringfence.kernel.failpoints import Failpoints
from ringfence.kernel.homes import homes_of, open_blobs
from ringfence.kernel.journal.admin import check_dsn
from ringfence.kernel.journal.anchor import Anchor, AnchorError
from ringfence.kernel.journal.blobs import BlobError
from ringfence.kernel.journal.migrate import migrate
from ringfence.kernel.journal.store import Store
from ringfence.kernel.journal.targets import ensure_target
from ringfence.kernel.journal.types import JournalError, Unavailable
from ringfence.kernel.journal.writer import Journal
from ringfence.kernel.leases import Heartbeat, boot_id
from ringfence.kernel.leftovers import open_backends, remove_run, short_run_dir
from ringfence.kernel.operations import pools, pruning
from ringfence.kernel.operations.kernel import Kernel
from ringfence.kernel.outreach import Outreach
from ringfence.kernel.ownership import Ownership
from ringfence.kernel.postgres import EmbeddedPostgres, PostgresError
from ringfence.kernel.processes import Processes
from ringfence.kernel.readiness import notify
from ringfence.kernel.resources import ResourceError, Resources, embedded_names
from ringfence.kernel.retention import Retention
from ringfence.kernel.revival import Revival
from ringfence.kernel.rollback import Rollback
from ringfence.kernel.scheduler import Scheduler
from ringfence.kernel.secrets import Secrets, SecretsError
from ringfence.kernel.server.operator_door import OperatorDoor
from ringfence.kernel.takeover import Takeover
from ringfence.kernel.telemetry import open_telemetry
from ringfence.kernel.tuning import calm_collector, let_helpers_wait
from ringfence.sandbox.types import SandboxError
from ringfence.syscalls.http_client import close_clients
from ringfence.syscalls.sql_target.session import close_targets
from ringfence.syscalls.table import build_table

log = logging.getLogger(__name__)

LAST_PATIENCE_S = 2.0
"""How long a kernel that stops waits for a database that is away, each time that it needs it."""
SOCKET_PATH_BYTES_MAX = 90
"""Longest directory of sockets: a socket's path has at most 107 bytes."""


class StartError(Exception):
    """The kernel can't start. `str()` is one line that says why and what to do."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run(settings: Settings, announce: Callable[[str], None] = print) -> int:
    """Run a kernel until it is stopped.

    Args:
        settings: what `ringfence up` was given.
        announce: gets one line when the kernel listens.

    Returns:
        0 after an ordered stop. When another kernel takes over, the process ends with 1 and this never returns.

    Raises:
        StartError: it can't start; nothing runs.
    """
    try:
        return uvloop.run(_run(settings, announce))
    except KeyboardInterrupt:
        return 0


async def _run(settings: Settings, announce: Callable[[str], None]) -> int:
    layout = prepare(settings)
    lock = _lock(layout)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(lock.close)
        stack.callback(remove_run, layout)
        try:
            _, stopping = await compose(settings, layout, stack)
        except (PostgresError, ResourceError, SecretsError, BlobError) as error:
            raise StartError(str(error), 2 if isinstance(error, ResourceError) else 1) from error
        except Unavailable as error:
            raise StartError(
                f"the database can't be reached: {error}; check the DSN and that the server runs", 6
            ) from error
        except (AnchorError, SandboxError) as error:
            raise StartError(str(error)) from error
        except JournalError as error:
            raise StartError(f"the database can't be used: {error}; mend that and start again") from error
        except OSError as error:
            raise StartError(
                f"the data directory `{layout.data}` can't be used: {error.strerror or error}; check its owner, modes and free space"
            ) from error
        listen = f"unix:{layout.operator_socket}"
        write_kernel_file(layout, listen)
        stack.callback(_withdraw_kernel_file, layout)
        announce(f"ringfence {VERSION} (pid {os.getpid()}) listens on {listen}")
        notify(f"READY=1\nSTATUS=listens on {listen}")
        code = await stopping
        notify("STOPPING=1")
        return code
    raise AssertionError  # pragma: no cover - the stack swallows nothing


def prepare(settings: Settings) -> Layout:
    """Make the data directory and find a place for sockets; as root, lay down supplementary groups.

    Raises:
        StartError: the directory can't be made or belongs to someone else.
    """
    if os.geteuid() == 0:
        # Root needs none, and where there are any each look at an agent's file has to take them off and put them on again.
        with contextlib.suppress(OSError):
            os.setgroups([])
    if settings.listen is not None:
        text = "operators connect by the unix socket alone in this release; leave --listen out, and forward the socket with `ssh -L`"
        raise StartError(text, 2)
    if settings.dsn is not None:
        try:
            check_dsn(settings.dsn)
        except JournalError as error:
            raise StartError(str(error), 2) from error
    data = settings.data.absolute()
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if data.stat().st_uid != os.geteuid():
            raise StartError(
                f"the data directory `{data}` belongs to another user; choose one of your own with --data", 3
            )
        # The embedded server of a root kernel has a uid of its own: it passes through, but can't list.
        data.chmod(0o711 if os.geteuid() == 0 else 0o700)
        for private in (data / "agents", data / "points"):
            private.mkdir(mode=0o700, exist_ok=True)
            private.chmod(0o700)
        run_dir = data / "run"
        if len(os.fsencode(run_dir)) > SOCKET_PATH_BYTES_MAX:
            run_dir = short_run_dir(data)
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if run_dir.stat().st_uid != os.geteuid() or run_dir.is_symlink():
            raise StartError(f"`{run_dir}` belongs to another user; remove it or choose a shorter --data", 3)
        run_dir.chmod(0o700)
    except OSError as error:
        raise StartError(
            f"the data directory `{data}` can't be used: {error.strerror or error}; choose another with --data"
        ) from error
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return Layout(data=data, run=run_dir)


def _lock(layout: Layout) -> TextIO:
    file = layout.lock_file.open("a+")
    os.fchmod(file.fileno(), 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        text = f"the data directory `{layout.data}` is in use by a kernel (pid {owner}); stop it with `ringfence down` or choose another --data"
        raise StartError(text, 5) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def write_kernel_file(layout: Layout, listen: str) -> None:
    """Tell clients where this kernel listens; replaced as a whole."""
    fresh = layout.kernel_file.with_suffix(".new")
    fresh.write_text(json.dumps({"pid": os.getpid(), "listen": listen, "version": VERSION}))
    fresh.chmod(0o600)
    fresh.replace(layout.kernel_file)


def _withdraw_kernel_file(layout: Layout) -> None:
    """Remove the file again, unless it is that of a kernel which has taken over."""
    with contextlib.suppress(OSError, ValueError):
        if json.loads(layout.kernel_file.read_text())["pid"] == os.getpid():
            layout.kernel_file.unlink()


async def _database(
    settings: Settings, layout: Layout, stack: contextlib.AsyncExitStack
) -> tuple[str, EmbeddedPostgres | None]:
    if settings.dsn is not None:
        return settings.dsn, None
    server = EmbeddedPostgres(layout.data)
    dsn = await server.start()
    stack.push_async_callback(server.stop)
    return dsn, server


async def _embedded_targets(settings: Settings, server: EmbeddedPostgres | None) -> Mapping[str, str]:
    """Make the databases that the kernel file declares in the embedded server."""
    if server is None or settings.config is None:
        return {}
    targets: dict[str, str] = {}
    for name in embedded_names(settings.config):
        await ensure_target(server.dsn("postgres"), name)
        targets[name] = server.dsn(name, name)
    return targets


async def compose(
    settings: Settings, layout: Layout, stack: contextlib.AsyncExitStack
) -> tuple[Kernel, asyncio.Future[int]]:
    """Wire all parts and start serving; `stack` takes them apart in reverse.

    Returns:
        The kernel, and what resolves to the exit code when it is to end.
    """
    calm_collector()
    table = build_table()
    backends = await open_backends(layout, stack)
    secrets = Secrets(layout.secrets)
    blobs, depot = open_blobs(settings, layout)
    anchor = Anchor(layout.anchor_file, layout.anchor_key)
    dsn, server = await _database(settings, layout, stack)
    await migrate(dsn)
    store = await Store.open(dsn)
    stack.push_async_callback(store.close)
    resources = Resources.load(settings.config, secrets, await _embedded_targets(settings, server))
    for missing in resources.unavailable():
        log.warning("resource `%s` is unavailable: %s", missing["name"], missing["reason"])
    stack.push_async_callback(close_targets)
    stack.push_async_callback(close_clients)
    key, fence = await store.register_kernel(
        host=socket.gethostname(),
        pid=os.getpid(),
        boot_id=boot_id(),
        data_dir=str(layout.data),
        lease_s=LEASE_S,
    )
    journal = Journal(dsn, key, fence)
    await journal.start()
    core = Core(
        journal=journal,
        store=store,
        blobs=blobs,
        failpoints=Failpoints.from_environment(),
        table=table,
        kernel=key,
        fence=fence,
    )
    await core.pools.relimit(resources.file.pools)
    telemetry = open_telemetry(core, str(key), stack)
    ownership = Ownership(core=core, layout=layout, resources=resources, backends=backends)
    ownership.homes = homes_of(core, layout, depot)
    stack.push_async_callback(ownership.servers.close)
    backends.file = lambda: ownership.resources.file
    dispatcher = Dispatcher(core)
    ownership.revive = Revival(core, dispatcher).revive
    processes = Processes(core, layout, ownership, dispatcher)
    rollback = Rollback(core, ownership, processes)
    kernel = Kernel(
        settings=settings,
        layout=layout,
        core=core,
        ownership=ownership,
        processes=processes,
        rollback=rollback,
        scheduler=Scheduler(core, processes),
        retention=Retention(core, ownership.own_points, ownership.points_kept),
        secrets=secrets,
        anchor=anchor,
        database_version=server.version if server is not None else await store.ping(),
        embed=functools.partial(_embedded_targets, settings, server),
        embedded_dsn=None if server is None else dsn,
        listen=f"unix:{layout.operator_socket}",
        telemetry=telemetry,
    )
    return kernel, await _serve(kernel, fence, stack)


async def _serve(kernel: Kernel, fence: int, stack: contextlib.AsyncExitStack) -> asyncio.Future[int]:
    """Start the doors and the background work; returns what resolves when the kernel is to end."""
    core = kernel.core
    loop = asyncio.get_running_loop()
    over: asyncio.Future[int] = loop.create_future()
    drain = [5.0]

    def stop(drain_s: float) -> None:
        drain[0] = drain_s
        if not over.done():
            over.set_result(0)

    async def fenced() -> None:
        await _abandon(core)

    kernel.stop = stop
    heartbeat = Heartbeat(core, fenced)
    await heartbeat.beat()
    takeover = Takeover(kernel, fence)
    door = OperatorDoor(kernel)
    kernel.outreach = outreach = Outreach(kernel)

    async def close() -> None:
        core.stopping = True
        away = await _hurry(core)
        await outreach.close()
        await door.close()
        await _drain(core, min(drain[0], LAST_PATIENCE_S) if away else drain[0])
        # Before the programs are ended: it starts some.
        await takeover.close()
        await core.mailboxes.close()
        await kernel.scheduler.timers.stop()
        await kernel.processes.stop_all()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await core.pools.upkeep.close()
        await (core.close() if away else _release(kernel, fence))

    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(heartbeat.run(), name="ringfence heartbeat"),
        asyncio.create_task(kernel.anchor.run(core.journal, core.store), name="ringfence anchor"),
    ]
    core.pools.upkeep.on_look = functools.partial(pools.wake, kernel)
    tasks.append(asyncio.create_task(core.pools.upkeep.run(), name="ringfence pools"))
    stack.push_async_callback(close)
    await core.mailboxes.open()
    kernel.scheduler.timers.start()
    await takeover.open()
    looks = (kernel.retention.run(kernel.thread), pruning.run(kernel))
    tasks.extend(asyncio.create_task(look, name="ringfence retention") for look in looks)
    with contextlib.suppress(FileNotFoundError):
        kernel.layout.operator_socket.unlink()
    await outreach.open()  # first, so that whoever waits for an answer hears what stands in their way
    await door.open(kernel.layout.operator_socket)
    let_helpers_wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, 5.0)
    return over


async def _abandon(core: Core) -> None:
    """End at once after a takeover: what lies at this kernel's paths may be its successor's, sockets above all.

    An ordered stop would remove them. Everything this kernel may not do any more is refused by the journal already.
    """
    programs = [t.program for t in core.threads.values() if t.program is not None]
    await asyncio.gather(*(program.kill() for program in programs), return_exceptions=True)
    logging.shutdown()
    os._exit(1)


async def _hurry(core: Core) -> bool:
    """Have nothing wait long for a database that is away: what was answered is written. Whether it is away."""
    core.journal.patience_s = LAST_PATIENCE_S
    core.store.hurry(LAST_PATIENCE_S)
    try:
        await core.store.ping()
    except JournalError as error:
        text = "nothing that was answered is lost, and the next kernel settles what was not"
        log.warning("the kernel stops without its database (%s): %s", error, text)
        return True
    return False


async def _release(kernel: Kernel, fence: int) -> None:
    """Sign the record and let others take the agents over at once; without a database they do when the lease has run out."""
    core = kernel.core
    with contextlib.suppress(JournalError):
        await kernel.anchor.sign_heads(core.journal, core.store)
    await core.close()
    with contextlib.suppress(JournalError):
        await core.store.release_kernel(core.kernel, fence)


async def _drain(core: Core, seconds: float) -> None:
    """Let calls that run finish; nothing new is admitted."""
    # A call that waits may do so for days; the next kernel goes on with it.
    busy = [f for t in core.threads.values() for f in t.flights.values() if f.step not in t.waits]
    answers = [f.answer for f in busy]
    if answers:
        await asyncio.wait(answers, timeout=seconds)
