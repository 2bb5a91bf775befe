"""workspace.commit: what an unmodified program changed on its overlay is judged, then taken into the workspace, all or nothing.

The kernel makes this call itself at every boundary of a `direct` agent; its program may make it too. The program is held still
meanwhile. What is refused stays on the overlay, outside the workspace.
"""

from __future__ import annotations

import msgspec
from ringfence.policy.types import Verdict
from ringfence.sandbox import changes as overlay
from ringfence.sandbox.changes import ChangesError, ChangeSet
from ringfence.sandbox.direct import DirectLayer
from ringfence.sandbox.snapshots import PointManifest
from ringfence.syscalls import errors, exec_changes, fs_common
from ringfence.syscalls.base import Call, Env, NeedsApproval, Plan, Question, Rerun
from ringfence.syscalls.redaction import redactor_for


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """None."""


class Result(msgspec.Struct, frozen=True):
    """Paths changed, as applied."""

    changed: list[str] = []


def plan(arguments: Arguments, env: Env) -> Plan:
    """The resource is what the boundary is for. What was changed is asked about when it is known.

    Raises:
        InvalidRequest: the agent has no overlay.
    """
    del arguments
    layer = _layer(env)
    return Plan(
        resource=layer.why or "asked by the program",
        questions=(Question(action="workspace.commit", resource=""),),
    )


async def run(call: Call, arguments: Arguments) -> Result:
    """Judge what changed since the last boundary, and apply it behind a rollback point.

    Raises:
        Denied: a rule or a person refuses a change.
        CallFailed: the changes can't be read, or the workspace can't hold them.
        SnapshotFailed: there is no rollback point.
    """
    del arguments
    layer = _layer(call.env)
    try:
        async with layer.hold():
            return await _commit(call, layer)
    except ChangesError as error:
        raise errors.CallFailed(str(error)) from error


async def _commit(call: Call, layer: DirectLayer) -> Result:
    async with call.env.lock():
        changes = await exec_changes.read(call, layer.upper, layer.changes)
        if not changes:
            return Result()
        verdicts = await exec_changes.verdicts_on(call, changes)
        hide = redactor_for(call.env, ())
        result = Result(changed=[hide.text(path) for path in changes.paths()])
        manifest = await exec_changes.protect(call, layer.upper, changes)
        await exec_changes.admit(call, layer.upper, changes, manifest)
        await fs_common.in_thread(lambda: _begin(layer, changes), effect=True)
        await call.record(msgspec.json.encode(exec_changes.record_of(call, result, changes, manifest)))
        if Verdict.ASK not in verdicts and not (changes.removed and layer.strayed()):
            await exec_changes.commit(call, layer.upper, changes, manifest)
            await fs_common.in_thread(layer.settle)
            return result
    # INVARIANT: the lock is free while a person is asked, and the program still: what is approved is what was shown.
    await exec_changes.commit_staged(call, layer.place, changes, manifest)
    await fs_common.in_thread(layer.settle)
    return result


def _begin(layer: DirectLayer, changes: ChangeSet) -> None:
    layer.committing(changes)
    exec_changes.begun_file(layer.upper).unlink(missing_ok=True)


async def resume(call: Call, arguments: Arguments) -> Result:
    """Go on with changes that wait for a person, under the next kernel: the program is gone, its layer is as it left it.

    Raises:
        Conflict: the workspace changed meanwhile; nothing was applied.
        Denied: a person or a rule denies the changes.
        OutcomeUnknown: the changes are lost, or in part, and the workspace is neither as before nor as after.
    """
    layer = _layer(call.env)
    if call.progress is None:
        return await run(call, arguments)
    record = msgspec.json.decode(call.progress, type=exec_changes.Record)
    manifest = await fs_common.in_thread(lambda: exec_changes.load(call, record.point))
    call.add_point(exec_changes.covers_of(manifest), "workspace", manifest.size_bytes)
    if not layer.upper.is_dir():
        return await _without_layer(call, record)
    changes = ChangeSet.from_json(manifest.extra["changes"])
    async with layer.hold():
        await exec_changes.commit_staged(call, layer.place, changes, manifest)
    return _recorded(record)


async def _without_layer(call: Call, record: exec_changes.Record) -> Result:
    async with call.env.lock():
        manifest = await fs_common.in_thread(lambda: exec_changes.load(call, record.point))
        done, untouched = await fs_common.in_thread(lambda: exec_changes.compare(call, manifest))
    if done:
        return _recorded(record)
    if untouched:
        raise errors.Conflict("the program's overlay is gone; nothing was applied: start the agent again")
    raise exec_changes.outcome_unknown(call, f"what step {call.step} was about to apply is lost")


async def recover(call: Call, arguments: Arguments) -> Result | Rerun:
    """Say what became of a boundary that a crash cut off.

    Nothing recorded, or recorded and nothing applied: it is dropped with the overlay, and the program does its work again.
    Recorded and begun: it is applied to the end.

    Raises:
        OutcomeUnknown: a path is neither as it was nor as the program left it, or the changes are lost.
    """
    del arguments
    layer = _layer(call.env)
    if call.progress is None:
        return Rerun.RERUN
    record = msgspec.json.decode(call.progress, type=exec_changes.Record)
    async with call.env.lock():
        manifest = await fs_common.in_thread(lambda: exec_changes.load(call, record.point))
        done, untouched = await fs_common.in_thread(lambda: exec_changes.compare(call, manifest))
        call.env.snapshots.touch(manifest.point)
        if not done and untouched and not layer.upper.is_dir():
            return Rerun.RERUN
        if not done:
            if not layer.upper.is_dir():
                what = f"what step {call.step} was about to apply is lost; look at its paths"
                raise exec_changes.outcome_unknown(call, what)
            changes = ChangeSet.from_json(manifest.extra["changes"])
            same = await fs_common.in_thread(lambda: _as_recorded(layer, changes, manifest))
            if untouched and not (same and await _still_allowed(call, changes)):
                return Rerun.RERUN
            if not same:
                what = f"the overlay is no longer what step {call.step} was about to apply; look at its paths"
                raise exec_changes.outcome_unknown(call, what)
            call.env.meter.forget()
            try:
                await fs_common.in_thread(
                    lambda: exec_changes.apply_all(call.env, layer.upper, changes), effect=True
                )
            except ChangesError as error:
                what = f"step {call.step} could not be finished: {error}"
                raise exec_changes.outcome_unknown(call, what) from error
        call.add_point(exec_changes.covers_of(manifest), "workspace", manifest.size_bytes)
    return _recorded(record)


def _as_recorded(layer: DirectLayer, changes: ChangeSet, manifest: PointManifest) -> bool:
    """Whether the layer still holds what was judged: a program may get a moment to run between freezer and death."""
    try:
        after = overlay.expected(layer.upper, changes)
    except OSError:
        return False
    return all(manifest.expect.get(path) == value for path, value in after.items())


async def _still_allowed(call: Call, changes: ChangeSet) -> bool:
    try:
        await fs_common.require_all(call, exec_changes.questions_of(changes))
        await call.check_live()
    except (errors.Denied, errors.Revoked, NeedsApproval):
        return False
    return True


def _recorded(record: exec_changes.Record) -> Result:
    return msgspec.json.decode(record.result, type=Result)


def _layer(env: Env) -> DirectLayer:
    layer = env.direct
    if layer is None:
        raise errors.InvalidRequest(
            "the agent has no overlay of its own to commit: its manifest doesn't say `sandbox.workspace: direct`"
        )
    return layer
