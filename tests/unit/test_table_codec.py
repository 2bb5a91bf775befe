"""Canonical arguments: one digest for a call, whichever way it came."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from ringfence.syscalls.codec import (
    ARGUMENTS_BYTES_MAX,
    DEPTH_MAX,
    arguments_from_message,
    decode_arguments,
    encode_result,
    result_to_message,
)
from ringfence.syscalls.errors import Internal, InvalidRequest
from ringfence.syscalls.table import build_table
from ringfence.v1 import syscalls_pb2

ROWS = build_table(
    {"state.put", "state.get", "state.transaction", "http.post", "random", "checkpoint.save", "now"}
)

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)
values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)


def both_routes(action: str, arguments: dict[str, Any], message: Any) -> bytes:
    row = ROWS[action]
    streamed = decode_arguments(row, json.dumps(arguments).encode())
    unary = arguments_from_message(row, message)
    assert streamed[1] == unary[1]
    assert streamed[2] == unary[2] == hashlib.sha256(streamed[1]).digest()
    assert streamed[0] == unary[0]
    # Canonical is a fixed point: decoding it changes nothing.
    assert decode_arguments(row, streamed[1])[1] == streamed[1]
    return streamed[1]


@given(key=text, value=values, version=st.none() | st.integers(0, 2**63 - 1))
def test_state_put_is_the_same_on_both_routes(key: str, value: Any, version: int | None) -> None:
    message = syscalls_pb2.StatePutRequest(key=key)
    json_format.ParseDict({"value": value}, message)
    arguments: dict[str, Any] = {"key": key, "value": value}
    if version is not None:
        message.if_version = version
        arguments["if_version"] = version
    both_routes("state.put", arguments, message)


@given(
    reads=st.dictionaries(text, st.integers(0, 2**40), max_size=3),
    puts=st.dictionaries(text, values, max_size=3),
    deletes=st.lists(text, max_size=3),
)
def test_state_transaction_is_the_same_on_both_routes(
    reads: dict[str, int], puts: dict[str, Any], deletes: list[str]
) -> None:
    message = syscalls_pb2.StateTransactionRequest(reads=reads, deletes=deletes)
    json_format.ParseDict({"puts": puts}, message)
    both_routes("state.transaction", {"reads": reads, "puts": puts, "deletes": deletes}, message)


@given(url=text, headers=st.dictionaries(text, text, max_size=3), body=st.binary(max_size=40))
def test_http_post_is_the_same_on_both_routes(url: str, headers: dict[str, str], body: bytes) -> None:
    message = syscalls_pb2.HttpPostRequest(url=url, headers=headers, body=body)
    encoded = json_format.MessageToDict(message, preserving_proto_field_name=True)
    both_routes("http.post", {"url": url, "headers": headers, **encoded}, message)


def test_canonical_bytes_are_these() -> None:
    raw = b'{ "puts": {"b": 5.0, "a": {"z": 1e2, "y": -0.0}}, "reads": {}, "deletes": ["\\u00e9"] }'
    _, canonical, digest = decode_arguments(ROWS["state.transaction"], raw)
    assert canonical == '{"deletes":["é"],"puts":{"a":{"y":0,"z":100},"b":5}}'.encode()
    assert digest == hashlib.sha256(canonical).digest()


def test_defaults_are_left_out() -> None:
    assert decode_arguments(ROWS["random"], b'{"size_bytes":0}')[1] == b"{}"
    assert decode_arguments(ROWS["now"], b"{}")[1] == b"{}"


def test_an_unset_version_differs_from_zero() -> None:
    unset = decode_arguments(ROWS["state.put"], b'{"key":"a"}')
    zero = decode_arguments(ROWS["state.put"], b'{"key":"a","if_version":0}')
    assert unset[0].if_version is None
    assert zero[0].if_version == 0
    assert unset[2] != zero[2]


def test_the_last_of_two_equal_keys_counts_in_value_and_digest() -> None:
    twice = decode_arguments(ROWS["state.get"], b'{"key":"a","key":"b"}')
    assert twice[0].key == "b"
    assert twice[2] == decode_arguments(ROWS["state.get"], b'{"key":"b"}')[2]


@pytest.mark.parametrize(
    ("action", "raw", "part"),
    [
        ("state.get", b"", "arguments of `state.get`"),
        ("state.get", b"nonsense", "malformed"),
        ("state.get", b"[]", "expected `object`"),
        ("state.get", b'{"key":"a"} {}', "trailing"),
        ("state.get", b'{"kez":"a"}', "unknown field `kez`"),
        ("state.get", b'{"key":1}', "`key`: expected `str`"),
        ("state.get", b'{"key":null}', "`key`"),
        ("state.get", b'{"key":"a\\u0000b"}', "`key` holds a NUL character"),
        ("state.put", b'{"key":"a","value":{"x":["\\u0000"]}}', "`value.x.0` holds a NUL"),
        ("state.put", b'{"key":"a","value":{"x\\u0000":1}}', "`value (a key)` holds a NUL"),
        ("state.put", b'{"key":"a","value":{"x":"\\ud800"}}', "`value.x` holds an unpaired surrogate"),
        ("state.get", b'{"key":"\xff"}', "utf-8"),
        ("state.put", b'{"key":"a","value":NaN}', "malformed"),
        ("state.put", b'{"key":"a","value":1e999}', "`value`"),
        ("state.put", b'{"key":"a","if_version":9223372036854775808}', "`if_version` is 9223372036854775808"),
        ("state.put", b'{"key":"a","if_version":1.5}', "`if_version`"),
        ("state.put", b'{"key":"a","if_version":"1"}', "`if_version`"),
        ("state.transaction", b'{"reads":{"k":99999999999999999999}}', "`reads.k`"),
        ("random", b'{"size_bytes":2147483648}', "`size_bytes`"),
        ("checkpoint.save", b'{"schema_version":-1}', "`schema_version` is -1"),
        ("http.post", b'{"body":"not base64!"}', "`body`: invalid base64"),
        ("http.post", b'{"headers":{"a":1}}', "`headers"),
    ],
)
def test_bad_arguments_are_refused_with_their_path(action: str, raw: bytes, part: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_arguments(ROWS[action], raw)
    message = str(caught.value)
    assert part.lower() in message.lower()
    assert "\n" not in message


def test_an_escaped_backslash_before_u0000_is_no_nul() -> None:
    assert decode_arguments(ROWS["state.get"], b'{"key":"a\\\\u0000"}')[0].key == "a\\u0000"


def test_size_and_depth_are_bounded() -> None:
    with pytest.raises(InvalidRequest, match="bytes"):
        decode_arguments(ROWS["state.put"], b" " * (ARGUMENTS_BYTES_MAX + 1))
    for depth in (DEPTH_MAX + 5, 100_000):
        raw = b'{"key":"a","value":' + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(InvalidRequest, match="nested"):
            decode_arguments(ROWS["state.put"], raw)
    at_most = b'{"key":"a","value":' + b"[" * (DEPTH_MAX - 1) + b"]" * (DEPTH_MAX - 1) + b"}"
    decode_arguments(ROWS["state.put"], at_most)


def test_a_message_with_a_nul_or_an_endless_number_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="`key` holds a NUL"):
        arguments_from_message(ROWS["state.get"], syscalls_pb2.StateGetRequest(key="a\x00"))
    message = syscalls_pb2.StatePutRequest(key="a")
    message.value.number_value = math.inf
    with pytest.raises(InvalidRequest, match="`value` is not a finite number"):
        arguments_from_message(ROWS["state.put"], message)


@given(found=st.booleans(), value=values, version=st.integers(0, 2**53))
def test_results_come_back_from_the_unary_route(found: bool, value: Any, version: int) -> None:
    row = ROWS["state.get"]
    encoded = encode_result(row, row.result(found=found, value=value, version=version))
    message = result_to_message(row, encoded)
    assert isinstance(message, syscalls_pb2.StateGetResponse)
    assert (message.found, message.version) == (found, version)
    assert json_format.MessageToDict(message).get("value") == (None if value is None else value)


def test_a_result_of_another_row_or_without_utf8_is_a_bug() -> None:
    with pytest.raises(Internal, match="report this"):
        encode_result(ROWS["state.get"], ROWS["now"].result(time="x"))
    with pytest.raises(Internal, match="can't be encoded"):
        encode_result(ROWS["now"], ROWS["now"].result(time="\ud800"))
    with pytest.raises(Internal, match="can't be read"):
        result_to_message(ROWS["now"], b'{"tim":1}')
