"""Networks that a resource's host may lead to, besides public ones, and what is public."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final, TypeAlias

from ringfence.policy.reader import Reader
from ringfence.policy.strict_yaml import Items, Node

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_NETWORKS_MAX: Final = 64
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_METADATA: Final = frozenset((ipaddress.IPv4Address("168.63.129.16"),))
"""Public by their number, and yet the host's own services."""


def read_networks(reader: Reader, node: Node | None, what: str) -> tuple[str, ...]:
    """Networks in the form `10.1.0.0/16`, or single addresses."""
    if node is None:
        return ()
    found: list[str] = []
    items = reader.items(node, what)
    for item in items:
        text = reader.text(item, what)
        if text is None:
            continue
        try:
            found.append(str(ipaddress.ip_network(text)))
        except ValueError:
            reader.wrong(item, f"`{text}` is no network", "write one such as `10.1.0.0/16` or `10.1.2.3`")
    if isinstance(node, Items) and not 1 <= len(items) <= _NETWORKS_MAX:
        reader.wrong(node, f"`{what}` names {len(items)} networks", f"name 1 to {_NETWORKS_MAX}")
    return tuple(found)


def inner(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, where it stands for one."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public network: not loopback, private, link-local, metadata, multicast or reserved."""
    real = inner(address)
    return real.is_global and not real.is_multicast and real not in _METADATA and not real.is_reserved


def reaches(address: Address, networks: Sequence[Network]) -> bool:
    """Whether a resource that declares these networks may be reached at an address."""
    real = inner(address)
    return is_public(address) or any(real.version == one.version and real in one for one in networks)
