"""Canonical forms of paths, hosts and URLs. What can't be brought into one is refused, never guessed.

Nothing here looks at a disk or a network: links are resolved by the workspace, before policy is asked.
"""

from __future__ import annotations

import ipaddress
import unicodedata
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote_to_bytes

import idna
from ringfence.policy.problems import PatternError

WORKSPACE: Final = "/workspace"
MAX_TEXT: Final = 4096
"""Longest path, URL, name or key, in characters."""

_REFUSED_CATEGORIES: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
# Shown as nothing though their category is a letter or a mark.
_INVISIBLE: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0\ufffe\uffff")
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_LABEL: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")
_MAX_HOST: Final = 253
_MAX_LABEL: Final = 63
_MAX_PORT: Final = 65535
_PATH_SAFE: Final = "!$&'()*+,;=:@-._~"
DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def check_text(text: str, what: str) -> None:
    """Refuse text that a person can't see or that is absurdly long.

    Raises:
        PatternError: control, zero-width or other invisible characters, lone surrogates, more than 4096 characters.
    """
    if len(text) > MAX_TEXT:
        raise PatternError(f"the {what} has {len(text)} characters", f"at most {MAX_TEXT} are accepted")
    if text.isascii() and text.isprintable():
        return
    for char in text:
        if unicodedata.category(char) in _REFUSED_CATEGORIES or char in _INVISIBLE:
            raise PatternError(
                f"the {what} holds the control or invisible character U+{ord(char):04X}",
                "remove the character",
            )


def canonical_path(path: str) -> str:
    """The one spelling of a workspace path: `/workspace/...`, NFC, without `.`, doubled or trailing slashes.

    A relative path is below `/workspace`. Links are not looked at; the workspace does that.

    Raises:
        PatternError: an empty path, `..`, control or invisible characters.
    """
    check_text(path, "path")
    if not path:
        raise PatternError("the path is empty", "write a path below `/workspace`")
    path = unicodedata.normalize("NFC", path)
    if not path.startswith("/"):
        path = f"{WORKSPACE}/{path}"
    kept = [segment for segment in path.split("/") if segment not in {"", "."}]
    if ".." in kept:
        raise PatternError("the path has a `..` segment", "write the path without it")
    return "/" + "/".join(kept)


def _ascii_host(host: str) -> str:
    """A host name in its A-label form, lower case, without the trailing dot."""
    if not host.isascii():
        try:
            host = idna.encode(host, uts46=True, std3_rules=True).decode()
        except idna.IDNAError as error:
            raise PatternError(
                "the host is not a valid international name", "write it in its `xn--` form"
            ) from error
    host = host.lower()
    return host.removesuffix(".")


def check_label(label: str, extra: str = "") -> None:
    """Refuse what is no label of a host name. `extra` are characters allowed besides, for patterns.

    Raises:
        PatternError: an empty or overlong label, or one with characters that no host name has.
    """
    if not label or len(label) > _MAX_LABEL:
        raise PatternError(
            "the host has an empty or overlong label", "write a host such as `api.example.com`"
        )
    if any(char not in _LABEL and char not in extra for char in label):
        raise PatternError(f"`{label}` is no label of a host", "letters, digits, `-` and `_` make a label")
    if label.startswith("xn--"):
        try:
            idna.decode(label)
        except idna.IDNAError as error:
            raise PatternError(f"`{label}` is no valid international label", "check its spelling") from error


def canonical_host(host: str) -> str:
    """A host: name in lower case A-labels without trailing dot, strict dotted IPv4, or compressed IPv6 in brackets.

    Raises:
        PatternError: anything else, in particular the other spellings of IPv4 (`0x7f.1`, `2130706433`).
    """
    if host.startswith("["):
        inside = host[1:-1] if host.endswith("]") and "%" not in host else ""
        try:
            return f"[{ipaddress.IPv6Address(inside).compressed}]"
        except ValueError as error:
            raise PatternError("the host is no IPv6 address", "write it as `[::1]`") from error
    name = _ascii_host(host)
    if not name or len(name) > _MAX_HOST:
        raise PatternError("the host is empty or too long", "write a host such as `api.example.com`")
    labels = name.split(".")
    for label in labels:
        check_label(label)
    if labels[-1].isdigit() or labels[-1].startswith("0x"):
        # Resolvers read such names as numbers in several bases; only the plain spelling may pass.
        try:
            return str(ipaddress.IPv4Address(name))
        except ValueError as error:
            raise PatternError(
                "the host is an unusual spelling of an address", "write it as `127.0.0.1`"
            ) from error
    return name


def decode_segment(segment: str) -> str:
    """Percent-decode one segment of a URL path, exactly once, and normalise it to NFC.

    Raises:
        PatternError: a broken escape, bytes that are no UTF-8, an encoded slash or backslash, a second layer of
            encoding, control or invisible characters.
    """
    if "%" in segment:
        at = segment.find("%")
        while at >= 0:
            if not is_escape(segment, at):
                raise PatternError("the URL has a broken percent escape", "write `%25` for a percent sign")
            at = segment.find("%", at + 1)
        try:
            segment = unquote_to_bytes(segment).decode()
        except UnicodeDecodeError as error:
            raise PatternError("the URL does not decode to UTF-8", "encode its path as UTF-8") from error
        if any(is_escape(segment, at) for at, char in enumerate(segment) if char == "%"):
            raise PatternError("the URL's path is encoded twice", "encode it once")
        check_text(segment, "URL")
    if "/" in segment or "\\" in segment:
        raise PatternError("the URL's path has an encoded slash or a backslash", "write it without")
    return unicodedata.normalize("NFC", segment)


