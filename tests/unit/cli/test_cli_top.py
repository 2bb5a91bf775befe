"""`top`: rates are of what passed between two looks, frames fit, and it ends as it is asked to."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from typing import Any

import grpc
import pytest
from ringfence.console.commands_top import frame, rate
from ringfence.console.rates import ORDERS, Rates, ordered


def agent(name: str = "bot", **more: Any) -> dict[str, Any]:
    return {
        "id": f"{name}-1a2b3",
        "name": name,
        "state": "running",
        "process": "live",
        "steps": 0,
        "tokens": 0,
        "cost_usd": 0.0,
        "age_ms": 1,
        "waiting_for": None,
        **more,
    }


def test_rates_are_of_what_passed_since_the_last_look() -> None:
    rates = Rates()
    (first,) = rates.add([agent(steps=10)], 100.0)
    assert first["calls_per_s"] is None
    (second,) = rates.add([agent(steps=15, tokens=100, cost_usd=0.5)], 102.0)
    assert (second["calls_per_s"], second["tokens_per_s"], second["usd_per_h"]) == (2.5, 50.0, 900.0)
    assert second["steps"] == 15


def test_an_agent_that_went_back_or_just_came_has_no_rate() -> None:
    rates = Rates()
    rates.add([agent(steps=10)], 0.0)
    back, new = rates.add([agent(steps=4), agent("new", steps=9)], 1.0)
    assert (back["calls_per_s"], new["calls_per_s"]) == (None, None)
    # One that was away in between is new again.
    rates.add([], 2.0)
    assert rates.add([agent(steps=5)], 3.0)[0]["calls_per_s"] is None


def looked(*agents: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"calls_per_s": 0.0, "tokens_per_s": 0.0, "usd_per_h": 0.0, **one} for one in agents]


@pytest.mark.parametrize(
    ("by", "first"),
    [
        ("calls", "fast"),
        ("tokens", "wordy"),
        ("cost", "dear"),
        ("state", "lost"),
        ("age", "old"),
        ("name", "a"),
    ],
)
def test_the_most_interesting_agent_comes_first(by: str, first: str) -> None:
    agents = looked(
        agent("fast", calls_per_s=9.0),
        agent("wordy", tokens_per_s=9.0),
        agent("dear", usd_per_h=9.0),
        agent("lost", state="unknown"),
        agent("old", age_ms=9),
        agent("a"),
    )
    assert ordered(agents, by)[0]["name"] == first
    assert set(ORDERS) == {"calls", "tokens", "cost", "state", "age", "name"}


WIDE = agent("n" * 60, steps=123456, tokens=9_876_543, cost_usd=123.4, state="sleeping", waiting_for="w" * 90)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_frame_fits(width: int) -> None:
    agents = looked({**WIDE, "calls_per_s": 12.3, "tokens_per_s": 1234.5, "usd_per_h": 9.99})
    lines = frame(agents * 40, width, height=24)
    assert len(lines) == 24
    assert max(map(len, lines)) <= width
    assert lines[-1].startswith("and 20 more")
    assert "40 sleeping" in lines[0]
    assert "TOK/S" in lines[2]


def test_columns_that_say_nothing_give_way() -> None:
    quiet = looked(agent(name="n" * 60, waiting_for="w" * 90))
    assert "TOKENS" not in frame(quiet, 80)[2]
    assert "TOKENS" in frame(quiet, None)[2]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (0.25, "0.2"), (9.96, "10.0"), (12.4, "12"), (12345.0, "12.3k")],
)
def test_rates_are_written_briefly(value: float | None, text: str) -> None:
    assert rate(value) == text


def counting(door: Any) -> None:
    numbers = itertools.count(0, 7)
    door.answers["List"] = lambda _: {"agents": [agent("quick\x1b[2J", steps=next(numbers))]}


def test_once_without_a_terminal(door: Any, run: Any) -> None:
    counting(door)
    done = run("top", "--interval", "100ms", "--once")
    assert done.exit_code == 0
    assert done.stdout.count("CALLS/S") == 1
    assert "\\x1b[2J" in done.stdout
    assert [name for name, _ in door.requests] == ["List", "List"]


def test_json_is_one_document(door: Any, run: Any) -> None:
    counting(door)
    document = json.loads(run("top", "--json", "--once", "--interval", "0.1").stdout)
    assert document["interval_ms"] == 100
    assert document["agents"][0]["calls_per_s"] > 0
    assert set(agent()) <= set(document["agents"][0])


def test_json_with_an_interval_is_a_document_a_line_until_ctrl_c(door: Any) -> None:
    counting(door)
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ringfence.console",
            "top",
            "--json",
            "--interval",
            "100ms",
            "--data",
            str(door.data),
        ],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    documents = [json.loads(child.stdout.readline()) for _ in range(3)]
    child.send_signal(signal.SIGINT)
    child.stdout.close()
    assert child.wait() == 0
    assert all(document["agents"][0]["calls_per_s"] > 0 for document in documents)


@pytest.mark.parametrize("words", [("--interval", "1ms"), ("--interval", "soon"), ("--sort", "colour")])
def test_wrong_words(words: tuple[str, ...], run: Any) -> None:
    done = run("top", *words)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)


def test_no_kernel_is_an_error_as_ever(terminal: Any, door: Any) -> None:
    (door.data / "kernel.json").unlink()
    code, shown = terminal("top")
    assert code == 6
    assert "\x1b[?1049h" not in shown
    assert "no kernel is reachable" in shown


@pytest.mark.parametrize("key", [b"\x03", b"q"])
def test_live_it_follows_the_window_and_puts_the_terminal_back(key: bytes, door: Any, terminal: Any) -> None:
    door.answers["List"] = {"agents": [{**WIDE, "id": "n" * 20}]}
    code, shown = terminal(
        "top", "--interval", "100ms", NO_COLOR="1", script=[(b"CALLS/S", 120), (b"w" * 16, key)]
    )
    assert code == 0
    assert shown.startswith("\x1b[?1049h\x1b[?25l")
    assert shown.rstrip().endswith("\x1b[?25h\x1b[?1049l")
    frames = [part.split("\x1b[J")[0] for part in shown.split("\x1b[H")[1:]]
    widths = [max(len(line.removesuffix("\x1b[K")) for line in part.split("\n")) for part in frames]
    assert widths[0] <= 80 < widths[-1] <= 120


def test_a_dumb_terminal_gets_plain_tables(door: Any, terminal: Any) -> None:
    counting(door)
    code, shown = terminal(
        "top", "--interval", "100ms", TERM="dumb", script=[(b"CALLS/S", b""), (b"CALLS/S", b"\x03")]
    )
    assert code == 0
    assert "\x1b[" not in shown.replace("\\x1b[", "")


def test_it_outlives_a_kernel_that_goes_away(door: Any, terminal: Any, refusal: Any) -> None:
    counting(door)
    good = door.answers["List"]
    away = refusal("", None, status=grpc.StatusCode.UNAVAILABLE)

    def answer(gone: bool) -> Any:
        def act() -> None:
            door.answers["List"] = (lambda _: away) if gone else good

        return act

    code, shown = terminal(
        "top",
        "--interval",
        "100ms",
        script=[
            (b"CALLS/S", answer(True)),
            (b"! no kernel answers since", answer(False)),
            (b"agent (1 running)", b""),
            (b"quick", b"q"),
        ],
    )
    assert code == 0
    assert "! no kernel" not in shown.rpartition("\x1b[H")[2]
