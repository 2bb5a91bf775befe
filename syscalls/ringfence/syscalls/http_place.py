"""Where a URL belongs: the declared resource that it lies below, and its path there."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from ringfence.policy.canonical import UrlParts, bare_url, canonical_port, canonical_url, split_url

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ringfence.syscalls.declared import HttpResource


def resource_of(url: str, resources: Iterable[HttpResource]) -> tuple[HttpResource, str] | None:
    """The most specific declared resource that a canonical URL lies below, and the path below its base; None: none."""
    best: tuple[int, HttpResource, str] | None = None
    target = split_url(url)
    for resource in resources:
        origin, above = _base(resource.base)
        # INVARIANT: component-wise. `/v1x` is not below `/v1`; another scheme, host or port is another
        # target.
        if origin != _origin(target) or target.segments[: len(above)] != above:
            continue
        if best is None or len(above) > best[0]:
            best = (len(above), resource, "/" + "/".join(target.segments[len(above) :]))
    return None if best is None else best[1:]


def path_below(resource: HttpResource, url: str) -> str:
    """The path of a canonical URL below the base of its resource."""
    return "/" + "/".join(split_url(url).segments[len(_base(resource.base)[1]) :])


def belongs(url: str, resource: HttpResource, resources: Collection[HttpResource]) -> bool:
    """Whether a canonical URL is of this resource and of no other one, however a server may read it.

    INVARIANT: what the kernel sends by itself goes where an agent's call with the same credential could go, and nowhere else:
    not below a more specific resource, whose credential is another, and not where a base was before the file changed.
    """
    found = [resource_of(reading, resources) for reading in (url, bare_url(url))]
    return all(one is not None and one[0].name == resource.name for one in found)


def _origin(parts: UrlParts) -> tuple[str, str, str]:
    return parts.scheme, parts.host, canonical_port(parts.scheme, parts.port)


@lru_cache(maxsize=256)
def _base(base: str) -> tuple[tuple[str, str, str], tuple[str, ...]]:
    parts = split_url(canonical_url(base))
    return _origin(parts), tuple(segment for segment in parts.segments if segment)
