"""Sub-uids are given out one by one, and a tool that refuses stops the start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from ringfence.sandbox.native import firsts, users
from ringfence.sandbox.native.job import Refused

if TYPE_CHECKING:
    from pathlib import Path

FIRST = 3_000_000_000
OWN = (os.getuid(), os.getgid())


def some(count: int, *, tools: tuple[str, str] = ("/bin/false", "/bin/false")) -> users.Ids:
    first = FIRST + os.getpid() * 1000
    halves = [range(first, first + count // 2), range(first + 500, first + 500 + count - count // 2)]
    return users.Ids(tools, OWN, (halves, [range(first, first + count)]))


def test_none_is_given_twice_and_each_comes_back() -> None:
    ids = some(5)
    ours, theirs = users.Leases(ids), users.Leases(ids)
    held = [source.take() for source in (ours, theirs, ours, theirs, ours)]
    assert {lease.uid for lease in held} == {ids.pair(index)[0] for index in range(5)}
    for source in (ours, theirs):
        with pytest.raises(Refused, match=r"all 5 sub-uids .* in use; .*/etc/subuid"):
            source.take()
    free = held.pop(2)
    free.close()
    again = theirs.take()
    assert again.uid == free.uid
    for lease in (*held, again):
        lease.close()


def test_a_range_of_two_parts_is_counted_through() -> None:
    ids = some(5)
    assert ids.most == 5
    assert [uid - ids.pair(0)[0] for uid, _ in map(ids.pair, range(5))] == [0, 1, 500, 501, 502]
    with pytest.raises(IndexError):
        ids.pair(5)


@pytest.mark.parametrize(
    ("tools", "said"),
    [(("/bin/false", "/bin/true"), "false: it failed"), (("/bin/true", "/nonexistent"), "No such file")],
)
def test_a_tool_that_fails_stops_the_start_and_frees_the_uid(
    tools: tuple[str, str], said: str, tmp_path: Path
) -> None:
    ids = some(1, tools=tools)
    pool = firsts.Pool(None, ids)
    first = pool.take(firsts.Kind(warm=False, records=str(tmp_path), user=users.SUB))
    with pytest.raises(Refused, match=rf"wall `uid` can't be raised: .*{said}.*; see that newuidmap"):
        first.settle()
    first.discard()
    pool.close()
    lease = users.Leases(ids).take()
    lease.close()


def test_without_sub_uids_the_form_is_the_weakest_of_its_kernel() -> None:
    assert users.form(7, sub=True) == "own"
    assert users.form(None, sub=True) == "sub"
    assert users.form(None, sub=False) == "namespace"
