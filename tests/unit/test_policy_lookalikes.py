"""What could be taken for ASCII is shown escaped; words of other scripts are not."""

from __future__ import annotations

import pytest
from ringfence.console.text import safe
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.lookalikes import unmasked
from ringfence.policy.types import Request


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("p\u0430ypal", "p\\u0430ypal"),
        ("/workspace/\u0435nv", "/workspace/\\u0435nv"),
        ("\u0441\u043e\u0440\u0443", "\\u0441\\u043e\\u0440\\u0443"),
        ("\uff41\uff42", "\\uff41\\uff42"),
        ("\U0001d5ee1", "\\U0001d5ee1"),
        ("G\u03bf\u03bfgle", "G\\u03bf\\u03bfgle"),
        ("\u043f\u0440\u0438\u0432\u0435\u0442", "\u043f\u0440\u0438\u0432\u0435\u0442"),
        ("a-\u043f\u0440\u0438\u0432\u0435\u0442", "a-\u043f\u0440\u0438\u0432\u0435\u0442"),
        (
            "\u03ba\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1",
            "\u03ba\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1",
        ),
        ("Z\u00fcrich \u6771\u4eac caf\u00e9", "Z\u00fcrich \u6771\u4eac caf\u00e9"),
        ("plain", "plain"),
    ],
)
def test_lookalikes(text: str, shown: str) -> None:
    assert unmasked(text) == shown
    assert safe(text) == shown


def test_a_refusal_shows_them() -> None:
    request = Request(principal="a", action="fs.read", resource="/workspace/p\u0430ypal")
    assert "p\\u0430ypal" in AgentPolicy("a", []).decide(request).reason
