"""The conformance suite of the Model Context Protocol, run in a sandbox against a kernel: `python -m bench.mcp_conformance DIR`."""
