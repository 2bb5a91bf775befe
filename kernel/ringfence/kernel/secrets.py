"""Secrets of the operator: one private file each, read by the kernel and never shown."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

MAX_BYTES = 64 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_OTHERS = 0o077


class SecretsError(Exception):
    """A secret can't be kept or read. `str()` is one line; it never holds a value."""


class BadSecret(SecretsError):
    """The name or the value can't be one of a secret."""


class NoSuchSecret(SecretsError):
    """There is none of that name."""


class Secrets:
    """A directory of secrets. Values pass through `set` and `get` only; nothing else shows or logs them.

    Args:
        root: the directory, created with mode 0700 at the first `set`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def __repr__(self) -> str:
        return f"Secrets({str(self._root)!r})"

    def set(self, name: str, value: bytes) -> None:
        """Keeps a value under a name, in place of an older one. When it returns the value is on disk.

        Raises:
            SecretsError: the name or the size is not allowed, or the directory can't be used.
        """
        path = self._path(name)
        if not value:
            raise BadSecret(
                f"the value of secret `{name}` is empty: give one, or remove it with `secrets rm`"
            )
        if len(value) > MAX_BYTES:
            raise BadSecret(f"the value of secret `{name}` has {len(value)} bytes: at most {MAX_BYTES} fit")
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_directory()
            handle, temporary = tempfile.mkstemp(prefix=".", dir=self._root)  # mode 0600
            try:
                with os.fdopen(handle, "wb") as output:
                    output.write(value)
                    output.flush()
                    os.fsync(output.fileno())
                Path(temporary).replace(path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
            self._fsync()
        except OSError as error:
            raise SecretsError(f"secret `{name}` can't be kept in `{self._root}`: {_why(error)}") from None

    def get(self, name: str) -> bytes:
        """Reads a value.

        Raises:
            SecretsError: there is none of that name, or others could read or change it.
        """
        path = self._path(name)
        try:
            self._check_directory()
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise NoSuchSecret(f"there is no secret `{name}`; see: ringfence secrets ls") from None
        except OSError as error:
            raise SecretsError(f"secret `{name}` can't be read: {_why(error)}") from None
        with os.fdopen(handle, "rb") as source:
            facts = os.fstat(source.fileno())
            if not stat.S_ISREG(facts.st_mode) or facts.st_mode & _OTHERS or not _ours(facts):
                raise SecretsError(
                    f"secret `{name}` is open to other users: set it anew, after a look at who read `{path}`"
                )
            return source.read(MAX_BYTES)

    def list(self) -> list[str]:
        """The names, sorted.

        Raises:
            SecretsError: the directory can't be read.
        """
        try:
            return sorted(path.name for path in self._root.iterdir() if _NAME.fullmatch(path.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SecretsError(f"`{self._root}` can't be read: {_why(error)}") from None

    def remove(self, name: str) -> None:
        """Forgets a secret.

        Raises:
            SecretsError: there is none of that name, or it can't be removed.
        """
        try:
            self._path(name).unlink()
            self._fsync()
        except FileNotFoundError:
            raise NoSuchSecret(f"there is no secret `{name}`; see: ringfence secrets ls") from None
        except OSError as error:
            raise SecretsError(f"secret `{name}` can't be removed: {_why(error)}") from None

    def _path(self, name: str) -> Path:
        if _NAME.fullmatch(name) is None:
            raise BadSecret(
                "a secret's name has letters, digits, `-` and `_`, starts with a letter or digit, "
                "and has at most 64 characters"
            )
        return self._root / name

    def _check_directory(self) -> None:
        facts = self._root.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_mode & _OTHERS or not _ours(facts):
            raise SecretsError(f"`{self._root}` is open to other users: `chmod 700` it and make it yours")

    def _fsync(self) -> None:
        handle = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _ours(facts: os.stat_result) -> bool:
    return facts.st_uid == os.geteuid()


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
