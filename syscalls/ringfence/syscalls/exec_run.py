"""exec.run: a command on an overlay of the workspace. Its changes are judged, then applied all or not at all.

Only a command that ended by itself, whatever its exit status, changes the workspace; what the kernel ended (time, memory,
disk) leaves nothing.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path

import msgspec
from ringfence.policy.shell import redirections
from ringfence.policy.types import Verdict
from ringfence.sandbox import changes as overlay
from ringfence.sandbox.changes import ChangesError, ChangeSet
from ringfence.sandbox.names import WORKSPACE, shown
from ringfence.sandbox.types import CommandResult, CommandSpec, ExitReason, SandboxError
from ringfence.sandbox.workspace import WorkspaceError
from ringfence.syscalls import errors, exec_changes, exec_output, fs_common
from ringfence.syscalls.base import Call, Env, NeedsApproval, Plan, Question, Rerun
from ringfence.syscalls.payload import result_bytes
from ringfence.syscalls.redaction import redactor_for
from ringfence.syscalls.refusals import outcome_unknown

_ENDED_BY_ITSELF = {ExitReason.EXIT, ExitReason.SIGNAL}
_MOST_ARGUMENT_BYTES = 128 << 10
_COMMIT_S = 5.0
"""Part of the call's deadline kept back for judging and applying."""
_LEAST_RUN_S = 0.1
_KEPT_NAMES = frozenset({"PATH"})
_KEPT_PREFIXES = ("LD_", "RINGFENCE_")


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Arguments of exec.run."""

    argv: list[str] = []
    cwd: str = ""
    env: dict[str, str] = {}
    stdin: bytes = b""
    timeout_ms: int = 0


class Result(msgspec.Struct, frozen=True):
    """Result of exec.run."""

    exit_code: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    changed: list[str] = []
    reason: str = ""
    stdout_ref: str = ""
    stderr_ref: str = ""


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check the words and the working directory. A program given by path is asked about by its name too.

    What shell scripts among the words open by redirections is asked about as calls on files. A person who is asked about a
    write sees what was written, so that comes when the changes are judged.

    Raises:
        InvalidRequest: nothing to run, or an environment that would change what the rules mean.
    """
    argv = arguments.argv
    if not argv or not argv[0]:
        raise errors.InvalidRequest("`argv` is empty; give a program and its arguments")
    if any(len(os.fsencode(word)) >= _MOST_ARGUMENT_BYTES for word in argv):
        raise errors.InvalidRequest(
            f"an argument is longer than {_MOST_ARGUMENT_BYTES} bytes; pass it as `stdin` or in a file"
        )
    if arguments.timeout_ms < 0:
        raise errors.InvalidRequest("`timeout_ms` is negative; leave it out for the sandbox's limit")
    for name in arguments.env:
        if not name or "=" in name:
            raise errors.InvalidRequest(f"`{shown(name)}` is no name of an environment variable; rename it")
        if name in _KEPT_NAMES or name.startswith(_KEPT_PREFIXES):
            raise errors.InvalidRequest(
                f"a call can't set `{name}`, which decides what program a rule allows; set it in the manifest's `run.env`"
            )
    cwd = fs_common.resolve(env, arguments.cwd or WORKSPACE)
    words = tuple(argv)
    questions = [Question(action="exec.run", resource=words)]
    name = words[0].rpartition("/")[2]
    if name != words[0]:
        if not name:
            raise errors.InvalidRequest(f"`{shown(words[0])}` is no program; give its name")
        questions.append(Question(action="exec.run", resource=(name, *words[1:])))
    files = _redirected(env, words, cwd)
    questions.extend(one for one in files if one.action == "fs.read")
    writes = tuple(one for one in files if one.action == "fs.write")
    return Plan(resource=shlex.join(argv), questions=tuple(questions), foreseen=writes, data=cwd)


def _redirected(env: Env, words: tuple[str, ...], cwd: str) -> list[Question]:
    found: list[Question] = []
    for action, path in redirections(words, cwd, WORKSPACE):
        try:
            where = env.workspace.canonical(path)
        except WorkspaceError:
            # Whoever runs the script can't open it either, or the changes are judged as what they turn out to be.
            where = path
        found.append(Question(action=action, resource=where))
    return list(dict.fromkeys(found))


