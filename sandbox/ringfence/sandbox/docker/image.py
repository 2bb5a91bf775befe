"""Makes the base image without a registry: an archive that an engine loads. The same files make the same image."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ringfence.sandbox.docker.engine import Engine, EngineError
from ringfence.sandbox.docker.image_files import Entry, collect, machine_name
from ringfence.sandbox.types import SandboxError

TAG = "ringfence-base:latest"
"""The base image's name on the engine; what runs is named by its digest."""

LABEL = "io.ringfence.image"
_EPOCH = "1970-01-01T00:00:00Z"
_ENV = ("PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An image archive.

    Attributes:
        digest: `sha256:…` of the image's configuration, by which engines know it.
        files: how many paths it holds.
        size_bytes: of its one layer.
    """

    digest: str
    files: int
    size_bytes: int


def build(archive: BinaryIO, tag: str, more: Sequence[Path] = ()) -> Built:
    """Write the base image as an archive for `load`.

    Args:
        archive: an empty file, open for writing and seeking; is left at its beginning.
        tag: name the engine gives the image.
        more: further files and directories of this host for it.

    Raises:
        SandboxError: something that is needed isn't there.
        OSError: a file can't be read or written.
    """
    entries = collect(more)
    layer_name = "layer.tar"
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as outer:
        # The layer's length and digest are known only when it has been written, and then its header is.
        start = archive.tell()
        _header(archive, layer_name, 0)
        layer = _Hashed(archive)
        _write_layer(layer, entries)
        end = archive.tell()
        archive.seek(start)
        _header(archive, layer_name, layer.length)
        archive.seek(end)
        archive.write(bytes(-layer.length % tarfile.BLOCKSIZE))
        outer.offset = archive.tell()
        config = _config(f"sha256:{layer.digest.hexdigest()}")
        digest = hashlib.sha256(config).hexdigest()
        manifest: list[dict[str, Any]] = [
            {"Config": f"{digest}.json", "RepoTags": [tag], "Layers": [layer_name]}
        ]
        for name, data in ((f"{digest}.json", config), ("manifest.json", json.dumps(manifest).encode())):
            outer.addfile(_info(name, Entry(mode=0o644), len(data)), io.BytesIO(data))
    archive.seek(0)
    return Built(digest=f"sha256:{digest}", files=len(entries), size_bytes=layer.length)


class _Hashed(io.RawIOBase):
    """Passes on what is written, and counts and hashes it."""

    def __init__(self, target: BinaryIO) -> None:
        self._target = target
        self.length = 0
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._target.write(data)
        self.digest.update(data)
        self.length += len(data)
        return len(data)


def _write_layer(target: _Hashed, entries: Mapping[str, Entry]) -> None:
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.GNU_FORMAT) as layer:
        for name in sorted(entries):
            entry = entries[name]
            if entry.source is not None:
                with entry.source.open("rb") as file:
                    layer.addfile(_info(name, entry, entry.source.stat().st_size), file)
            elif entry.data is not None:
                layer.addfile(_info(name, entry, len(entry.data)), io.BytesIO(entry.data))
            elif entry.target is not None:
                info = _info(name, entry, 0)
                info.type, info.linkname = tarfile.SYMTYPE, entry.target
                layer.addfile(info)
            else:
                info = _info(name, entry, 0)
                info.type = tarfile.DIRTYPE
                layer.addfile(info)


def _info(name: str, entry: Entry, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mode, info.size, info.mtime = entry.mode, size, 0
    return info


def _header(archive: BinaryIO, name: str, size: int) -> None:
    archive.write(_info(name, Entry(mode=0o644), size).tobuf(tarfile.GNU_FORMAT))


def _config(layer: str) -> bytes:
    document = {
        "architecture": machine_name(),
        "os": "linux",
        "created": _EPOCH,
        "config": {"Env": list(_ENV), "Cmd": ["python3"], "Labels": {LABEL: "base"}},
        "rootfs": {"type": "layers", "diff_ids": [layer]},
        "history": [{"created": _EPOCH, "created_by": "ringfence image build"}],
    }
    return json.dumps(document, sort_keys=True).encode()


def load(engine: Engine, archive: BinaryIO, tag: str) -> str:
    """Hand an archive to the engine. Blocks.

    Returns:
        The digest by which the engine knows the image.

    Raises:
        SandboxError: the engine refuses or can't be reached.
    """
    for line in engine.ask(lambda api: list(api.load_image(archive, quiet=True)), slow=True):
        if "error" in line:
            raise SandboxError(
                f"the docker engine can't load the image: {line['error']}; look at its free disk space"
            )
    return find(engine, tag)


def find(engine: Engine, tag: str) -> str:
    """The digest of a tagged image on the engine; empty: there is none. Blocks.

    Raises:
        SandboxError: the engine can't be reached.
    """
    try:
        return str(engine.ask(lambda api: api.inspect_image(tag))["Id"])
    except EngineError as error:
        if error.not_found:
            return ""
        raise
