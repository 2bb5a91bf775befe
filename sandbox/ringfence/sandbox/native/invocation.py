"""Which programs a warm interpreter can become: those that its own start says nothing else about.

Whatever is not known here for certain to be the same is executed, in a fresh interpreter.
"""

# A zygote works on strings; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH119

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

FLAGS = {"PYTHONDONTWRITEBYTECODE": "B", "PYTHONUNBUFFERED": "u"}
"""Variables that say the same as an option."""
FLAGS_ON = dict.fromkeys(FLAGS, "1")
"""The flags that agents' programs have, and so a warm interpreter."""

# What the interpreter, libc and protobuf look at when they start or are imported.
_DECIDES = (
    "PYTHON",
    "LC_",
    "LANG",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "GCONV_",
    "LOCPATH",
    "PROTOCOL_BUFFERS_",
    "OPENSSL_",
)


class Invocation(NamedTuple):
    """What a Python is asked to run.

    Attributes:
        kind: `script`, `module` or `code`.
        target: path, name or text.
        arguments: what follows it.
    """

    kind: str
    target: str
    arguments: list[str]


def parse(argv: Sequence[str], env: Mapping[str, str], warm: Mapping[str, str]) -> Invocation | None:
    """Read a command line of Python's.

    Args:
        argv: program and arguments.
        env: the program's environment.
        warm: the environment in which the warm interpreter was started.

    Returns:
        What to run; None: a fresh interpreter could differ from the warm one, or it is no Python.
    """
    if not os.path.basename(argv[0]).startswith("python"):
        return None
    relevant = {name for name in env if name.startswith(_DECIDES)} | set(warm)
    if any(env.get(name) != warm.get(name) for name in relevant - set(FLAGS)):
        return None
    on = {flag for name, flag in FLAGS.items() if env.get(name)}
    if any(env.get(name, "") not in ("", "1") for name in FLAGS):
        return None
    found: Invocation | None = None
    for position, word in enumerate(argv[1:], 1):
        rest = list(argv[position + 1 :])
        if not word.startswith("-"):
            found = Invocation("script", word, rest)
            break
        if word in ("-c", "-m") and rest:
            found = Invocation("code" if word == "-c" else "module", rest[0], rest[1:])
            break
        if not set(word[1:]) or not set(word[1:]) <= set(FLAGS.values()):
            return None
        on |= set(word[1:])
    wanted = {flag for name, flag in FLAGS.items() if warm.get(name)}
    return found if on == wanted else None
