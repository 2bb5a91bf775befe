"""Statements that were classified before: agents make the same ones over and over, with other parameters."""

from __future__ import annotations

import functools
from typing import Final

from ringfence.syscalls.sql_common import Statement, classify

KNOWN_MAX: Final = 256
KNOWN_CHARS_MAX: Final = 2048
"""A longer statement is taken apart anew each time: what is known of all of them stays within a few megabytes."""

_known = functools.lru_cache(maxsize=KNOWN_MAX)(classify)


def known_or_classified(statement: str, parameter_count: int) -> Statement:
    """What a statement is; see `classify`, which depends on nothing but these, and for how it can fail."""
    return (_known if len(statement) <= KNOWN_CHARS_MAX else classify)(statement, parameter_count)
