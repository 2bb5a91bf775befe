"""The kernel's gRPC servers. gRPC looks at its environment while it is imported, so that is set before any module here."""

import os

from ringfence.kernel.config import GRPC_ENVIRONMENT

for _name, _value in GRPC_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
