"""What the bodies of work claims have in common."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from ringfence.syscalls.base import Plan, Question
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.now import rfc3339
from ringfence.syscalls.state_common import KEYS_MAX, check_key

TTL_MS_LEAST: Final = 1000
TTL_MS_MAX: Final = 7 * 24 * 3600 * 1000


def plan_of(action: str, key: str) -> Plan:
    """The plan of a call on one claim.

    Raises:
        InvalidRequest: the key is none.
    """
    return Plan(resource=check_key(key), questions=(Question(action=action, resource=key),))


def check_ttl(ttl_ms: int) -> None:
    """Refuse a lease that is too short or too long.

    Raises:
        InvalidRequest: it is.
    """
    if not TTL_MS_LEAST <= ttl_ms <= TTL_MS_MAX:
        raise InvalidRequest(
            f"`ttl_ms` is {ttl_ms}; a claim is held for {TTL_MS_LEAST} to {TTL_MS_MAX} ms, renew it to hold it longer"
        )


def check_fence(fence: int) -> None:
    """Refuse what no take ever gave.

    Raises:
        InvalidRequest: it is no fence.
    """
    if fence < 1:
        raise InvalidRequest(f"`fence` is {fence}; give the one that `claim.take` answered")


def check_claims(claims: Mapping[str, int]) -> None:
    """Refuse claims of a state change that can be none.

    Raises:
        InvalidRequest: they can't.
    """
    if len(claims) > KEYS_MAX:
        raise InvalidRequest(
            f"a change rests on at most {KEYS_MAX} claims, this one on {len(claims)}; name fewer"
        )
    for key, fence in claims.items():
        check_key(key)
        check_fence(fence)


def moment(us: int) -> str:
    """A time of the database as results carry it."""
    return rfc3339(datetime.fromtimestamp(us / 1e6, UTC))
