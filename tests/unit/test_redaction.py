"""A credential is found in an answer in every spelling that programs make of one, wherever it lies."""

from __future__ import annotations

import base64
import html
import json
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.syscalls.declared import HttpResource, LlmResource, ObjectResource, SqlResource
from ringfence.syscalls.redaction import Redactor, redactor_for

SECRET = 'to/k"en+=é-7b2d'
HIDE = Redactor([SECRET, ""])


def spelled(secret: str) -> dict[str, str]:
    raw = secret.encode()
    return {
        "plain": secret,
        "other case": "".join(c.upper() if c.isascii() else c for c in secret),
        "a URL's": quote(secret, safe=""),
        "a path's": quote(secret),
        "lower-case escapes": quote(secret, safe="").lower(),
        "a form's": quote_plus(secret),
        "all escaped": "".join(f"%{byte:02X}" for byte in raw),
        "JSON": json.dumps(secret)[1:-1],
        "JSON in UTF-8": json.dumps(secret, ensure_ascii=False)[1:-1],
        "JSON with slashes escaped": json.dumps(secret)[1:-1].replace("/", "\\/"),
        "JSON in JSON": json.dumps(json.dumps(secret)[1:-1])[1:-1],
        "Python's bytes": repr(raw)[2:-1],
        "HTML": html.escape(secret),
        "base64": base64.b64encode(raw).decode(),
        "base64 for URLs": base64.urlsafe_b64encode(raw).decode(),
        "base64 without its end": base64.b64encode(raw).decode().rstrip("="),
        "hex": raw.hex(),
        "HEX": raw.hex().upper(),
        "hex with colons": raw.hex(":"),
    }


@pytest.mark.parametrize("how", spelled(""))
def test_a_secret_is_taken_out_in_every_spelling(how: str) -> None:
    echo = spelled(SECRET)[how]
    assert HIDE.data(f"<{echo}>".encode()) == b"<[redacted]>"
    assert HIDE.text(f"<{echo}>") == "<[redacted]>"
    assert HIDE.value({"a": [echo, 1, None], echo: True}) == {
        "a": ["[redacted]", 1, None],
        "[redacted]": True,
    }
    assert HIDE.data(b"plain") == b"plain"


@given(
    secret=st.binary(min_size=9, max_size=60).map(lambda raw: base64.b85encode(raw).decode()),
    ahead=st.text("abcXYZ:/ ", max_size=8),
    behind=st.text("abcXYZ:/ ", max_size=8),
    code=st.sampled_from([base64.b64encode, base64.urlsafe_b64encode]),
)
def test_base64_of_what_holds_it_gives_nothing_away(secret: str, ahead: str, behind: str, code: Any) -> None:
    """All three ways in which the bits can lie: what is left decodes to what stood around it, and to no byte of the secret."""
    coded = code(f"{ahead}{secret}{behind}".encode())
    clean = Redactor([secret]).data(b"<" + coded + b">")
    before, found, after = clean.partition(b"[redacted]")
    assert found
    # Of the bytes next to it at most two share a character with it, and go too.
    kept = len(before[1:] + after[:-1].rstrip(b"="))
    assert kept * 6 <= (len(ahead) + len(behind)) * 8 + 12
    assert (
        base64.b64decode((before[1:] + b"AAAA")[: len(before[1:]) // 4 * 4], altchars=b"-_") in ahead.encode()
    )


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("how", ["plain", "base64", "hex"])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_the_ends_of_lines_hide_no_part_of_it(how: str, width: int, end: str) -> None:
    echo = spelled("a-long-enough-token-of-a-target")[how]
    torn = end.join(echo[at : at + width] for at in range(0, len(echo), width))
    clean = Redactor(["a-long-enough-token-of-a-target"]).data(f"one{end}<{torn}>{end}two".encode())
    assert clean == f"one{end}<[redacted]>{end}two".encode()


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16"])
def test_a_body_in_another_encoding_is_searched_too(encoding: str) -> None:
    assert SECRET not in HIDE.data(f"<{SECRET}>".encode(encoding)).decode(encoding, "replace")
    assert b"[redacted]" in HIDE.data(f"<{SECRET}>".encode(encoding))


def test_json_may_escape_any_letter_of_it() -> None:
    odd = "".join(f"\\u{ord(c):04x}" if nr % 2 else json.dumps(c)[1:-1] for nr, c in enumerate(SECRET))
    assert json.loads(HIDE.body(f'{{"a": "<{odd}>", "n": 1}}'.encode())) == {"a": "<[redacted]>", "n": 1}
    # What holds none of it is left as it was, byte for byte.
    other = b'{"a":  "\\u0041\\/", "a": 1.0}'
    assert HIDE.body(other) == other
    assert HIDE.body(b"[" * 100_000 + b'"\\n"') == b"[" * 100_000 + b'"\\n"'


def test_what_lies_too_deep_is_left_out() -> None:
    value: Any = SECRET
    for _ in range(400):
        value = [value]
    assert SECRET not in str(HIDE.value(value))


def test_several_secrets_and_places_are_found_at_once() -> None:
    hide = Redactor(["abcdefgh", "abcdefghijkl", "zzzzzzzz"])
    assert hide.data(b"abcdefghijkl abcdefgh zzzzzzzzabcdefgh") == (
        b"[redacted] [redacted] [redacted][redacted]"
    )
    assert Redactor([]).data(b"abcdefgh") == b"abcdefgh"
    assert "abcdefgh" not in repr(hide) + str(hide)


def test_credentials_of_other_resources_count_where_they_are_long_enough() -> None:
    http = {
        name: HttpResource(
            name=name, base="http://a", headers={}, effects=(), idempotency_header=None, secrets=(secret,)
        )
        for name, secret in (("a", "own"), ("b", "short"), ("c", "of-another-host"))
    }
    llm = {
        "m": LlmResource(name="m", base="http://m", headers={}, models=("*",), secrets=("of-a-model-host",))
    }
    sql = {"d": SqlResource(name="d", dsn="", secrets=("of-a-database-",))}
    objects = {"o": ObjectResource(name="o", secrets=("of-a-bucket-key",))}
    env: Any = SimpleNamespace(http=http, llm=llm, sql=sql, objects=objects, mcp={}, a2a={})
    hide = redactor_for(env, http["a"].secrets)
    assert hide.text("own short of-another-host of-a-model-host of-a-database- of-a-bucket-key") == (
        "[redacted] short [redacted] [redacted] [redacted] [redacted]"
    )
