"""Readers of what the kernel file says about the world outside that hears of agents, answers and calls: `webhooks` and `callback`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ringfence.policy import hooks, sections
from ringfence.policy.canonical import canonical_url
from ringfence.policy.networks import read_networks
from ringfence.policy.problems import PatternError
from ringfence.policy.reader import Reader
from ringfence.policy.resources import SecretRef, read_secret
from ringfence.policy.strict_yaml import Items, Node, Table

KEYS: Final = {
    "webhook": ("url", "key", "events", "addresses"),
    "callback": ("listen", "people", "hooks"),
    "person": ("key", "account"),
    "hook": hooks.KEYS,
}
"""Keys of each mapping."""

EVENTS: Final = (
    "approval.asked",
    "approval.voted",
    "approval.decided",
    "agent.budget",
    "agent.unknown",
    "agent.failed",
)
"""What a webhook can be told of."""

WEBHOOKS_MAX: Final = 16
PEOPLE_MAX: Final = 64
LISTEN_PATTERN: Final = "([0-9.]{7,15}|\\[[0-9a-fA-F:.]+\\]):[0-9]{1,5}"
_LISTEN: Final = re.compile(LISTEN_PATTERN, re.ASCII)
_PERSON: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_ACCOUNT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.$-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookDecl:
    """One receiver.

    Attributes:
        name: unique; stands for the receiver in the outbox.
        url: where events are posted.
        key: secret that signs them.
        events: what it is told of.
        addresses: networks that its host may lead to besides public ones.
    """

    name: str
    url: str
    key: SecretRef
    events: tuple[str, ...] = EVENTS
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonDecl:
    """Who may decide approvals by callback.

    Attributes:
        key: secret that signs what this person's system sends.
        account: the operators' account of the same person; what it approves is this person's approval.
    """

    name: str
    key: SecretRef
    account: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackDecl:
    """Where people's own systems decide approvals, and others put messages into mailboxes.

    Attributes:
        host: address to listen at.
        port: the same.
        people: by name.
        hooks: by name.
    """

    host: str
    port: int
    people: Mapping[str, PersonDecl] = field(default_factory=dict[str, PersonDecl])
    hooks: Mapping[str, hooks.HookDecl] = field(default_factory=dict[str, hooks.HookDecl])

    def person_of(self, account: str) -> str:
        """Who works with an operators' account; the account's own name where nobody is declared to."""
        return next((one.name for one in self.people.values() if one.account == account), account)


def read_webhooks(reader: Reader, node: Node) -> Mapping[str, WebhookDecl]:
    """The section `webhooks`."""
    found: dict[str, WebhookDecl] = {}
    entries = reader.free_mapping(node, "spec.webhooks")
    if len(entries) > WEBHOOKS_MAX:
        reader.wrong(node, f"there are {len(entries)} webhooks", f"at most {WEBHOOKS_MAX} are told")
    for key, value in entries:
        if name := sections.read_name(reader, key, "spec.webhooks"):
            found[name] = _webhook(reader, name, value)
    return found


def _webhook(reader: Reader, name: str, node: Node) -> WebhookDecl:
    what = f"spec.webhooks.{name}"
    fields = reader.mapping(node, what, KEYS["webhook"])
    for wanted, example in (("url", '"https://HOST/PATH"'), ("key", "{secret: NAME}")):
        if wanted not in fields and isinstance(node, Table):
            reader.wrong(node, f"`{what}` has no `{wanted}`", f"add `{wanted}: {example}`")
    events = EVENTS
    if "events" in fields:
        listed = reader.items(fields["events"][1], f"{what}.events")
        events = tuple(
            dict.fromkeys(reader.choice(item, f"{what}.events", EVENTS, EVENTS[0]) for item in listed)
        )
        if isinstance(fields["events"][1], Items) and not listed:
            reader.wrong(
                fields["events"][1], f"`{what}.events` is empty", "name one, or leave it out for all"
            )
    addresses = fields["addresses"][1] if "addresses" in fields else None
    return WebhookDecl(
        name=name,
        url=_url(reader, fields["url"][1], f"{what}.url") if "url" in fields else "",
        key=read_secret(reader, fields["key"][1], f"{what}.key") if "key" in fields else SecretRef(secret=""),
        events=events,
        addresses=read_networks(reader, addresses, f"{what}.addresses"),
    )


def _url(reader: Reader, node: Node, what: str) -> str:
    text = reader.text(node, what)
    if text is None:
        return ""
    try:
        url = canonical_url(text)
    except PatternError as error:
        reader.wrong(node, f"`{what}`: {error.message}", error.fix)
        return ""
    if "?" in url or "#" in text:
        # It is shown by `status`, and a query is where tokens stand.
        reader.wrong(node, f"`{what}` has a query or a fragment", "write scheme, host and path only")
    return url


def read_callback(reader: Reader, node: Node) -> CallbackDecl:
    """The section `callback`."""
    what = "spec.callback"
    fields = reader.mapping(node, what, KEYS["callback"])
    if "listen" not in fields and isinstance(node, Table):
        reader.wrong(node, f"`{what}` has no `listen`", 'add `listen: "127.0.0.1:8766"`')
    if not {"people", "hooks"} & fields.keys() and isinstance(node, Table):
        text = f"`{what}` has no `people` and no `hooks`, so it would hear nobody"
        reader.wrong(node, text, "add `people: {anna: {key: {secret: NAME}}}`")
    host, port = read_listen(reader, fields["listen"][1], f"{what}.listen") if "listen" in fields else ("", 0)
    people: dict[str, PersonDecl] = {}
    entries = reader.free_mapping(fields["people"][1], f"{what}.people") if "people" in fields else []
    if len(entries) > PEOPLE_MAX:
        reader.wrong(node, f"there are {len(entries)} people", f"at most {PEOPLE_MAX} can be named")
    for key, value in entries:
        if _PERSON.fullmatch(key.text) is None:
            reader.wrong(
                key, f"`{key.text}` is no name of a person", "write letters, digits, `.`, `-` and `_`"
            )
            continue
        people[key.text] = _person(reader, key.text, value)
    heard: Mapping[str, hooks.HookDecl] = {}
    if "hooks" in fields:
        heard = hooks.read_hooks(reader, fields["hooks"][1])
    _check_distinct(reader, node, people, heard)
    return CallbackDecl(host=host, port=port, people=people, hooks=heard)


def _person(reader: Reader, name: str, node: Node) -> PersonDecl:
    what = f"spec.callback.people.{name}"
    fields = reader.mapping(node, what, KEYS["person"])
    if "key" not in fields and isinstance(node, Table):
        reader.wrong(node, f"`{what}` has no `key`", "add `key: {secret: NAME}`")
    account = ""
    if "account" in fields:
        account = reader.text(fields["account"][1], f"{what}.account") or ""
        if account and _ACCOUNT.fullmatch(account) is None:
            reader.wrong(
                fields["account"][1], f"`{account}` is no account", "write a user's name on this host"
            )
    key = read_secret(reader, fields["key"][1], f"{what}.key") if "key" in fields else SecretRef(secret="")
    return PersonDecl(name=name, key=key, account=account)


def _check_distinct(
    reader: Reader, node: Node, people: Mapping[str, PersonDecl], heard: Mapping[str, hooks.HookDecl]
) -> None:
    """INVARIANT: no two people share a key or an account: one of them could approve as both. Nor does a hook have the key of another."""
    for label, values in (
        ("key", [one.key.secret for one in people.values() if one.key.secret]),
        ("account", [one.account for one in people.values() if one.account]),
    ):
        twice = next((value for value in values if values.count(value) > 1), "")
        if twice:
            reader.wrong(node, f"two people have the {label} `{twice}`", "give each one of their own")
    keys = [one.key.secret for one in people.values()]
    for hook in heard.values():
        if hook.key.secret and hook.key.secret in keys:
            text = f"the hook `{hook.name}` has the key `{hook.key.secret}` of somebody else"
            reader.wrong(node, text, "give each hook and each person a key of their own")
        keys.append(hook.key.secret)
    for one in people.values():
        other = next((p.name for p in people.values() if p.account == one.name and p is not one), "")
        if other:
            reader.wrong(
                node,
                f"`{one.name}` is a person and the account of `{other}`",
                "give the person another name: the two could not be told apart",
            )


def read_listen(reader: Reader, node: Node, what: str) -> tuple[str, int]:
    """An address and a port; empty and 0 where it is none, which the reader has been told."""
    text = reader.text(node, what) or ""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    good = _LISTEN.fullmatch(text) is not None and 0 < int(port) < 1 << 16
    try:
        good = good and bool(ipaddress.ip_address(host))
    except ValueError:
        good = False
    if not good:
        if text:
            reader.wrong(node, f"`{text}` is no address to listen at", 'write one such as `"127.0.0.1:8766"`')
        return "", 0
    return host, int(port)
