"""Resources that the operator declares: databases, HTTP targets and language models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ringfence.policy import a2a_peers, credentials, mcp_servers, sections
from ringfence.policy.a2a_peers import PeerDecl
from ringfence.policy.canonical import canonical_url
from ringfence.policy.credentials import Auth, SecretRef, check_header, read_auth, read_secret, text_or_secret
from ringfence.policy.matcher import compile_pattern
from ringfence.policy.mcp_servers import McpDecl
from ringfence.policy.networks import read_networks
from ringfence.policy.problems import PatternError
from ringfence.policy.reader import Reader
from ringfence.policy.strict_yaml import Items, Node, Scalar, Table
from ringfence.policy.tokenizers import read_tokenizers
from ringfence.policy.undoing import UndoDecl, read_undo
from ringfence.policy.units import Rate
from ringfence.policy.vouching import VouchDecl, read_vouches

KEYS: Final = {
    "postgres": ("type", "dsn", "embedded", "environment", "untrusted"),
    "http": (
        *("type", "base", "auth", "effects", "idempotency_header", "environment", "untrusted", "timeout"),
        *("vouches", "undo", "addresses", "rate"),
    ),
    "llm": (
        *("type", "base", "protocol", "models", "price", "max_output", "limit_key", "tokenizer", "effect"),
        *("auth", "environment", "untrusted", "timeout", "addresses", "rate"),
    ),
    "object": ("type", "driver", "options", "keep_max", "environment", "untrusted", "timeout"),
    "mcp": mcp_servers.KEYS["mcp"],
    "a2a": a2a_peers.KEYS,
    "price": ("input", "output"),
    **credentials.KEYS,
}
"""Keys of each mapping."""

TYPES: Final = ("postgres", "http", "llm", "object", "mcp", "a2a")
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "*")
EFFECTS: Final = ("read", "write", "destroy", "external")
PROTOCOLS: Final = ("openai", "anthropic")
LIMIT_KEYS: Final = ("max_tokens", "max_completion_tokens")
LLM_EFFECTS: Final = ("read", "external")
_RESOURCE: Final = re.compile(r"[a-z]([a-z0-9_-]{0,61}[a-z0-9])?", re.ASCII)
_EMBEDDED: Final = re.compile(r"[a-z][a-z0-9_]{0,61}", re.ASCII)
_DRIVER: Final = re.compile(r"[a-z][a-z0-9_.-]{0,62}", re.ASCII)
_URL_DSN: Final = re.compile(r"postgres(ql)?://\S+")
_MAX_PRICE: Final = 1e6
_MAX_OUTPUT: Final = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectDecl:
    """What calls of one method on matching paths do. `path` is a pattern below the base; `effect` is in lower case."""

    method: str
    path: str
    effect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceDecl:
    """One resource that the operator declares. Fields of other types keep their defaults.

    Attributes:
        name: unique.
        type: `postgres`, `http`, `llm`, `object`, `mcp` or `a2a`.
        environment: a word such as `staging`, for people and conditions.
        untrusted: whether what it answers taints an agent.
        addresses: http, llm, mcp and a2a: networks that its host may lead to besides public ones.
        rate: http, llm, mcp and a2a: how often all agents together may ask it.
        dsn: postgres: connection string, or the secret that holds it.
        embedded: postgres: a database of this name in the kernel's own embedded server, instead of a `dsn`.
        base: http and llm: canonical URL without trailing slash; mcp: the endpoint's, empty where a command is started; a2a: the agent's.
        auth: http, llm, mcp and a2a: credential, None for none.
        effects: http: in the order of the file, the first match counts.
        idempotency_header: http: header that carries the effect id; empty where the target takes no key.
        vouches: http: in the order of the file, the first match counts.
        undo: http: the same.
        timeout_s: http and llm: longest wait for an answer.
        protocol: llm.
        models: llm: patterns of the model names it serves.
        price_input: llm: US dollars for a million tokens read.
        price_output: llm: the same for tokens written.
        max_output: llm: most tokens that one reply may have, and what a call without a limit of its own gets.
        limit_key: llm: the request's key that carries this limit; newer models take another.
        tokenizers: llm: `(model pattern, tokenizer)`, first match counts.
        effect: llm: `external` where a call leaves something behind, else `read`.
        driver: object: name of the driver.
        options: object: what the driver is given, each a value or a secret.
        keep_max: object: bytes of the largest object that is kept before a change.
        mcp: mcp: what else is said of it.
        a2a: a2a: what else is said of it.
    """

    name: str
    type: str
    environment: str = ""
    untrusted: bool = False
    addresses: tuple[str, ...] = ()
    rate: Rate | None = None
    dsn: str | SecretRef = ""
    embedded: bool = False
    base: str = ""
    auth: Auth | None = None
    effects: tuple[EffectDecl, ...] = ()
    vouches: tuple[VouchDecl, ...] = ()
    undo: tuple[UndoDecl, ...] = ()
    idempotency_header: str = ""
    timeout_s: float = 30.0
    protocol: str = "openai"
    models: tuple[str, ...] = ()
    price_input: float = 0.0
    price_output: float = 0.0
    max_output: int = 4096
    limit_key: str = "max_tokens"
    tokenizers: tuple[tuple[str, str], ...] = ()
    effect: str = "read"
    driver: str = ""
    options: tuple[tuple[str, str | int | bool | SecretRef], ...] = ()
    keep_max: int = 1 << 30
    mcp: McpDecl = field(default_factory=McpDecl)
    a2a: PeerDecl = field(default_factory=PeerDecl)
    line: int = field(default=0, compare=False)

    def secrets(self) -> tuple[str, ...]:
        """Names of the secrets it refers to."""
        found = [
            item.secret
            for item in (
                self.dsn,
                self.auth.value if self.auth else "",
                *(value for _, value in self.options),
                *self.mcp.secrets(),
            )
            if isinstance(item, SecretRef)
        ]
        return tuple(found)


def read_resource(reader: Reader, key: Scalar, node: Node) -> ResourceDecl | None:
    """Read one declaration; None where not even its type is clear."""
    if _RESOURCE.fullmatch(key.text) is None:
        reader.wrong(
            key,
            f"`{key.text}` is no resource name",
            "write lower-case letters, digits, `-` and `_`, a letter first",
        )
    if not isinstance(node, Table):
        reader.wrong(
            node, f"the resource `{key.text}` is no mapping", "write `{type: postgres, dsn: {secret: NAME}}`"
        )
        return None
    types = [value for name, value in node.entries if name.text == "type"]
    if not types:
        reader.wrong(node, f"the resource `{key.text}` has no `type`", f"add one of: {', '.join(TYPES)}")
        return None
    kind = reader.choice(types[0], f"{key.text}.type", TYPES, "")
    if not kind:
        return None
    fields = reader.mapping(node, f"the {kind} resource `{key.text}`", KEYS[kind])
    nodes = {name: value for name, (_, value) in fields.items()}
    base = ResourceDecl(
        name=key.text,
        type=kind,
        environment=_optional_name(reader, nodes.get("environment"), f"{key.text}.environment"),
        untrusted=reader.flag(nodes["untrusted"], f"{key.text}.untrusted") if "untrusted" in nodes else False,
        timeout_s=reader.duration(nodes["timeout"], f"{key.text}.timeout", 30.0)
        if "timeout" in nodes
        else 30.0,
        line=key.line,
    )
    if kind == "postgres":
        return _postgres(reader, base, node, nodes)
    if kind == "object":
        return _object(reader, base, node, nodes)
    if kind == "mcp":
        return _mcp(reader, base, node, nodes)
    if kind == "a2a":
        base = replace(base, a2a=a2a_peers.read_peer(reader, base.name, nodes))
        base = replace(base, untrusted=not base.a2a.trusted, base=_base(reader, base, node, nodes, "url"))
        return _reached(reader, base, nodes)
    base = _reached(reader, replace(base, base=_base(reader, base, node, nodes)), nodes)
    return _http(reader, base, nodes) if kind == "http" else _llm(reader, base, nodes)


def _reached(reader: Reader, base: ResourceDecl, nodes: Mapping[str, Node]) -> ResourceDecl:
    """How a host is reached: with which credential, at which addresses, how often."""
    return replace(
        base,
        auth=read_auth(reader, base.name, nodes.get("auth")),
        addresses=read_networks(reader, nodes.get("addresses"), f"{base.name}.addresses"),
        rate=reader.rate(nodes["rate"], f"{base.name}.rate") if "rate" in nodes else None,
    )


def _mcp(reader: Reader, base: ResourceDecl, node: Node, nodes: Mapping[str, Node]) -> ResourceDecl:
    trusted = "trusted" in nodes and reader.flag(nodes["trusted"], f"{base.name}.trusted")
    base = replace(base, untrusted=not trusted, mcp=mcp_servers.read_mcp(reader, base.name, node, nodes))
    if "url" not in nodes:
        return base
    return _reached(reader, replace(base, base=_base(reader, base, node, nodes, "url")), nodes)


def _optional_name(reader: Reader, node: Node | None, what: str) -> str:
    return "" if node is None else sections.read_name(reader, node, what)


def _postgres(reader: Reader, base: ResourceDecl, node: Node, nodes: Mapping[str, Node]) -> ResourceDecl:
    embedded = "embedded" in nodes and bool(reader.flag(nodes["embedded"], f"{base.name}.embedded"))
    if embedded:
        if "dsn" in nodes:
            reader.wrong(nodes["dsn"], f"`{base.name}` has both `dsn` and `embedded`", "keep one of them")
        if _EMBEDDED.fullmatch(base.name) is None:
            reader.wrong(
                node,
                f"`{base.name}` can't name an embedded database",
                "use lower-case letters, digits and `_`",
            )
        return replace(base, embedded=True)
    if "dsn" not in nodes:
        reader.wrong(
            node, f"the resource `{base.name}` has no `dsn`", "add `dsn: {secret: NAME}` or `embedded: true`"
        )
        return base
    dsn = text_or_secret(reader, nodes["dsn"], f"{base.name}.dsn")
    if isinstance(dsn, str) and dsn and _URL_DSN.fullmatch(dsn) is None and "=" not in dsn:
        # The text is not repeated: it may hold a password.
        reader.wrong(
            nodes["dsn"],
            f"`{base.name}.dsn` is no connection string",
            "write `postgresql://HOST/DATABASE` or `{secret: NAME}`",
        )
    return replace(base, dsn=dsn)


def _object(reader: Reader, base: ResourceDecl, node: Node, nodes: Mapping[str, Node]) -> ResourceDecl:
    if "driver" not in nodes:
        reader.wrong(node, f"the resource `{base.name}` has no `driver`", "add `driver: s3`")
        return base
    driver = reader.text(nodes["driver"], f"{base.name}.driver") or ""
    if driver and _DRIVER.fullmatch(driver) is None:
        reader.wrong(nodes["driver"], f"`{driver}` is no name of a driver", "write one such as `s3`")
    options: list[tuple[str, str | int | bool | SecretRef]] = []
    for key, value in (
        reader.free_mapping(nodes["options"], f"{base.name}.options") if "options" in nodes else ()
    ):
        what = f"{base.name}.options.{key.text}"
        if isinstance(value, Table):
            options.append((key.text, read_secret(reader, value, what)))
        elif isinstance(value, Scalar) and isinstance(value.value, str | bool | int):
            options.append((key.text, value.value))
        else:
            reader.wrong(value, f"`{what}` is no text, number or flag", "write one, or `{secret: NAME}`")
    keep = (
        reader.size(nodes["keep_max"], f"{base.name}.keep_max", 0, 1 << 30)
        if "keep_max" in nodes
        else 1 << 30
    )
    return replace(base, driver=driver, options=tuple(options), keep_max=keep)


def _base(
    reader: Reader, base: ResourceDecl, node: Node, nodes: Mapping[str, Node], key: str = "base"
) -> str:
    if key not in nodes:
        reader.wrong(node, f"the resource `{base.name}` has no `{key}`", f'add `{key}: "https://HOST/PATH"`')
        return ""
    text = reader.text(nodes[key], f"{base.name}.{key}")
    if text is None:
        return ""
    try:
        url = canonical_url(text)
    except PatternError as error:
        reader.wrong(nodes[key], f"`{base.name}.{key}`: {error.message}", error.fix)
        return ""
    if "?" in url or "#" in text:
        reader.wrong(
            nodes[key], f"`{base.name}.{key}` has a query or a fragment", "write scheme, host and path only"
        )
    return url.rstrip("/")


def _http(reader: Reader, base: ResourceDecl, nodes: Mapping[str, Node]) -> ResourceDecl:
    effects: list[EffectDecl] = []
    for key, value in (
        reader.free_mapping(nodes["effects"], f"{base.name}.effects") if "effects" in nodes else ()
    ):
        method, path = _effect_key(reader, key)
        effect = reader.choice(value, f"{base.name}.effects", EFFECTS, "external")
        effects.append(EffectDecl(method=method, path=path, effect=effect))
    header = ""
    if "idempotency_header" in nodes:
        header = reader.text(nodes["idempotency_header"], f"{base.name}.idempotency_header") or ""
        if header:
            check_header(reader, nodes["idempotency_header"], header)
    vouches: tuple[VouchDecl, ...] = ()
    if "vouches" in nodes:
        vouches = read_vouches(reader, nodes["vouches"], f"{base.name}.vouches", _effect_key)
    undo = read_undo(reader, nodes["undo"], f"{base.name}.undo", _effect_key) if "undo" in nodes else ()
    return replace(base, effects=tuple(effects), idempotency_header=header, vouches=vouches, undo=undo)


def _effect_key(reader: Reader, key: Scalar) -> tuple[str, str]:
    method, space, path = key.text.partition(" ")
    if not space or method not in METHODS or not path.startswith("/"):
        reader.wrong(
            key, f"`{key.text}` is no method and path", 'write `"POST /pay"`, `"DELETE /**"` or `"* /**"`'
        )
        return method, path
    try:
        compile_pattern("url", f"http://a{path}")
    except PatternError as error:
        reader.wrong(key, error.message, error.fix)
    if "?" in path:
        reader.wrong(key, "it can't depend on a query", "write the path alone")
    return method, path


def _llm(reader: Reader, base: ResourceDecl, nodes: Mapping[str, Node]) -> ResourceDecl:
    models: list[str] = []
    for item in reader.items(nodes["models"], f"{base.name}.models") if "models" in nodes else ():
        text = reader.text(item, f"{base.name}.models")
        try:
            models.append(compile_pattern("name", text).text if text else "")
        except PatternError as error:
            reader.wrong(item, error.message, error.fix)
    if "models" in nodes and isinstance(nodes["models"], Items) and not nodes["models"].items:
        reader.wrong(
            nodes["models"], f"`{base.name}.models` is empty, so it serves nothing", 'write `models: ["*"]`'
        )
    price = {"input": 0.0, "output": 0.0}
    if "price" in nodes:
        for name, (_, value) in reader.mapping(nodes["price"], f"{base.name}.price", KEYS["price"]).items():
            price[name] = reader.number(value, f"{base.name}.price.{name}", 0, _MAX_PRICE, 0.0)
    protocol = (
        reader.choice(nodes["protocol"], f"{base.name}.protocol", PROTOCOLS, "openai")
        if "protocol" in nodes
        else "openai"
    )
    return replace(
        base,
        models=tuple(models) or ("*",),
        max_output=_max_output(reader, base, nodes.get("max_output")),
        limit_key=_one_of(reader, base, nodes, "limit_key", LIMIT_KEYS),
        tokenizers=read_tokenizers(reader, nodes["tokenizer"], f"{base.name}.tokenizer")
        if "tokenizer" in nodes
        else (),
        effect=_one_of(reader, base, nodes, "effect", LLM_EFFECTS),
        protocol=protocol,
        price_input=price["input"],
        price_output=price["output"],
    )


def _one_of(
    reader: Reader, base: ResourceDecl, nodes: Mapping[str, Node], key: str, choices: Sequence[str]
) -> str:
    first = choices[0]
    return reader.choice(nodes[key], f"{base.name}.{key}", choices, first) if key in nodes else first


def _max_output(reader: Reader, base: ResourceDecl, node: Node | None) -> int:
    if node is None:
        return base.max_output
    value = reader.count(node, f"{base.name}.max_output", float(base.max_output))
    if value != int(value) or not 1 <= value <= _MAX_OUTPUT:
        reader.wrong(
            node, f"`{base.name}.max_output` is no number of tokens", "write one such as `4096` or `16k`"
        )
        return base.max_output
    return int(value)
