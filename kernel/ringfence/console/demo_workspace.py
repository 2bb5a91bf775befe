"""Lays out the demo's input: what is really installed beside it, copied into a workspace."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import py_compile
import secrets
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

AGENT = Path(__file__).with_name("demo_agent")
EXAMPLE_URL = "http://127.0.0.1:9000"
"""Where the example's files say the desk is; the demo's own port stands there in the copies."""

CACHED_DISTRIBUTIONS = 4
CACHED_FILES = 12
_LICENCE_NAMES = ("licen", "copying", "notice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """What was laid out.

    Attributes:
        names: of the distributions, as `name-version`.
        places: directory that the RECORD of each is relative to.
        hashed: how many files their RECORDs vouch for.
        unhashed: how many lines of their RECORDs have no hash.
        stale: cache directories whose sources are gone or changed, as paths below the workspace.
        kept: cache directories that belong to a source.
        canary: the token in `.env`.
    """

    names: tuple[str, ...]
    places: dict[str, str]
    hashed: int
    unhashed: int
    stale: tuple[str, ...]
    kept: tuple[str, ...]
    canary: str


def lay_out(root: Path) -> Input:
    """Make the workspace of the inventory agent at `root`, from the environment of this interpreter."""
    root.mkdir()
    for name in ("agent.py", "software.py"):
        shutil.copyfile(AGENT / name, root / name)
    canary = f"rf-canary-{secrets.token_hex(16)}"
    env = root / ".env"
    env.write_text(f"RELEASE_TOKEN={canary}\n", encoding="utf-8")
    env.chmod(0o600)
    found = dict(sorted(_distributions()))
    hashed = unhashed = 0
    for name, distribution in found.items():
        _copy_metadata(distribution, root / "dists" / name)
        lines = {
            line[0]: line[1]
            for line in csv.reader((distribution.read_text("RECORD") or "").splitlines())
            if line
        }
        hashed += sum(bool(value) for value in lines.values())
        unhashed += sum(not value for value in lines.values())
    stale, kept = _copy_caches(found, root)
    places = {name: str(distribution.locate_file("")) for name, distribution in found.items()}
    return Input(
        names=tuple(found),
        places=places,
        hashed=hashed,
        unhashed=unhashed,
        stale=stale,
        kept=kept,
        canary=canary,
    )


def render_template(name: str, target: Path, url: str) -> Path:
    """Copy a file of the example with the desk's real address in it."""
    text = (AGENT / name).read_text(encoding="utf-8")
    target.write_text(text.replace(EXAMPLE_URL, url), encoding="utf-8")
    return target


def _distributions() -> Iterator[tuple[str, importlib.metadata.Distribution]]:
    """Distributions of this interpreter's own environment that have a RECORD; sandboxes see these directories too."""
    places = {str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("purelib", "platlib")}
    for distribution in importlib.metadata.distributions(path=sorted(places)):
        name = distribution.metadata["Name"]
        if name and distribution.read_text("RECORD") and distribution.read_text("METADATA"):
            yield f"{name}-{distribution.version}", distribution


def _copy_metadata(distribution: importlib.metadata.Distribution, target: Path) -> None:
    """METADATA and RECORD as they are, licence files by a running number and their name."""
    licences = target / "licences"
    licences.mkdir(parents=True)
    for name in ("METADATA", "RECORD"):
        (target / name).write_text(distribution.read_text(name) or "", encoding="utf-8")
    files = [
        file
        for file in distribution.files or ()
        if ".dist-info" in file.parts[0] and file.name.lower().startswith(_LICENCE_NAMES)
    ]
    for number, file in enumerate(sorted(files, key=str)):
        source = Path(str(file.locate()))
        if source.is_file():
            shutil.copy(source, licences / f"{number:02d}-{file.name}")


def _copy_caches(
    found: dict[str, importlib.metadata.Distribution], root: Path
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compiled files of a few distributions: beside their sources, beside a changed source, or alone.

    Returns:
        The stale cache directories and the current ones.
    """
    stale: list[str] = []
    kept: list[str] = []
    packages = [pair for pair in map(_modules, found.items()) if pair[1]][:CACHED_DISTRIBUTIONS]
    for number, (name, modules) in enumerate(packages):
        folder = root / "caches" / name
        for source in modules:
            copy = folder / source.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
            # A time in whole seconds travels through an archive unchanged.
            seconds = int(source.stat().st_mtime)
            os.utime(copy, (seconds, seconds))
            py_compile.compile(
                str(copy), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP
            )
            if number == 1:
                copy.unlink()  # its source is gone
            elif number > 1:
                copy.write_bytes(copy.read_bytes() + b"# changed since it was compiled\n")
        cache = f"caches/{name}/__pycache__"
        (stale if number else kept).append(cache)
    _leave_odd_things(root, stale)
    return tuple(stale), tuple(kept)


def _modules(pair: tuple[str, importlib.metadata.Distribution]) -> tuple[str, list[Path]]:
    """The first modules of one package of a distribution."""
    name, distribution = pair
    files = [
        Path(str(file.locate()))
        for file in distribution.files or ()
        if file.suffix == ".py" and len(file.parts) == 2  # noqa: PLR2004 - package and module
    ]
    first = files[0].parent if files else None
    return name, [file for file in files if file.parent == first and file.is_file()][:CACHED_FILES]


def _leave_odd_things(root: Path, stale: list[str]) -> None:
    """What a rollback easily loses: an empty directory, a link, modes that are not the usual ones."""
    folder = root / stale[0]
    (folder / "empty").mkdir(mode=0o700)
    (folder / "newest.pyc").symlink_to(min(folder.glob("*.pyc")).name)
    tool = folder / "rebuild.sh"
    tool.write_text("#!/bin/sh\nexec python -m compileall ..\n", encoding="utf-8")
    tool.chmod(0o751)
