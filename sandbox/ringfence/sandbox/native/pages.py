"""Writes to pages of memory ahead: after a fork Linux copies each at the first write, and who waits has time for that.

An interpreter writes to what it runs: each object counts who holds it.
"""

# A zygote has to start fast; the types of `inspect` and `types` cost more than what is here.

from __future__ import annotations

from types import CodeType, FunctionType, ModuleType


def touch(*modules: ModuleType) -> None:
    """Hold, and let go of, what functions of these modules take in hand when they run."""
    for module in modules:
        things = list(vars(module).values())
        for thing in things:
            if isinstance(thing, FunctionType):
                _code(thing.__code__)
            elif isinstance(thing, type):
                for inner in list(vars(thing).values()):
                    if isinstance(inner, FunctionType):
                        _code(inner.__code__)


def _code(code: CodeType) -> None:
    for held in tuple(code.co_consts):
        if isinstance(held, CodeType):
            _code(held)
