"""What a program is started with, and what its end is called."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from ringfence.kernel.config import Layout
from ringfence.kernel.core import Core
from ringfence.kernel.environment import PROGRAM_ENVIRONMENT
from ringfence.kernel.problems import lost_files
from ringfence.kernel.settled import Answer
from ringfence.kernel.thread import Thread
from ringfence.sandbox.types import Exit, ExitReason, Program, ProgramSpec, Sandbox
from ringfence.syscalls.errors import BudgetExhausted


async def enter(core: Core, sandbox: Sandbox, spec: ProgramSpec) -> Program:
    """Make the sandbox and start the program in it, and count how long that takes.

    Raises:
        SandboxError: it can't be had.
    """
    began = time.monotonic()
    program = await sandbox.start(spec)
    if core.telemetry is not None:
        core.telemetry.sandbox_started(time.monotonic() - began)
    return program


def confined_by(thread: Thread) -> dict[str, str]:
    """The backend around a thread's program, and in which form its walls stand that have several."""
    held = {} if thread.program is None else dict(thread.program.forms)
    return {"backend": thread.environment.sandbox.name, **held}


async def missing_files(thread: Thread, layout: Layout) -> str:
    """Why an agent can't be started whose directory was removed; empty: it is there."""
    gone = await asyncio.to_thread(thread.environment.workspace.tree.gone)
    return lost_files(layout.agent(thread.id)) if gone else ""


def restartable(thread: Thread) -> bool:
    """Whether the manifest lets the program be started once more after it has failed."""
    restart = thread.manifest.restart
    return restart.policy == "on-failure" and thread.restarts < restart.max


def room_again(thread: Thread, answer: Answer) -> bool:
    """Whether the total that ran out was raised, or calls under way gave some back, before the agent was parked."""
    if not isinstance(answer.failure, BudgetExhausted):
        return False
    facts = answer.failure.metadata
    return thread.budgets.fits(facts["budget"], float(facts["asked"]))


def program_spec(thread: Thread, layout: Layout, token: str, fds: Sequence[int]) -> ProgramSpec:
    """What to start for an agent; `fds` take its output and its errors."""
    environment = thread.environment
    return ProgramSpec(
        agent=thread.id,
        argv=thread.manifest.run.command,
        env={
            **PROGRAM_ENVIRONMENT,
            **environment.command_env,
            "RINGFENCE_SOCKET": "/run/ringfence/syscall.sock",
            "RINGFENCE_TOKEN": token,
            "RINGFENCE_AGENT": thread.id,
        },
        image=layout.agent(thread.id) / "image",
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
