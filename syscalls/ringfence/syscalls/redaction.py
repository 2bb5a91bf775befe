"""Takes the operator's credentials out of what targets answer, before anybody else sees it: the agent, the journal, a log.

A target may echo what it was sent, in another spelling, and it may be asked to. What is looked for is each credential as it
is and in the spellings that programs make of it by themselves; a target that sets out to give it away in a code of its own
can't be stopped from that.

INVARIANT: what is searched is the whole answer, put together and unpacked: no part of a credential hides behind where a
chunk, an event or a line ends.
"""

from __future__ import annotations

import base64
import html
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, cast
from urllib.parse import quote, quote_plus

from ringfence.syscalls.errors import CallFailed

if TYPE_CHECKING:
    from ringfence.syscalls.declared import (
        A2aResource,
        HttpResource,
        LlmResource,
        McpResource,
        ObjectResource,
        SqlResource,
    )

REDACTED: Final = "[redacted]"

ELSEWHERE_CHARS_MIN: Final = 12
"""Shortest credential that is taken out of answers of other resources than its own, and out of rows of databases."""

_CODE_CHARS_MIN: Final = 8
"""Shortest part of a code that is looked for: less of it stands in many texts."""

_HALF_CHARS_MIN: Final = 4
"""Shortest part of a spelling that is looked for where something was left out."""

_CACHED: Final = 64
_DEPTH_MAX: Final = 200
_ERROR_CHARS_MAX: Final = 600
_LINE: Final = re.compile(rb"[^\r\n]+")
_PATH_SAFE: Final = "!$&'()*+,;=:@-._~/"


class Declared(Protocol):
    """Whoever knows the declared resources."""

    @property
    def http(self) -> Mapping[str, HttpResource]:
        """HTTP resources by name."""
        ...

    @property
    def sql(self) -> Mapping[str, SqlResource]:
        """SQL resources by name."""
        ...

    @property
    def llm(self) -> Mapping[str, LlmResource]:
        """Hosts of language models by name."""
        ...

    @property
    def objects(self) -> Mapping[str, ObjectResource]:
        """Resources of objects by name."""
        ...

    @property
    def mcp(self) -> Mapping[str, McpResource]:
        """MCP servers by name."""
        ...

    @property
    def a2a(self) -> Mapping[str, A2aResource]:
        """Agents elsewhere by name."""
        ...


