"""Statements that make large values out of nothing are refused before a target plans them."""

from __future__ import annotations

import pytest
from ringfence.syscalls.errors import InvalidRequest
from ringfence.syscalls.sql_growth import SIZE_MAX, refuse_growth
from ringfence.syscalls.sql_lexer import lex


@pytest.mark.parametrize(
    ("statement", "parameters"),
    [
        ("select repeat('x', 1000000000)", ()),
        ("select REPEAT('x', 1000000000)", ()),
        ("select pg_catalog.\"repeat\" ('x', 1000000000)", ()),
        ("select repeat /* no */ ('x', 1000000000)", ()),
        ("select repeat('x', %s)", (1_000_000_000,)),
        ("select repeat('x', %s)", ("1000000000",)),
        ("select repeat('x', 1e9::int)", ()),
        ("select repeat('x', 1000*1000*1000)", ()),
        ("select repeat('x', '1000000000'::int)", ()),
        ("select repeat('x', n) from (select 1000000000 as n) s", ()),
        ("select repeat(repeat('x', 100000), 100000)", ()),
        ("select repeat(a, 1001) from (select repeat('x', 1000) as a) s", ()),
        ("select lpad('x', 1000000000), rpad('x', 3)", ()),
        ("select rpad('x', 1000000000, 'ab')", ()),
        ("select array_fill(1, array[100000000])", ()),
    ],
)
def test_sizes_that_are_too_large_or_not_plain_are_refused(statement, parameters):
    with pytest.raises(InvalidRequest):
        refuse_growth(lex(statement, len(parameters)), parameters)


@pytest.mark.parametrize(
    ("statement", "parameters"),
    [
        ("select lpad(id::text, 8, '0'), rpad(name, %s), repeat('-', 40) from t", (20,)),
        (f"select repeat('x', {SIZE_MAX})", ()),
        ("select coalesce(lpad(f(a, b), 3), repeat('(,)', 2)) from t", ()),
        ("select 'repeat(1, 1000000000)', repeat from t", ()),
    ],
)
def test_others_pass(statement, parameters):
    refuse_growth(lex(statement, len(parameters)), parameters)
