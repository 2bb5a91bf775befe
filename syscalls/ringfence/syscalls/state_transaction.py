"""`state.transaction`: several writes at once, only if what was read is still current."""

from __future__ import annotations

from typing import Any

import msgspec
from ringfence.syscalls.base import Call, Env, Plan, Question, StateChange, StateDone
from ringfence.syscalls.claim_common import check_claims
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.payload import Room, exactly
from ringfence.syscalls.state_common import KEYS_MAX, check_key, check_version, encode_value

_SHOWN_MAX = 3


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Keys read with the version seen, new values, keys to remove, and claims that must still be held."""

    reads: dict[str, int] = {}
    puts: dict[str, Any] = {}
    deletes: list[str] = []
    claims: dict[str, int] = {}


class Result(msgspec.Struct, frozen=True):
    """New version of each key written."""

    versions: dict[str, int]


def plan(arguments: Arguments, env: Env) -> Plan:
    """Check every key, value and version; each key is a question of its own.

    Raises:
        InvalidRequest: one of them is none, a key is written twice, or there are none or too many.
    """
    del env
    count = len(arguments.reads) + len(arguments.puts) + len(arguments.deletes)
    if not 1 <= count <= KEYS_MAX:
        raise InvalidRequest(f"a transaction names 1 to {KEYS_MAX} keys, this one {count}; split it")
    check_claims(arguments.claims)
    questions: list[Question] = []
    for key, version in arguments.reads.items():
        check_version(f"reads.{check_key(key)}", version)
        questions.append(Question(action="state.get", resource=key))
    for key, value in arguments.puts.items():
        encode_value(check_key(key), value)
        questions.append(Question(action="state.put", resource=key))
    for key in arguments.deletes:
        check_key(key)
        if key in arguments.puts or arguments.deletes.count(key) > 1:
            raise InvalidRequest(f"`{key}` is written twice in one transaction; write it once")
        questions.append(Question(action="state.delete", resource=key))
    return Plan(
        resource=_shown([*arguments.puts, *arguments.deletes, *arguments.reads]), questions=tuple(questions)
    )


def room(call: Call, arguments: Arguments) -> Room:
    """A version for each key."""
    del call
    keys = [*arguments.puts, *arguments.deletes]
    return exactly(64 + len(msgspec.json.encode(keys)) + 24 * len(keys))


def transaction(arguments: Arguments) -> StateChange:
    """What to commit."""
    puts = {key: encode_value(key, value) for key, value in arguments.puts.items()}
    return StateChange(
        reads=arguments.reads, puts=puts, deletes=tuple(arguments.deletes), claims=arguments.claims
    )


def finish(arguments: Arguments, done: StateDone) -> Result:
    """What the agent gets once it is committed."""
    written = [*arguments.puts, *arguments.deletes]
    return Result(versions={key: done.versions[key] for key in written if key in done.versions})


def _shown(keys: list[str]) -> str:
    unique = list(dict.fromkeys(keys))
    rest = len(unique) - _SHOWN_MAX
    return ", ".join(unique[:_SHOWN_MAX]) + (f" and {rest} more" if rest > 0 else "")
