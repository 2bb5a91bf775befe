"""One request that was posted to the callback, and why one is refused."""

from __future__ import annotations

from dataclasses import dataclass, field


class HttpProblem(Exception):
    """Why a request is refused: an HTTP status, a stable reason, one line, and where it helps, seconds to try again after."""

    def __init__(self, status: int, reason: str, message: str, *, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s


@dataclass(slots=True, kw_only=True)
class Message:
    """One request as it came. Names of headers in lower case."""

    method: str = ""
    target: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytearray = field(default_factory=bytearray)
