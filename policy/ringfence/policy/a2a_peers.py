"""Declarations of agents elsewhere in the operator's file: how each is reached by A2A, and what of it may be used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ringfence.policy.reader import Reader
from ringfence.policy.strict_yaml import Items, Node

KEYS: Final = (
    *("type", "url", "auth", "addresses", "rate"),
    *("skills", "repeat", "card", "trusted", "environment", "timeout"),
)
"""Keys of one."""

SKILLS_MAX: Final = 100
_HASH: Final = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDecl:
    """What an agent elsewhere is besides an address and a credential.

    Attributes:
        skills: ids of those that may be named, one of which each message has to name; empty: any.
        repeat: whether it knows a message again by its id, so that one sent twice does nothing twice.
        card: hash of the only card that is taken; empty: the first that is seen.
        trusted: whether what it says taints nobody.
    """

    skills: tuple[str, ...] = ()
    repeat: bool = False
    card: str = ""
    trusted: bool = False


def read_peer(reader: Reader, name: str, nodes: Mapping[str, Node]) -> PeerDecl:
    """Read what is of A2A alone; address and credential are read as those of other resources."""
    return PeerDecl(
        skills=_skills(reader, name, nodes["skills"]) if "skills" in nodes else (),
        repeat="repeat" in nodes and reader.flag(nodes["repeat"], f"{name}.repeat"),
        card=_card(reader, name, nodes["card"]) if "card" in nodes else "",
        trusted="trusted" in nodes and reader.flag(nodes["trusted"], f"{name}.trusted"),
    )


def _skills(reader: Reader, name: str, node: Node) -> tuple[str, ...]:
    what = f"{name}.skills"
    found = [reader.text(item, what) for item in reader.items(node, what)]
    if isinstance(node, Items) and not 0 < len(found) <= SKILLS_MAX:
        reader.wrong(
            node, f"`{what}` has {len(found)} entries", f"name 1 to {SKILLS_MAX}, or leave it out for any"
        )
    return tuple(one for one in found if one)


def _card(reader: Reader, name: str, node: Node) -> str:
    text = reader.text(node, f"{name}.card") or ""
    if text and _HASH.fullmatch(text) is None:
        reader.wrong(node, f"`{text}` is no hash of a card", "write one such as `sha256:5f1d…`")
    return text
