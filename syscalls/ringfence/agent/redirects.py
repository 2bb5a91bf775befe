"""Following HTTP redirects: each hop is a call of its own, decided, journaled and undone like any other.

INVARIANT: nothing of a hop rests on the one before. The kernel judges its URL by rule, declared resource and address, and puts the
credential of that resource on it alone; what the program sent to one host goes to no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urldefrag, urljoin, urlsplit

from ringfence.agent import targets
from ringfence.agent.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.agent.operations import Script
    from ringfence.agent.values import Response

FOLLOW_MAX: Final = 20
"""Most redirects that one request follows."""
_MOVED: Final = frozenset({301, 302})
_SEE_OTHER: Final = 303
_SAME: Final = frozenset({307, 308})
_REDACTED: Final = "[redacted]"
_OF_A_BODY: Final = frozenset({"content-type", "content-encoding", "content-language", "content-location"})


def follow(
    method: str,
    url: str,
    hops: int,
    *,
    json: Any = None,
    data: str | bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Script[Response]:
    """Send a request, and follow at most so many redirects. What isn't followed is the answer itself, a 3xx.

    Args:
        method: in lower case.
        url: of the first request.
        hops: redirects that are followed at most; 0: none.
        json: body as a JSON value.
        data: body as it is.
        headers: of the first request, and of further ones to the same origin.

    Raises:
        InvalidRequest: `hops` is no number of redirects; nothing is sent.
    """
    if type(hops) is not int or not 0 <= hops <= FOLLOW_MAX:
        raise InvalidRequest(f"`follow` is {hops!r}; give a whole number from 0 to {FOLLOW_MAX}")
    while True:
        response: Response = yield targets.http_call(method, url, json=json, data=data, headers=headers)
        location = response.headers.get("location", "")
        turned = _method_of(method, response.status)
        # Where a credential was taken out of it, nobody knows any more where it leads.
        if not hops or turned is None or not location or _REDACTED in location:
            return response
        hops -= 1
        there = urldefrag(urljoin(url, location)).url
        if turned != method:
            json = data = None
            headers = _without_body(headers)
        if _origin(there) != _origin(url):
            headers = None
        method, url = turned, there


def _method_of(method: str, status: int) -> str | None:
    """The method by which a redirect of this status is followed (RFC 9110, 15.4); None: it isn't."""
    reads = method in ("get", "head")
    if status in _SAME or (status in _MOVED and reads):
        return method
    if status == _SEE_OTHER:
        return method if reads else "get"
    # What became of a PUT, PATCH or DELETE that was moved, servers don't agree on: the program decides.
    return "get" if status in _MOVED and method == "post" else None


def _without_body(headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Headers without those that speak of a body."""
    if headers is None:
        return None
    return {name: value for name, value in headers.items() if name.lower() not in _OF_A_BODY}


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme.lower(), parts.netloc.lower()