class Redactor:
    """Knows some secrets in all their spellings. None of its texts shows them.

    Args:
        secrets: the values; empty ones are left out.
    """

    __slots__ = ("_plain", "_spellings")

    def __init__(self, secrets: Sequence[str]) -> None:
        found: dict[bytes, tuple[int, int]] = {}
        for secret in filter(None, secrets):
            for core, before, after in _spellings(secret):
                held = found.get(core.lower(), (0, 0))
                found[core.lower()] = (max(before, held[0]), max(after, held[1]))
        self._spellings = sorted(found.items(), key=lambda item: -len(item[0]))
        self._plain = not found

    def __repr__(self) -> str:
        return f"Redactor({len(self._spellings)} spellings)"

    def data(self, data: bytes) -> bytes:
        """The same bytes without any of the secrets, whatever the case of their letters."""
        spans = self.spans(data)
        return _without(data, spans) if spans else data

    @property
    def longest(self) -> int:
        """Bytes of the longest spelling with what may hold some of its bits; 0: there is nothing to look for."""
        return max((before + len(core) + after for core, (before, after) in self._spellings), default=0)

    def spans(self, data: bytes) -> list[tuple[int, int]]:
        """Where in some bytes any of the secrets lies; in no order, and they may overlap."""
        if self._plain or not data:
            return []
        spans = list(self._found(data))
        if b"\n" in data or b"\r" in data:
            spans += self._over_lines(data)
        return spans

    def halves(self, head: bytes, tail: bytes) -> tuple[int, int]:
        """How many bytes at the end of one text and at the start of another belong to a secret that was cut there."""
        ends, starts = head.lower(), tail.lower()
        before = after = 0
        for core, _ in self._spellings:
            for size in range(len(core) - 1, _HALF_CHARS_MIN - 1, -1):
                if ends.endswith(core[:size]):
                    before = max(before, size)
                if starts.startswith(core[-size:]):
                    after = max(after, size)
        return before, after

    def begins(self, data: bytes) -> int:
        """How many bytes at the end may be the beginning of a secret, of which the rest is yet to come."""
        held = 0
        tail = data[-self.longest :].lower() if self.longest else b""
        flat = tail.translate(None, b"\r\n")
        for core, (before, _) in self._spellings:
            size = _begun(core, tail)
            if size:
                held = max(held, size + before)
            elif flat != tail and _begun(core, flat):
                return len(data)  # it may go on over lines
        return min(held, len(data))

    def body(self, data: bytes) -> bytes:
        """The same for a body, which may be JSON with characters escaped in whatever way."""
        data = self.data(data)
        if self._plain or b"\\" not in data:
            return data
        try:
            value: Any = json.loads(data)
        except (ValueError, RecursionError):
            return data
        clean = self.value(value)
        return data if clean == value else json.dumps(clean).encode()

    def text(self, text: str) -> str:
        """The same for a text."""
        if self._plain:
            return text
        given = text.encode("utf-8", "surrogatepass")
        clean = self.data(given)
        return text if clean == given else clean.decode("utf-8", "replace")

    def value(self, value: Any, depth: int = 0) -> Any:
        """The same for a JSON value: every text in it, and names of fields too. What lies too deep is left out."""
        if self._plain:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping | list) and depth == _DEPTH_MAX:
            return REDACTED
        if isinstance(value, Mapping):
            table = cast("Mapping[str, Any]", value)
            return {self.text(key): self.value(inner, depth + 1) for key, inner in table.items()}
        if isinstance(value, list):
            return [self.value(inner, depth + 1) for inner in cast("list[Any]", value)]
        return value

    def _found(self, data: bytes) -> Iterator[tuple[int, int]]:
        folded = data.lower()
        for core, (before, after) in self._spellings:
            at = folded.find(core)
            while at >= 0:
                end = at + len(core)
                yield max(0, at - before), _code_end(data, end, after)
                at = folded.find(core, end)

    def _over_lines(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Where it goes on over the ends of lines, as codes do that are cut into lines."""
        spans = list(self._found(data.translate(None, b"\r\n")))
        if not spans:
            return
        lines = [match.span() for match in _LINE.finditer(data)]
        starts, total = list[int](), 0
        for begin, end in lines:
            starts.append(total)
            total += end - begin

        def place(at: int) -> int:
            line = bisect_right(starts, at) - 1
            return lines[line][0] + at - starts[line]

        for begin, end in spans:
            yield place(begin), place(end - 1) + 1


def redactor_of(secrets: Sequence[str]) -> Redactor:
    """What takes these secrets out."""
    return _made(tuple(secrets))


@lru_cache(maxsize=_CACHED)
def _made(secrets: tuple[str, ...]) -> Redactor:
    return Redactor(secrets)


def redactor_for(env: Declared, own: Sequence[str]) -> Redactor:
    """What takes every declared credential out of an answer.

    Args:
        env: knows the resources: what one was sent may come back from another that looks into the same house.
        own: credentials of the resource that answers; these count however short they are.
    """
    resources = (
        *(*env.http.values(), *env.llm.values(), *env.sql.values(), *env.objects.values()),
        *(*env.mcp.values(), *env.a2a.values()),
    )
    others = {secret for one in resources for secret in one.secrets if len(secret) >= ELSEWHERE_CHARS_MIN}
    return redactor_of((*own, *sorted(others.difference(own))))


def without_secrets(env: Declared, error: CallFailed) -> CallFailed:
    """An error whose text quotes a target, without any declared credential; cut where it is long."""
    # INVARIANT: cut last, or the half of a credential that is left could no longer be found.
    return CallFailed(redactor_for(env, ()).text(error.message)[:_ERROR_CHARS_MAX], **error.metadata)


def _spellings(secret: str) -> Iterator[tuple[bytes, int, int]]:
    """Each spelling, and how many characters before and behind it may hold some bits of the secret too."""
    plain = secret.encode()
    escaped = json.dumps(secret)[1:-1]
    texts = {
        secret,
        *(quote(secret, safe=safe) for safe in ("", "/", _PATH_SAFE)),
        quote_plus(secret),
        *(escaped, escaped.replace("/", "\\/"), json.dumps(escaped)[1:-1]),
        *(json.dumps(secret, ensure_ascii=False)[1:-1], repr(plain)[2:-1]),
        *(
            html.escape(secret),
            html.escape(secret, quote=False),
            html.escape(secret).replace("&#x27;", "&#39;"),
        ),
        base64.b64encode(plain).decode(),
        base64.urlsafe_b64encode(plain).decode(),
    }
    for text in texts:
        yield text.encode(), 0, 0
    codes = (
        *(plain.hex(), plain.hex(":"), plain.hex(" ")),
        "".join(f"%{byte:02x}" for byte in plain),
        "".join(f"\\x{byte:02x}" for byte in plain),
        "".join(f"\\u{unit:04x}" for unit in memoryview(secret.encode("utf-16-le")).cast("H")),
    )
    for code in codes:
        if len(code) >= _CODE_CHARS_MIN:
            yield code.encode(), 0, 0
    for encoding in ("utf-16-le", "utf-16-be"):
        yield secret.encode(encoding), 0, 0
    yield from _base64(plain)


def _base64(plain: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Base64 of a text that holds the secret, wherever in it: there are three ways in which the bits can lie."""
    for ahead in range(3):
        first, last = 8 * ahead, 8 * (ahead + len(plain))
        padded = bytes(ahead) + plain + bytes(3)
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            core = encode(padded)[-(-first // 6) : last // 6]
            if len(core) >= _CODE_CHARS_MIN:
                yield core, 1 if first % 6 else 0, 1 if last % 6 else 0


def _begun(core: bytes, tail: bytes) -> int:
    """Bytes at the end of a text with which a spelling begins; 0: it doesn't there."""
    at = tail.find(core[:1])
    while at >= 0:
        if core.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(core[:1], at + 1)
    return 0


def _code_end(data: bytes, end: int, after: int) -> int:
    """Where a code ends: with the last bits, and what fills it up."""
    if not after:
        return end
    end = min(len(data), end + after)
    while data[end : end + 1] == b"=":
        end += 1
    return end


def _without(data: bytes, spans: list[tuple[int, int]]) -> bytes:
    parts: list[bytes] = []
    at = 0
    for begin, end in sorted(spans):
        if begin >= at:
            parts += (data[at:begin], REDACTED.encode())
        at = max(at, end)
    return b"".join((*parts, data[at:]))
