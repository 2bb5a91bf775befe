"""Credentials in the operator's file: names of secrets, and how they are shown to a resource."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ringfence.policy import sections
from ringfence.policy.reader import Reader
from ringfence.policy.strict_yaml import Node, Scalar, Table

KEYS: Final = {
    "auth": ("bearer", "basic", "header"),
    "basic": ("username", "password"),
    "header": ("name", "value"),
    "secret": ("secret",),
}
"""Keys of each mapping."""

_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}", re.ASCII)
_OWN_HEADERS: Final = frozenset(
    ("host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRef:
    """The name of a secret that the kernel keeps. Never its value."""

    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    """How to prove who we are to a resource.

    Attributes:
        scheme: `bearer`, `basic` or `header`.
        value: the token, password or header value.
        username: for `basic`.
        header: header name, for `header`.
    """

    scheme: str
    value: SecretRef
    username: str = ""
    header: str = ""


def text_or_secret(reader: Reader, node: Node, what: str) -> str | SecretRef:
    """A text, or the secret that holds it."""
    return reader.text(node, what) or "" if isinstance(node, Scalar) else read_secret(reader, node, what)


def read_secret(reader: Reader, node: Node, what: str) -> SecretRef:
    """A reference to a secret; its name is empty on a problem."""
    if isinstance(node, Scalar):
        # INVARIANT: what may be a credential is never repeated in a problem.
        reader.wrong(
            node,
            f"`{what}` has to name a secret",
            "write `{secret: NAME}` and keep it with `ringfence secrets set NAME`",
        )
        return SecretRef(secret="")
    fields = reader.mapping(node, what, KEYS["secret"])
    if "secret" not in fields:
        if isinstance(node, Table) and not node.entries:
            reader.wrong(node, f"`{what}` names no secret", "write `{secret: NAME}`")
        return SecretRef(secret="")
    return SecretRef(secret=sections.read_name(reader, fields["secret"][1], f"{what}.secret"))


def read_auth(reader: Reader, owner: str, node: Node | None) -> Auth | None:
    """How a resource is shown who asks; None where nothing says so, or on a problem."""
    if node is None:
        return None
    what = f"{owner}.auth"
    fields = reader.mapping(node, what, KEYS["auth"])
    if len(fields) != 1:
        reader.wrong(
            node,
            f"`{what}` needs exactly one of: {', '.join(KEYS['auth'])}",
            "write `{bearer: {secret: NAME}}`",
        )
        return None
    scheme, (_, value) = next(iter(fields.items()))
    if scheme == "bearer":
        return Auth(scheme=scheme, value=read_secret(reader, value, f"{what}.bearer"))
    inner = reader.mapping(value, f"{what}.{scheme}", KEYS["basic" if scheme == "basic" else "header"])
    name_key, value_key = ("username", "password") if scheme == "basic" else ("name", "value")
    for wanted in (name_key, value_key):
        if wanted not in inner:
            reader.wrong(value, f"`{what}.{scheme}` has no `{wanted}`", f"add `{wanted}`")
            return None
    name = reader.text(inner[name_key][1], f"{what}.{scheme}.{name_key}") or ""
    secret = read_secret(reader, inner[value_key][1], f"{what}.{scheme}.{value_key}")
    if scheme == "header":
        check_header(reader, inner[name_key][1], name)
        return Auth(scheme=scheme, value=secret, header=name)
    if ":" in name:
        reader.wrong(inner[name_key][1], "a user name can't hold a colon", "write it without")
    return Auth(scheme=scheme, value=secret, username=name)


def check_header(reader: Reader, node: Node, name: str) -> None:
    """Refuse a header that belongs to the connection, or is none."""
    if _HEADER.fullmatch(name) is None or name.lower() in _OWN_HEADERS:
        reader.wrong(
            node, f"`{name}` is no header that a resource can have", "write one such as `Idempotency-Key`"
        )
