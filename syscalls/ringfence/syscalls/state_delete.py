"""`state.delete`: remove one key of the shared state, in one transaction with the outcome."""

from __future__ import annotations

import msgspec
from ringfence.syscalls.base import Env, Plan, Question, StateChange, StateDone
from ringfence.syscalls.claim_common import check_claims
from ringfence.syscalls.state_common import check_key, check_version


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The key, the version it must still have (None: any), and claims that must still be held."""

    key: str = ""
    if_version: int | None = None
    claims: dict[str, int] = {}


class Result(msgspec.Struct, frozen=True):
    """Whether there was a value, and the version that marks its end."""

    existed: bool
    version: int


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check key and version.

    Raises:
        InvalidRequest: one of them is none.
    """
    del env
    key = check_key(arguments.key)
    check_version("if_version", arguments.if_version)
    check_claims(arguments.claims)
    return Plan(resource=key, questions=(Question(action="state.delete", resource=key),))


def transaction(arguments: Arguments) -> StateChange:
    """What to commit."""
    key = arguments.key
    reads = {} if arguments.if_version is None else {key: arguments.if_version}
    return StateChange(reads=reads, deletes=(key,), claims=arguments.claims)


def finish(arguments: Arguments, done: StateDone) -> Result:
    """What the agent gets once it is committed; a previous version of 0 means that there was no value."""
    key = arguments.key
    return Result(existed=done.previous.get(key, 0) > 0, version=done.versions.get(key, 0))
