"""Signatures of webhooks: as the scheme's own example has them, and refused for everything that is not right."""

from __future__ import annotations

import base64
import secrets
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.kernel.signing import TOLERANCE_S, BadKey, BadSignature, key_of, sign, verify
from ringfence.kernel.webhooks import ANSWER_S, LEASE_S, RETRY_FIRST_S, RETRY_MAX_S, delay_s
from support import signed

KEY = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
BODY = b'{"test": 2432232314}'
MESSAGE = "msg_p5jXN8AQM9LWM0D4loKWxJek"
RIGHT = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
AT = 1614265330


def checked(**changed: object) -> None:
    given: dict[str, object] = {
        "key": KEY,
        "message": MESSAGE,
        "timestamp": str(AT),
        "signatures": RIGHT,
        "body": BODY,
        "now": float(AT),
    }
    verify(**{**given, **changed})  # type: ignore[arg-type]


def test_another_program_finds_the_same_signature() -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("there is no openssl here")
    key = secrets.token_bytes(32)
    signed_text = f"{MESSAGE}.{AT}.".encode() + BODY
    words = [program, "dgst", "-sha256", "-mac", "HMAC", "-macopt", f"hexkey:{key.hex()}", "-binary"]
    found = subprocess.run(words, input=signed_text, capture_output=True, check=True).stdout
    assert sign(key, MESSAGE, AT, BODY) == "v1," + base64.b64encode(found).decode()


def test_the_example_of_the_scheme() -> None:
    assert sign(KEY, MESSAGE, AT, BODY) == RIGHT
    checked()
    checked(signatures=f"v1,{'A' * 43}= {RIGHT}")  # a sender that changes its key


@pytest.mark.parametrize(
    "changed",
    [
        {"body": b'{"test": 2432232315}'},
        {"message": "msg_other"},
        {"message": ""},
        {"message": "m\u00fc"},
        {"message": "m" * 257},
        {"timestamp": str(AT + 1)},
        {"timestamp": ""},
        {"timestamp": "-1"},
        {"timestamp": "\u0661"},
        {"timestamp": "9" * 400},
        {"key": KEY[::-1]},
        {"signatures": ""},
        {"signatures": RIGHT.removeprefix("v1,")},
        {"signatures": RIGHT.replace("v1,", "v1a,")},
        {"signatures": "v1,"},
        {"signatures": f"{'v1, ' * 8}{RIGHT}"},
        {"signatures": "v1,\u00e9"},
    ],
)
def test_what_is_not_right_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(BadSignature):
        checked(**changed)


def test_a_message_is_good_for_minutes() -> None:
    checked(now=float(AT + TOLERANCE_S))
    checked(now=float(AT - TOLERANCE_S))
    for now in (AT + TOLERANCE_S + 1, AT - TOLERANCE_S - 1):
        with pytest.raises(BadSignature, match="minutes"):
            checked(now=float(now))


@given(st.binary(max_size=200), st.integers(0, 10**12 - 1), st.from_regex(r"\A[!-~]{1,60}\Z"))
def test_what_is_signed_is_what_others_sign(body: bytes, at: int, message: str) -> None:
    key = "whsec_" + base64.b64encode(KEY).decode()
    assert sign(KEY, message, at, body) == signed.signature(key, message, str(at), body)
    checked(
        body=body, message=message, timestamp=str(at), signatures=sign(KEY, message, at, body), now=float(at)
    )


def test_a_key_has_the_schemes_form() -> None:
    text = b"whsec_" + base64.b64encode(KEY)
    assert key_of(text + b"\n", "k") == KEY
    for bad in (
        base64.b64encode(KEY),
        b"whsec_",
        b"whsec_c2hvcnQ=",
        b"whsec_" + b"!" * 40,
        b"whsec_" + base64.b64encode(bytes(65)),
        b"\xff" * 40,
    ):
        with pytest.raises(BadKey) as caught:
            key_of(bad, "k")
        assert (
            bad.decode("ascii", "replace").removeprefix("whsec_")[:20] not in str(caught.value)
            or bad == b"whsec_"
        )
        assert "ringfence secrets set k" in str(caught.value)


def test_pauses_grow_and_are_spread() -> None:
    longest = [delay_s(attempts, spread=1.0) for attempts in range(1, 40)]
    shortest = [delay_s(attempts, spread=0.0) for attempts in range(1, 40)]
    assert longest[0] == RETRY_FIRST_S
    assert longest[-1] == RETRY_MAX_S
    assert longest == sorted(longest)
    assert [high / 2 for high in longest] == shortest
    assert delay_s(1, 60.0) == 60.0
    assert delay_s(1, 1e9) == RETRY_MAX_S
    assert LEASE_S > ANSWER_S  # or another kernel would send what is under way
