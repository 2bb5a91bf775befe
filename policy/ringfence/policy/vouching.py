"""Fields of answers that a resource vouches for, though the rest of what it answers is untrusted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from ringfence.policy.hearsay import SOURCES, VOUCHER, words_in
from ringfence.policy.reader import Fields, Reader
from ringfence.policy.strict_yaml import Items, Node, Scalar, Table

KEYS: Final = ("of", "where", "fields", "names", "as")
_PLACE: Final = re.compile(r"(/([^~/*]|~[01])*|/\*){1,16}")
_EXACT: Final = re.compile(r"(/([^~/*]|~[01])*){1,16}")
_FORM: Final = "write `/items/*/owner`, with `*` for every one of a list or object"
_PARTS: Final = "name `fields`, `names` or both"

Plain = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Vouched:
    """Places in a JSON answer that are the resource's own word. All are JSON pointers; `*` is every one of a list or object.

    Attributes:
        fields: every text and number there counts, in lists and objects too.
        names: of the objects there every name of a field counts.
        of: what the others are looked for in, each by itself; empty: the whole answer.
        where: pointers within each of these, and what has to stand there, as it is written; else it says nothing.
        name: what conditions call it by; empty: it has no name of its own.
    """

    fields: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    of: str = ""
    where: tuple[tuple[str, tuple[Plain, ...]], ...] = ()
    name: str = ""

    def words(self, answer: object) -> Iterator[str]:
        """Every word of an answer that it vouches for."""
        for one in _at(answer, self.of):
            if not all(_is_one_of(one, pointer, wanted) for pointer, wanted in self.where):
                continue
            for pointer in self.fields:
                for value in _at(one, pointer):
                    yield from words_in(value)
            for pointer in self.names:
                for value in _at(one, pointer):
                    if isinstance(value, Mapping):
                        yield from filter(None, cast("Mapping[str, object]", value))


@dataclass(frozen=True, slots=True, kw_only=True)
class VouchDecl:
    """What a resource vouches for in its answers to some requests."""

    method: str
    path: str
    said: tuple[Vouched, ...]


def read_vouches(
    reader: Reader, node: Node, what: str, place_of: Callable[[Reader, Scalar], tuple[str, str]]
) -> tuple[VouchDecl, ...]:
    """Read `vouches` of a resource; `place_of` reads its keys, which are those of `effects`."""
    found: list[VouchDecl] = []
    for key, value in reader.free_mapping(node, what):
        method, path = place_of(reader, key)
        listed = value.items if isinstance(value, Items) else [value]
        if not listed:
            reader.wrong(value, f"`{key.text}` vouches for nothing", "name a field, or leave it out")
        plain = _places(reader, [item for item in listed if not isinstance(item, Table)], what)
        said = [Vouched(fields=plain)] if plain else []
        said += filter(None, (_some(reader, item, what) for item in listed if isinstance(item, Table)))
        if said:
            found.append(VouchDecl(method=method, path=path, said=tuple(said)))
    return tuple(found)


def _some(reader: Reader, node: Node, what: str) -> Vouched | None:
    """Fields of those entries alone that have something else in them."""
    given = reader.mapping(node, what, KEYS)
    fields, names = (_listed(reader, given, key, what) for key in ("fields", "names"))
    if not fields and not names:
        if "fields" not in given and "names" not in given:
            reader.wrong(node, f"an entry of `{what}` vouches for nothing", _PARTS)
        return None
    of = _places(reader, [given["of"][1]], f"{what}.of") if "of" in given else ()
    where: list[tuple[str, tuple[Plain, ...]]] = []
    for key, value in reader.free_mapping(given["where"][1], f"{what}.where") if "where" in given else ():
        if _EXACT.fullmatch(key.text) is None:
            reader.wrong(key, f"`{key.text}` is no field of an entry", "write `/status`, without `*`")
        where.append((key.text, _wanted(reader, value, f"{what}.where")))
    name = ""
    if "as" in given:
        name = reader.text(given["as"][1], f"{what}.as") or ""
        if name and (name in SOURCES or VOUCHER.fullmatch(name) is None):
            reader.wrong(
                given["as"][1],
                f"`{name}` can't be the name of what is vouched for",
                "write a word such as `payees`, in small letters",
            )
    return Vouched(fields=fields, names=names, of="".join(of), where=tuple(where), name=name)


def _wanted(reader: Reader, node: Node, what: str) -> tuple[Plain, ...]:
    found: list[Plain] = []
    for item in node.items if isinstance(node, Items) else [node]:
        if isinstance(item, Scalar) and isinstance(item.value, str | int | float | bool):
            found.append(item.value)
        else:
            reader.wrong(item, f"`{what}` names no value", "write a text, a number, `true` or `false`")
    if isinstance(node, Items) and not node.items:
        reader.wrong(node, f"`{what}` names no value, so nothing is vouched for", "name one, or leave it out")
    return tuple(found)


def _listed(reader: Reader, given: Fields, key: str, what: str) -> tuple[str, ...]:
    if key not in given:
        return ()
    node = given[key][1]
    if isinstance(node, Items) and not node.items:
        reader.wrong(node, f"`{what}.{key}` is empty", _PARTS)
    return _places(reader, node.items if isinstance(node, Items) else [node], f"{what}.{key}")


def _places(reader: Reader, nodes: Sequence[Node], what: str) -> tuple[str, ...]:
    found: list[str] = []
    for item in nodes:
        place = reader.text(item, what)
        if place is not None and _PLACE.fullmatch(place) is None:
            reader.wrong(item, f"`{place}` is no field of an answer", _FORM)
        elif place is not None:
            found.append(place)
    return tuple(found)


def _is_one_of(entry: object, pointer: str, wanted: Sequence[Plain]) -> bool:
    # INVARIANT: of the same kind too: `1` is no `true`, and what isn't there is nothing.
    return any(type(value) is type(one) and value == one for value in _at(entry, pointer) for one in wanted)


def _at(value: object, pointer: str) -> Iterator[object]:
    """Every value at a pointer; the empty one is the value itself."""
    return _within(value, pointer.split("/")[1:])


def _within(value: object, parts: Sequence[str]) -> Iterator[object]:
    if not parts:
        yield value
        return
    name = parts[0].replace("~1", "/").replace("~0", "~")
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        chosen = list(table.values()) if parts[0] == "*" else [table[name]] if name in table else []
    elif isinstance(value, list):
        listed = cast("list[object]", value)
        inside = name.isascii() and name.isdigit() and int(name) < len(listed)
        chosen = listed if parts[0] == "*" else [listed[int(name)]] if inside else []
    else:
        chosen = []
    for one in chosen:
        yield from _within(one, parts[1:])
