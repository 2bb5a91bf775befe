from __future__ import annotations

import json

import pytest


@pytest.mark.parametrize(
    ("data", "kept"),
    [(b"s3cret\n", b"s3cret"), (b"s3cret\r\n", b"s3cret"), (b"a\n\n", b"a\n"), (b"\x00\xff", b"\x00\xff")],
)
def test_set_from_a_pipe(data, kept, door, run) -> None:
    result = run("secrets", "set", "token", "--from", "-", stdin=data)
    assert (result.exit_code, result.stdout) == (0, "token: set\n")
    assert (door.asked("SecretSet").name, door.asked("SecretSet").value) == ("token", kept)


def test_set_from_a_file_and_without_a_word(door, run, tmp_path) -> None:
    (tmp_path / "dsn").write_bytes(b"one")
    assert run("secrets", "set", "a", "--from", tmp_path / "dsn").exit_code == 0
    assert run("secrets", "set", "b", stdin=b"two").exit_code == 0
    assert [request.value for _, request in door.requests] == [b"one", b"two"]


@pytest.mark.parametrize("data", [b"", b"\n", b"x" * 70_000])
def test_values_that_are_none(data, door, run) -> None:
    result = run("secrets", "set", "token", stdin=data)
    assert result.exit_code == 2
    assert door.requests == []


def test_a_missing_file(door, run, tmp_path) -> None:
    result = run("secrets", "set", "token", "--from", tmp_path / "none")
    assert result.exit_code == 2
    assert "no such file" in result.stderr


def test_the_value_is_never_printed(door, run, refusal) -> None:
    for answer in ({"name": "token"}, refusal("no room", 1)):
        door.answers["SecretSet"] = lambda _, answer=answer: answer
        for flags in ((), ("--json",)):
            assert "s3cret" not in run("secrets", "set", "token", *flags, stdin=b"s3cret").output


def test_ls_and_rm(door, run) -> None:
    door.answers["SecretList"] = {"secrets": ["a", "b"]}
    door.answers["SecretRemove"] = {"name": "a"}
    assert run("secrets", "ls").stdout == "a\nb\n"
    assert json.loads(run("secrets", "ls", "--json").stdout) == {"secrets": ["a", "b"]}
    assert run("secrets", "rm", "a").stdout == "a: removed\n"
