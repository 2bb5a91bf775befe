"""What Ringfence costs, as ratios against references measured in the same run: `python -m bench`."""

import os

from ringfence.kernel.config import GRPC_ENVIRONMENT

# Kernel, echo and generator run gRPC alike, or the echo would be no reference.
for _name, _value in GRPC_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
