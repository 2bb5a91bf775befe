"""gRPC as this package uses it. The library's stubs lag behind it, so it is untyped here, and nowhere else."""

from __future__ import annotations

import importlib
from typing import Any, TypeAlias

rpc: Any = importlib.import_module("grpc")
aio: Any = importlib.import_module("grpc.aio")
rich: Any = importlib.import_module("grpc_status.rpc_status")
details: Any = importlib.import_module("google.rpc.error_details_pb2")
statuses: Any = importlib.import_module("google.rpc.status_pb2")

Context: TypeAlias = Any
"""The context of one call."""
