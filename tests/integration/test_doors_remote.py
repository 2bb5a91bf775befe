"""A program on a sandbox host elsewhere asks models through the gateway on its loopback, and reaches nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.kernel.environment import interpreter_directories
from support import elsewhere
from support.cable import Cable, cable_to
from support.kernels import eventually
from support.model import Turn
from support.scenes import Scene, scene_of_its_own
from support.vendors import VendorHost

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(240)]

PROGRAMS = Path(__file__).parent / "doors"
CONFIG = """apiVersion: ringfence/v1
kind: Kernel
spec:
  sandbox: {{backend: remote, remote: {{address: "{address}", certs: {certs}}}}}
  resources: {{openai: {{type: llm, base: "{base}", models: ["gpt-*"]}}}}
"""
RULES = ('llm.complete: "gpt-*"', 'fs.read: "/workspace/**"')
MORE = "sandbox: {doors: [models, mcp]}\nrestart: {policy: never}"
WALLS = """
import os, socket
for family, kind, protocol in ((2, 1, 0), (2, 2, 0), (2, 3, 1), (10, 1, 0), (16, 3, 0), (2, 1, 262)):
    try:
        socket.socket(family, kind, protocol).close()
        print("made")
    except OSError:
        print("refused")
for host in ("127.0.0.1", "10.0.0.1", "1.1.1.1"):
    try:
        socket.create_connection((host, 443), timeout=5)
        print("reached")
    except OSError:
        print("refused")
print(*os.listdir("/run/ringfence"))
"""
TOOLS = """
import json, os, urllib.request
headers = {
    "Authorization": "Bearer " + os.environ["RINGFENCE_TOKEN"], "Content-Type": "application/json",
    "Accept": "application/json, text/event-stream",
}
hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
ask = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
request = urllib.request.Request(os.environ["RINGFENCE_MCP_URL"], json.dumps(ask).encode(), headers)
print("serverInfo" in urllib.request.urlopen(request).read().decode())
"""


@pytest.fixture(scope="module")
def host() -> Iterator[VendorHost]:
    host = VendorHost()
    yield host
    host.close()


@pytest.fixture(scope="module")
def far(
    postgres_server: Any, template_database: str, tmp_path_factory: Any, host: VendorHost
) -> Iterator[tuple[Scene, Cable]]:
    place = tmp_path_factory.mktemp("elsewhere")
    with (
        elsewhere.running(place, lease="30s", provide=interpreter_directories()) as machine,
        cable_to(machine.address) as cable,
    ):
        config = CONFIG.format(address=cable.address, certs=machine.certs, base=host.base)
        with scene_of_its_own(postgres_server, template_database, config=config) as scene:
            yield scene, cable


def test_a_program_elsewhere_has_doors_and_no_network(far: tuple[Scene, Cable], host: VendorHost) -> None:
    scene, _ = far
    host.script()
    agent = scene.run((PROGRAMS / "raw.py").read_text(), allow=RULES, more=MORE, input_bytes=b"a ~b")
    assert scene.said(agent) == [["a", 200, "Good day."], ["b", "Good "], ["b", "day."], ["b", None]]
    walls = scene.run(WALLS, more=MORE)
    assert scene.output(walls).split() == ["made"] + ["refused"] * 8 + ["syscall.sock"]
    assert scene.output(scene.run(TOOLS, allow=RULES, more=MORE)) == "True\n"
    # Nothing is left of their doors, by which anybody would find them.
    assert not list(scene.kernel.data.parent.rglob("doors-*"))


def test_a_reply_comes_over_a_cut_cable(far: tuple[Scene, Cable], host: VendorHost) -> None:
    scene, cable = far
    host.script(Turn(words=("At ", "last."), hold=True))
    agent = scene.submit((PROGRAMS / "raw.py").read_text(), allow=RULES, more=MORE, input_bytes=b"a")
    eventually(host.holding.is_set, "nothing is asked")
    cable.cut()
    host.go.set()
    scene.await_end(agent)
    assert scene.said(agent) == [["a", 200, "At last."]]
    assert len(host.asked) == 1
    assert scene.show(agent)["restarts"] == 0