async def run(call: Call, arguments: Arguments) -> Result:
    """Run the command, judge what it changed, and apply it behind a rollback point.

    Changes that a rule asks about stay staged, outside the workspace and without its lock, until a person has decided.
    """
    scratch = _scratch(call)
    keep = False
    try:
        async with call.env.lock():
            await fs_common.in_thread(lambda: _make_scratch(scratch))
            ended = await _execute(call, arguments, scratch)
            result = await _result(call, ended)
            await _afford(call, result)
            if ended.exit.reason not in _ENDED_BY_ITSELF:
                return result
            changes = await exec_changes.read(call, ended.upper)
            verdicts = await exec_changes.verdicts_on(call, changes)
            if not changes:
                return result
            hide = redactor_for(call.env, ())
            result = msgspec.structs.replace(result, changed=[hide.text(path) for path in changes.paths()])
            await _afford(call, result)
            manifest = await exec_changes.protect(call, ended.upper, changes)
            await exec_changes.admit(call, ended.upper, changes, manifest)
            await call.record(msgspec.json.encode(exec_changes.record_of(call, result, changes, manifest)))
            if Verdict.ASK not in verdicts:
                await exec_changes.commit(call, ended.upper, changes, manifest)
                return result
        # INVARIANT: the lock is free while a person is asked; a kernel that stops meanwhile keeps what is staged.
        keep = True
        await exec_changes.commit_staged(call, scratch, changes, manifest)
        keep = False
    except errors.SyscallError:
        keep = False
        raise
    except ChangesError as error:
        keep = False
        raise errors.CallFailed(str(error)) from error
    finally:
        if not keep:
            await fs_common.in_thread(lambda: overlay.discard(scratch), effect=True)
    return result


async def resume(call: Call, arguments: Arguments) -> Result:
    """Go on with staged changes under the next kernel; where nothing is staged nor applied, run the command again.

    Raises:
        Conflict: the workspace changed meanwhile; nothing was applied.
        Denied: a person or a rule denies the changes.
        OutcomeUnknown: the changes are lost, or in part, and the workspace is neither as before nor as after.
    """
    scratch = _scratch(call)
    if call.progress is None:
        return await run(call, arguments)
    record = msgspec.json.decode(call.progress, type=exec_changes.Record)
    manifest = await fs_common.in_thread(lambda: exec_changes.load(call, record.point))
    changes = ChangeSet.from_json(manifest.extra["changes"])
    if not (scratch / "upper").is_dir():
        # Only the end of an attempt removes the layer: it was approved and applied, or refused before anything was.
        async with call.env.lock():
            done, untouched = await fs_common.in_thread(lambda: exec_changes.compare(call, manifest))
        if untouched and not done:
            return await run(call, arguments)
        if not done:
            raise exec_changes.outcome_unknown(call, f"what step {call.step} was about to apply is lost")
        call.add_point(exec_changes.covers_of(manifest), "workspace", manifest.size_bytes)
        return _recorded(record)
    call.add_point(exec_changes.covers_of(manifest), "workspace", manifest.size_bytes)
    keep = True
    try:
        await exec_changes.commit_staged(call, scratch, changes, manifest)
        keep = False
    except errors.SyscallError:
        keep = False
        raise
    finally:
        if not keep:
            await fs_common.in_thread(lambda: overlay.discard(scratch), effect=True)
    return _recorded(record)


