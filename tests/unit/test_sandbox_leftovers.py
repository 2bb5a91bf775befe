"""What a sweep meets of sandboxes whose own warden is just at work on them."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from ringfence.sandbox.native import identity, program
from ringfence.sandbox.native.cgroups import Groups


@pytest.mark.parametrize(
    ("number", "told"), [(errno.ENODEV, False), (errno.ENOENT, False), (errno.EACCES, True)]
)
def test_a_group_that_goes_meanwhile_is_gone(
    monkeypatch: pytest.MonkeyPatch, number: int, told: bool
) -> None:
    """Its files can't be found then, or can't be used; anything else is a sandbox that could not be ended."""

    def refuse(_: Groups, frozen: bool) -> None:
        assert frozen is False
        raise OSError(number, "no")

    monkeypatch.setattr(Groups, "freeze", refuse)
    monkeypatch.setattr(identity, "kill_process", lambda _: 7)
    monkeypatch.setattr(identity, "wait_dead", lambda *_: None)
    monkeypatch.setattr(Groups, "kill", lambda _: None)
    monkeypatch.setattr(Groups, "remove", lambda _: None)
    record: Any = {
        "boot": identity.boot_id(),
        "groups": [],
        "freezer": ("/sys/fs/cgroup/none", 1),
        "init": {"pid": 7},
        "launcher": {"pid": 8},
    }
    if told:
        with pytest.raises(OSError, match="no"):
            program.end_recorded(record)
    else:
        assert program.end_recorded(record)
