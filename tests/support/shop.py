"""A declared MCP server for tests, as somebody else sees it, and the kernel file that declares it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.kernels import eventually

SERVER = Path(__file__).with_name("tool_server.py")
TOKEN = "the-token-of-the-shop-0815"
CANARY = "canary-of-the-kernels-environment-4711"
CANARIES = ("DB_URL", "LLM_KEY")
CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    shop:
      type: mcp
      url: "http://127.0.0.1:{port}/mcp"
      auth: {{bearer: {{secret: shop-token}}}}
      environment: staging
      timeout: {timeout}
      tools:
        peek: {{effect: read, subject: /item}}
        pay: {{key: {{argument: key}}}}
    till:
      type: mcp
      command: [python, tool_server.py, stdio, /tmp]
      files: {files}
      env: {{TILL_TOKEN: {{secret: shop-token}}, REGION: eu}}
      sandbox: {{memory: 256Mi, pids: 32}}
    broken: {{type: mcp, command: [no-such-program]}}
    nowhere: {{type: mcp, url: "http://127.0.0.1:9/mcp", timeout: 2s}}
"""


class Shop:
    """The server as somebody else sees it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [sys.executable, str(SERVER), "http", str(self.place), str(self.port)]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(self._listens, "the server never listened")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def deliveries(self, tool: str) -> list[dict[str, Any]]:
        file = self.place / "deliveries"
        lines = file.read_text().splitlines() if file.exists() else []
        return [one for one in map(json.loads, lines) if one["tool"] == tool]
