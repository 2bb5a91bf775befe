"""A credential is found in a file of any length, wherever the windows end in which it is searched."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.syscalls.redaction import Redactor
from ringfence.syscalls.redaction_files import AROUND_BYTES, without_credentials
from unit.test_redaction import spelled

SECRET = "a-long/enough+tok=en-of-a-target"
HIDE = Redactor([SECRET])


def cleaned(directory: Path, data: bytes, window: int) -> bytes:
    source = directory / "stdout"
    source.write_bytes(data)
    return without_credentials(HIDE, source, window=window).read_bytes()


@pytest.mark.parametrize("how", spelled(SECRET))
@pytest.mark.parametrize("behind", range(0, 130, 13))
def test_no_end_of_a_window_hides_a_part_of_it(tmp_path: Path, how: str, behind: int) -> None:
    window = AROUND_BYTES * 2
    ahead = b"." * (window - behind)
    data = ahead + f"<{spelled(SECRET)[how]}>".encode() + b"." * window
    assert cleaned(tmp_path, data, window) == ahead + b"<[redacted]>" + b"." * window


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("how", ["plain", "base64", "hex"])
def test_nor_do_lines_that_a_window_ends_in(tmp_path: Path, how: str, end: str) -> None:
    window = AROUND_BYTES
    torn = end.join(spelled(SECRET)[how])
    ahead = b"x" * (window - len(torn) // 2)
    data = ahead + f"<{torn}>".encode() + b"y" * window
    assert cleaned(tmp_path, data, window) == ahead + b"<[redacted]>" + b"y" * window


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.sampled_from([b"x" * 7, SECRET.encode(), b"\n", SECRET.encode().hex().encode()])),
    window=st.integers(1, 200),
)
def test_windows_make_no_difference(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], window: int
) -> None:
    data = b"".join(parts)
    assert cleaned(tmp_path_factory.mktemp("w"), data, window) == HIDE.data(data)


@pytest.mark.parametrize("how", ["plain", "a URL's", "base64", "hex", "HEX"])
@pytest.mark.parametrize("cut", [4, 9, 20])
def test_what_is_left_of_it_where_the_middle_was_dropped_goes_too(tmp_path: Path, how: str, cut: int) -> None:
    echo = spelled(SECRET)[how].encode()
    gap = b"\n[ringfence: 4711 bytes left out]\n"
    data = b"one " + echo[:cut] + gap + echo[-cut:] + b" two"
    assert cleaned(tmp_path, data, 1 << 20) == b"one [redacted]" + gap + b"[redacted] two"
    assert cleaned(tmp_path, data, 10) == b"one [redacted]" + gap + b"[redacted] two"


def test_a_short_one_is_searched_as_json_too_and_one_without_any_is_left_alone(tmp_path: Path) -> None:
    odd = "".join(f"\\u{ord(c):04X}" if nr % 2 else c for nr, c in enumerate(SECRET))
    assert cleaned(tmp_path, f'{{"a": "<{odd}>"}}'.encode(), 1 << 20) == b'{"a": "<[redacted]>"}'
    source = tmp_path / "stdout"
    source.write_bytes(b'{"a":  "\\u0041"}')
    assert without_credentials(HIDE, source) == source
    source.write_bytes(b"")
    assert without_credentials(HIDE, source) == source
    assert without_credentials(Redactor([]), tmp_path / "not there") == tmp_path / "not there"
    source.write_bytes(SECRET.encode())
    assert without_credentials(HIDE, source) != source
    assert source.read_bytes() == SECRET.encode()
