"""What a call carries is as long as it is in JSON, binary content as it is; sizes are read wherever totals are."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel.carrying import lowered
from ringfence.policy.kernel_file import parse_kernel_file
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.pools import parse_limit
from ringfence.policy.problems import ManifestError
from ringfence.policy.units import parse_total
from ringfence.syscalls import fs_write
from ringfence.syscalls.errors import BudgetExhausted
from ringfence.syscalls.payload import content_bytes, result_bytes
from ringfence.syscalls.table import build_table

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: bot}
spec:
  run: {command: [sh]}
  when: [{action: now, if: {budget: {total: bytes, over: 80%}}, then: deny}]
  budgets: {total: {bytes: SIZE}}
"""
FILE = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  ceilings: {budgets: {total: {bytes: 2GiB}}}
  budgets: {fleet: {total: {bytes: SIZE}}}
"""


@given(data=st.binary(max_size=200), path=st.text(max_size=20))
def test_content_counts_as_it_is(data: bytes, path: str) -> None:
    arguments = fs_write.Arguments(path=path, data=data)
    encoded = msgspec.json.encode(arguments)
    bare: dict[str, Any] = json.loads(encoded)
    if data:
        bare["data"] = ""
    text = json.dumps(bare, separators=(",", ":"), ensure_ascii=False)
    assert content_bytes(arguments, len(encoded)) == len(encoded) - (4 * ((len(data) + 2) // 3) - len(data))
    if path.isprintable():
        assert content_bytes(arguments, len(encoded)) == len(text.encode()) + len(data)


def test_every_result_can_be_counted_before_it_is_encoded() -> None:
    for row in build_table().values():
        if all(not field.required for field in msgspec.structs.fields(row.result)):
            empty = row.result()
            assert result_bytes(empty) == len(msgspec.json.encode(empty))


@pytest.mark.parametrize(
    ("text", "size"), [("10MiB", 10 << 20), ("1500", 1500), ("2k", 2000), ("1.5Ki", 1536), ("0", 0)]
)
def test_sizes_are_read_everywhere(text: str, size: int) -> None:
    assert parse_manifest(MANIFEST.replace("SIZE", text), "m").budgets.total == {"bytes": size}
    file = parse_kernel_file(FILE.replace("SIZE", f"{text}/d"), "k")
    assert file.ceilings.budgets.total == {"bytes": 2 << 30}
    limit = file.pools["fleet"].limits["bytes"]
    assert (limit.amount, limit.period) == (size, "d")
    assert parse_total("bytes", text) == size


@pytest.mark.parametrize("text", ["many", "-1", "10 MiB", "5.5.5", "1M/s"])
def test_what_is_no_size_is_refused_where_it_stands(text: str) -> None:
    with pytest.raises(ManifestError, match=r"spec\.budgets\.total\.bytes"):
        parse_manifest(MANIFEST.replace("SIZE", f'"{text}"'), "m")
    assert parse_limit("bytes", text) is None


def test_other_totals_take_no_sizes() -> None:
    assert parse_total("tokens", "10MiB") is None
    assert parse_total("calls", "1.5") is None
    assert (parse_total("usd", "1.5"), parse_total("tokens", "1.5k")) == (1.5, 1500)


def test_a_pool_is_asked_for_less_until_it_is_what_the_call_needs() -> None:
    """So the agent is parked for what it lacks, and not refused for the largest answer that it could have had."""
    flight: Any = SimpleNamespace(load=16 << 20, least=100)
    left = {"budget": "bytes", "pool": "fleet", "left": "5000"}
    assert not lowered(flight, BudgetExhausted("", budget="calls", pool="fleet", left="0"))
    assert not lowered(flight, BudgetExhausted("", budget="bytes", left="5000"))
    assert (lowered(flight, BudgetExhausted("", **left)), flight.load) == (True, 5000)
    # Others took some meanwhile; nothing is asked twice.
    assert (lowered(flight, BudgetExhausted("", **left)), flight.load) == (True, 4999)
    assert (lowered(flight, BudgetExhausted("", **{**left, "left": "7"})), flight.load) == (True, 100)
    assert not lowered(flight, BudgetExhausted("", **{**left, "left": "7"}))
