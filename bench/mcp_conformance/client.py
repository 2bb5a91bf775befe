"""What the suite starts as the client under test: asks the harness, which has an agent of a real kernel do it. Standard library alone."""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as harness:
    harness.connect(sys.argv[1])
    words = {
        "scenario": os.environ["MCP_CONFORMANCE_SCENARIO"],
        "url": sys.argv[2],
        "context": json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}")),
    }
    harness.sendall(json.dumps(words).encode() + b"\n")
    said = json.loads(harness.makefile().readline())
print(said["text"])
sys.exit(said["status"])
