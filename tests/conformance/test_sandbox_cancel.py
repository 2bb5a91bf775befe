"""Everything that is awaited may be cancelled at any moment: nothing half done is left, and the next order works."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Box

sys.path.insert(0, str(Path(__file__).parent))
from sandbox_kit import Traces, closing_at_its_end, eventually, says, silent, talking
from workspace_kit import facts_of, workspace_of

POINTS_MOST = 2000


def cut_at_each_point(box: Box, op: str, arguments: dict[str, Any], whole: str = "done") -> int:
    """Cancel an order at its first point, then at its second, until it ends before it is cancelled."""
    for at in range(1, POINTS_MOST):
        said = box.host.call("cut", order=op, at=at, arguments=arguments)
        if said == whole:
            return at
        assert said == "cancelled"
        assert box.left() == [], f"after {op} was cancelled at point {at}"
    pytest.fail(f"{op} has no end")


def test_a_start_that_is_cancelled_leaves_nothing(box: Box) -> None:
    before = Traces(box)
    log = box.directory(box.fresh("logs"), owner=box.kind.kernel_uid) / "out"
    arguments = {
        "agent": "agent-1",
        "argv": ["/bin/sh", "-c", "sleep 1000 & wait", box.token],
        "env": {"PATH": "/usr/bin:/bin"},
        "image": str(box.directory(box.fresh("image"))),
        "socket_dir": str(box.directory(box.fresh("sockets"))),
        "uid": box.uid,
        "stdout": str(log),
        "stderr": str(log),
        "stdin": "x" * 3_000_000,
    }
    assert cut_at_each_point(box, "start", arguments) > 2
    eventually(lambda: before.new() == [], lambda: f"left behind: {before.new()}")
    assert box.program(["/bin/true"]).wait() == ("exit", 0)


def test_a_command_that_is_cancelled_leaves_nothing_running(box: Box) -> None:
    before = Traces(box)
    workspace = workspace_of(box)
    untouched = facts_of(workspace)
    script = "trap '' TERM INT; echo new > made; setsid sh -c 'sleep 1000' $0 & read word; echo $word"
    for at in range(1, POINTS_MOST):
        spec = box.command_spec(["/bin/sh", "-c", script, box.token], workspace, stdin="word\n")
        said = box.host.call("cut", order="command", at=at, arguments=spec)
        assert box.left() == [], f"after a cancel at point {at}"
        if said == "done":
            break
    assert at > 2
    assert facts_of(workspace) == untouched
    eventually(lambda: before.new() == [], lambda: f"left behind: {before.new()}")
    assert box.run("echo well", workspace).out == "well\n"


def test_orders_that_are_cancelled_are_done_or_not_done(box: Box) -> None:
    with talking(box) as (program, connection):
        number = {"program": program.number}
        for order in ("pause", "resume"):
            for at in range(1, POINTS_MOST):
                if box.host.call("cut", order=order, at=at, arguments=number) == "done":
                    break
                # Whatever became of it: the next order is obeyed.
                program.call("pause")
                connection.sendall(b"word")
                if at == 1:
                    assert silent(connection)
                program.call("resume")
                assert connection.recv(100) == b"word"
            program.call("resume")
        assert says(connection, b"well") == b"well"
        with closing_at_its_end(connection):
            program.kill()
    assert program.wait() == ("killed", -9)


def test_a_wait_that_is_cancelled_ends_nothing(box: Box) -> None:
    with talking(box) as (program, connection):
        first, one = program.begin("wait")
        second, two = program.begin("wait")
        box.host.call("cancel", order=first)
        with pytest.raises(Exception, match="cancelled"):
            one.result(60)
        assert says(connection, b"well") == b"well"
        assert not two.done()
        third, three = program.begin("wait")
        connection.close()
        assert two.result(60) == three.result(60) == {"reason": "exit", "code": 0}
        assert program.wait() == ("exit", 0)
        assert len({first, second, third}) == 3


def test_a_kill_that_is_cancelled_kills_all_the_same(box: Box) -> None:
    for at in range(1, POINTS_MOST):
        with talking(box) as (program, connection), closing_at_its_end(connection) as heard:
            said = box.host.call("cut", order="kill", at=at, arguments={"program": program.number})
            # A kill that has begun is not taken back, and another one may be asked for.
            program.kill()
            assert program.wait() == ("killed", -9)
            assert heard.result(60) == b""
        assert box.left() == []
        if said == "done":
            break


def test_many_waits_and_kills_at_once(box: Box) -> None:
    with talking(box) as (program, connection), closing_at_its_end(connection):
        waits = [program.begin("wait")[1] for _ in range(5)]
        kills = [program.begin("kill")[1] for _ in range(5)]
        for kill in kills:
            kill.result(60)
        assert box.left() == []
        assert [wait.result(60) for wait in waits] == [{"reason": "killed", "code": -9}] * 5
