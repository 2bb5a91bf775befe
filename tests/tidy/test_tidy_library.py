"""docs/library.md lists what the library has, from the library itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringfence.agent import aio, errors, runtime

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


def spaces(owner: type) -> Iterator[tuple[str, type]]:
    """What the constructor puts under public names, such as `fs`, and of which class."""
    module = importlib.import_module(owner.__module__)
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(owner.__init__)))):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Call(func=ast.Name(id=made))) if (
                not name.startswith("_")
            ):
                yield name, getattr(module, made)


def public(owner: type) -> dict[str, Any]:
    return {
        name: found
        for name in dir(owner)
        if not name.startswith("_") and inspect.isfunction(found := inspect.unwrap(getattr(owner, name)))
    }


def call(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in list(signature.parameters.values())[1:]]
    words = signature.replace(parameters=plain, return_annotation=signature.empty)
    return f"`{name}{words}`"


def about(function: Any) -> str:
    return (inspect.getdoc(function) or "").splitlines()[0]


def expected() -> list[str]:
    """Rows of the page's tables."""
    both = dict(spaces(aio.AsyncRingfence))
    rows: list[str] = []
    for space, owner in [("", runtime.Ringfence), *spaces(runtime.Ringfence)]:
        other = aio.AsyncRingfence if not space else both[space]
        prefix = f"rf.{space}." if space else "rf."
        for name, function in public(owner).items():
            there = f"`{other.__module__}`" if name in public(other) else "-"
            rows.append(
                f"| {call(prefix + name, function)} | {about(function)} | `{owner.__module__}` | {there} |"
            )
    kinds = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.RingfenceError)]
    return rows + [f"| `{kind.__name__}` | {about(kind)} |" for kind in kinds]


def test_the_page_lists_the_library() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    heads = ("| call |", "|---", "| error |")
    written = [line for line in lines if line.startswith("|") and not line.startswith(heads)]
    assert written == expected()
