"""What each tool of other people's permission settings means in our rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice, product
from typing import Final, TypeAlias

from ringfence.policy.canonical import canonical_host
from ringfence.policy.problems import PatternError
from ringfence.policy.types import Verdict

_OPERATORS: Final = re.compile(r"&&|\|\||[;|&<>`\n]|\$\(|\$\{?[A-Za-z_]")
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_BRACES: Final = re.compile(r"\{([^{}]*,[^{}]*)\}")
_BRACES_MAX: Final = 32
_ALL: Final = "**"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Patterns by action, and what they don't say."""

    rules: tuple[tuple[str, tuple[str, ...]], ...] = ()
    notes: tuple[str, ...] = ()


ToolReader: TypeAlias = Callable[[str, Verdict], Said]


# -- commands ---------------------------------------------------------------------------------------------------------


def bash(spec: str, verdict: Verdict) -> Said:
    """`Bash(git diff *)`: a text with wildcards there, words here."""
    if spec in {"", "*"}:
        return Said(rules=(("exec.run", ("*",)),))
    prefix = spec.endswith(":*")
    text = spec.removesuffix(":*").strip() if prefix else spec
    return _allowed(text, prefix=prefix) if verdict is Verdict.ALLOW else _forbidden(text, prefix=prefix)


def _allowed(text: str, *, prefix: bool) -> Said:
    if _OPERATORS.search(text):
        return Said(notes=("left out: it needs a shell, and a rule is about the words of one command",))
    words = text.split()
    if not words or _ASSIGNMENT.match(words[0]):
        return Said(notes=("left out: it begins with no program; give variables with the call's `env`",))
    if any(word.startswith("-") and "*" in word for word in words[:1]) or words[0] == "*":
        return Said(notes=("left out: it names no program",))
    last = words[-1]
    if last != "*" and last.endswith("*"):
        # `npm*` there is any text that begins so; here the word has to be whole.
        words = [*words[:-1], last.rstrip("*")] if last.rstrip("*") else words[:-1]
        return Said(rules=(("exec.run", (f"{' '.join(words)} *",)),), notes=("only with that word whole",))
    notes = ("each `*` but a last one is one word",) if "*" in " ".join(words[:-1]) else ()
    shown = " ".join(words)
    return Said(rules=(("exec.run", (f"{shown} *" if prefix else shown,)),), notes=notes)


def _forbidden(text: str, *, prefix: bool) -> Said:
    """The words before anything that a rule can't say, and whatever follows them."""
    cut = _OPERATORS.search(text)
    head = text[: cut.start()] if cut else text
    whole = not cut and "*" not in head and not prefix
    words = head.split()
    while words and _ASSIGNMENT.match(words[0]):
        words, whole = words[1:], False
    kept: list[str] = []
    for word in words:
        if "*" in word:
            break
        kept.append(word)
    if not kept:
        return Said(rules=(("exec.run", ("*",)),), notes=("it can't be said, so every command is meant",))
    shown = " ".join(kept)
    if whole:
        return Said(rules=(("exec.run", (shown,)),))
    more = words[len(kept) :]
    notes = (
        ("wider than it was: whatever follows these words is meant",)
        if cut or more[:1] not in ([], ["*"]) or len(more) > 1
        else ()
    )
    # There a text, here words: what begins with the last word is meant too, such as `rmdir` by `rm`.
    glued = (f"{shown}* *",) if prefix or (bool(more) and more[0] != "*") else ()
    return Said(rules=(("exec.run", (f"{shown} *", *glued)),), notes=notes)


# -- files ------------------------------------------------------------------------------------------------------------


def files(*actions: str, also: tuple[str, ...] = ()) -> ToolReader:
    """`Read(./src/**)` and the like. `also`: what a deny or ask has to speak of besides."""

    def read(spec: str, verdict: Verdict) -> Said:
        wanted = actions if verdict is Verdict.ALLOW else (*actions, *also)
        if spec in {"", "*", "**", "./**"}:
            pattern = "/workspace/**" if verdict is Verdict.ALLOW else _ALL
            return Said(rules=tuple((action, (pattern,)) for action in wanted))
        found: list[str] = []
        notes: list[str] = []
        for text in _expanded(spec):
            patterns, note = _path(text, verdict)
            found += patterns
            if note:
                notes.append(note)
        unique = tuple(dict.fromkeys(found))
        return Said(
            rules=tuple((action, unique) for action in wanted if unique), notes=tuple(dict.fromkeys(notes))
        )

    return read


def _expanded(spec: str) -> list[str]:
    """A pattern with `{a,b}` written out; as it is where there are too many."""
    parts = _BRACES.split(spec)
    if len(parts) == 1:
        return [spec]
    choices = [part.split(",") if nr % 2 else [part] for nr, part in enumerate(parts)]
    made = list(islice(("".join(one) for one in product(*choices)), _BRACES_MAX + 1))
    return made if len(made) <= _BRACES_MAX else [spec]


