"""What a program does to a tree, as values that Hypothesis can make."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

Mutation = tuple[str, tuple[Any, ...]]


def mutate(top: Path, mutations: Sequence[Mutation]) -> None:
    """Change a tree as a program would; what can't be done is left out.

    INVARIANT: nothing outside is touched, whatever links the mutations themselves have made: this runs as root on a real host.
    """
    for name, arguments in mutations:
        places = arguments if name in {"move", "link"} else arguments[:1]
        if all(_lies_inside(top, place) for place in places):
            with contextlib.suppress(OSError, shutil.Error):
                _MUTATIONS[name](top, *arguments)


def _lies_inside(top: Path, place: str) -> bool:
    try:
        return (top / place).resolve().is_relative_to(top.resolve())
    except (OSError, RuntimeError):  # links in a circle
        return False


def _write(top: Path, path: str, data: bytes, mode: int) -> None:
    (top / path).parent.mkdir(parents=True, exist_ok=True)
    (top / path).write_bytes(data)
    (top / path).chmod(mode)


def _sparse(top: Path, path: str, size: int) -> None:
    with (top / path).open("r+b" if (top / path).exists() else "wb") as file:
        file.seek(size)
        file.write(b"end")


def _remove(top: Path, path: str) -> None:
    if (top / path).is_dir() and not (top / path).is_symlink():
        shutil.rmtree(top / path)
    else:
        (top / path).unlink()


def _remake(top: Path, path: str, mode: int) -> None:
    """Another directory in place of one: an opaque one, where the overlay has it below."""
    shutil.rmtree(top / path)
    (top / path).mkdir()
    (top / path / "new").write_bytes(b"new")
    (top / path).chmod(mode)


def _append(top: Path, path: str, data: bytes) -> None:
    with (top / path).open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(data)


def _chmod(top: Path, path: str, mode: int) -> None:
    # An ordinary user's walker has to get into every directory, and the mutations themselves have to change what is in it.
    (top / path).chmod(mode | 0o700 if not _ROOT and (top / path).is_dir() else mode)


_ROOT = os.geteuid() == 0
_MUTATIONS: dict[str, Callable[..., object]] = {
    "write": _write,
    "append": _append,
    "sparse": _sparse,
    "remove": _remove,
    "remake": _remake,
    "mkdir": lambda top, path, mode: (top / path).mkdir(mode),
    "move": lambda top, path, to: shutil.move(top / path, top / to),
    "link": lambda top, path, to: os.link(top / path, top / to, follow_symlinks=False),
    "symlink": lambda top, path, target: (top / path).symlink_to(target),
    "chmod": _chmod,
    "tag": lambda top, path, value: os.setxattr(top / path, "user.tag", value),
    "untag": lambda top, path: os.removexattr(top / path, "user.tag"),
    "touch": lambda top, path: os.utime(top / path, ns=(10**18, 10**18)),
}


# -- chosen at random ---------------------------------------------------------------------------------------------
# By a generator of numbers and not by Hypothesis: its small values leave trees nearly empty and kill at the first change only.

NAMES = ("a", "b", "c", "d", "ü", "x y", "n" * 255)
ODD_NAMES = ("bad\udcff", "line\nbreak", "e\u0301")
CONTENTS = (b"", b"x", b"another text\n", b"z" * 9_000, bytes(20_000))
FILE_MODES = (0o644, 0o600, 0o755, 0o444)
DIRECTORY_MODES = (0o755, 0o700, 0o555 if _ROOT else 0o750, 0o777)
_KINDS = [
    "write",
    "write",
    "write",
    "append",
    "sparse",
    "sparse",
    "remove",
    "remove",
    "remake",
    "mkdir",
    "mkdir",
    "move",
    "move",
    "link",
    "link",
    "symlink",
    "chmod",
    "chmod",
    "tag",
    "untag",
    "touch",
]


def a_path(random: Random, there: Sequence[str]) -> str:
    """One that is there, or a new name below something that is."""
    if there and random.random() < 0.6:
        return random.choice(there)
    above = random.choice([*there, ""])
    return f"{above}/{random.choice(NAMES)}".lstrip("/")


def some_mutations(random: Random, there: Sequence[str], most: int) -> list[Mutation]:
    """Up to so many; a later one may go on from where an earlier one made something."""
    known = list(there)
    made: list[Mutation] = []
    for _ in range(random.randint(1, most)):
        kind = random.choice(_KINDS)
        path = a_path(random, known)
        made.append((kind, (path, *_more(random, kind, known))))
        known.append(path)
    return made


def _more(random: Random, kind: str, known: Sequence[str]) -> tuple[Any, ...]:
    match kind:
        case "write":
            return random.choice(CONTENTS), random.choice(FILE_MODES)
        case "append":
            return (random.choice(CONTENTS),)
        case "sparse":
            return (random.choice((5_000, 200_000)),)
        case "remake" | "mkdir":
            return (random.choice(DIRECTORY_MODES),)
        case "move" | "link":
            return (a_path(random, known),)
        case "symlink":
            return (random.choice(("a", "../d", "/nowhere", "gone")),)
        case "chmod":
            # A set-id bit makes a command's changes be refused, so it is rare.
            return (random.choice((*FILE_MODES, *DIRECTORY_MODES, *FILE_MODES, *DIRECTORY_MODES, 0o4755)),)
        case "tag":
            return (random.choice((b"", b"1", b"12345")),)
        case _:
            return ()


def a_tree(random: Random) -> list[Mutation]:
    """What makes a tree of a dozen paths, with names that no rule can name among them."""
    made = some_mutations(random, [], 25)
    known = [arguments[0] for _, arguments in made]
    for _ in range(random.randint(0, 2)):
        made.append(("write", (f"{random.choice(known)}/{random.choice(ODD_NAMES)}", b"odd", 0o644)))
    # Holes and zeros of the same content, which the store keeps once.
    made += [("sparse", ("holes", 200_000)), ("write", ("zeros", bytes(200_000) + b"end", 0o644))]
    made += [("link", (random.choice(known), a_path(random, known))) for _ in range(3)]
    return made


def some_kills(random: Random) -> tuple[int, ...]:
    """At which of its changes a process is killed, and the ones that recover from that; half of the time none is."""
    if random.random() < 0.5:
        return ()
    return tuple(random.randint(1, random.choice((12, 40, 90))) for _ in range(random.choice((1, 1, 2, 3))))
