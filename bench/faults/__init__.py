"""What kills repeat and what they lose: nothing. `python -m bench.faults`."""

import sys
from pathlib import Path

# The fault tests run the same machinery at a smaller size: kernels, victims, and observers that count effects.
_MACHINERY = str(Path(__file__).parents[2] / "tests")
if _MACHINERY not in sys.path:
    sys.path.append(_MACHINERY)
