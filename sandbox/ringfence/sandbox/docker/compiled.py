"""Compiled modules for interpreters inside: taken without a look at their source, whatever the times of the files are."""

from __future__ import annotations

import importlib.util
import marshal
import sys


def compiled(source: bytes, path: str) -> tuple[str, bytes]:
    """Compile a module for interpreters of this one's version; others compile the source themselves.

    Args:
        source: of the module.
        path: where it will be.

    Returns:
        Where the compiled form belongs beside it, and that form (PEP 552, unchecked).

    Raises:
        SyntaxError: it is none.
        ValueError: the same, in another way.
    """
    code = compile(source, path, "exec", dont_inherit=True, optimize=0)
    flags = (0b01).to_bytes(4, "little")
    # Loaded once and dumped again: what is shared in it then no longer depends on what else this process has seen.
    body = marshal.dumps(marshal.loads(marshal.dumps(code)))  # noqa: S302 - made in this line
    data = importlib.util.MAGIC_NUMBER + flags + importlib.util.source_hash(source) + body
    directory, _, name = path.rpartition("/")
    # Not asked of `importlib`: it answers for this interpreter's own settings.
    return f"{directory}/__pycache__/{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc", data
