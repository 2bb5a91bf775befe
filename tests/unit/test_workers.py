"""Which tests stay in one process when many run beside each other."""

from __future__ import annotations

import pytest
from support.workers import shares


@pytest.mark.parametrize(
    ("test", "together"),
    [
        ("tests/unit/test_a.py::test_one[root]", "tests/unit/test_a.py"),
        ("tests/integration/test_b.py::TestC::test_one", "tests/integration/test_b.py"),
        ("tests/conformance/test_c.py::test_one[docker]", "tests/conformance/test_c.py[docker]"),
        ("tests/conformance/test_c.py::test_two[docker-a-b]", "tests/conformance/test_c.py[docker]"),
        ("tests/conformance/test_c.py::test_two[root-docker]", "tests/conformance/test_c.py[root]"),
        ("tests/conformance/test_c.py::test_three[own user]", "tests/conformance/test_c.py"),
        ("tests/conformance/test_c.py::test_four", "tests/conformance/test_c.py"),
    ],
)
def test_what_shares_a_kernel_or_a_backend_stays_together(test: str, together: str) -> None:
    assert shares(test) == together
