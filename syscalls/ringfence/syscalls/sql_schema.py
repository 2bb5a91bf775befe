"""Takes statements apart that change the schema: those few of which a verified copy can be made, or that a person is asked about.

Everything else is refused by name. As with other writes nothing is guessed: what is not in these forms is not understood.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NoReturn

from ringfence.syscalls.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ringfence.syscalls.sql_lexer import Lexed, Token


class Act(StrEnum):
    """What is done to a table itself."""

    CREATE = "create table"
    DROP = "drop table"
    DROP_COLUMN = "drop column"
    ADD_COLUMN = "add column"
    RENAME_COLUMN = "rename column"
    CREATE_INDEX = "create index"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaShape:
    """The parts of one such statement.

    Attributes:
        act: what it does.
        schema: of the table, or empty.
        table: its name.
        column: that is dropped, added or renamed, or the name of a new index; empty for other acts.
        lenient: `if exists`, or for a table that is made `if not exists`.
        column_lenient: `if exists` or `if not exists` of the column or index.
        renamed: what the column is called from then on.
        unique: whether a new index is.
        body: offset of what follows the name of a new table or column, or that of an index's table.
        refers: tables that foreign keys of a new table refer to, as schema, or empty, and name.
    """

    act: Act
    schema: str
    table: str
    column: str = ""
    lenient: bool = False
    column_lenient: bool = False
    renamed: str = ""
    unique: bool = False
    body: int = 0
    refers: tuple[tuple[str, str], ...] = ()


_ONLY: Final = (
    "`create table`, `drop table`, `create index` and `alter table … drop column`, `add column` or `rename column` are taken; "
    "an operator can run others"
)
# What a new column may be: a type, perhaps not null, with a default. All else of it may bring other tables or rows in.
_NO_PART: Final = frozenset(
    {"references", "check", "generated", "primary", "unique", "constraint", "storage", "compression", "as"}
)


def shape_of_schema(lexed: Lexed) -> SchemaShape:
    """Take a statement apart that begins with `create`, `alter`, `drop` or the like.

    Raises:
        InvalidRequest: it is none that is taken, or not in a form that is understood.
    """
    return _Cutter(lexed).cut()


class _Cutter:
    """One pass over the tokens."""

    def __init__(self, lexed: Lexed) -> None:
        self._tokens = lexed.tokens
        self._at = 0

    def cut(self) -> SchemaShape:
        if self._take("create"):
            if self._take("unique"):
                self._need("index")
                return self._index(unique=True)
            return self._index(unique=False) if self._take("index") else self._create()
        if self._take("drop"):
            self._need("table")
            return self._drop()
        self._need("alter")
        self._need("table")
        return self._alter()

    def _create(self) -> SchemaShape:
        self._need("table")
        lenient = self._if_not_exists()
        schema, table = self._name()
        if not self._peek("("):
            self._refuse("write `create table name (columns)`")
        body = self._tokens[self._at].start
        inside = self._inside()
        if self._take("with"):
            if not self._peek("("):
                self._refuse("write `with (options)`")
            self._inside()
        self._end()
        return SchemaShape(
            act=Act.CREATE,
            schema=schema,
            table=table,
            lenient=lenient,
            body=body,
            refers=tuple(_references(inside)),
        )

    def _drop(self) -> SchemaShape:
        lenient = self._if_exists()
        schema, table = self._name()
        if self._peek(","):
            raise InvalidRequest("a `drop table` of several tables is refused; make one call for each")
        self._restrict()
        return SchemaShape(act=Act.DROP, schema=schema, table=table, lenient=lenient)

    def _alter(self) -> SchemaShape:
        lenient = self._if_exists()
        self._take("only")
        schema, table = self._name()
        if self._take("add"):
            return self._add(schema, table, lenient=lenient)
        if self._take("rename"):
            return self._rename(schema, table, lenient=lenient)
        self._need("drop")
        if not self._take("column") and self._peek("constraint"):
            self._refuse(_ONLY)
        column_lenient = self._if_exists()
        column = self._part()
        if self._peek(","):
            raise InvalidRequest(
                "several changes of a table in one statement are refused; make one call for each"
            )
        self._restrict()
        return SchemaShape(
            act=Act.DROP_COLUMN,
            schema=schema,
            table=table,
            column=column,
            lenient=lenient,
            column_lenient=column_lenient,
        )

    def _add(self, schema: str, table: str, *, lenient: bool) -> SchemaShape:
        if not self._take("column") and any(map(self._peek, _NO_PART)):
            self._refuse(_ONLY)
        column_lenient = self._if_not_exists()
        column = self._part()
        body = self._start_of("a type")
        self._rest(_NO_PART, "write a type, and perhaps `not null` and a `default`")
        return SchemaShape(
            act=Act.ADD_COLUMN,
            schema=schema,
            table=table,
            column=column,
            lenient=lenient,
            column_lenient=column_lenient,
            body=body,
        )

    def _rename(self, schema: str, table: str, *, lenient: bool) -> SchemaShape:
        if not self._take("column") and (self._peek("to") or self._peek("constraint")):
            self._refuse(_ONLY)
        column = self._part()
        self._need("to")
        renamed = self._part()
        self._end()
        return SchemaShape(
            act=Act.RENAME_COLUMN,
            schema=schema,
            table=table,
            column=column,
            lenient=lenient,
            renamed=renamed,
        )

    def _index(self, *, unique: bool) -> SchemaShape:
        lenient = self._if_not_exists()
        if self._peek("concurrently") or self._peek("on"):
            self._refuse("write `create index name on table (columns)`")
        index = self._part()
        self._need("on")
        if self._peek("only"):
            self._refuse("leave it out")
        schema, table = self._name()
        body = self._start_of("a column")
        self._rest(frozenset({"tablespace"}), "leave it out")
        return SchemaShape(
            act=Act.CREATE_INDEX,
            schema=schema,
            table=table,
            column=index,
            column_lenient=lenient,
            unique=unique,
            body=body,
        )

    def _start_of(self, what: str) -> int:
        token = self._maybe()
        if token is None:
            self._refuse(f"{what} is expected there")
        return token.start

    def _rest(self, refused: frozenset[str], instead: str) -> None:
        """All that is left; outside of parentheses it is one change alone, without some words."""
        depth = self._tokens[0].depth
        while (token := self._maybe()) is not None:
            if token.depth == depth and self._peek(","):
                raise InvalidRequest(
                    "several changes of a table in one statement are refused; make one call for each"
                )
            if token.depth == depth and any(map(self._peek, refused)):
                self._refuse(instead)
            self._at += 1

    def _if_not_exists(self) -> bool:
        if not self._take("if"):
            return False
        self._need("not")
        self._need("exists")
        return True

    def _if_exists(self) -> bool:
        if not self._take("if"):
            return False
        self._need("exists")
        return True

    def _restrict(self) -> None:
        if self._peek("cascade"):
            raise InvalidRequest(
                "`cascade` is refused: it would drop what the statement doesn't name; leave it out"
            )
        self._take("restrict")
        self._end()

    def _end(self) -> None:
        if self._at < len(self._tokens):
            self._refuse("leave it out")

    def _inside(self) -> tuple[Token, ...]:
        """The tokens in parentheses; behind them afterwards."""
        depth = self._tokens[self._at].depth
        self._at += 1
        start = self._at
        while self._tokens[self._at].depth > depth:
            self._at += 1
        self._at += 1
        return self._tokens[start : self._at - 1]

    def _name(self) -> tuple[str, str]:
        first = self._part()
        if not self._peek("."):
            return "", first
        self._at += 1
        second = self._part()
        if self._peek("."):
            raise InvalidRequest(
                "a table is named as `table` or `schema.table`, without a database before it; name it so"
            )
        return first, second

    def _part(self) -> str:
        token = self._maybe()
        if token is None or not token.is_name:
            self._refuse("a name is expected there")
        self._at += 1
        return token.value

    def _maybe(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _peek(self, value: str) -> bool:
        token = self._maybe()
        return token is not None and token.kind in ("word", "punct") and token.value == value

    def _take(self, word: str) -> bool:
        found = self._peek(word)
        self._at += found
        return found

    def _need(self, word: str) -> None:
        if not self._take(word):
            self._refuse(_ONLY)

    def _refuse(self, instead: str) -> NoReturn:
        token = self._maybe()
        what = "the end of the statement" if token is None else f"`{token.value}`"
        raise InvalidRequest(f"{what} is refused in a statement that changes the schema: {instead}")


def _references(inside: Sequence[Token]) -> Iterator[tuple[str, str]]:
    """Tables that foreign keys name; what copies from other tables is refused."""
    for at, token in enumerate(inside):
        before = inside[at - 1] if at else None
        if token.is_word("like") and token.depth == 1 and (before is None or before.value == ","):
            raise InvalidRequest("`like` in `create table` is refused; write the columns")
        if token.is_word("references") and before is not None:
            yield from _referred(inside[at + 1 : at + 4])


def _referred(tokens: Sequence[Token]) -> Iterator[tuple[str, str]]:
    if not tokens or not tokens[0].is_name:
        raise InvalidRequest("`references` lacks the table it refers to; name it")
    if len(tokens) > 2 and tokens[1].value == "." and tokens[2].is_name:  # noqa: PLR2004 - schema, dot, name
        yield tokens[0].value, tokens[2].value
    else:
        yield "", tokens[0].value
