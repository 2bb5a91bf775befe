"""Programs in any order of start, pause, resume, kill, end, wait and sweep behave as a small model of them says."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

if TYPE_CHECKING:
    import socket
    from concurrent.futures import Future

    from conftest import Box, Running

sys.path.insert(0, str(Path(__file__).parent))
from sandbox_kit import ECHO, closing_at_its_end, talking

EXAMPLES = 12
STEPS = 20
LIVE_MOST = 4
CODE = "import os\nif os.fork() == 0:\n  import time\n  while True: time.sleep(1000)\n" + ECHO


class Modelled:
    """A program and what it must be."""

    def __init__(self, box: Box) -> None:
        self.stack = contextlib.ExitStack()
        started: tuple[Running, socket.socket] = self.stack.enter_context(talking(box, CODE))
        self.program, self.connection = started
        self.waiting: list[Future[Any]] = []
        self.paused = False
        self.unread = b""
        self.ended: tuple[str, int] | None = None


class Machine(RuleBasedStateMachine):
    box: ClassVar[Box]

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Modelled] = []

    def live(self) -> list[Modelled]:
        return [one for one in self.all if one.ended is None]

    @precondition(lambda self: len(self.live()) < LIVE_MOST)
    @rule()
    def start(self) -> None:
        self.all.append(Modelled(self.box))

    @rule()
    def fail_to_start(self) -> None:
        with pytest.raises(Exception, match="no-such-program") as caught:
            self.box.program(["no-such-program"])
        assert caught.value.kind == "SandboxError"

    @precondition(lambda self: self.all)
    @rule(data=st.data(), order=st.sampled_from(["pause", "resume"]))
    def order(self, data: st.DataObject, order: str) -> None:
        one = data.draw(st.sampled_from(self.all))
        one.program.call(order)
        if one.ended is None:
            one.paused = order == "pause"

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.all))
        if one.ended is None:
            with closing_at_its_end(one.connection):
                one.program.kill()
        else:
            one.program.kill()
        self.over(one, ("killed", -9))

    @precondition(lambda self: any(not one.paused for one in self.live()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.live() if not one.paused]))
        one.connection.close()
        assert one.program.wait() == ("exit", 0)
        self.over(one, ("exit", 0))

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.all))
        if one.ended is None:
            one.waiting.append(one.program.begin("wait")[1])
        else:
            assert one.program.wait() == one.ended

    @rule()
    def sweep(self) -> None:
        assert self.box.host.call("sweep") == []

    @rule(word=st.binary(min_size=1, max_size=20))
    def talk(self, word: bytes) -> None:
        """Whoever runs answers; who is paused does so after the thaw."""
        for one in self.live():
            one.connection.sendall(word)
            one.unread += word
        for one in self.live():
            while not one.paused and one.unread:
                answer = one.connection.recv(100)
                assert answer, "it is gone"
                assert one.unread.startswith(answer)
                one.unread = one.unread[len(answer) :]

    def over(self, one: Modelled, how: tuple[str, int]) -> None:
        if one.ended is None:
            one.ended, one.paused = how, False
            one.stack.close()
        reported = {"reason": one.ended[0], "code": one.ended[1]}
        assert [future.result(60) for future in one.waiting] == [reported] * len(one.waiting)

    def teardown(self) -> None:
        for one in self.live():
            assert not any(future.done() for future in one.waiting)
            with closing_at_its_end(one.connection):
                one.program.kill()
            self.over(one, ("killed", -9))
        assert self.box.left() == []


def test_any_order_of_orders(box: Box) -> None:
    run_state_machine_as_test(
        type("BoxMachine", (Machine,), {"box": box}),
        settings=settings(
            max_examples=max(2, EXAMPLES // box.kind.pace),
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
