"""The process of `peer_agent.py`, as its own people see it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.kernels import eventually
from support.signed import free_port

AGENT = Path(__file__).parent / "peer_agent.py"
CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  a2a:
    listen: "127.0.0.1:{door}"
    clients: {{home: {{key: {{secret: home-key}}, agents: ["clerk-*"]}}}}
    push: ["http://127.0.0.1:{peer}/told"]
  resources:
    oracle:
      type: a2a
      url: "http://127.0.0.1:{peer}/oracle"
      auth: {{bearer: {{secret: oracle-token}}}}
      environment: staging
      timeout: 3s
    rest: {{type: a2a, url: "http://127.0.0.1:{peer}/rest", skills: [lookup], repeat: true, trusted: true}}
    moved: {{type: a2a, url: "http://127.0.0.1:{peer}/moved"}}
    old: {{type: a2a, url: "http://127.0.0.1:{peer}/old"}}
    vault: {{type: http, base: "http://127.0.0.1:{peer}", auth: {{bearer: {{secret: vault-token}}}}}}
    nowhere: {{type: a2a, url: "http://127.0.0.1:9", timeout: 2s}}
    clerk: {{type: a2a, url: "http://127.0.0.1:{door}/agents/clerk-1", auth: {{bearer: {{secret: home-key}}}}, repeat: true}}
"""
"""The kernel file of tests: a door of its own, and agents elsewhere."""


class Oracle:
    """The agent elsewhere, as its own people see it."""

    def __init__(self, place: Path) -> None:
        self.place, self.port = place, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [sys.executable, str(AGENT), str(self.place), str(self.port)]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(self._listens, "it never listened")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def heard(self, word: str) -> list[dict[str, Any]]:
        """Messages that begin with a word."""
        file = self.place / "deliveries"
        lines = file.read_text().splitlines() if file.exists() else []
        said = [json.loads(line) for line in lines]
        return [one for one in said if one["parts"][0].get("text", "").partition(" ")[0] == word]

    def told(self) -> list[dict[str, Any]]:
        """What it was told of tasks of others."""
        file = self.place / "told"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
