"""Resources as the operator declares them, with their credentials filled in: what bodies send calls to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.policy.units import Rate
    from ringfence.policy.vouching import Vouched
    from ringfence.syscalls.base import Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpUndo:
    """How calls of one method on matching paths are undone.

    Attributes:
        keep: path of the GET that reads what is destroyed: plain parts and holes by turns, see `policy.undoing`.
        put_back_method: how it is sent back.
        put_back: path of that, in the same form.
    """

    method: str
    path: str
    keep: Sequence[str]
    put_back_method: str
    put_back: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResource:
    """An HTTP target declared by the operator.

    Attributes:
        base: URL without trailing slash, canonical.
        headers: added to every request; hold the credential.
        effects: `(method, path pattern) -> effect`, first match counts; method `*` is any.
        idempotency_header: header that carries the effect id; None: the target takes no key.
        untrusted: whether what it answers taints an agent.
        vouches: `(method, path pattern) -> fields` of its answers that are its own word; first match counts.
        undo: how destructive calls are undone; first match counts. One that has none is refused.
        addresses: networks that the host may lead to besides public ones.
        rate: how often all agents together may ask it.
        secrets: values that must not appear in a recorded response.
        unavailable: why no call may use it, and what the operator does about it; empty: it can be used.
    """

    name: str
    base: str
    headers: Mapping[str, str]
    effects: Sequence[tuple[str, str, Effect]]
    idempotency_header: str | None
    untrusted: bool = False
    vouches: Sequence[tuple[str, str, tuple[Vouched, ...]]] = ()
    undo: Sequence[HttpUndo] = ()
    timeout_s: float = 30.0
    addresses: Sequence[str] = ()
    rate: Rate | None = None
    secrets: Sequence[str] = ()
    unavailable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmResource:
    """A language model's host declared by the operator.

    Attributes:
        base: URL without trailing slash, canonical.
        headers: added to every request; hold the credential.
        models: patterns of the model names it serves.
        price_input: US dollars for a million tokens read.
        price_output: the same for tokens written.
        max_output: most tokens of one reply.
        limit_key: the request's key that carries the limit of a reply.
        tokenizers: `(model pattern, tokenizer)`, first match counts; a model that none names is known by its name.
        external: whether a call counts as leaving the system.
        untrusted: whether what it answers taints an agent.
        timeout_s: longest wait for an answer, or for the next part of a streamed one.
        addresses: networks that the host may lead to besides public ones.
        rate: how often all agents together may ask it.
        secrets: values that must not appear in a recorded response.
        unavailable: why no call may use it, and what the operator does about it; empty: it can be used.
    """

    name: str
    base: str
    headers: Mapping[str, str]
    models: Sequence[str]
    price_input: float = 0.0
    price_output: float = 0.0
    max_output: int = 4096
    limit_key: str = "max_tokens"
    tokenizers: Sequence[tuple[str, str]] = ()
    external: bool = False
    untrusted: bool = False
    timeout_s: float = 30.0
    addresses: Sequence[str] = ()
    rate: Rate | None = None
    secrets: Sequence[str] = ()
    unavailable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlResource:
    """A PostgreSQL target declared by the operator.

    Attributes:
        dsn: how to connect to it; holds the credential.
        untrusted: whether what it answers taints an agent.
        secrets: values that must not appear in what is recorded of its answers.
        unavailable: why no call may use it, and what the operator does about it; empty: it can be used.
    """

    name: str
    dsn: str
    untrusted: bool = False
    secrets: Sequence[str] = ()
    unavailable: str = ""

    def __repr__(self) -> str:
        return f"SqlResource(name={self.name!r}, unavailable={self.unavailable!r})"
