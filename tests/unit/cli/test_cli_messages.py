"""send: a text or a file's JSON value, and where `--json` means the answer instead."""

from __future__ import annotations

import json

import pytest

SENT = {"id": "m7", "to": "bot-abcde", "from": "operator:ann"}


def test_a_text_is_sent_and_its_id_printed(door, run) -> None:
    door.answers["Send"] = SENT
    result = run("send", "bot", "hello  ä")
    assert (result.exit_code, result.stdout) == (0, "m7\n")
    request = door.asked("Send")
    assert (request.agent, request.text, request.json) == ("bot", "hello  ä", b"")


def test_an_empty_text_is_a_text(door, run) -> None:
    door.answers["Send"] = SENT
    assert run("send", "bot", "").exit_code == 0
    assert door.asked("Send").HasField("text")


def test_json_comes_from_a_file_or_from_standard_input(door, run, tmp_path) -> None:
    door.answers["Send"] = SENT
    file = tmp_path / "order.json"
    file.write_text('{"n": 1}')
    assert run("send", "bot", "--json", file).stdout == "m7\n"
    assert run("send", "bot", "--json", "-", stdin='{"n": 1}').stdout == "m7\n"
    for _, request in door.requests:
        assert request.json == b'{"n": 1}'
        assert not request.HasField("text")


@pytest.mark.parametrize("words", [("send", "bot", "hi", "--json"), ("--json", "send", "bot", "hi")])
def test_the_answer_as_json(words, door, run) -> None:
    door.answers["Send"] = SENT
    assert json.loads(run(*words).stdout) == SENT
    assert door.asked("Send").text == "hi"


@pytest.mark.parametrize(
    "words",
    [
        ("bot",),
        ("bot", "--json"),
        ("bot", "hi", "--json", "/dev/null"),
        ("bot", "--json", "/nonexistent/x"),
        (),
    ],
)
def test_what_is_no_message(words, door, run) -> None:
    result = run("send", *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("ringfence: ")
    assert door.requests == []
