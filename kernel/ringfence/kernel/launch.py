"""What a program is started with, and what its end is called."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.kernel.config import Layout
from ringfence.kernel.core import Core
from ringfence.kernel.doors import places
from ringfence.kernel.environment import PROGRAM_ENVIRONMENT
from ringfence.kernel.problems import lost_files
from ringfence.kernel.settled import Answer
from ringfence.kernel.thread import Thread
from ringfence.policy.manifest_types import Manifest
from ringfence.sandbox.direct import DirectLayer
from ringfence.sandbox.types import Exit, ExitReason, Loopback, Program, ProgramSpec, SandboxError
from ringfence.syscalls.errors import BudgetExhausted

if TYPE_CHECKING:
    from ringfence.kernel.server.agent_door import AgentDoor


async def enter(core: Core, thread: Thread, spec: ProgramSpec, door: AgentDoor) -> Program:
    """Make the sandbox and start the program in it, and count how long that takes; open the doors that it asks for.

    Raises:
        SandboxError: it can't be had.
    """
    began = time.monotonic()
    if doors := thread.manifest.sandbox.doors:
        program = await _with_doors(thread, spec, door, doors)
    else:
        program = await thread.environment.sandbox.start(spec)
    if core.telemetry is not None:
        core.telemetry.sandbox_started(time.monotonic() - began)
    return program


async def _with_doors(thread: Thread, spec: ProgramSpec, door: AgentDoor, doors: Sequence[str]) -> Program:
    """Start a program whose loopback leads to the kernel.

    Raises:
        SandboxError: as for `enter`.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loopback = Loopback(port=places.PORT, hand_fd=theirs.fileno())
        program = await thread.environment.sandbox.start(dataclasses.replace(spec, loopback=loopback))
        ours.setblocking(False)
        try:
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1, socket.MSG_CMSG_CLOEXEC)
            door.lend(socket.socket(fileno=descriptors[0]), doors)
        except (OSError, IndexError) as error:
            await program.kill()
            raise SandboxError(f"the sandbox handed no doors out ({error}); report this") from error
    return program


def confined_by(thread: Thread) -> dict[str, str]:
    """The backend around a thread's program, and in which form its walls stand that have several."""
    held = {} if thread.program is None else dict(thread.program.forms)
    return {"backend": thread.environment.sandbox.name, **held}


def open_image(top: Path) -> None:
    """Let a program that runs as another user than the kernel's read its image, whatever modes its files came with.

    Nobody else gets there: directories of agents lie in one that is closed to others. A kernel that is root gives images to
    their users instead.

    Raises:
        OSError: it can't be read or changed.
    """
    if os.geteuid() == 0:
        return
    pending = [top]
    while pending:
        here = pending.pop()
        _add_mode(here, here.lstat())
        with os.scandir(here) as entries:
            for entry in entries:
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode):
                    pending.append(here / entry.name)
                elif stat.S_ISREG(facts.st_mode):
                    _add_mode(here / entry.name, facts)


def _add_mode(path: Path, facts: os.stat_result) -> None:
    """What the owner may read and run, all may."""
    mode = stat.S_IMODE(facts.st_mode)
    wanted = mode | (mode & 0o500) >> 3 | (mode & 0o500) >> 6
    if stat.S_ISDIR(facts.st_mode):
        wanted |= 0o755
    if wanted != mode:
        path.chmod(wanted)


async def missing_files(thread: Thread, layout: Layout) -> str:
    """Why an agent can't be started whose directory was removed or is closed; empty: it is there, and its image open."""
    if await asyncio.to_thread(thread.environment.workspace.tree.gone):
        return lost_files(layout.agent(thread.id))
    # INVARIANT: no bit of what lies below an overlay is changed: a program on it runs as the kernel's user, and keeps those bits.
    if thread.generation == 0 and thread.environment.direct is None:  # the first start in this kernel's life
        try:
            await asyncio.to_thread(open_image, layout.agent(thread.id) / "image")
        except FileNotFoundError:
            return ""  # the sandbox says so
        except OSError as error:
            return f"the program image `{error.filename}` can't be read: {error.strerror}; submit the agent again"
    return ""


def kept_from_start(core: Core, thread: Thread) -> str:
    """Why no program of this agent may be started now, which says nothing against the agent; empty: it may."""
    if core.stopping:
        return "the kernel is stopping; start it again under the next one"
    if thread.borrowed:
        return f"`{thread.id}` goes back to the kernel that has its files; start it there"
    return f"a rollback of it is under way; see: ringfence show {thread.id}" if thread.going_back else ""


def restartable(thread: Thread) -> bool:
    """Whether the manifest lets the program be started once more after it has failed."""
    restart = thread.manifest.restart
    return restart.policy == "on-failure" and thread.restarts < restart.max


def room_again(thread: Thread, answer: Answer) -> bool:
    """Whether the total that ran out was raised, or calls under way gave some back, before the agent was parked."""
    if not isinstance(answer.failure, BudgetExhausted):
        return False
    facts = answer.failure.metadata
    if "pool" in facts:
        return False  # looked at from time to time, see `operations.pools.wake`
    return thread.budgets.fits(facts["budget"], float(facts["asked"]))


def layer_of(manifest: Manifest, home: Path) -> DirectLayer | None:
    """The overlay that an agent's program works on; None: it sees an image.

    Args:
        manifest: of the agent.
        home: its directory.
    """
    if manifest.sandbox.workspace != "direct":
        return None
    return DirectLayer(home, own=manifest.restart.resume == "own")


def program_spec(thread: Thread, layout: Layout, token: str, fds: Sequence[int]) -> ProgramSpec:
    """What to start for an agent; `fds` take its output and its errors."""
    environment = thread.environment
    layer = environment.direct
    return ProgramSpec(
        agent=thread.id,
        argv=thread.manifest.run.command,
        env={
            **PROGRAM_ENVIRONMENT,
            **places.environment(thread.manifest.sandbox.doors, token),
            **environment.command_env,
            "RINGFENCE_SOCKET": "/run/ringfence/syscall.sock",
            "RINGFENCE_TOKEN": token,
            "RINGFENCE_AGENT": thread.id,
        },
        image=layout.agent(thread.id) / "image" if layer is None else layer.base,
        overlay=None if layer is None else layer.place,
        socket_dir=layout.socket_dir(thread.key),
        readonly=environment.readonly,
        mounts=environment.mounts,
        require=environment.require,
        uid=environment.uid,
        limits=environment.limits,
        stdin=thread.record.input,
        stdout_fd=fds[0],
        stderr_fd=fds[1],
    )


def why_ended(ended: Exit, stderr: str) -> str:
    """Why a program ended, with its last word."""
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "")
    kinds = {
        ExitReason.EXIT: f"exit status {ended.code}",
        ExitReason.SIGNAL: f"ended by signal {-ended.code}",
        ExitReason.MEMORY: "out of memory; raise `sandbox.memory`",
        ExitReason.TIMEOUT: "ran longer than `sandbox.timeout`",
        ExitReason.DISK: "wrote more than `sandbox.disk`; raise it or write less",
        ExitReason.KILLED: "killed",
    }
    return kinds[ended.reason] + (f": {last.strip()[:300]}" if last else "")