def _path(text: str, verdict: Verdict) -> tuple[list[str], str]:
    """Patterns below `/workspace`, and what they don't say."""
    allow = verdict is Verdict.ALLOW
    if text.startswith(("//", "~")) or ".." in text.split("/"):
        if allow:
            return [], "left out: it is outside the workspace, which is all that an agent sees"
        # Nobody knows here where the settings lay: it may be a path of the workspace all the same.
        names = [name for name in text.split("/") if name not in {"", "~", "..", ".", "**"}]
        last = _widened(names[-1]) if names else "**"
        return [
            "**" if last == "**" else f"**/{last}/**"
        ], "wider than it was: meant wherever its last name stands"
    if text.startswith("!"):
        return [], "an exception can't be said" + (
            "" if allow else "; what it takes out of other rules stays denied"
        )
    bare = "/" not in text.strip("/") and not text.startswith(("/", "./"))
    path = text.removeprefix("./").strip("/")
    directory = text.endswith("/")
    note = ""
    if re.search(r"[?\[\]{}\\]", path) or any("**" in s and s != "**" for s in path.split("/")):
        if allow:
            return [], "left out: it has wildcards that a rule doesn't know"
        path, note = _widened(path), "wider than it was: it had wildcards that a rule doesn't know"
    if not path:
        return (["/workspace/**"] if allow else [_ALL]), note
    if allow:
        return [f"/workspace/{path}/**" if directory else f"/workspace/{path}"], note
    # There a pattern without a slash means any depth, and one that names a directory all that is in it.
    base = (
        f"**/{path}"
        if bare and not path.startswith("**")
        else path
        if path.startswith("**")
        else f"/workspace/{path}"
    )
    return [base if base.endswith("**") else f"{base}/**"], note


def _widened(path: str) -> str:
    kept: list[str] = []
    for segment in path.split("/"):
        if "**" in segment and segment != "**":
            return "/".join([*kept, "**"])
        kept.append(re.sub(r"\[[^\]]*\]?|\{[^}]*\}?|[?\\\]}]", "*", segment))
    return re.sub(r"\*{2,}", "*", "/".join(kept)) if "**" not in kept else "/".join(kept)


# -- the rest ---------------------------------------------------------------------------------------------------------


def fetch(spec: str, verdict: Verdict) -> Said:
    """`WebFetch(domain:example.com)`."""
    declare = "the operator has to declare the resource in the kernel file"
    if spec in {"", "*", "domain:*"}:
        if verdict is Verdict.ALLOW:
            return Said(rules=(("http.get", (_ALL,)),), notes=(f"every declared resource; {declare}",))
        return Said(rules=(("http.*", (_ALL,)),))
    kind, _, value = spec.partition(":")
    if kind != "domain" or not value:
        if verdict is Verdict.ALLOW:
            return Said(notes=("left out: only `domain:HOST` can be said",))
        return Said(rules=(("http.*", (_ALL,)),), notes=("it can't be said, so all of http is meant",))
    sub = value.startswith("*.")
    try:
        host = canonical_host(value.removeprefix("*."))
    except PatternError as error:
        if verdict is Verdict.ALLOW:
            return Said(notes=(f"left out: {error.message}",))
        return Said(rules=(("http.*", (_ALL,)),), notes=("it can't be said, so all of http is meant",))
    if verdict is Verdict.ALLOW:
        shown = f"*.{host}" if sub else host
        return Said(rules=(("http.get", (f"https://{shown}/**",)),), notes=(declare,))
    named = (f"**.{host}",) if not host.startswith("[") else (host,)
    urls = tuple(f"{scheme}://{name}:*/**" for scheme in ("https", "http") for name in named)
    return Said(rules=(("http.*", urls),))


def spawning(spec: str, verdict: Verdict) -> Said:
    """`Task(NAME)`."""
    del verdict
    return Said(rules=(("spawn", (spec or "*",)),))


def nothing(text: str) -> ToolReader:
    """A tool without a counterpart."""
    return lambda _spec, _verdict: Said(notes=(text,))


def mcp(tool: str, spec: str, verdict: Verdict) -> Said:
    """`mcp__server__tool`, or all of a server."""
    _, server, *rest = tool.split("__")
    name = "__".join(rest)
    if not server or "*" in server or spec:
        if server in {"", "*"} and not spec:
            return Said(rules=(("mcp.*", ("*",)),))
        if verdict is Verdict.ALLOW:
            return Said(notes=("left out: it can't be said",))
        whole = "mcp.*" if not server or "*" in server else f"mcp.{server}.*"
        return Said(rules=((whole, ("*",)),), notes=("wider than it was",))
    if not name or name == "*":
        return Said(rules=((f"mcp.{server}.*", ("*",)),))
    if "*" in name:
        if verdict is Verdict.ALLOW:
            return Said(notes=("left out: a part of a tool's name can't be a wildcard",))
        return Said(rules=((f"mcp.{server}.*", ("*",)),), notes=("wider than it was",))
    return Said(rules=((f"mcp.{server}.{name}", ("*",)),))


_WRITE: Final = files("fs.write", also=("fs.delete",))
TOOLS: Final[Mapping[str, ToolReader]] = {
    "Bash": bash,
    "Read": files("fs.read"),
    "NotebookRead": files("fs.read"),
    "LS": files("fs.list", also=("fs.stat",)),
    "Glob": files("fs.search", also=("fs.list",)),
    "Grep": files("fs.search"),
    "Edit": _WRITE,
    "MultiEdit": _WRITE,
    "Write": _WRITE,
    "NotebookEdit": _WRITE,
    "WebFetch": fetch,
    "WebSearch": nothing(
        "has no counterpart: declare a search service as a resource and allow `http.get` on it"
    ),
    "Task": spawning,
    "Agent": spawning,
}
"""Readers by the name of the tool."""