def is_escape(text: str, at: int) -> bool:
    """Whether `%XX` stands at a place."""
    return len(text) >= at + 3 and text[at] == "%" and text[at + 1] in _HEX and text[at + 2] in _HEX


def encode_segment(segment: str) -> str:
    """Percent-encode one decoded segment; every such text has exactly one encoding."""
    return quote(segment, safe=_PATH_SAFE)


def bare_segment(segment: str) -> str:
    """A decoded segment as servers read it that drop its parameters (`;…`), or dots and spaces at its end."""
    return segment.partition(";")[0].rstrip(". ")


def bare_url(url: str) -> str:
    """A canonical URL as such servers read it; the same where all servers read it alike."""
    parts = split_url(url)
    path = "/".join(encode_segment(bare_segment(decode_segment(segment))) for segment in parts.segments)
    port = "" if parts.port is None else f":{parts.port}"
    query = "" if parts.query is None else f"?{parts.query}"
    return f"{parts.scheme}://{parts.host}{port}/{path}{query}"


def canonical_query(query: str) -> str:
    """A query with upper-case escapes and non-ASCII encoded; its parameters are otherwise left as they are."""
    out: list[str] = []
    at = 0
    while at < len(query):
        char = query[at]
        if is_escape(query, at):
            out.append(query[at : at + 3].upper())
            at += 3
            continue
        if char == "%":
            raise PatternError(
                "the URL's query has a broken percent escape", "write `%25` for a percent sign"
            )
        out.append(char if char.isascii() and char not in '"<>`{}|^[]\\' else quote(char, safe=""))
        at += 1
    return "".join(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlParts:
    """A URL taken apart, each part still as it was written.

    Attributes:
        scheme: `http` or `https`.
        host: as written.
        port: as written, None where there is none.
        segments: the path's segments, encoded; a trailing slash leaves an empty last one.
        query: None where there is none.
    """

    scheme: str
    host: str
    port: str | None
    segments: tuple[str, ...]
    query: str | None


def split_url(url: str) -> UrlParts:
    """Take a URL apart. One reading only: no trimming, no backslash as slash, no credentials.

    Raises:
        PatternError: anything that clients read in different ways.
    """
    check_text(url, "URL")
    if any(char.isspace() or char == "\\" for char in url):
        raise PatternError("the URL has a space or a backslash", "percent-encode it")
    scheme, found, rest = url.partition("://")
    scheme = scheme.lower()
    if not found or scheme not in DEFAULT_PORTS:
        raise PatternError("the URL has to begin with `http://` or `https://`", "write the whole URL")
    rest = rest.partition("#")[0]
    rest, question, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    if "@" in authority or "%" in authority:
        raise PatternError(
            "the URL has credentials or an escape in its host", "declare credentials with the resource"
        )
    host, port = authority, None
    closing = authority.rfind("]")
    colon = authority.rfind(":")
    if colon > closing:
        host, port = authority[:colon], authority[colon + 1 :]
    if ":" in host and not host.startswith("["):
        raise PatternError("the URL's host has more than one colon", "write an IPv6 address in brackets")
    segments = tuple(path.split("/")) if slash and path else ()
    if "" in segments[:-1]:
        raise PatternError("the URL's path has a doubled slash", "write single slashes")
    return UrlParts(scheme=scheme, host=host, port=port, segments=segments, query=query if question else None)


def canonical_port(scheme: str, port: str | None) -> str:
    """`:port`, or nothing for the scheme's own.

    Raises:
        PatternError: not a number from 1 to 65535.
    """
    if port is None:
        return ""
    if not (
        port.isascii() and port.isdigit() and len(port) <= len(str(_MAX_PORT)) and 0 < int(port) <= _MAX_PORT
    ):
        raise PatternError(f"`{port}` is no port", "write a number from 1 to 65535")
    return "" if int(port) == DEFAULT_PORTS[scheme] else f":{int(port)}"


def canonical_url(url: str) -> str:
    """The one spelling of a URL, which is also what has to be sent.

    Scheme and host in lower case, the host as A-labels without trailing dot, no default port, the path decoded once and
    encoded again in one way, no fragment. The query stays, with its escapes in upper case.

    Raises:
        PatternError: what can't be read in one way only: other schemes, credentials, `.` and `..`, `..;x`, doubled slashes,
            encoded slashes, double encoding, control and invisible characters, odd spellings of addresses.
    """
    parts = split_url(url)
    decoded = [decode_segment(segment) for segment in parts.segments]
    if "." in decoded or ".." in decoded:
        raise PatternError("the URL's path has a `.` or `..` segment", "write the path without it")
    if any(segment and not bare_segment(segment) for segment in decoded):
        # `..;x` leads up on servers that drop parameters of segments, and `;x` is a doubled slash.
        raise PatternError(
            "the URL's path has a segment that some servers read as `..` or as none",
            "write the path without it",
        )
    host = canonical_host(parts.host) + canonical_port(parts.scheme, parts.port)
    path = "/".join(encode_segment(segment) for segment in decoded)
    query = "" if parts.query is None else f"?{canonical_query(parts.query)}"
    return f"{parts.scheme}://{host}/{path}{query}"
