"""Submission: the manifest is checked as a whole before anything exists."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ringfence.kernel.config import AGENT_UID_BASE
from ringfence.kernel.demands import WallMissing, check_walls
from ringfence.kernel.journal.types import AgentRecord, JournalError
from ringfence.kernel.moments import short_time
from ringfence.kernel.mounts import MountRefused
from ringfence.kernel.operations.kernel import Kernel, manifest_version
from ringfence.kernel.ownership import manifest_of
from ringfence.kernel.problems import Problem, bad_usage, conflict
from ringfence.kernel.rights import effective_rules
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.manifest_types import Manifest
from ringfence.policy.problems import ManifestError
from ringfence.policy.schedule import next_fire
from ringfence.policy.sections import is_name
from ringfence.policy.types import Verdict
from ringfence.sandbox.trees import copy_tree, extract_tar
from ringfence.sandbox.types import SandboxError
from ringfence.sandbox.usage import Meter
from ringfence.sandbox.workspace import Workspace, WorkspaceError
from ringfence.syscalls.errors import SyscallError
from ringfence.v1 import operator_pb2 as pb

log = logging.getLogger(__name__)

MANIFEST_BYTES_MAX = 256 << 10
INPUT_BYTES_MAX = 16 << 20
WORKSPACE_BYTES_MAX = 8 << 30

STAGING = ".incoming-"
"""How directories of submissions that are on their way begin; an agent's id never begins so."""


_under_way: set[asyncio.Task[dict[str, Any]]] = set()


async def submit(kernel: Kernel, frames: AsyncIterator[pb.SubmitRequest], operator: str) -> dict[str, Any]:
    """Create an agent from a stream of one header and the parts of its workspace.

    Raises:
        Problem: the manifest is wrong, a resource is missing, the workspace is unsafe, or the sandbox can't be had;
            nothing is left of it.
    """
    first = await anext(frames, None)
    if first is None or first.WhichOneof("frame") != "header":
        raise bad_usage("the first frame of a submission has to be its header")
    header = first.header
    if header.name and not is_name(header.name):
        raise bad_usage(
            f"`{header.name}` is no name for an agent; use up to 63 letters, digits, `.`, `-` and `_`"
        )
    manifest = check_manifest(kernel, header.manifest, header.source or "manifest")
    try:
        await _check_walls(kernel, manifest, header.source or "manifest")
    except Problem as problem:
        facts = {"operator": operator, "manifest": manifest_version(header.manifest), "error": str(problem)}
        await kernel.core.operator_event("operator.submit_refused", manifest.name, **facts)
        raise
    if len(header.input) > INPUT_BYTES_MAX:
        raise bad_usage(
            f"the input has {len(header.input)} bytes; the limit is {INPUT_BYTES_MAX}: put it in the workspace"
        )
    agents = kernel.layout.data / "agents"
    agents.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=agents))
    try:
        tar = await _receive(frames, staging)
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
        raise
    # All of it is here: whoever sent it may go now, and it is still carried out or refused as a whole.
    work = asyncio.create_task(_carry_out(kernel, header, manifest, tar, operator))
    _under_way.add(work)
    work.add_done_callback(_under_way.discard)
    return await asyncio.shield(work)


async def _carry_out(
    kernel: Kernel, header: pb.SubmitHeader, manifest: Manifest, tar: Path, operator: str
) -> dict[str, Any]:
    try:
        return await _create(kernel, header, manifest, tar, operator)
    finally:
        await asyncio.to_thread(shutil.rmtree, tar.parent, ignore_errors=True)


async def _create(
    kernel: Kernel, header: pb.SubmitHeader, manifest: Manifest, tar: Path, operator: str
) -> dict[str, Any]:
    """Make the agent and start it, or leave nothing of it."""
    rules = effective_rules(manifest, kernel.ownership.resources.file)
    first_fire, waiting_for = _first_fire(manifest)
    grants = [(rule.verdict.value, rule.text) for rule in rules if rule.verdict is not Verdict.DENY]
    record = await kernel.core.store.create_agent(
        name=header.name or manifest.name,
        thread=f"t-{secrets.token_hex(8)}",
        manifest=header.manifest,
        source=header.source or "manifest",
        labels=dict(manifest.labels),
        input=header.input,
        owner=kernel.core.kernel,
        uid_base=AGENT_UID_BASE if os.geteuid() == 0 else None,
        grants=grants,
        first_fire=first_fire,
        waiting_for=waiting_for,
        submitted_by=operator,
    )
    version = manifest_version(header.manifest)
    try:
        home = kernel.layout.agent(record.id)
        await asyncio.to_thread(_lay_out, kernel, manifest, tar, home, record.uid)
        thread = await kernel.ownership.adopt(record)
        await kernel.core.operator_event("operator.submit", record.id, operator=operator, manifest=version)
        if thread.schedule is not None:
            kernel.scheduler.adopt(thread)
            return {
                "id": record.id,
                "name": record.name,
                "state": thread.state,
                "waiting_for": thread.waiting_for,
            }
        async with thread.operation:
            await kernel.processes.start(thread)
    except BaseException as error:
        await _leave_nothing(kernel, record)
        facts = {"operator": operator, "manifest": version, "error": str(error)}
        with contextlib.suppress(JournalError, SyscallError):
            await kernel.core.operator_event("operator.submit_refused", record.id, **facts)
        if isinstance(error, WorkspaceError | OSError):
            raise bad_usage(f"the workspace can't be taken in: {error}", "BadWorkspace") from error
        if isinstance(error, SandboxError):
            text = f"`{record.name}` can't start, so it was not submitted: {error}"
            raise Problem(text, exit_code=1, reason="SandboxError") from error
        raise
    return {"id": record.id, "name": record.name, "state": thread.state}


