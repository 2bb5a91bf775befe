"""`state.put`: write one key of the shared state, in one transaction with the outcome."""

from __future__ import annotations

from typing import Any

import msgspec
from ringfence.syscalls.base import Env, Plan, Question, StateChange, StateDone
from ringfence.syscalls.claim_common import check_claims
from ringfence.syscalls.state_common import check_key, check_version, encode_value


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The key, its value, the version it must still have (None: any, 0: it must not exist), and claims that must still be held."""

    key: str = ""
    value: Any = None
    if_version: int | None = None
    claims: dict[str, int] = {}


class Result(msgspec.Struct, frozen=True):
    """The new version."""

    version: int


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check key, value and version.

    Raises:
        InvalidRequest: one of them is none.
    """
    del env
    key = check_key(arguments.key)
    check_version("if_version", arguments.if_version)
    encode_value(key, arguments.value)
    check_claims(arguments.claims)
    return Plan(resource=key, questions=(Question(action="state.put", resource=key),))


def transaction(arguments: Arguments) -> StateChange:
    """What to commit."""
    key = arguments.key
    reads = {} if arguments.if_version is None else {key: arguments.if_version}
    return StateChange(reads=reads, puts={key: encode_value(key, arguments.value)}, claims=arguments.claims)


def finish(arguments: Arguments, done: StateDone) -> Result:
    """What the agent gets once it is committed."""
    return Result(version=done.versions[arguments.key])
