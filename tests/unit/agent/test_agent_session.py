"""The stream for threads against a real server: order, breaks, large messages, interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter

import grpc
import pytest
from ringfence import agent
from ringfence.v1 import syscalls_pb2 as pb


def test_calls_are_numbered_and_welcomed(kernel):
    kernel.welcome = pb.Welcome(agent="a9", thread="t9", branch=2, next_step=4, next_child=1)
    with agent.boot() as rf:
        assert rf.now().isoformat() == "2026-01-02T03:04:05.000006+00:00"
        rf.now()
        assert (rf.identity.agent, rf.identity.thread, rf.identity.branch) == ("a9", "t9", 2)
    assert kernel.places() == [("0", 4), ("0", 5)]
    assert kernel.calls[0].id != kernel.calls[1].id
    assert kernel.hellos[0].protocol == 1
    assert kernel.hellos[0].client.startswith("ringfence.agent ")


def test_answers_may_come_in_any_order(kernel):
    held: list[pb.Call] = []

    def intercept(connection, call) -> bool:
        held.append(call)
        if len(held) == 4:
            for one in reversed(held):
                connection.send(kernel.answer(one))
        return True

    kernel.intercept = intercept
    kernel.bodies["echo"] = lambda arguments: arguments
    with agent.boot() as rf:
        made = rf.parallel([lambda n=n: rf.call("echo", {"n": n})["n"] for n in range(4)])
    assert made == [0, 1, 2, 3]
    assert sorted(kernel.places()) == [("0.0", 0), ("0.1", 0), ("0.2", 0), ("0.3", 0)]


def test_a_failure_is_typed_and_the_stream_goes_on(kernel, refusal):
    def deny(_):
        raise refusal(
            "Denied", "`fs.read` of `/x` is denied by rule `r1`; ask the operator", rule="r1", audit_id="9"
        )

    kernel.bodies["fs.read"] = deny
    with agent.boot() as rf:
        with pytest.raises(agent.Denied, match="denied by rule `r1`") as caught:
            rf.fs.read_bytes("/x")
        rf.now()
    assert caught.value.metadata == {"rule": "r1", "audit_id": "9"}
    assert caught.value.step == 1
    assert kernel.places() == [("0", 0), ("0", 1)]


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, None]
)
def test_a_broken_stream_is_opened_again_and_nothing_is_done_twice(kernel, code):
    breaks = iter([True, True])

    def intercept(connection, call) -> bool:
        if call.step != 1 or not next(breaks, False):
            return False
        kernel.answer(call)  # done and recorded, but the answer never arrives
        connection.abort(code) if code else connection.end()
        return True

    kernel.intercept = intercept
    with agent.boot() as rf:
        for _ in range(3):
            rf.now()
    assert kernel.places() == [("0", 0), ("0", 1), ("0", 1), ("0", 1), ("0", 2)]
    assert set(kernel.done.values()) == {1}
    assert len(kernel.hellos) == 3


def test_a_kernel_that_restarts_is_found_again(kernel):
    restarted = threading.Event()

    def intercept(_connection, call) -> bool:
        if call.step == 1 and not restarted.is_set():
            restarted.set()
            threading.Thread(target=restart).start()
            return True
        return False

    def restart() -> None:
        kernel.stop()
        kernel.start()

    kernel.intercept = intercept
    with agent.boot() as rf:
        rf.now()
        rf.now()
    assert kernel.places() == [("0", 0), ("0", 1), ("0", 1)]
    assert kernel.done[("0", 1)] == 1


def test_all_threads_get_their_answers_after_a_break(kernel):
    first: list[pb.Call] = []

    def intercept(connection, call) -> bool:
        if len(kernel.hellos) > 1:
            return False
        first.append(call)
        if len(first) == 6:
            for one in first[:3]:
                kernel.answer(one)
            connection.abort()
        return True

    kernel.intercept = intercept
    with agent.boot() as rf:
        assert len(rf.parallel([rf.now] * 6)) == 6
    assert set(kernel.done.values()) == {1}
    assert len(kernel.calls) == 12


def test_without_a_kernel_it_gives_up_in_time(kernel):
    kernel.stop()
    with pytest.raises(agent.KernelGone, match=r"no kernel answered for 0\.2 s"), agent.boot(patience_s=0.2):
        pass


def test_a_kernel_that_goes_away_for_good_ends_all_calls(kernel):
    def intercept(_connection, call) -> bool:
        if call.step == 1:
            threading.Thread(target=kernel.stop).start()
            return True
        return False

    kernel.intercept = intercept
    with agent.boot(patience_s=0.3) as rf:
        rf.now()
        with pytest.raises(agent.KernelGone):
            rf.now()
        with pytest.raises(agent.KernelGone):
            rf.now()
    assert len(kernel.calls) == 2


def test_outside_a_sandbox_it_says_so(monkeypatch):
    monkeypatch.delenv("RINGFENCE_SOCKET", raising=False)
    with pytest.raises(agent.KernelGone, match="ringfence submit"), agent.boot():
        pass


def test_a_kernel_that_never_welcomes_is_given_up(kernel):
    kernel.silent = True
    with pytest.raises(agent.KernelGone, match="never answered"), agent.boot(patience_s=0.2):
        pass
    assert len(kernel.hellos) == 1


def test_an_old_token_is_refused_at_once(kernel, monkeypatch):
    monkeypatch.setenv("RINGFENCE_TOKEN", "old")
    with pytest.raises(agent.BadCredential, match="token"), agent.boot():
        pass
    assert len(kernel.hellos) == 1


def test_another_branch_after_a_break_ends_the_process_part(kernel):
    def intercept(connection, _call) -> bool:
        kernel.welcome = pb.Welcome(agent="a1", thread="t1", branch=2)
        connection.abort()
        return True

    kernel.intercept = intercept
    with agent.boot() as rf, pytest.raises(agent.Diverged, match="branch 2"):
        rf.now()


def test_large_payloads_go_both_ways(kernel, files):
    stored: dict[str, bytes] = {}
    kernel.bodies |= files(stored, part=16 << 20)
    data = os.urandom(8 << 20)
    with agent.boot() as rf:
        assert rf.fs.write_bytes("big", data).size_bytes == len(data)
        assert rf.fs.read_bytes("big") == data
    assert stored["big"] == data


def test_what_the_kernel_finds_too_large_fails_alone_and_gives_its_step_back(kernel, files):
    kernel.stop()
    kernel.receive_bytes = 2 << 20
    kernel.start()
    kernel.bodies |= files({})
    with agent.boot() as rf:
        rf.now()
        with pytest.raises(agent.InvalidRequest, match="send it in parts"):
            rf.fs.write_bytes("big", bytes(3 << 20))
        rf.fs.write_bytes("small", b"x")
    assert kernel.places() == [("0", 0), ("0", 1)]
    assert kernel.arguments()["path"] == "small"


def test_what_no_message_holds_is_refused_before_it_is_a_step(kernel):
    with agent.boot() as rf:
        with pytest.raises(agent.InvalidRequest, match="send them in parts"):
            rf.fs.write_bytes("big", bytes(49 << 20))
        with pytest.raises(agent.InvalidRequest, match="not JSON"):
            rf.call("now", {"x": float("nan")})
        rf.now()
    assert kernel.places() == [("0", 0)]


def test_a_call_after_the_block_is_refused(kernel):
    with agent.boot() as rf:
        pass
    with pytest.raises(agent.KernelGone, match="after the end"):
        rf.now()


def test_an_interrupted_call_leaves_the_session_usable(kernel):
    waiting = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def intercept(_connection, call) -> bool:
        if call.action == "sleep":
            waiting.set()
            return True
        return False

    kernel.intercept = intercept

    def interrupt() -> None:
        waiting.wait()
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with agent.boot() as rf:
        with pytest.raises(KeyboardInterrupt):
            rf.sleep(3600)
        thread.join()
        rf.now()
    assert kernel.places() == [("0", 0), ("0", 1)]


def test_an_interrupted_leader_hands_over(kernel):
    """The main thread reads for all, is interrupted, and the other thread still gets its answer."""
    main = threading.main_thread().ident
    assert main is not None
    both = threading.Event()
    seen: list[pb.Call] = []

    def intercept(_connection, call) -> bool:
        if call.action == "sleep":
            seen.append(call)
            if len(seen) == 2:
                both.set()
            return len(kernel.hellos) == 1
        return False

    kernel.intercept = intercept
    kernel.bodies["sleep"] = lambda _: {"time": "2026-01-02T03:04:05Z"}

    def interrupt() -> None:
        both.wait()
        signal.pthread_kill(main, signal.SIGINT)

    started = threading.Event()
    thread = threading.Thread(target=interrupt)
    thread.start()
    with agent.boot() as rf:

        def second():
            started.wait()
            return rf.sleep(2)

        worker = rf.thread(second)
        started.set()
        with pytest.raises(KeyboardInterrupt):
            rf.sleep(3600)
        assert worker.result().year == 2026
    thread.join()
    assert kernel.done[("0.0", 0)] == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_can_not_call_and_a_program_ends_by_itself(kernel):
    """In a process of its own: the exit of the interpreter must not hang either."""
    program = """
import os
from ringfence import agent
with agent.boot() as rf:
    rf.now()
    child = os.fork()
    if child == 0:
        try:
            rf.now()
        except agent.NoLane as error:
            print(error, flush=True)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    rf.thread(rf.now)
    rf.now()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "forked process" in done.stdout
    assert Counter(lane for lane, _ in kernel.places()) == {"0": 2, "0.0": 1}


def test_a_program_that_fails_ends_at_once_though_a_thread_waits(kernel):
    kernel.intercept = lambda _connection, call: call.action == "sleep"
    program = """
from ringfence import agent
with agent.boot() as rf:
    rf.thread(rf.sleep, 3600)
    rf.now()
    raise SystemExit(7)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7, done.stderr


def test_importing_the_package_does_not_import_grpc():
    program = "import sys; from ringfence import agent; agent.Denied; print('grpc' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


def test_arguments_reach_the_kernel_as_json(kernel):
    kernel.bodies["echo"] = lambda arguments: arguments
    with agent.boot() as rf:
        assert rf.call("echo", {"text": "ü ✓ \x00", "n": 2**60}) == {"text": "ü ✓ \x00", "n": 2**60}
    assert json.loads(kernel.calls[0].arguments) == {"text": "ü ✓ \x00", "n": 2**60}
