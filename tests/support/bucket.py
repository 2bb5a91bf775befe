"""A bucket of an S3-compatible server (nanio: HTTP, signed requests, objects as files) that runs beside the test."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.kernels import eventually

KEY, SECRET = "AKTESTRINGFENCE", "a-secret-of-the-tests-alone"


@dataclass
class Bucket:
    """A server with one bucket. Its files lie under `objects`.

    Attributes:
        url: as `--store` takes it.
        env: what a kernel needs to sign with.
    """

    root: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://shelf/rf?endpoint={self.endpoint}&region=us-east-1"

    @property
    def env(self) -> dict[str, str]:
        keys = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return {**keys, "RINGFENCE_STORE": self.url}

    @property
    def objects(self) -> Path:
        return self.root / "shelf" / "rf"

    def start(self) -> None:
        """Start the server, or start it again on the same port and files."""
        env = {**os.environ, "NANIO_ACCESS_KEY": KEY, "NANIO_SECRET_KEY": SECRET}
        words = [
            "--data-dir",
            str(self.root),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--no-access-log",
        ]
        with (self.root.parent / "bucket.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nanio", "serve", *words],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        eventually(self._listens, "the bucket's server does not listen")

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def stop(self) -> None:
        """End the server; the objects stay."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def a_bucket(directory: Path) -> Iterator[Bucket]:
    """A started server; nothing of it runs afterwards."""
    root = directory / "buckets"
    (root / "shelf").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    bucket = Bucket(root, port)
    bucket.start()
    try:
        yield bucket
    finally:
        bucket.stop()
