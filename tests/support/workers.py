"""How tests are handed out to processes that run beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conformance.backends import KINDS
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    import pytest
    from xdist.remote import Producer


def shares(test: str) -> str:
    """What a test shares a kernel or a backend with, so that one process runs it: a file, of the conformance suite one mode of it."""
    file, _, name = test.partition("::")
    mode = name.partition("[")[2].rstrip("]").partition("-")[0]
    return f"{file}[{mode}]" if file.startswith("tests/conformance/") and mode in KINDS else file


class Files(LoadFileScheduling):
    """Hands out files in the order of their names: what waits long comes first, the many short unit tests fill the end."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return shares(nodeid)
