"""Declarations of MCP servers in the operator's file: how each is reached, and what its tools do.

What a server says about its own tools only ever makes a call stricter; what a call may be less than `external` is the operator's word.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ringfence.policy.credentials import SecretRef, check_header, read_secret
from ringfence.policy.manifest_types import SandboxSpec
from ringfence.policy.matcher import compile_pattern
from ringfence.policy.problems import PatternError
from ringfence.policy.reader import Reader
from ringfence.policy.sections import read_sandbox
from ringfence.policy.strict_yaml import Items, Node, Scalar, Table

KEYS: Final = {
    "mcp": (
        *("type", "url", "auth", "addresses", "rate", "command", "files", "env", "sandbox"),
        *("tools", "trusted", "environment", "timeout"),
    ),
    "tool": ("effect", "key", "repeat", "subject", "definition"),
    "key": ("argument", "header"),
    "box": ("memory", "pids", "cpu", "disk"),
}
"""Keys of each mapping."""

HTTP_KEYS: Final = ("auth", "addresses", "rate")
STDIO_KEYS: Final = ("files", "env", "sandbox")
EFFECTS: Final = ("read", "external", "destroy")
_ARGUMENT: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
_POINTER: Final = re.compile(r"(/([^~/]|~[01])*){1,16}")
_HASH: Final = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
_FORM: Final = "write `{effect: read}`"
_FORMS: Final = {
    "subject": (_POINTER, "place among arguments", "/repo"),
    "definition": (_HASH, "hash of a definition", "sha256:5f1d…"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDecl:
    """What the operator says of tools of one pattern.

    Attributes:
        pattern: of the tool's name.
        effect: `read`, `external` or `destroy`; empty: what the server says, and no less than `external`.
        key_argument: argument that carries the effect id; empty: none.
        key_header: header that carries it; empty: none.
        repeat: whether a call made twice does nothing twice.
        subject: JSON pointer to the argument that is the resource of rules; empty: there is none.
        definition: hash of the only definition that is taken; empty: the first that is seen.
    """

    pattern: str
    effect: str = ""
    key_argument: str = ""
    key_header: str = ""
    repeat: bool = False
    subject: str = ""
    definition: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpDecl:
    """What an MCP server is besides an address and a credential.

    Attributes:
        tools: in the order of the file, the first match counts.
        command: what is started in a sandbox; empty: it is reached over HTTP.
        files: directory of the host that the command sees as its working directory; empty: an empty one.
        env: its environment, each a value or a secret.
        box: limits of that sandbox.
    """

    tools: tuple[ToolDecl, ...] = ()
    command: tuple[str, ...] = ()
    files: str = ""
    env: tuple[tuple[str, str | SecretRef], ...] = ()
    box: SandboxSpec = field(default_factory=SandboxSpec)

    def secrets(self) -> tuple[SecretRef, ...]:
        """Secrets in its environment."""
        return tuple(value for _, value in self.env if isinstance(value, SecretRef))


def read_mcp(reader: Reader, name: str, node: Node, nodes: Mapping[str, Node]) -> McpDecl:
    """Read what is of MCP alone; address and credential are read as those of other resources."""
    if ("url" in nodes) == ("command" in nodes):
        reader.wrong(node, f"the mcp resource `{name}` needs one of: url, command", "write one of them")
    for key in HTTP_KEYS if "command" in nodes else STDIO_KEYS:
        if key in nodes:
            other = "command" if key in HTTP_KEYS else "url"
            reader.wrong(nodes[key], f"`{name}.{key}` has no meaning beside `{other}`", "leave it out")
    tools = _tools(reader, name, nodes["tools"]) if "tools" in nodes else ()
    if "command" in nodes and any(tool.key_header for tool in tools):
        reader.wrong(
            nodes["tools"], f"`{name}` is a command and has no headers", "write `key: {argument: NAME}`"
        )
    return McpDecl(
        tools=tools,
        command=_command(reader, name, nodes["command"]) if "command" in nodes else (),
        files=_files(reader, name, nodes["files"]) if "files" in nodes else "",
        env=_env(reader, name, nodes["env"]) if "env" in nodes else (),
        box=read_sandbox(reader, nodes["sandbox"], f"{name}.sandbox", KEYS["box"])
        if "sandbox" in nodes
        else SandboxSpec(),
    )


def _tools(reader: Reader, name: str, node: Node) -> tuple[ToolDecl, ...]:
    found: list[ToolDecl] = []
    for key, value in reader.free_mapping(node, f"{name}.tools"):
        what = f"{name}.tools.{key.text}"
        try:
            pattern = compile_pattern("name", key.text).text
        except PatternError as error:
            reader.wrong(key, error.message, error.fix)
            continue
        nodes = {one: inner for one, (_, inner) in reader.mapping(value, what, KEYS["tool"]).items()}
        if not nodes and isinstance(value, Table):
            reader.wrong(value, f"`{what}` says nothing", _FORM)
        argument, header = _key(reader, nodes["key"], f"{what}.key") if "key" in nodes else ("", "")
        if "repeat" in nodes and "key" in nodes:
            reader.wrong(nodes["key"], f"`{what}` has both `key` and `repeat`", "keep one of them")
        found.append(
            ToolDecl(
                pattern=pattern,
                effect=reader.choice(nodes["effect"], f"{what}.effect", EFFECTS, "")
                if "effect" in nodes
                else "",
                key_argument=argument,
                key_header=header,
                repeat="repeat" in nodes and reader.flag(nodes["repeat"], f"{what}.repeat"),
                subject=_form(reader, nodes, "subject", what),
                definition=_form(reader, nodes, "definition", what),
            )
        )
    return tuple(found)


def _form(reader: Reader, nodes: Mapping[str, Node], key: str, what: str) -> str:
    if key not in nodes:
        return ""
    form, kind, such = _FORMS[key]
    text = reader.text(nodes[key], f"{what}.{key}")
    if text is not None and form.fullmatch(text) is None:
        reader.wrong(nodes[key], f"`{text}` is no {kind}", f"write one such as `{such}`")
    return text or ""


def _key(reader: Reader, node: Node, what: str) -> tuple[str, str]:
    fields = reader.mapping(node, what, KEYS["key"])
    if len(fields) != 1:
        reader.wrong(
            node, f"`{what}` needs exactly one of: {', '.join(KEYS['key'])}", "write `{argument: NAME}`"
        )
        return "", ""
    kind, (_, value) = next(iter(fields.items()))
    text = reader.text(value, f"{what}.{kind}") or ""
    if kind == "header":
        check_header(reader, value, text)
        return "", text
    if text and _ARGUMENT.fullmatch(text) is None:
        reader.wrong(value, f"`{text}` is no name of an argument", "write one such as `request_id`")
    return text, ""


def _command(reader: Reader, name: str, node: Node) -> tuple[str, ...]:
    words = [reader.loose_text(item, f"{name}.command") for item in reader.items(node, f"{name}.command")]
    if isinstance(node, Items) and (not words or words[0] == ""):
        reader.wrong(node, f"`{name}.command` starts nothing", "write `[python, server.py]`")
    return tuple(word or "" for word in words)


def _files(reader: Reader, name: str, node: Node) -> str:
    path = reader.text(node, f"{name}.files") or ""
    if path and (not path.startswith("/") or posixpath.normpath(path) != path):
        reader.wrong(node, f"`{path}` is no absolute path", "write one such as `/srv/mcp/files`")
    return path


def _env(reader: Reader, name: str, node: Node) -> tuple[tuple[str, str | SecretRef], ...]:
    found: list[tuple[str, str | SecretRef]] = []
    for key, value in reader.free_mapping(node, f"{name}.env"):
        what = f"{name}.env.{key.text}"
        if _VARIABLE.fullmatch(key.text) is None:
            reader.wrong(key, f"`{key.text}` is no name of a variable", "write letters, digits and `_`")
        if isinstance(value, Scalar):
            found.append((key.text, reader.loose_text(value, what) or ""))
        else:
            found.append((key.text, read_secret(reader, value, what)))
    return tuple(found)
