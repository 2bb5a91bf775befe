"""`checkpoint.save`: keep the agent's own state, in one transaction with the outcome."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

import msgspec
from ringfence.syscalls.base import CheckpointSave, Env, Plan, Question
from ringfence.syscalls.codec import canonical_json
from ringfence.syscalls.errors import InvalidRequest

STATE_BYTES_MAX: Final = 1 << 20


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """The state, the schema version its author counts, and how many child lanes lane `0` has made."""

    state: Any = None
    schema_version: int = 0
    next_child: int = 0

    @cached_property
    def encoded(self) -> bytes:
        """The state as canonical JSON, made once: it may have a megabyte."""
        return canonical_json(self.state)


class Result(msgspec.Struct, frozen=True):
    """Step at which it was saved."""

    step: int


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check the size.

    Raises:
        InvalidRequest: the state is larger than 1 MiB.
    """
    del env
    size = len(arguments.encoded)
    if size > STATE_BYTES_MAX:
        raise InvalidRequest(
            f"the state has {size} bytes; a checkpoint holds at most {STATE_BYTES_MAX}, "
            "put larger data into a file"
        )
    return Plan(resource="", questions=(Question(action="checkpoint.save", resource=""),))


def transaction(arguments: Arguments) -> CheckpointSave:
    """What to commit."""
    return CheckpointSave(
        state=arguments.encoded,
        schema_version=arguments.schema_version,
        next_child=arguments.next_child,
    )


def finish(arguments: Arguments, done: int) -> Result:
    """What the agent gets once it is committed.

    Args:
        arguments: the call's.
        done: the step of the call. A checkpoint's atomic work answers nothing, and a body doesn't know its
            step here, so the kernel hands it in.
    """
    del arguments
    return Result(step=done)
