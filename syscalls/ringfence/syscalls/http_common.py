"""What the HTTP verbs plan in common: which resource a URL belongs to, what it does there, what may be sent.

What is judged is what is sent: the canonical URL. Effects are the operator's word, in the resource's
`effects`; where it says nothing, GET and HEAD read and every other verb leaves the system.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from ringfence.policy.canonical import bare_url, canonical_url
from ringfence.policy.matcher import match_url_path
from ringfence.policy.problems import PatternError
from ringfence.syscalls.base import Effect, Plan, Question
from ringfence.syscalls.declared import HttpResource
from ringfence.syscalls.errors import InvalidRequest, NoSuchResource
from ringfence.syscalls.http_place import resource_of
from ringfence.syscalls.http_undo import undo_of
from ringfence.syscalls.refusals import refuse_unavailable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

HEADERS_MAX: Final = 64
HEADER_BYTES_MAX: Final = 16 << 10

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# With these an agent could have a credential that is echoed sent to it in pieces, none of which is one.
_SLICING_HEADERS: Final = frozenset({"range", "if-range"})
# One line of visible ASCII: no header can be smuggled in behind another.
_HEADER_VALUE: Final = re.compile(r"[\x20-\x7e\t]*")
# Of the connection, of the credential, of the way a request came, or another method or path in disguise.
_REFUSED_HEADERS: Final = frozenset(
    {
        *("host", "content-length", "transfer-encoding", "connection", "keep-alive", "proxy-connection"),
        *("te", "trailer", "upgrade", "expect", "accept-encoding"),
        *("authorization", "proxy-authorization", "authentication", "cookie", "cookie2"),
        *("forwarded", "x-real-ip", "true-client-ip", "x-client-ip", "x-host", "x-http-host-override"),
        *("x-http-method", "x-http-method-override", "x-method-override", "x-method"),
    }
)
_REFUSED_BEGINNINGS: Final = ("x-forwarded-", "x-original-", "x-rewrite-")
# What hosts commonly take a credential in. Credentials come from the kernel file: one that an agent found is of no use here.
_CREDENTIAL_HEADER: Final = re.compile(
    r"(?:.*-)?(?:authorization|api-?key|app(?:lication)?-key|subscription-key|functions-key|auth-key"
    r"|(?:auth|access|session|security|private|bearer|refresh|job|api|app|user|secret)-?token)"
    r"|x-(?:auth|token|key|secret|password|cookie|(?:gitlab|github|vault|figma|consul|gitea|redmine)-token)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a call goes, kept in `Plan.data`.

    Attributes:
        resource: the declared resource.
        method: upper case.
        url: canonical; what was judged and what is sent.
        headers: the agent's own, checked; names in lower case.
        reads: whether the verb only reads, so that sending it twice does nothing twice.
    """

    resource: HttpResource
    method: str
    url: str
    headers: Mapping[str, str]
    reads: bool


class Declaring(Protocol):
    """What planning looks at."""

    @property
    def http(self) -> Mapping[str, HttpResource]:
        """HTTP resources by name."""
        ...


def plan_http(method: str, url: str, headers: Mapping[str, str], env: Declaring) -> Plan:
    """Find the resource of a URL and what a call would do to it.

    Args:
        method: upper case.
        url: as the agent wrote it.
        headers: the agent's own.
        env: what the kernel lends; its `http` are the declared resources.

    Raises:
        InvalidRequest: a URL that can be read in two ways, or a header that an agent may not set.
        NoSuchResource: the URL lies below no declared resource, or below one that is unavailable.
    """
    try:
        canonical = canonical_url(url)
    except PatternError as error:
        raise InvalidRequest(f"the URL can't be used: {error}") from None
    found = resource_of(canonical, env.http.values())
    if found is None:
        declared = ", ".join(f"`{env.http[name].base}` ({name})" for name in sorted(env.http)) or "none"
        # A query may hold anything, so it is left out of the text.
        raise NoSuchResource(
            f"`{canonical.partition('?')[0]}` lies below no declared resource; declared: {declared}; "
            "the operator can declare it in the kernel file"
        )
    resource, path = found
    refuse_unavailable(resource)
    reads = method in ("GET", "HEAD")
    effect = _effect_of(resource, method, path, reads=reads)
    bare = bare_url(canonical)
    if bare != canonical:
        effect = _stricter(effect, _effect_as(bare, resource, env, method, reads=reads))
    return Plan(
        resource=canonical,
        questions=(Question(action=f"http.{method.lower()}", resource=canonical),),
        effect=effect,
        idempotent=reads or resource.idempotency_header is not None,
        no_return="" if reads and effect is None else _no_return(resource, method, canonical),
        data=Target(
            resource=resource,
            method=method,
            url=canonical,
            headers=_check_headers(headers, resource),
            reads=reads,
        ),
    )


