"""How an insert, update, delete or truncate is put together, cut by our own lexer and never by guessing.

The rollback point of a write is taken with the statement's own condition, so the parts are kept as the exact
text that the database would have read. Whatever a verified copy can't be made of in this release is refused
here by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ringfence.syscalls.errors import InvalidRequest

if TYPE_CHECKING:
    from ringfence.syscalls.sql_lexer import Lexed, Token

_STATEMENTS: Final = ("insert", "update", "delete", "select", "values", "table", "merge")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteShape:
    """The parts of one write.

    Attributes:
        schema: of the table written, or empty.
        table: its name.
        only: whether the statement says ONLY.
        alias: the table's alias, or empty.
        prefix: offsets of a WITH clause before the statement; equal where there is none.
        condition: offsets of what follows WHERE; None where there is none.
        others: offsets of the other tables of an update, which follow FROM; None where there is none.
        sets: columns that an update gives values; None where that can't be told.
        upserts: whether an insert changes the rows that it finds in its place.
        deletes: whether a merge deletes rows.
        body_end: offset behind the statement without its RETURNING clause.
        returning: offsets of what follows RETURNING; None where there is none.
    """

    schema: str
    table: str
    only: bool = False
    alias: str = ""
    prefix: tuple[int, int] = (0, 0)
    condition: tuple[int, int] | None = None
    others: tuple[int, int] | None = None
    sets: frozenset[str] | None = None
    upserts: bool = False
    deletes: bool = False
    body_end: int = 0
    returning: tuple[int, int] | None = None


def shape_of_write(lexed: Lexed, kind: str) -> WriteShape:
    """Take a write apart.

    Args:
        lexed: the statement.
        kind: `insert`, `update`, `delete`, `merge` or `truncate`, as the parser sees it.

    Raises:
        InvalidRequest: it isn't put together as `kind` says, or in a way that no copy can be made of.
    """
    return _Cutter(lexed).cut(kind)


class _Cutter:
    """One pass over the tokens of depth 0."""

    def __init__(self, lexed: Lexed) -> None:
        self._tokens = lexed.tokens
        self._end = lexed.tokens[-1].end
        self._at = 0

    def cut(self, kind: str) -> WriteShape:
        prefix = (0, 0)
        if self._peek("with"):
            self._find(*_STATEMENTS)
            prefix = (0, self._token().start)
        if not self._take(kind):
            raise InvalidRequest(f"the {kind} can't be told for certain; write it more plainly")
        if kind == "truncate":
            return self._truncate()
        if kind in ("insert", "merge"):
            self._need("into")
        elif kind == "delete":
            self._need("from")
        only, schema, table, alias = self._target(kind)
        if kind == "insert":
            return self._insert(prefix, schema, table, alias)
        if kind == "merge":
            return self._merge(prefix, only=only, schema=schema, table=table, alias=alias)
        return self._change(kind, prefix, only=only, schema=schema, table=table, alias=alias)

    def _truncate(self) -> WriteShape:
        self._take("table")
        only, schema, table, _ = self._target("truncate")
        while (token := self._maybe()) is not None:
            if token.value == ",":
                raise InvalidRequest("a truncate of several tables is refused; make one call for each")
            if token.is_word("cascade"):
                raise InvalidRequest(
                    "`truncate … cascade` is refused: it would empty tables that it doesn't name; truncate each by itself"
                )
            if token.is_word("restart"):
                raise InvalidRequest(
                    "`restart identity` is refused: a sequence can't be put back; leave it out"
                )
            if not token.is_word("continue", "identity", "restrict"):
                raise InvalidRequest(f"`{token.value}` is not understood in a truncate; leave it out")
            self._at += 1
        return WriteShape(schema=schema, table=table, only=only, body_end=self._end)

    def _insert(self, prefix: tuple[int, int], schema: str, table: str, alias: str) -> WriteShape:
        start = self._at
        returning, body_end = self._returning(start)
        upserts = False
        for at in range(start, len(self._tokens) - 2):
            first, second, third = self._tokens[at : at + 3]
            if first.depth or not (first.is_word("on") and second.is_word("conflict")):
                continue
            if third.value not in ("(", "do", "on"):
                continue
            upserts = not any(
                here.depth == 0 and here.is_word("do") and following.is_word("nothing")
                for here, following in zip(self._tokens[at:], self._tokens[at + 1 :], strict=False)
            )
        return WriteShape(
            schema=schema,
            table=table,
            alias=alias,
            prefix=prefix,
            upserts=upserts,
            body_end=body_end,
            returning=returning,
        )

    def _merge(
        self, prefix: tuple[int, int], *, only: bool, schema: str, table: str, alias: str
    ) -> WriteShape:
        self._need("using")
        start = self._at
        returning, body_end = self._returning(start)
        deletes = any(
            here.depth == 0 and here.is_word("then") and following.is_word("delete")
            for here, following in zip(self._tokens[start:], self._tokens[start + 1 :], strict=False)
        )
        return WriteShape(
            schema=schema,
            table=table,
            only=only,
            alias=alias,
            prefix=prefix,
            deletes=deletes,
            body_end=body_end,
            returning=returning,
        )

    def _change(
        self, kind: str, prefix: tuple[int, int], *, only: bool, schema: str, table: str, alias: str
    ) -> WriteShape:
        if kind == "update":
            self._need("set")
        start = self._at
        returning, body_end = self._returning(start)
        condition: tuple[int, int] | None = None
        others = 0
        for at in range(start, len(self._tokens)):
            token = self._tokens[at]
            if token.depth or token.end > body_end:
                continue
            if token.is_word("from") and not self._tokens[at - 1].is_word("distinct"):
                others = others or token.end
            if token.is_word("where"):
                if (
                    at + 2 < len(self._tokens)
                    and self._tokens[at + 1].is_word("current")
                    and self._tokens[at + 2].is_word("of")
                ):
                    raise InvalidRequest("`where current of` is refused; there are no cursors here")
                condition = (token.end, body_end)
                break
        end_of_others = body_end if condition is None else condition[0] - len("where")
        end_of_sets = end_of_others if not others else others - len("from")
        return WriteShape(
            schema=schema,
            table=table,
            only=only,
            alias=alias,
            prefix=prefix,
            condition=condition,
            others=(others, end_of_others) if others else None,
            sets=self._sets(start, end_of_sets) if kind == "update" else None,
            body_end=body_end,
            returning=returning,
        )

    def _sets(self, start: int, end: int) -> frozenset[str] | None:
        """The columns of `column = …, (column, column) = …`: what stands first, and behind each comma that is in no brackets."""
        names: set[str] = set()
        expected = inside = False
        for at, token in enumerate(self._tokens[start:], start):
            if token.end > end:
                break
            expected = expected or at == start
            if expected:
                inside = token.kind == "punct" and token.value == "("
                if token.is_name:
                    names.add(token.value)
                elif not inside:
                    return None
                expected = False
            elif inside and token.depth:
                if token.is_name:
                    names.add(token.value)
                elif token.value != ",":
                    return None
            else:
                inside = False
                expected = token.depth == 0 and token.kind == "punct" and token.value == ","
        return frozenset(names)

    def _returning(self, start: int) -> tuple[tuple[int, int] | None, int]:
        for at in range(start, len(self._tokens)):
            token = self._tokens[at]
            if token.depth == 0 and token.is_word("returning"):
                if at + 1 < len(self._tokens) and self._tokens[at + 1].is_word("with"):
                    raise InvalidRequest("`returning with (…)` is refused; name the columns of the new row")
                return (token.end, self._end), token.start
        return None, self._end

    def _target(self, kind: str) -> tuple[bool, str, str, str]:
        """`[only] [schema .] table [*] [[as] alias]`."""
        following = self._tokens[self._at + 1] if self._at + 1 < len(self._tokens) else None
        only = self._peek("only") and following is not None and (following.is_name or following.value == "(")
        if only:
            self._at += 1
            if self._peek_value("("):
                raise InvalidRequest("write `only table` without parentheses")
        parts = [self._name()]
        while self._peek_value("."):
            self._at += 1
            parts.append(self._name())
        if len(parts) > 2:  # noqa: PLR2004 - schema and table
            raise InvalidRequest(
                "a table is named as `table` or `schema.table`, without a database before it"
            )
        if self._peek_value("*"):
            self._at += 1
        alias = ""
        if self._take("as"):
            alias = self._name()
        elif kind in ("update", "delete", "merge"):
            token = self._maybe()
            if (
                token is not None
                and token.is_name
                and not token.is_word("set", "where", "returning", "using")
            ):
                alias = self._name()
        return only, parts[0] if len(parts) > 1 else "", parts[-1], alias

    def _find(self, *words: str) -> None:
        while (token := self._maybe()) is not None and not (token.depth == 0 and token.is_word(*words)):
            self._at += 1
        if self._maybe() is None:
            raise InvalidRequest("the statement can't be told for certain; write it more plainly")

    def _maybe(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _token(self) -> Token:
        token = self._maybe()
        if token is None:
            raise InvalidRequest("the statement ends too early; write the whole of it")
        return token

    def _peek(self, word: str) -> bool:
        token = self._maybe()
        return token is not None and token.is_word(word)

    def _peek_value(self, value: str) -> bool:
        token = self._maybe()
        return token is not None and token.kind in ("punct", "op") and token.value == value

    def _take(self, word: str) -> bool:
        if self._peek(word):
            self._at += 1
            return True
        return False

    def _need(self, word: str) -> None:
        if not self._take(word):
            raise InvalidRequest(f"the statement lacks `{word}` where it is expected; write it more plainly")

    def _name(self) -> str:
        token = self._token()
        if not token.is_name:
            raise InvalidRequest(
                f"`{token.value}` stands where a name is expected; put a name there, in double quotes if it is a keyword"
            )
        self._at += 1
        return token.value
