"""Budgets of many agents in the kernel file: selectors, limits and windows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.policy.kernel_file import ManifestError, parse_kernel_file
from ringfence.policy.pools import PERIODS, selector, window_at
from ringfence.policy.problems import PatternError

HEAD = "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  budgets:\n"


def test_a_selector_has_one_form_and_holds_those_below_an_agent_too() -> None:
    file = parse_kernel_file(
        HEAD + '    fleet: {total: {usd: 5}}\n    "team=a, env=prod": {total: {calls: 1k/h}}\n'
    )
    assert list(file.pools) == ["fleet", "env=prod,team=a"]
    pool = file.pools["env=prod,team=a"]
    assert (pool.limits["calls"].amount, pool.limits["calls"].period) == (1000, "h")
    both, child = {"team": "a", "env": "prod", "more": "x"}, {"team": "b"}
    assert pool.holds([both])
    # A child's labels don't take it out of what its parent is in, and don't add up with its parent's.
    assert pool.holds([child, both])
    assert not pool.holds([{"team": "a"}, {"env": "prod"}])
    assert file.pools["fleet"].holds([{}])
    with pytest.raises(PatternError, match="no selector"):
        selector("team=a,team=b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("    team: {total: {usd: 5}}\n", "5:5: `team` is no selector"),
        ("    fleet: {}\n", "5:12: `spec.budgets.fleet` has no `total`"),
        ("    fleet: {total: {usd: 5/y}}\n", "`spec.budgets.fleet.total.usd` is no limit"),
        ("    fleet: {total: {calls: 1.5/d}}\n", "`spec.budgets.fleet.total.calls` is no limit"),
        ("    fleet: {total: {usd: 5}, timezone: Mars}\n", "`Mars` is no time zone"),
        ("    a=b,c=d: {total: {usd: 5}}\n    c=d,a=b: {total: {usd: 5}}\n", "is there twice"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(text: str, said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_kernel_file(HEAD + text)
    assert said in str(caught.value)


@given(
    st.datetimes(datetime(2000, 1, 1), datetime(2090, 1, 1)),  # noqa: DTZ001 - Hypothesis wants naive bounds
    st.sampled_from(sorted(PERIODS)),
    st.sampled_from(["UTC", "Europe/Berlin", "Australia/Lord_Howe", "Asia/Kathmandu", "America/St_Johns"]),
)
def test_windows_hold_their_time_and_follow_each_other_without_a_gap(
    at: datetime, period: str, zone: str
) -> None:
    now = at.replace(tzinfo=UTC)
    window = window_at(period, zone, now)
    assert window.closes is not None
    assert window.opens <= now < window.closes
    assert window_at(period, zone, window.opens) == window
    assert window_at(period, zone, window.closes - timedelta(microseconds=1)) == window
    assert window_at(period, zone, window.closes).opens == window.closes


def test_a_day_has_the_hours_that_its_zone_gives_it() -> None:
    spring = window_at("d", "Europe/Berlin", datetime(2026, 3, 29, 12, tzinfo=UTC))
    assert spring.closes is not None
    assert spring.closes - spring.opens == timedelta(hours=23)
    assert window_at("", "UTC", datetime(2026, 1, 1, tzinfo=UTC)).closes is None