async def recover(call: Call, arguments: Arguments) -> Result | Rerun:
    """Say what became of a command that a crash cut off.

    Nothing recorded: nothing was applied, so it is run again. Recorded: its changes are applied to the end. Recorded, but
    neither applied nor there any more: the attempt was refused before its outcome could be kept, so it is run again. So is one
    that had applied nothing when its permission was taken away: it is decided afresh.

    Raises:
        OutcomeUnknown: a path is neither as it was nor as the command left it, or the changes are lost.
    """
    del arguments  # the record and the point hold all
    scratch = _scratch(call)
    if call.progress is None:
        await fs_common.in_thread(lambda: overlay.discard(scratch))
        return Rerun.RERUN
    record = msgspec.json.decode(call.progress, type=exec_changes.Record)
    async with call.env.lock():
        manifest = await fs_common.in_thread(lambda: exec_changes.load(call, record.point))
        done, untouched = await fs_common.in_thread(lambda: exec_changes.compare(call, manifest))
        upper = scratch / "upper"
        call.env.snapshots.touch(manifest.point)
        if untouched and not done and not upper.is_dir():
            # Only the end of `run` removes the layer, so it refused or failed before anything was applied.
            return Rerun.RERUN
        if not done or (untouched and upper.is_dir()):
            if not upper.is_dir():
                what = f"what step {call.step} was about to apply is lost; look at its paths"
                raise outcome_unknown(call, what)
            changes = ChangeSet.from_json(manifest.extra["changes"])
            under_way = not untouched or (done and exec_changes.has_begun(call))
            if not under_way and not await _still_allowed(call, changes):
                await fs_common.in_thread(lambda: overlay.discard(scratch), effect=True)
                return Rerun.RERUN
            call.env.meter.forget()
            try:
                await fs_common.in_thread(
                    lambda: exec_changes.apply_all(call.env, upper, changes), effect=True
                )
            except ChangesError as error:
                raise outcome_unknown(call, f"step {call.step} could not be finished: {error}") from error
        call.add_point(exec_changes.covers_of(manifest), "workspace", manifest.size_bytes)
        await fs_common.in_thread(lambda: overlay.discard(scratch), effect=True)
    return _recorded(record)


def _recorded(record: exec_changes.Record) -> Result:
    return msgspec.json.decode(record.result, type=Result)


async def _still_allowed(call: Call, changes: ChangeSet) -> bool:
    """Whether changes of which nothing is applied may still be. What was under way goes to its end without asking."""
    try:
        await fs_common.require_all(call, exec_changes.questions_of(changes))
        await call.check_live()
    except (errors.Denied, errors.Revoked, NeedsApproval):
        return False
    return True


def _scratch(call: Call) -> Path:
    return call.env.scratch_root / f"p{call.step}"


def _make_scratch(scratch: Path) -> None:
    overlay.discard(scratch)
    scratch.mkdir(mode=0o700, parents=True)


async def _execute(call: Call, arguments: Arguments, scratch: Path) -> CommandResult:
    env = call.env
    wanted = arguments.timeout_ms / 1000 or env.limits.timeout_s
    timeout_s = max(min(wanted, env.limits.timeout_s, call.deadline_s - _COMMIT_S), _LEAST_RUN_S)
    try:
        # INVARIANT: the lock is held, so what is hidden can't change between this list and the overlay.
        masks = env.masked()
        mounts = env.mounts
    except WorkspaceError as error:
        raise fs_common.refusal(error) from error
    except SandboxError as error:
        raise errors.CallFailed(str(error)) from error
    spec = CommandSpec(
        agent=env.agent,
        argv=arguments.argv,
        env={**env.command_env, **arguments.env},
        lower=env.workspace.root,
        scratch=scratch,
        cwd=call.plan.data,
        masks=masks,
        readonly=env.readonly,
        mounts=mounts,
        require=env.require,
        uid=env.uid,
        limits=dataclasses.replace(env.limits, timeout_s=timeout_s),
        stdin=arguments.stdin,
    )
    try:
        ended = await env.sandbox.run_command(spec)
    except SandboxError as error:
        raise errors.CallFailed(str(error)) from error
    if ended.exit.reason is ExitReason.KILLED:
        raise errors.CallFailed("the command's sandbox was ended from outside; nothing was applied")
    return ended


async def _afford(call: Call, result: Result) -> None:
    """Refuse an answer that a budget of bytes does not cover, while nothing is applied yet.

    Raises:
        BudgetExhausted: it doesn't.
    """
    if call.answer_max is not None:
        await call.afford(result_bytes(result))


async def _result(call: Call, ended: CommandResult) -> Result:
    stdout = await exec_output.taken_in(call, "stdout", ended.stdout, ended.stdout_bytes)
    stderr = await exec_output.taken_in(call, "stderr", ended.stderr, ended.stderr_bytes)
    return Result(
        exit_code=ended.exit.code,
        stdout=stdout.shown,
        stderr=stderr.shown,
        stdout_bytes=stdout.total_bytes,
        stderr_bytes=stderr.total_bytes,
        reason=ended.exit.reason.value,
        stdout_ref=stdout.ref,
        stderr_ref=stderr.ref,
    )
