"""A program in a container asks models through the gateway on its loopback, and reaches nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines import base_image
from support.kernels import KernelProcess, eventually
from support.scenes import Scene, short_directory
from support.vendors import VendorHost

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(300)]

PROGRAMS = Path(__file__).parent / "doors"
CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  sandbox: {{docker: {{image: "{image}"}}}}
  resources: {{openai: {{type: llm, base: "{base}", models: ["gpt-*"]}}}}
"""
MORE = "sandbox: {backend: docker, doors: [models]}\nrestart: {policy: never}"
WALLS = """
import socket
for family, kind, protocol in ((2, 1, 0), (2, 2, 0), (2, 3, 1), (10, 1, 0), (16, 3, 0), (2, 1, 262)):
    try:
        socket.socket(family, kind, protocol).close()
        print("made", flush=True)
    except OSError:
        print("refused", flush=True)
for host in ("127.0.0.1", "10.0.0.1", "1.1.1.1"):
    try:
        socket.create_connection((host, 443), timeout=5)
        print("reached")
    except OSError:
        print("refused")
"""


@pytest.fixture
def host() -> Iterator[VendorHost]:
    host = VendorHost()
    yield host
    host.close()


def test_a_container_has_doors_and_no_network(host: VendorHost) -> None:
    with short_directory() as place:
        kernel = KernelProcess(place / "d", config=CONFIG.format(image=base_image(), base=host.base))
        kernel.start()
        try:
            scene = Scene(kernel)
            rules, program = ('llm.complete: "gpt-*"',), (PROGRAMS / "raw.py").read_text()
            agent = scene.submit(program, allow=rules, more=MORE, input_bytes=b"a ~b")
            eventually(lambda: scene.show(agent)["state"] in ("done", "failed"), "it does not end")
            said = scene.said(agent)
            assert said == [["a", 200, "Good day."], ["b", "Good "], ["b", "day."], ["b", None]], (
                scene.output(agent, stderr=True),
                scene.show(agent)["error"],
            )
            walls = scene.run(WALLS, more=MORE)
            assert scene.output(walls).split() == ["made"] + ["refused"] * 8
        finally:
            kernel.stop()