def _first_fire(manifest: Manifest) -> tuple[datetime | None, str]:
    """When the schedule fires first, and what the agent waits for until then.

    Raises:
        Problem: it never fires.
    """
    if manifest.schedule is None:
        return None, ""
    now = datetime.now(UTC)
    first = next_fire(manifest.schedule, now, now)
    if first is None:
        raise bad_usage(f"the schedule `{manifest.schedule.cron}` never fires", "BadManifest")
    return first, f"schedule {short_time(first)}"


async def _leave_nothing(kernel: Kernel, record: AgentRecord) -> None:
    """Forget an agent that never ran: its files, its name, its place in memory. The audit keeps the refusal."""
    thread = kernel.core.threads.get(record.key)
    if thread is not None and thread.program is not None:
        return  # it runs, whatever could not be recorded of it: it is an agent
    try:
        if not await kernel.core.store.forget_agent(record.key):
            return  # something is recorded of it
    except JournalError as error:
        log.warning("the refused submission %s can't be forgotten now: %s", record.id, error)
        return
    kernel.core.threads.pop(record.key, None)
    kernel.core.journal.forget(record.key)
    if kernel.ownership.homes is not None:
        await asyncio.to_thread(kernel.ownership.homes.forget, record.id)
    for place in (
        kernel.layout.agent(record.id),
        kernel.layout.points(record.id),
        kernel.layout.socket_dir(record.key),
    ):
        await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)


def check_manifest(kernel: Kernel, text: str, source: str) -> Manifest:
    """Parse a manifest and hold it against what this kernel has.

    Raises:
        Problem: every mistake with line and column.
    """
    if len(text.encode()) > MANIFEST_BYTES_MAX:
        raise bad_usage(
            f"the manifest is longer than {MANIFEST_BYTES_MAX} bytes; make it shorter", "BadManifest"
        )
    try:
        manifest = manifest_of(text, source)
    except ManifestError as error:
        raise bad_usage(str(error), "BadManifest") from error
    unsupported = manifest.unsupported()
    if unsupported:
        lines = "\n".join(f"{source}:{p.line}:{p.column}: {p.message}; {p.fix}" for p in unsupported)
        raise bad_usage(lines, "BadManifest")
    file = kernel.ownership.resources.file
    for role in (*manifest.roles, *manifest.delegates):
        if role not in file.roles:
            known = ", ".join(sorted(file.roles)) or "none"
            raise bad_usage(
                f"{source}: the kernel file declares no role `{role}`; it has: {known}", "BadManifest"
            )
    try:
        kernel.ownership.mounts(manifest.sandbox)
    except MountRefused as error:
        raise bad_usage(f"{source}:{error.line}:{error.column}: {error}", "BadManifest") from error
    return manifest


async def _check_walls(kernel: Kernel, manifest: Manifest, source: str) -> None:
    """Refuse before anything is made what this host can't confine as demanded; the audit keeps it.

    Raises:
        Problem: it names the wall and the fix.
    """
    floor = kernel.ownership.resources.file.sandbox.require or ()
    backend = kernel.ownership.backends.name_for([manifest.sandbox])
    cant = kernel.ownership.backends.named(backend).direct if manifest.sandbox.workspace == "direct" else ""
    if cant:
        text = f"{source}: the sandbox `{backend}` has no `workspace: direct`: {cant}"
        raise Problem(text, exit_code=1, reason="SandboxError")
    walls = await kernel.walls(backend)
    for demands, place in ((manifest.sandbox.require, source), (floor, "the kernel file")):
        try:
            check_walls(demands, walls, backend)
        except WallMissing as error:
            where = f"{place}:{error.line}:{error.column}" if error.line else place
            raise Problem(f"{where}: {error}", exit_code=1, reason="SandboxError") from error


async def _receive(frames: AsyncIterator[pb.SubmitRequest], staging: Path) -> Path:
    path = staging / "workspace.tar"
    size = 0
    with path.open("wb") as file:
        async for frame in frames:
            if frame.WhichOneof("frame") != "workspace":
                raise bad_usage("after its header a submission has only parts of the workspace")
            size += len(frame.workspace)
            if size > WORKSPACE_BYTES_MAX:
                raise bad_usage(
                    f"the workspace is larger than {WORKSPACE_BYTES_MAX} bytes; leave large data out of it"
                )
            try:
                await asyncio.to_thread(file.write, frame.workspace)
            except OSError as error:
                raise conflict(
                    f"the workspace can't be stored: {error}; make room in the data directory"
                ) from error
    return path


def _lay_out(kernel: Kernel, manifest: Manifest, tar: Path, home: Path, uid: int | None) -> None:
    """Make `live` and the program image beside it: the image is what the program may read of the workspace."""
    home.mkdir(mode=0o700, parents=True)
    live, owner = home / "live", uid if os.geteuid() == 0 else None
    live.mkdir(mode=0o755)
    if owner is not None:
        os.chown(live, owner, owner)
    if tar.stat().st_size:
        with tar.open("rb") as file:
            extract_tar(file, live, uid=owner)
        # One that is over its limit could take in nothing, so it is refused here and not at the first write.
        Meter(Workspace(live), manifest.sandbox.disk_bytes).check()
    (home / "scratch").mkdir(mode=0o711)
    (home / "logs").mkdir(mode=0o700)
    file = kernel.ownership.resources.file
    denies = [rule for rule in effective_rules(manifest, file) if rule.verdict is Verdict.DENY]
    policy = AgentPolicy("image", [], denies, file.ceilings.rules)
    hidden = set(policy.masks(info.path for info in Workspace(live).walk()))
    copy_tree(live, home / "image", skip=lambda path: path in hidden, uid=owner)
