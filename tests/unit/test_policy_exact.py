"""Numbers are compared as they are written, not as binary fractions."""

from __future__ import annotations

import base64
import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel.weighing import arguments_of
from ringfence.policy.conditions import Amount
from ringfence.policy.exact import Exact, exact, plain
from ringfence.policy.facts import Facts
from ringfence.policy.hearsay import words_in
from ringfence.policy.units import parse_amount


def held(number: str, over: str) -> bool:
    """Whether a condition on an amount matches a request whose body has a number, as it stands there."""
    body = base64.b64encode(f'{{"amount": {number}}}'.encode()).decode()
    bound = parse_amount(over)
    assert bound is not None
    facts = Facts(arguments=arguments_of(json.dumps({"body": body}).encode()))
    return bool(Amount(field="/json/amount", over=bound).holds(facts))


@pytest.mark.parametrize(
    ("number", "over", "matches"),
    [
        ("100", "100", False),
        ("100.00", "100", False),
        ("1e2", "100", False),
        ("100.00000000000000000001", "100", True),
        ("100.0000000000000001", "100", True),
        ("999999999999999.00000001", "999999999999999", True),
        ("900719925474099.200001", "900719925474099.2", True),
        ("0.1", "0.1", False),
        ("0.10000000000000000001", "0.1", True),
        ("0.30000000000000004", "0.3", True),
        ("2500.01", "2.5k", True),
        ("2500", "2.5k", False),
        ("1e400", "100", True),
        ("-1e400", "100", False),
        ("1e99999999999999999999", "100", True),
        ("NaN", "100", True),
        ("Infinity", "100", True),
        ("-Infinity", "100", True),
        ('"100"', "100", True),
        ("true", "100", True),
        ("1" * 5000, "100", True),
    ],
)
def test_a_bound_is_exact(number: str, over: str, matches: bool) -> None:
    assert held(number, over) is matches


def test_a_condition_keeps_its_bound_as_it_was_written() -> None:
    bound = parse_amount("999999999999999.000001")
    assert bound is not None
    assert Amount(field="/a", over=bound).text == 'amount: {field: "/a", over: 999999999999999.000001}'
    assert held("999999999999999.000001", "999999999999999.000001") is False
    assert held("999999999999999.0000011", "999999999999999.000001") is True


def test_two_accounts_that_differ_in_the_last_digit_are_two() -> None:
    known, other = 1234567890123456781, 1234567890123456782
    assert set(words_in([known])).isdisjoint(words_in([other]))
    assert list(words_in([known, 5.0, Exact("5.00"), 0.1, 10**60])) == [str(known), "5", "5", "0.1", "1e60"]


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_equal_numbers_have_one_text(value: Decimal) -> None:
    text = plain(value)
    assert Decimal(text) == value
    assert plain(Decimal(text)) == text
    assert exact(Exact(str(value))) == value
