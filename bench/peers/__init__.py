"""Other durable runtimes, each in a process of its own that is told over standard input what to do.

They run in the interpreter of `.peers` at the top of the repository where there is one, else in this one; see docs/bench.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from bench.host import BenchError, child, end, last_line

_HERE = Path(__file__).parent
_OWN = _HERE.parent.parent / ".peers" / "bin" / "python"

DBOS, LANGGRAPH = "dbos", "langgraph"
_PACKAGES = {DBOS: ("dbos",), LANGGRAPH: ("langgraph", "langgraph-checkpoint-postgres")}


def interpreter() -> str:
    """The Python that has them."""
    return str(_OWN) if _OWN.exists() else sys.executable


@cache
def version(name: str) -> str | None:
    """What is installed of a peer; None: it is not, or does not import."""
    asked = f"import importlib.metadata as m; print(*[m.version(n) for n in {_PACKAGES[name]}])"
    done = subprocess.run(
        [interpreter(), "-c", asked], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        return None
    return ", ".join(
        f"{package} {number}" for package, number in zip(_PACKAGES[name], done.stdout.split(), strict=True)
    )


def missing(name: str) -> str:
    """A note for the reader."""
    return f"{' and '.join(_PACKAGES[name])}: not installed; docs/bench.md says how"


class Peer:
    """One process of a peer."""

    def __init__(self, name: str, log: Path, *options: str) -> None:
        self._log = log
        with log.open("ab") as errors:
            self.process = child(
                [interpreter(), str(_HERE / f"{name}_app.py"), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "LANGSMITH_TRACING": "false", "DBOS__CLOUD": "false"},
            )

    def heard(self) -> dict[str, Any]:
        """The next thing that it says.

        Raises:
            BenchError: it ended instead.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise BenchError(f"a peer ended: {last_line(self._log)}")

    def tell(self, what: str = "go") -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.process.pid

    def close(self) -> None:
        """Let it end; it has no work of its own left."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        end(self.process)
