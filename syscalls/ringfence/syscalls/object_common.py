"""What the object.* bodies share: names, errors, the point before a change, and what recovery makes of one.

INVARIANT: no object is overwritten or removed before what stood there was read, kept durably and read back, and none that
has another version by then.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final, TypeVar, cast

import msgspec
from ringfence.policy.canonical import check_text
from ringfence.policy.problems import PatternError
from ringfence.sandbox.points import PointManifest, PointPath, SnapshotError
from ringfence.syscalls.base import Call, Env, Plan, Question, Rerun
from ringfence.syscalls.drivers.protocol import ABSENT, Changed, DriverError, ObjectDriver, Snapshot, Stat
from ringfence.syscalls.errors import CallFailed, Conflict, InvalidRequest, NoSuchResource, SnapshotFailed
from ringfence.syscalls.redaction import redactor_for
from ringfence.syscalls.refusals import outcome_unknown, refuse_unavailable

if TYPE_CHECKING:
    from ringfence.syscalls.declared import ObjectResource

T = TypeVar("T")

KEY_BYTES_MAX: Final = 1024
DATA_BYTES_MAX: Final = 3080192
"""What one call carries: as base64 it still fits into a frame."""

KIND: Final = "object"
"""Kind of the points."""

GONE: Final = "gone"
CONTENT: Final = "sha256:"
"""Before the content that a call is about to write, as what is expected while its version is not known."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A point: which resource, and how the object stood; `identity` of the target that it then was."""

    resource: str
    snapshot: Snapshot
    identity: str = ""

    def elsewhere(self, driver: ObjectDriver) -> bool:
        """Whether the resource is another target by now."""
        return bool(self.identity) and getattr(driver, "identity", "") != self.identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a call is about, kept in `Plan.data`."""

    resource: ObjectResource
    key: str

    @property
    def driver(self) -> ObjectDriver:
        """Who does the work."""
        driver = self.resource.driver
        if driver is None:
            raise NoSuchResource(f"resource `{self.resource.name}` is unavailable")
        return driver

    @property
    def name(self) -> str:
        """As policy knows it."""
        return f"{self.resource.name}/{self.key}" if self.key else self.resource.name


def plan_object(action: str, text: str, env: Env, *, prefix: bool = False) -> Plan:
    """Find the resource that `NAME/KEY` names.

    Args:
        action: of the row.
        text: as the agent wrote it.
        env: what the kernel lends.
        prefix: whether it may name the resource alone, and end in a slash.

    Raises:
        InvalidRequest: it is no such name.
        NoSuchResource: nothing is declared by that name, or it is unavailable.
    """
    name, _, key = text.partition("/")
    if prefix:
        key = key.removesuffix("/")
    resource = env.objects.get(name)
    if resource is None:
        declared = ", ".join(f"`{one}`" for one in sorted(env.objects)) or "none"
        raise NoSuchResource(
            f"`{name[:80]}` is no declared resource of objects; declared: {declared}; "
            "the operator can declare it in the kernel file"
        )
    refuse_unavailable(resource)
    if key or not prefix:
        _check_key(key)
    target = Target(resource=resource, key=key)
    return Plan(resource=target.name, questions=(Question(action=action, resource=target.name),), data=target)


def _check_key(key: str) -> None:
    size = len(key.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= KEY_BYTES_MAX:
        raise InvalidRequest(f"a key has 1 to {KEY_BYTES_MAX} bytes, this one has {size}; write `NAME/KEY`")
    try:
        check_text(key, "key")
    except PatternError as error:
        raise InvalidRequest(str(error)) from None
    # INVARIANT: what policy compares component by component is what the target takes for one object.
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise InvalidRequest(
            f"the key `{key}` has an empty, `.` or `..` component; it can't be reached from here"
        )


async def within(call: Call, target: Target, work: Awaitable[T]) -> T:
    """Await something short of a driver.

    Raises:
        CallFailed: it failed or took too long; nothing was changed.
    """
    limit = min(target.resource.timeout_s, max(call.deadline_s, 0.001))
    try:
        async with asyncio.timeout(limit):
            return await work
    except TimeoutError:
        raise CallFailed(f"`{target.resource.name}` did not answer within {limit:g} s", sent="no") from None
    except DriverError as error:
        raise failed(call, target, error) from None


def failed(call: Call, target: Target, error: DriverError, *, sent: str = "no") -> CallFailed:
    """A driver's error in the user's words, without credentials."""
    hide = redactor_for(call.env, target.resource.secrets)
    return CallFailed(f"`{target.resource.name}`: {hide.text(str(error))}", sent=sent)


# -- a change ---------------------------------------------------------------------------------------------------------


async def keep(call: Call, target: Target, expect: str) -> Snapshot:
    """Keep an object as the call's rollback point, or find what a crashed attempt has kept.

    Args:
        call: the call.
        target: which object.
        expect: how it will stand after the call: `gone`, or `sha256:` and the hash of its content.

    Raises:
        SnapshotFailed: it can't be kept; nothing was changed.
    """
    store, point = call.env.snapshots, f"p{call.step}"
    known = await asyncio.to_thread(store.load, point)
    if known is None:
        try:
            known = await _take(call, target, expect)
        except (DriverError, SnapshotError, OSError) as error:
            hide = redactor_for(call.env, target.resource.secrets)
            raise SnapshotFailed(
                f"what stands at `{target.name}` can't be kept: {hide.text(str(error))}; nothing was changed"
            ) from None
    call.add_point([target.name], KIND, known.size_bytes)
    return msgspec.convert(known.extra, Kept).snapshot


async def _take(call: Call, target: Target, expect: str) -> PointManifest:
    store = call.env.snapshots
    await asyncio.to_thread(store.root.mkdir, mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=store.root) as file:
        content = cast("BinaryIO", file)
        snapshot = await target.driver.snapshot(target.key, content, target.resource.keep_max)
        content.flush()
        entry = PointPath(path=target.name, before="absent", kind="absent")
        size = 0
        if snapshot.stat is not None:
            size = snapshot.stat.size
            entry = PointPath(
                path=target.name,
                before=snapshot.stat.version,
                kind="file",
                mode=0o600,
                size=size,
                blob=snapshot.sha256,
            )
        manifest = PointManifest(
            point=f"p{call.step}",
            paths=(entry,),
            size_bytes=size,
            expect={target.name: expect},
            extra=msgspec.to_builtins(
                Kept(
                    resource=target.resource.name,
                    snapshot=snapshot,
                    identity=getattr(target.driver, "identity", ""),
                )
            ),
        )
        # Opened anew for each reader: a copy of the descriptor would share its place in the file.
        fresh = f"/proc/self/fd/{content.fileno()}"
        return await asyncio.to_thread(
            store.keep, manifest, lambda _: os.open(fresh, os.O_RDONLY | os.O_CLOEXEC)
        )


async def note_after(call: Call, target: Target, version: str) -> None:
    """Keep with the point how the call left the object, so that a rollback tells that from what others did."""
    expect = {target.name: version or GONE}
    try:
        await asyncio.to_thread(call.env.snapshots.set_expect, f"p{call.step}", expect)
    except SnapshotError:
        # It is known by its content as well: a rollback reads more then.
        return


async def change(
    call: Call,
    target: Target,
    before: Snapshot,
    effect: Callable[[str], Awaitable[str]],
    done: Callable[[Stat | None], Awaitable[bool]],
) -> str:
    """Make the change, and find out what came of one whose answer was lost. Returns the version that stands there then.

    Args:
        call: the call.
        target: which object.
        before: how it stood.
        effect: does it, given the version that has to stand there.
        done: whether what stands there now is what the call was to leave.

    Raises:
        Conflict: others changed it meanwhile; nothing was done.
        CallFailed: it failed, and nothing was done.
        OutcomeUnknown: nobody can tell.
    """
    await call.failpoint("before_effect")
    await call.check_live()
    try:
        version = await effect(ABSENT if before.stat is None else before.stat.version)
    except Changed as error:
        raise Conflict(f"`{target.name}` changed meanwhile: {error}; read it again and retry") from None
    except DriverError as error:
        if not error.sent:
            raise failed(call, target, error) from None
        settled = await settle(call, target, before, done)
        if settled is Rerun.RERUN:
            raise failed(call, target, error) from None
        version = settled
    await call.failpoint("after_effect")
    await note_after(call, target, version)
    return version


async def settle(
    call: Call,
    target: Target,
    before: Snapshot,
    done: Callable[[Stat | None], Awaitable[bool]],
) -> str | Rerun:
    """Ask the target what became of a change. Returns the version that stands there, or that nothing was done.

    Raises:
        OutcomeUnknown: it can't be asked, or something else stands there.
    """
    try:
        now = await target.driver.describe(target.key)
        if await done(now):
            return ABSENT if now is None else now.version
        if await target.driver.verify(before):
            return Rerun.RERUN
    except (DriverError, TimeoutError, OSError) as error:
        hide = redactor_for(call.env, target.resource.secrets)
        text = f"`{target.name}` may have been changed, and can't be asked for: {hide.text(str(error))}"
        raise outcome_unknown(call, text) from None
    raise outcome_unknown(call, f"`{target.name}` is neither as it was nor as the call would leave it")


async def recover_change(
    call: Call, target: Target, done: Callable[[Stat | None], Awaitable[bool]]
) -> tuple[str, Snapshot] | Rerun:
    """Say what became of a change that a crash cut off.

    Raises:
        OutcomeUnknown: nobody can tell.
    """
    manifest = await asyncio.to_thread(call.env.snapshots.load, f"p{call.step}")
    if manifest is None:
        return Rerun.RERUN
    kept = msgspec.convert(manifest.extra, Kept)
    if kept.elsewhere(target.driver):
        raise outcome_unknown(call, f"`{target.resource.name}` is another target now, which can't tell")
    before = kept.snapshot
    settled = await settle(call, target, before, done)
    if isinstance(settled, Rerun):
        return settled
    call.add_point([target.name], KIND, manifest.size_bytes)
    await note_after(call, target, settled)
    return settled, before


def content_test(
    target: Target, data: bytes, attributes: Mapping[str, str]
) -> Callable[[Stat | None], Awaitable[bool]]:
    """Whether an object has a content and attributes, byte for byte."""

    async def test(now: Stat | None) -> bool:
        if now is None or now.size != len(data):
            return False
        if any(now.attributes.get(name) != value for name, value in attributes.items()):
            return False
        wanted = Stat(size=len(data), version=".", attributes=now.attributes)
        sha256 = hashlib.sha256(data).hexdigest()
        return await target.driver.verify(Snapshot(key=target.key, stat=wanted, sha256=sha256))

    return test
