"""A sandbox host and its data directory."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from ringfence.sandbox.remote import issue
from ringfence.sandbox.remote.host import HostSettings, SandboxHost
from ringfence.sandbox.types import SandboxError


def _listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


async def test_a_data_directory_is_one_host_s_at_a_time(tmp_path: Path) -> None:
    issue.make_authority(tmp_path / "ca")
    issue.issue(tmp_path / "ca", tmp_path / "certs", "host", "sandbox-host", peers=("kernel",), days=1)
    settings = HostSettings(data=tmp_path / "data", certs=tmp_path / "certs")
    with _listener() as one, _listener() as other:
        started = asyncio.Event()
        first = asyncio.create_task(SandboxHost(settings).serve(one, started.set))
        await started.wait()
        with pytest.raises(SandboxError, match="in use by another sandbox host; stop it, or choose another"):
            await SandboxHost(settings).serve(other, lambda: None)
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        started.clear()
        second = asyncio.create_task(SandboxHost(settings).serve(other, started.set))
        await started.wait()
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
