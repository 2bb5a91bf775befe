"""gRPC as this package uses it. The library's stubs lag behind it, so it is untyped here, and nowhere else."""

from __future__ import annotations

from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs] - it has none

rpc: Any = grpc
aio: Any = grpc.aio
details: Any = error_details_pb2
statuses: Any = status_pb2

Context: TypeAlias = Any
"""The context of one call."""
