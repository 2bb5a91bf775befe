"""What is said of agents that serve others: `serve` of a manifest, `a2a` of the kernel file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ringfence.policy import hooks, outreach
from ringfence.policy.canonical import canonical_url
from ringfence.policy.hooks import HookDecl
from ringfence.policy.manifest_types import Serve, Skill
from ringfence.policy.matcher import compile_pattern, subject
from ringfence.policy.problems import PatternError
from ringfence.policy.reader import Reader
from ringfence.policy.strict_yaml import Node, Table

KEYS: Final = {
    "serve": ("a2a",),
    "serve.a2a": ("description", "skills"),
    "skill": ("id", "name", "description", "tags"),
    "a2a": ("listen", "url", "clients", "push"),
    "client": hooks.KEYS,
}
"""Keys of each mapping."""

SKILLS_MAX: Final = 32
TEXT_MAX: Final = 2000
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class A2aDecl:
    """Where clients give tasks to agents.

    Attributes:
        host: address to listen at.
        port: the same.
        url: where clients reach that, as cards say it; empty: at the address itself.
        clients: by name; the key of each is the bearer token that it sends.
        push: patterns of URLs that clients may have told of their tasks; empty: none.
    """

    host: str
    port: int
    url: str = ""
    clients: Mapping[str, HookDecl] = field(default_factory=dict[str, HookDecl])
    push: tuple[str, ...] = ()


def read_serve(reader: Reader, node: Node) -> Serve | None:
    """`serve` of a manifest: `a2a`, or a mapping that says what its card tells."""
    if not isinstance(node, Table):
        text = reader.text(node, "spec.serve")
        if text not in {None, "a2a"}:
            reader.wrong(node, f"`spec.serve` is `{text}`", "write `serve: a2a`, or leave it out")
        return Serve()
    fields = reader.mapping(node, "spec.serve", KEYS["serve"])
    if "a2a" not in fields:
        reader.wrong(node, "`spec.serve` says nothing", "write `serve: a2a`, or leave it out")
        return None
    what = "spec.serve.a2a"
    said = reader.mapping(fields["a2a"][1], what, KEYS["serve.a2a"])
    skills: list[Skill] = []
    listed = reader.items(said["skills"][1], f"{what}.skills") if "skills" in said else []
    if len(listed) > SKILLS_MAX:
        reader.wrong(node, f"there are {len(listed)} skills", f"at most {SKILLS_MAX} fit on a card")
    for item in listed:
        skills.append(_skill(reader, item, f"{what}.skills"))
        if skills[-1].id in {one.id for one in skills[:-1]}:
            reader.wrong(item, f"two skills have the id `{skills[-1].id}`", "give each one of its own")
    return Serve(
        description=_line(reader, said["description"][1], f"{what}.description")
        if "description" in said
        else "",
        skills=tuple(skills),
    )


def _line(reader: Reader, node: Node, what: str) -> str:
    text = reader.text(node, what) or ""
    if len(text) > TEXT_MAX:
        reader.wrong(node, f"`{what}` has {len(text)} characters", f"at most {TEXT_MAX} fit")
    return text


def _skill(reader: Reader, node: Node, what: str) -> Skill:
    fields = reader.mapping(node, what, KEYS["skill"])
    for wanted in ("id", "name", "description"):
        if wanted not in fields and isinstance(node, Table):
            reader.wrong(node, f"a skill of `{what}` has no `{wanted}`", f"add `{wanted}: TEXT`")
    said = {
        key: _line(reader, fields[key][1], f"{what}.{key}")
        for key in ("name", "description")
        if key in fields
    }
    ident = reader.text(fields["id"][1], f"{what}.id") or "" if "id" in fields else ""
    if ident and _ID.fullmatch(ident) is None:
        reader.wrong(
            fields["id"][1], f"`{ident}` is no id of a skill", "write letters, digits, `.`, `-` and `_`"
        )
    listed = reader.items(fields["tags"][1], f"{what}.tags") if "tags" in fields else []
    tags = tuple(_line(reader, item, f"{what}.tags") for item in listed)
    return Skill(id=ident, name=said.get("name", ""), description=said.get("description", ""), tags=tags)


def read_a2a(reader: Reader, node: Node) -> A2aDecl:
    """The section `a2a` of the kernel file."""
    what = "spec.a2a"
    fields = reader.mapping(node, what, KEYS["a2a"])
    for wanted, example in (
        ("listen", 'listen: "127.0.0.1:8770"'),
        ("clients", 'clients: {shop: {key: {secret: NAME}, agents: ["NAME"]}}'),
    ):
        if wanted not in fields and isinstance(node, Table):
            reader.wrong(node, f"`{what}` has no `{wanted}`", f"add `{example}`")
    host, port = (
        outreach.read_listen(reader, fields["listen"][1], f"{what}.listen") if "listen" in fields else ("", 0)
    )
    url = ""
    if "url" in fields:
        text = reader.text(fields["url"][1], f"{what}.url") or ""
        try:
            url = canonical_url(text).rstrip("/") if text else ""
        except PatternError as error:
            reader.wrong(fields["url"][1], f"`{what}.url`: {error.message}", error.fix)
        if "?" in url or "#" in text:
            reader.wrong(
                fields["url"][1],
                f"`{what}.url` has a query or a fragment",
                "write scheme, host and path only",
            )
    clients: Mapping[str, HookDecl] = {}
    if "clients" in fields:
        clients = hooks.read_hooks(reader, fields["clients"][1], f"{what}.clients")
    keys = [one.key.secret for one in clients.values() if one.key.secret]
    twice = next((key for key in keys if keys.count(key) > 1), "")
    if twice:
        # INVARIANT: the token alone says who it is.
        reader.wrong(node, f"two clients have the key `{twice}`", "give each one of its own")
    push = _push(reader, fields["push"][1], f"{what}.push") if "push" in fields else ()
    return A2aDecl(host=host, port=port, url=url, clients=clients, push=push)


def _push(reader: Reader, node: Node, what: str) -> tuple[str, ...]:
    found: list[str] = []
    for item in reader.items(node, what):
        text = reader.text(item, what) or ""
        try:
            pattern = compile_pattern("url", text).text if text else ""
        except PatternError as error:
            reader.wrong(item, error.message, error.fix)
            continue
        # INVARIANT: clients choose the URL, so the host is the operator's word: no name that they own leads into the house.
        if "*" in pattern.partition("://")[2].partition("/")[0]:
            reader.wrong(
                item, f"`{text}` leaves the host open", 'name it, as in `"https://hooks.example.com/**"`'
            )
        found.append(pattern)
    return tuple(found)


def may_push(declared: A2aDecl, url: str) -> bool:
    """Whether clients may have something told there."""
    try:
        asked = subject("url", canonical_url(url))
    except PatternError:
        return False
    return any(compile_pattern("url", text).permits(asked) for text in declared.push)
