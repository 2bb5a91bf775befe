from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ringfence.kernel.journal.blobs import CHUNK, BlobError, Blobs

if TYPE_CHECKING:
    from pathlib import Path


def noise(seed: int, size: int) -> bytes:
    """Bytes that don't compress, the same each time."""
    return hashlib.shake_128(str(seed).encode()).digest(size)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


@pytest.fixture
def blobs(tmp_path):
    return Blobs(tmp_path / "artifacts")


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17])
def test_what_was_put_comes_back_under_its_hash(blobs, size):
    data = noise(size, size)
    ref = blobs.put(data)
    assert ref == hashlib.sha256(data).hexdigest()
    assert blobs.get(ref) == data


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=4096))
def test_any_bytes_come_back(blobs, data):
    assert blobs.get(blobs.put(data)) == data


def test_equal_bytes_are_kept_once_and_compressed(blobs, tmp_path):
    text = b"the same line\n" * 100_000
    assert blobs.put(text) == blobs.put(text)
    kept = files(tmp_path)
    assert len(kept) == 1
    assert kept[0].stat().st_size < len(text) / 20


def test_only_its_owner_can_read_it(blobs, tmp_path):
    blobs.put(b"private")
    for path in (tmp_path / "artifacts").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_file_is_kept_in_bounded_memory(tmp_path):
    """A process that may use little memory beyond its start keeps 100 MB."""
    source = tmp_path / "big"
    block = noise(1, CHUNK)
    digest = hashlib.sha256()
    with source.open("wb") as output:
        for _ in range(100):
            output.write(block)
            digest.update(block)
    code = (
        "import resource, sys; from pathlib import Path; from ringfence.kernel.journal.blobs import Blobs\n"
        "blobs = Blobs(Path(sys.argv[1])); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(blobs.put_file(Path(sys.argv[2])))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "artifacts"), str(source)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    ref, grown_kib = done.stdout.split()
    assert ref == digest.hexdigest()
    assert int(grown_kib) < 30 * 1024
    assert Blobs(tmp_path / "artifacts").has(ref)


@pytest.mark.parametrize("harm", ["flip", "truncate", "append", "empty"])
def test_changed_bytes_are_refused(blobs, tmp_path, harm):
    data = noise(5, 5000)
    ref = blobs.put(data)
    (path,) = files(tmp_path)
    stored = bytearray(path.read_bytes())
    if harm == "flip":
        stored[len(stored) // 2] ^= 1
    changed = {
        "flip": bytes(stored),
        "truncate": bytes(stored[:-10]),
        "append": bytes(stored) + b"x",
        "empty": b"",
    }
    path.write_bytes(changed[harm])
    with pytest.raises(BlobError, match="has changed on disk"):
        blobs.get(ref)
    assert not blobs.has(ref)
    assert blobs.put(data) == ref
    assert blobs.get(ref) == data


@pytest.mark.parametrize("ref", ["", "x", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n", "/" * 64])
def test_what_is_no_reference_is_refused(blobs, ref):
    with pytest.raises(BlobError, match="not the reference"):
        blobs.get(ref)


def test_a_missing_artifact_is_named(blobs):
    with pytest.raises(BlobError, match=f"artifact `{'0' * 64}` can't be read: .* does not exist"):
        blobs.get("0" * 64)


def test_a_missing_file_is_named(blobs, tmp_path):
    with pytest.raises(BlobError, match=r"`.*nothing` can't be kept as an artifact: .* does not exist"):
        blobs.put_file(tmp_path / "nothing")


def test_a_failed_write_keeps_nothing(tmp_path):
    """A process that may write files of 64 KiB only fails to keep more, and leaves no file behind."""
    root = tmp_path / "artifacts"
    code = (
        "import os, resource, signal, sys; from pathlib import Path\n"
        "from ringfence.kernel.journal.blobs import Blobs, BlobError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); blobs = Blobs(Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "try: blobs.put(os.urandom(1 << 20))\n"
        "except BlobError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root)], check=True, capture_output=True, text=True)
    assert "an artifact can't be kept: file too large" in done.stdout
    assert files(root) == []


def test_many_threads_put_the_same_and_other_bytes(blobs):
    pieces = [noise(n % 7, 20_000) for n in range(56)]
    refs: list[str] = [""] * len(pieces)

    def put(start: int) -> None:
        for n in range(start, len(pieces), 8):
            refs[n] = blobs.put(pieces[n])

    threads = [threading.Thread(target=put, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [blobs.get(ref) for ref in refs] == pieces


def test_only_abandoned_halves_are_removed_at_the_next_start(blobs, tmp_path):
    fresh = tmp_path / "artifacts" / "fresh"
    old, young = fresh / "old", fresh / "young"
    for path in (old, young):
        path.write_bytes(b"half")
    long_ago = time.time() - 7200
    os.utime(old, (long_ago, long_ago))
    Blobs(tmp_path / "artifacts")
    assert not old.exists()
    assert young.exists()


def test_a_directory_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BlobError, match="the artifact store can't be opened"):
        Blobs(tmp_path / "file" / "artifacts")
