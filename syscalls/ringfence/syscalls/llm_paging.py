"""Which results of tools leave a prompt that is too long, and what stands in their place. No I/O.

INVARIANT: only the content of a result is replaced. No message, call or part comes, goes or moves, so a call and its
result stay a pair, whatever protocol they are in.
INVARIANT: what is replaced is kept byte for byte: a text as its UTF-8, anything else as the JSON that would be sent.
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from ringfence.syscalls.llm_profiles import Profile
from ringfence.syscalls.llm_shape import (
    Count,
    Place,
    content_at,
    extra_pieces,
    message_pieces,
    result_key,
    results,
    shown,
    tally,
)

PREFIX: Final = "paged."
"""Names of artifacts that only the kernel gives."""
TEXT: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"
FIRST_LINE_CHARS: Final = 80
_NAME_DIGITS: Final = 32


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be counted, and made to fit.

    Attributes:
        tokenizer: name of a profile.
        factor: how many times what is counted the host counts.
        limit: most tokens of the prompt; None: any.
        page: whether results may leave it.
    """

    tokenizer: str
    messages: list[dict[str, Any]]
    tools: list[Any] = []
    tool_choice: Any = None
    response_format: Any = None
    factor: float = 1.0
    limit: int | None = None
    page: bool = False


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One result that leaves the prompt.

    Attributes:
        message: index of its message.
        part: index of the part that holds it; -1: the message does.
        name: of the artifact that keeps it; holds half of the hash of its content.
        ref: SHA-256 of its content.
        tokens: by which the prompt gets shorter.
    """

    message: int
    part: int
    name: str
    ref: str
    size_bytes: int
    media_type: str
    tokens: int


class Paging(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal keeps of a prompt that something left, before it is sent.

    Attributes:
        pages: what left it.
        before: SHA-256 of its messages as the agent gave them, as canonical JSON.
        after: the same of the messages that are sent.
    """

    pages: list[Page]
    before: str
    after: str


def hash_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """SHA-256 of messages, as JSON with sorted keys and no blanks."""
    return hashlib.sha256(msgspec.json.encode(messages, order="sorted")).hexdigest()


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt has.

    Attributes:
        raw: tokens as counted, with what was paged out left out.
        tokens: the same times the factor: what is reserved, and held against the limit.
        whole: as `tokens`, before anything was paged out.
        pages: what has to leave it so that it fits, in order.
    """

    raw: int
    tokens: int
    whole: int
    pages: list[Page] = []


def kept(content: object) -> tuple[bytes, str]:
    """The bytes that keep a result, and their media type.

    Raises:
        UnicodeEncodeError: it is no text that can be sent.
    """
    if isinstance(content, str):
        return content.encode(), TEXT
    return msgspec.json.encode(content), JSON


def first_line(data: bytes) -> str:
    """The beginning of a result on one line, without control characters."""
    text = data[: FIRST_LINE_CHARS * 8].decode("utf-8", "ignore").strip()
    line = text.partition("\n")[0].strip()
    flat = "".join(c if unicodedata.category(c)[0] != "C" else " " for c in line).replace('"', "'")
    return flat if len(flat) <= FIRST_LINE_CHARS else f"{flat[:FIRST_LINE_CHARS]}…"


def pointer(name: str, data: bytes, media_type: str) -> str:
    """What the model reads in place of a result."""
    return (
        f"[paged out to keep the prompt within its limit: {len(data)} bytes, {media_type.partition(';')[0]}, "
        f'beginning "{first_line(data)}". Kept whole as the artifact `{name}`: '
        "read it with artifacts.get, by this name, in parts with `offset` and `limit`.]"
    )


def page_of(place: Place, content: object, tokens: int) -> tuple[Page, str]:
    """A page, and the pointer for it."""
    data, media_type = kept(content)
    ref = hashlib.sha256(data).hexdigest()
    name = f"{PREFIX}{ref[:_NAME_DIGITS]}"
    page = Page(
        message=place[0],
        part=place[1],
        name=name,
        ref=ref,
        size_bytes=len(data),
        media_type=media_type,
        tokens=tokens,
    )
    return page, pointer(name, data, media_type)


def measure(request: Request, profile: Profile, count: Count) -> Counted:
    """Count a prompt, and find what has to leave it: the oldest results first, no more than it takes.

    Results that come after the model's last turn stay. Where nothing helps, `tokens` is above the limit, with all that
    could leave counted out.
    """
    messages = request.messages
    pieces = [message_pieces(message, profile) for message in messages]
    pieces.append(
        extra_pieces(request.tools, request.tool_choice, request.response_format, profile),
    )
    raw = sum(tally(pieces, count, profile.margin))
    whole = _times(raw, request.factor)
    if request.limit is None or whole <= request.limit or not request.page:
        return Counted(raw=math.ceil(raw), tokens=whole, whole=whole)
    places = results(messages)
    contents = [content_at(messages, place) for place in places]
    found = [page_of(place, content, 0) for place, content in zip(places, contents, strict=True)]
    old = tally([shown(content, profile) for content in contents], count, profile.margin)
    new = tally([shown(text, profile) for _, text in found], count, profile.margin)
    pages: list[Page] = []
    for (page, _), before, after in zip(found, old, new, strict=True):
        if _times(raw, request.factor) <= request.limit:
            break
        if after < before:
            raw -= before - after
            pages.append(msgspec.structs.replace(page, tokens=math.floor(before - after)))
    return Counted(raw=math.ceil(raw), tokens=_times(raw, request.factor), whole=whole, pages=pages)


def _times(raw: float, factor: float) -> int:
    # Sums of margins are not exact in binary: a hair above a whole number is that number.
    return math.ceil(raw * factor - 1e-6)


def apply(
    messages: Sequence[Mapping[str, Any]], pages: Sequence[Page]
) -> tuple[list[Mapping[str, Any]], dict[str, bytes]]:
    """The messages with pointers in place of what is paged out, and the bytes that left, by the artifact's name.

    The messages that are given stay as they are.

    Raises:
        ValueError: a page is of something else than stands there.
    """
    changed: list[Mapping[str, Any]] = list(messages)
    left: dict[str, bytes] = {}
    for page in pages:
        place = (page.message, page.part)
        content = content_at(messages, place)
        data, media_type = kept(content)
        if hashlib.sha256(data).hexdigest() != page.ref:
            raise ValueError(f"message {page.message} is not the one that was paged out")
        left[page.name] = data
        text = pointer(page.name, data, media_type)
        message = changed[page.message]
        if page.part < 0:
            changed[page.message] = _replaced(message, text, message=True)
        else:
            parts = list(message["content"])
            parts[page.part] = _replaced(parts[page.part], text, message=False)
            changed[page.message] = {**message, "content": parts}
    return changed, left


def _replaced(holder: Mapping[str, Any], text: str, *, message: bool) -> Mapping[str, Any]:
    """A result with a pointer as its content, in the form that its content had."""
    key = result_key(holder, message=message)
    if key is None:
        raise ValueError("no result of a tool stands there")
    kind = "input_text" if key == "output" else "text"
    content = [{"type": kind, "text": text}] if isinstance(holder[key], list) else text
    return {**holder, key: content}