def _effect_as(
    url: str, resource: HttpResource, env: Declaring, method: str, *, reads: bool
) -> Effect | None:
    """The effect of a URL as another server would read it.

    Raises:
        InvalidRequest: read so it belongs to another resource, with other rights and another credential.
    """
    found = resource_of(url, env.http.values())
    if found is None or found[0] is not resource:
        raise InvalidRequest(
            "the URL can be read as one of another resource, by a server that drops `;…`, or dots and spaces at the end of a "
            "segment; write it without"
        )
    return _effect_of(resource, method, found[1], reads=reads)


def _stricter(one: Effect | None, other: Effect | None) -> Effect | None:
    # What an operator says is destroyed is held to that, whatever else it is.
    return next((effect for effect in (Effect.DESTROY, Effect.EXTERNAL) if effect in (one, other)), None)


def _no_return(resource: HttpResource, method: str, url: str) -> str:
    """Why nothing can undo a call, for people; empty: its resource says how."""
    if undo_of(resource, method, url) is not None:
        return ""
    return f"can't be undone: the resource `{resource.name}` declares no `undo` for this {method}"


def no_return(action: str, url: str, env: Declaring) -> str:
    """Why a call on a URL destroys and can't be undone, without its arguments; empty: it doesn't, or nobody can tell."""
    family, _, method = action.partition(".")
    if family != "http":
        return ""
    try:
        plan = plan_http(method.upper(), url, {}, env)
    except (InvalidRequest, NoSuchResource):
        return ""
    return plan.no_return if plan.effect is Effect.DESTROY else ""


def _effect_of(resource: HttpResource, method: str, path: str, *, reads: bool) -> Effect | None:
    """The effect where it is above the row's, else None. What a declaration can't lower stays as it is."""
    for verb, pattern, effect in resource.effects:
        if verb.upper() in ("*", method) and match_url_path(pattern, path):
            if effect is Effect.DESTROY:
                return Effect.DESTROY
            # A WRITE is what the kernel can undo, and here it can't: it leaves the system like any other.
            return Effect.EXTERNAL if reads and effect is not Effect.READ else None
    return None


def _read_as(name: str) -> str:
    """A header's name as a server may read it: many take `_` for `-`."""
    return name.lower().replace("_", "-")


def _check_header(name: str, value: str, own: Collection[str], resource: HttpResource) -> None:
    """Refuse one header that an agent may not set.

    Raises:
        InvalidRequest: it belongs to the connection, to the operator or to nobody.
    """
    if not _TOKEN.fullmatch(name):
        raise InvalidRequest(f"{name!a} is no header name; use letters, digits and dashes")
    if not _HEADER_VALUE.fullmatch(value):
        raise InvalidRequest(f"header `{name}` holds a line break or a character outside ASCII; remove it")
    seen = _read_as(name)
    if seen in own:
        raise InvalidRequest(f"header `{name}` is set by the resource `{resource.name}`; leave it out")
    if seen in _REFUSED_HEADERS or seen.startswith(_REFUSED_BEGINNINGS):
        raise InvalidRequest(f"header `{name}` can't be set by an agent; leave it out")
    if _CREDENTIAL_HEADER.fullmatch(seen):
        raise InvalidRequest(
            f"header `{name}` carries a credential; leave it out, the operator declares it as `auth` of the resource "
            f"`{resource.name}`"
        )
    if seen in _SLICING_HEADERS and resource.secrets:
        raise InvalidRequest(
            f"header `{name}` can't be used on `{resource.name}`, which has a credential: pieces of an answer can't be "
            "searched for it; leave it out"
        )


def _check_headers(headers: Mapping[str, str], resource: HttpResource) -> Mapping[str, str]:
    """The agent's headers, names in lower case.

    Raises:
        InvalidRequest: a header that belongs to the connection, to the operator or to nobody.
    """
    if len(headers) > HEADERS_MAX or sum(map(len, (*headers, *headers.values()))) > HEADER_BYTES_MAX:
        raise InvalidRequest(
            f"too many headers; at most {HEADERS_MAX} with {HEADER_BYTES_MAX} bytes are sent"
        )
    own = {_read_as(name) for name in resource.headers}
    if resource.idempotency_header is not None:
        own.add(_read_as(resource.idempotency_header))
    checked: dict[str, str] = {}
    for name, value in headers.items():
        lower = name.lower()
        _check_header(name, value, own, resource)
        if lower in checked:
            raise InvalidRequest(f"header `{name}` is given twice; give it once")
        checked[lower] = value
    return checked
