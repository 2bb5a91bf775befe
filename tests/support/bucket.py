"""A bucket of an S3-compatible server that runs beside the test: nanio (HTTP, signed requests, objects as files), or another one.

`RINGFENCE_TEST_S3` is the command of another server, with `{port}`, `{root}` for its files and a bucket `shelf`; the credentials that it takes are in
`RINGFENCE_TEST_S3_KEY` and `RINGFENCE_TEST_S3_SECRET`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ringfence.sandbox.depot import Depot
from ringfence.sandbox.depot_s3 import BucketDepot
from support.kernels import eventually

KEY = os.environ.get("RINGFENCE_TEST_S3_KEY", "AKTESTRINGFENCE")
SECRET = os.environ.get("RINGFENCE_TEST_S3_SECRET", "a-secret-of-the-tests-alone")
NANIO = f"{shlex.quote(sys.executable)} -m nanio serve --data-dir {{root}} --host 127.0.0.1 --port {{port}} --no-access-log"
_PREFIXES = itertools.count()


@dataclass
class Bucket:
    """A server with one bucket.

    Attributes:
        prefix: of what this test keeps in it.
        url: as `--store` takes it.
        env: what a kernel needs to sign with.
    """

    root: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    prefix: str = "rf"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://shelf/{self.prefix}?endpoint={self.endpoint}&region=us-east-1"

    @property
    def env(self) -> dict[str, str]:
        keys = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return {**keys, "RINGFENCE_STORE": self.url}

    def emptied(self) -> Bucket:
        """The same server, with nothing beneath the prefix."""
        self.prefix = f"rf-{next(_PREFIXES)}"
        return self

    def depot(self, monkeypatch: pytest.MonkeyPatch) -> Depot:
        """What lies in it, beside the kernel's own connection."""
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        return BucketDepot("shelf", self.prefix, endpoint=self.endpoint, region="us-east-1")

    def start(self) -> None:
        """Start the server, or start it again on the same port and files."""
        env = {**os.environ, "NANIO_ACCESS_KEY": KEY, "NANIO_SECRET_KEY": SECRET}
        words = shlex.split(os.environ.get("RINGFENCE_TEST_S3", NANIO).format(port=self.port, root=self.root))
        with (self.root.parent / "bucket.log").open("ab") as log:
            self.process = subprocess.Popen(
                words,
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
