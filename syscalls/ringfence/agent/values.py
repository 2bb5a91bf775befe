"""What calls return."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ringfence.agent.errors import CallFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

T = TypeVar("T")
HTTP_ERRORS: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a person answered. True where they agreed.

    Attributes:
        approved: whether they agreed.
        answer: what they said, perhaps nothing.
        by: who it was.
    """

    approved: bool = False
    answer: str = ""
    by: str = ""

    def __bool__(self) -> bool:
        """Whether they agreed."""
        return self.approved


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """One path of the workspace.

    Attributes:
        path: absolute, below /workspace.
        kind: `file`, `directory`, `link` or `other`.
        size_bytes: size.
        mode: permission bits.
        modified_at: time of the last change, UTC.
        target: where a link points, else empty.
    """

    path: str
    kind: str
    size_bytes: int
    mode: int
    modified_at: datetime | None
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchMatch:
    """One hit of a search. `line` counts from 1; it is 0 and `text` empty where only names were asked for."""

    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContent:
    """Bytes of a file, the size of the whole file, and the version that was read."""

    data: bytes
    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file after a write: its size in bytes and its version."""

    size_bytes: int
    version: str


class Found(list[T]):
    """A list that says what it leaves out.

    Attributes:
        withheld: entries that policy hides.
        truncated: whether a limit cut the list.
    """

    def __init__(self, items: Iterable[T] = (), *, withheld: int = 0, truncated: bool = False) -> None:
        super().__init__(items)
        self.withheld = withheld
        self.truncated = truncated


class Rows(list[dict[str, Any]]):
    """Rows of a query, each a dict by column name. A name that comes twice gets `_2`, `_3` and so on.

    Attributes:
        columns: names in the order of the statement, as the keys of the rows.
        truncated: whether a limit cut the rows.
    """

    def __init__(
        self, columns: Iterable[str], rows: Iterable[Iterable[Any]], *, truncated: bool = False
    ) -> None:
        self.columns = _distinct(columns)
        self.truncated = truncated
        super().__init__(dict(zip(self.columns, row, strict=True)) for row in rows)


def _distinct(names: Iterable[str]) -> list[str]:
    taken: dict[str, None] = {}
    for name in names:
        free, count = name, 2
        while free in taken:
            free, count = f"{name}_{count}", count + 1
        taken[free] = None
    return list(taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlResult:
    """What a changing statement did: how many rows, and those of its RETURNING clause."""

    row_count: int
    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """An HTTP answer. Statuses of 400 and above are answers, too; `raise_for_status` makes errors of them."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status is below 400."""
        return self.status < HTTP_ERRORS

    @property
    def text(self) -> str:
        """The body as text in its declared charset, else UTF-8; what can't be decoded shows as `�`."""
        found = re.search(r"charset=\"?([\w.:-]+)", self.headers.get("content-type", ""), re.IGNORECASE)
        try:
            return self.body.decode(found[1] if found else "utf-8", errors="replace")
        except LookupError:
            return self.body.decode("utf-8", errors="replace")

    def json(self) -> Any:
        """Parse the body as JSON.

        Raises:
            ValueError: it isn't JSON.
        """
        return json.loads(self.body)

    def raise_for_status(self) -> None:
        """Raise where the status is 400 or above.

        Raises:
            CallFailed: with the status in `metadata["status"]`.
        """
        if not self.ok:
            raise CallFailed(
                f"the target answered with status {self.status}", metadata={"status": str(self.status)}
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that ran.

    Attributes:
        exit_code: status; negative: the signal that ended it.
        stdout: first and last part of standard output; what isn't UTF-8 shows as `�`.
        stderr: the same of standard error.
        stdout_bytes: bytes written to standard output in all.
        stderr_bytes: bytes written to standard error in all.
        changed: paths of the workspace that it changed.
        reason: why it ended: `exit`, `signal`, `timeout` or `memory`.
        stdout_ref: artifact with all of standard output where `stdout` is only a part; empty: it is all.
        stderr_ref: the same of standard error.
    """

    exit_code: int
    stdout: str
    stderr: str
    stdout_bytes: int
    stderr_bytes: int
    changed: tuple[str, ...]
    reason: str
    stdout_ref: str = ""
    stderr_ref: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versioned:
    """A key of the shared state: whether it has a value, the value, the version (0: it never existed)."""

    found: bool
    value: Any
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this program is to the kernel: agent id, thread id, branch number."""

    agent: str
    thread: str
    branch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """A result of a tool in place of which a model read a pointer; `rf.artifacts.get(name)` gives it back.

    Attributes:
        name: of the artifact that keeps it.
        ref: SHA-256 of its content.
        size_bytes: size of its content.
        message: index of its message in `messages`.
        part: index of the part of that message's content that holds it; -1: the message itself does.
    """

    name: str
    ref: str
    size_bytes: int
    message: int
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A model's reply.

    Attributes:
        text: its text; empty where the model only wants tools called.
        message: the whole message as the host sent it; append it to `messages` to go on.
        tool_calls: tools that the model wants called.
        finish_reason: why it ended, as the host says: `stop`, `length`, `tool_calls` and others.
        model: the model that answered, as the host says.
        resource: the declared host.
        prompt_tokens: tokens read.
        completion_tokens: tokens written.
        estimated: whether the host gave no usage, so that the kernel counted.
        cost_usd: by the declared price.
        paged: results of tools that left the prompt so that it fits, oldest first.
        counted_tokens: tokens of the prompt as the kernel counted them before it was sent.
        tokenizer: what they were counted with.
    """

    text: str
    message: dict[str, Any]
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    model: str
    resource: str
    prompt_tokens: int
    completion_tokens: int
    estimated: bool
    cost_usd: float
    paged: tuple[Paged, ...] = ()
    counted_tokens: int = 0
    tokenizer: str = ""
