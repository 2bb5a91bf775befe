"""Every failpoint that the sources name is one where a test kills or looks."""

from __future__ import annotations

import re
from pathlib import Path

from support.jobs import POINTS

REPOSITORY = Path(__file__).parents[2]
NAMED = re.compile(r'(?:failpoint|reach)\(\s*"([\w:]+)"')


def named() -> set[str]:
    """As `call.failpoint("before_effect")` and `failpoints.reach("rm:before_files", …)` have them."""
    texts = [
        path.read_text(encoding="utf-8")
        for top in ("kernel", "syscalls")
        for path in (REPOSITORY / top).rglob("*.py")
    ]
    return {name for text in texts for name in NAMED.findall(text)}


def test_no_failpoint_is_left_out() -> None:
    tests = "\n".join(
        path.read_text(encoding="utf-8")
        for top in ("fault", "integration")
        for path in (REPOSITORY / "tests" / top).rglob("*.py")
    )
    found = named()
    assert len(found) > 15
    # The matrix goes through those of calls; those of operators and of keeping house have tests of their own.
    rest = {point for point in found - set(POINTS) if point not in tests}
    assert {point for point in rest if f'"{point.removeprefix("rollback:")}"' not in tests} == set()


def test_the_matrix_has_no_point_that_is_not_there() -> None:
    assert set(POINTS) <= named()
