"""What the docker backend keeps in a kernel's data directory: who owns containers, and the small files it shows inside."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from ringfence.sandbox.docker import inside
from ringfence.sandbox.docker.compiled import compiled

LABEL_DATA = "io.ringfence.data"
LABEL_KERNEL = "io.ringfence.kernel"
LABEL_BOOT = "io.ringfence.boot"
LABEL_AGENT = "io.ringfence.agent"
LABEL_KIND = "io.ringfence.kind"

START_DIR = "/run/start"
"""Where a container sees the directory of its link."""

START_MODULE, LINK_NAME = "start", "link"
_FENCED = ".over"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Places:
    """The backend's part of one data directory.

    Args:
        data_dir: the kernel's data directory.
    """

    def __init__(self, data_dir: Path) -> None:
        self._top = data_dir / "sandboxes" / "docker"
        self._owner = self._top / "owner"
        self._engines = self._top / "engines"
        self.kernel = uuid.uuid4().hex

    def used(self) -> bool:
        """Whether a kernel of this data directory ever made a container."""
        return self._owner.exists()

    def prepare(self) -> None:
        """Make what every sandbox needs.

        Raises:
            OSError: the data directory can't be written.
        """
        for directory in (self._top.parent, self._top):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in ("etc", "mask", "links", "nothing"):
            (self._top / directory).mkdir(mode=0o755, exist_ok=True)
        if not self._owner.exists():
            # Several threads may be here at once.
            fresh = self._owner.with_suffix(f".{uuid.uuid4().hex}")
            with fresh.open("w", encoding="ascii") as file:
                file.write(uuid.uuid4().hex)
                file.flush()
                # INVARIANT: the identity is on disk before the first container carries it.
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(fresh, self._owner)
            fresh.unlink()
        file_mask, directory_mask = self.masks()
        with contextlib.suppress(FileExistsError):
            os.close(os.open(file_mask, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0))
        with contextlib.suppress(FileExistsError):
            directory_mask.mkdir(mode=0)

    def remember(self, host: str) -> None:
        """Keep which engine is used, for a later kernel that ends what is left there."""
        if host not in self.engines():
            fresh = self._engines.with_suffix(f".{uuid.uuid4().hex}")
            with fresh.open("w", encoding="utf-8") as file:
                file.write("".join(f"{one}\n" for one in (*self.engines(), host)))
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._engines)

    def engines(self) -> list[str]:
        """All engines that were ever used."""
        try:
            return self._engines.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []

    def labels(self, agent: str, kind: str) -> dict[str, str]:
        """What everything that is made for an agent carries, so that a later kernel finds it."""
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
        return {
            LABEL_DATA: self.data(),
            LABEL_KERNEL: self.kernel,
            LABEL_BOOT: boot,
            LABEL_AGENT: agent,
            LABEL_KIND: kind,
        }

    def data(self) -> str:
        """Who this data directory is to the engine. A copy of it is another one, and so is one of another user."""
        identity = f"{self._owner.read_text(encoding='ascii')}\n{self._top.resolve()}\n{os.geteuid()}"
        return hashlib.sha256(identity.encode()).hexdigest()[:32]

    def masks(self) -> tuple[Path, Path]:
        """A file and a directory that nobody but root may read, to lay over what is hidden."""
        return self._top / "mask" / "file", self._top / "mask" / "directory"

    def nothing(self) -> Path:
        """A directory with nothing in it."""
        return self._top / "nothing"

    def etc(self, uid: int) -> list[tuple[Path, str]]:
        """Files of `/etc` as a user finds them: itself, and no name server of this host."""
        texts = {
            "passwd": f"agent:x:{uid}:{uid}::/tmp:/bin/sh\n",
            "group": f"agent:x:{uid}:\n",
            "hosts": "127.0.0.1 localhost sandbox\n",
            "hostname": "sandbox\n",
            "resolv.conf": "",
        }
        found: list[tuple[Path, str]] = []
        for name, text in texts.items():
            path = self._top / "etc" / (f"{name}-{uid}" if str(uid) in text else name)
            if not path.exists():
                fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
                fresh.write_text(text)
                fresh.chmod(0o444)
                fresh.replace(path)
            found.append((path, f"/etc/{name}"))
        return found

    def link(self, name: str, host: str) -> Path:
        """A fresh directory for the link with one container's first process, and the program of that process.

        Its name tells a later kernel which container of which engine this one was about to make.
        """
        directory = self._link(name, host)
        directory.mkdir(mode=0o755)
        directory.chmod(0o755)
        for place, data in _program().items():
            path = directory / place
            if path.parent != directory:
                path.parent.mkdir(mode=0o755)
                path.parent.chmod(0o755)
            path.write_bytes(data)
            path.chmod(0o444)
        return directory

    def forget_link(self, name: str, host: str) -> None:
        """Remove it again."""
        shutil.rmtree(self._link(name, host), ignore_errors=True)

    def fence(self, host: str) -> Sequence[str]:
        """Put the directories of kernels that are no more out of an engine's reach.

        Returns:
            The names of the launches on it that they died in.
        """
        left = self._left(host)
        for path in left:
            if not path.name.endswith(_FENCED):
                path.rename(path.with_name(path.name + _FENCED))
        return [path.name.removesuffix(_FENCED).split("-")[1] for path in left]

    def forget_links(self, host: str) -> None:
        """Remove those of kernels that are no more."""
        for path in self._left(host):
            shutil.rmtree(path, ignore_errors=True)

    def _link(self, name: str, host: str) -> Path:
        return self._top / "links" / f"{self.kernel}-{name}-{_key(host)}"

    def _left(self, host: str) -> list[Path]:
        others = {_key(one) for one in self.engines()} - {_key(host)}
        found = [path for path in (self._top / "links").glob("*-*") if not path.name.startswith(self.kernel)]
        return [path for path in found if path.name.removesuffix(_FENCED).split("-")[-1] not in others]


def container_name(launch: str) -> str:
    """What the container of a launch is called on its engine."""
    return f"ringfence-{launch}"


def _key(host: str) -> str:
    return hashlib.sha256(host.encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def _program() -> dict[str, bytes]:
    """The program of a first process by its names, with what spares an interpreter of this version to compile it."""
    source = Path(inside.__file__).read_bytes()
    place, data = compiled(source, f"{START_DIR}/{START_MODULE}.py")
    return {f"{START_MODULE}.py": source, str(Path(place).relative_to(START_DIR)): data}
