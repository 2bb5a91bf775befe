"""What a statement is: its kind, its tables, and how a write is put together. Found without a database.

This only refuses early and asks policy the right questions. The barrier is the database: a read runs in a
READ ONLY transaction, and the relations of its plan are judged again. Nothing that is not understood gets
through.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import sqlglot
from ringfence.syscalls.base import Call, Env, Question
from ringfence.syscalls.declared import SqlResource
from ringfence.syscalls.errors import InvalidRequest, NoSuchResource
from ringfence.syscalls.refusals import refuse_unavailable
from ringfence.syscalls.sql_lexer import Lexed, Token, lex
from ringfence.syscalls.sql_schema import Act, SchemaShape, shape_of_schema
from ringfence.syscalls.sql_shape import WriteShape, shape_of_write
from sqlglot import exp
from sqlglot.errors import SqlglotError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PARAMETERS_MAX: Final = 256

Node: TypeAlias = Any
"""A node of the parser's tree, whose library has no useful types."""


class Kind(StrEnum):
    """Kinds of statements."""

    READ = "read"
    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"
    MERGE = "merge"
    TRUNCATE = "truncate"
    DDL = "ddl"


@dataclass(frozen=True, slots=True, order=True)
class Table:
    """One relation, spelled as the database stores it."""

    schema: str
    name: str

    def resource(self, database: str) -> str:
        """As policy knows it: `database/table` in the schema `public`, else `database/schema.table`."""
        return f"{database}/{self}"

    def __str__(self) -> str:
        return self.name if self.schema == "public" else f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A classified statement.

    Attributes:
        kind: what it is.
        lexed: its normal text and tokens.
        reads: tables it reads; for a write, those besides the one written.
        write: how a write is put together; None for READ and DDL.
        ddl: how a statement is put together that changes the schema; None for others.
        functions: `(schema or empty, name)` of everything that may be a call.
        attributes: names behind a dot, which PostgreSQL may take for calls of functions on a row.
        operators: operators used.
    """

    kind: Kind
    lexed: Lexed
    reads: tuple[Table, ...]
    write: WriteShape | None = None
    ddl: SchemaShape | None = None
    functions: frozenset[tuple[str, str]] = field(default_factory=frozenset[tuple[str, str]])
    attributes: frozenset[str] = field(default_factory=frozenset[str])
    operators: frozenset[str] = field(default_factory=frozenset[str])

    @property
    def target(self) -> Table | None:
        """The table written, made or dropped."""
        shape = self.write or self.ddl
        return None if shape is None else table_of(shape.schema, shape.table)

    @property
    def destroys(self) -> bool:
        """Whether rows or a table go, or a table is changed in a way that no rollback takes back."""
        if self.ddl is not None:
            return self.ddl.act is not Act.CREATE
        deletes = self.write is not None and self.write.deletes
        return deletes or self.kind in (Kind.DELETE, Kind.TRUNCATE)


SYSTEM_SCHEMAS: Final = frozenset({"pg_catalog", "information_schema", "pg_toast"})

_READ_WORDS: Final = frozenset({"select", "with", "values", "table"})
_WRITE_WORDS: Final = frozenset({"insert", "update", "delete", "merge"})
_DDL_WORDS: Final = frozenset(
    {"create", "alter", "drop", "comment", "reindex", "refresh", "import", "security"}
)
_REFUSED: Final = {
    "copy": "copying from or to files and programs",
    "do": "anonymous code blocks",
    "call": "procedures",
    "set": "changing settings or roles",
    "reset": "changing settings or roles",
    "show": "reading settings",
    "discard": "changing the session",
    "load": "loading libraries",
    "listen": "notifications",
    "unlisten": "notifications",
    "notify": "notifications",
    "lock": "locks",
    "explain": "plans",
    "vacuum": "maintenance",
    "analyze": "maintenance",
    "analyse": "maintenance",
    "cluster": "maintenance",
    "checkpoint": "maintenance",
    "repack": "maintenance",
    "grant": "rights",
    "revoke": "rights",
    "reassign": "rights",
    "begin": "transactions",
    "start": "transactions",
    "commit": "transactions",
    "end": "transactions",
    "rollback": "transactions",
    "abort": "transactions",
    "savepoint": "transactions",
    "release": "transactions",
    "prepare": "prepared statements and transactions",
    "execute": "prepared statements and transactions",
    "deallocate": "prepared statements and transactions",
    "declare": "cursors",
    "fetch": "cursors",
    "move": "cursors",
    "close": "cursors",
}


def database_of(name: str, env: Env) -> SqlResource:
    """The declared database.

    Raises:
        NoSuchResource: there is none of that name, or it is unavailable.
    """
    found = env.sql.get(name)
    if found is None:
        declared = ", ".join(f"`{known}`" for known in sorted(env.sql)) or "none"
        raise NoSuchResource(
            f"no database `{name}` is declared; declared: {declared}; the operator can declare it in the kernel file"
        )
    refuse_unavailable(found)
    return found


def classify(statement: str, parameter_count: int) -> Statement:
    """Find out what a statement is.

    Raises:
        InvalidRequest: it is more than one statement, one of a kind that is refused, or not understood.
    """
    if parameter_count > PARAMETERS_MAX:
        raise InvalidRequest(f"{parameter_count} parameters are too many; at most {PARAMETERS_MAX} are taken")
    lexed = lex(statement, parameter_count)
    tokens = lexed.tokens
    first = next((token for token in tokens if token.value != "("), tokens[0])
    word = first.value if first.kind == "word" else ""
    if word in _REFUSED:
        raise InvalidRequest(
            f"`{word}` is refused ({_REFUSED[word]}); use select, insert, update, delete, merge or truncate"
        )
    calls: dict[str, Any] = {
        "functions": frozenset(_functions(tokens)),
        "attributes": frozenset(_attributes(tokens)),
        "operators": frozenset(_operators(tokens)),
    }
    if word in _DDL_WORDS:
        return _classify_schema(lexed, calls)
    if word == "truncate":
        return Statement(kind=Kind.TRUNCATE, lexed=lexed, reads=(), write=shape_of_write(lexed, "truncate"))
    if word not in _READ_WORDS | _WRITE_WORDS:
        raise InvalidRequest(
            "the statement is none that is known; begin it with select, insert, update or delete"
        )
    tree = _parse(lexed)
    if isinstance(tree, (exp.Insert, exp.Update, exp.Delete, exp.Merge)):
        return _classify_write(lexed, tree, calls)
    return _classify_read(lexed, tree, calls)


def _classify_schema(lexed: Lexed, calls: dict[str, Any]) -> Statement:
    shape = shape_of_schema(lexed)
    reads = _unique(table_of(*name) for name in shape.refers)
    return Statement(kind=Kind.DDL, lexed=lexed, reads=reads, ddl=shape, **calls)


def _classify_write(lexed: Lexed, tree: Node, calls: dict[str, Any]) -> Statement:
    kind = Kind(type(tree).__name__.lower())
    _refuse_inner_writes(tree)
    shape = shape_of_write(lexed, kind.value)
    named = list(_tables(tree))
    target = table_of(shape.schema, shape.table)
    # INVARIANT: the shape was cut by our own lexer; a parser that sees another target means that one of them
    # is wrong.
    if target not in named or not _same_target(tree, target):
        raise InvalidRequest(
            "the statement's table can't be told for certain; write it without unusual spellings"
        )
    named.remove(target)
    return Statement(kind=kind, lexed=lexed, reads=_unique(named), write=shape, **calls)


def _classify_read(lexed: Lexed, tree: Node, calls: dict[str, Any]) -> Statement:
    if not isinstance(tree, (exp.Select, exp.SetOperation, exp.Values, exp.Subquery)):
        raise InvalidRequest(
            "the statement is none that is known; begin it with select, insert, update or delete"
        )
    _refuse_inner_writes(tree)
    if any(token.is_word("into") for token in lexed.tokens):
        raise InvalidRequest("`select into` is refused; it would create a table")
    if any(select.args.get("locks") for select in tree.find_all(exp.Select)):
        raise InvalidRequest("locking rows in a read is refused; leave out `for update` or `for share`")
    return Statement(kind=Kind.READ, lexed=lexed, reads=_unique(_tables(tree)), **calls)


def read_questions(database: str, tables: Iterable[Table]) -> tuple[Question, ...]:
    """One question a table; about the database itself where no table is named."""
    resources = [table.resource(database) for table in tables] or [database]
    return tuple(Question(action="sql.read", resource=resource) for resource in resources)


def refuse_system_tables(tables: Iterable[Table]) -> None:
    """Refuse the tables that describe the database itself, its roles and its settings.

    Raises:
        InvalidRequest: one of them is such a table.
    """
    for table in tables:
        if table.schema in SYSTEM_SCHEMAS or table.schema.startswith("pg_"):
            raise InvalidRequest(
                f"`{table}` is a system table; these are refused in this release, name the tables you need"
            )


def table_of(schema: str, name: str) -> Table:
    """A table as named in a statement.

    Without a schema it is one of `public`, or of the catalog when its name begins with `pg_`.

    Raises:
        InvalidRequest: a name that policy could read in two ways.
    """
    for part in filter(None, (schema, name)):
        check_name(part)
    # The search path is pinned to the catalog and `public`, and all relations of the catalog begin so.
    return Table(schema or ("pg_catalog" if name.startswith("pg_") else "public"), name)


def check_name(name: str) -> None:
    """Refuse a name that can't stand in `database/schema.table` without a second reading.

    Raises:
        InvalidRequest: it has a dot, a slash or a character that isn't seen.
    """
    if "." in name or "/" in name or not name.isprintable():
        raise InvalidRequest(
            f"the name {name!a} holds a dot, a slash or an invisible character; such names can't be judged"
        )


def _parse(lexed: Lexed) -> Node:
    try:
        trees = sqlglot.parse(lexed.skeleton(), read="postgres")
    except SqlglotError as error:
        what = str(error).splitlines()[0] if str(error) else "unknown"
        raise InvalidRequest(f"the statement is not understood ({what}); write it more plainly") from None
    except RecursionError:
        raise InvalidRequest("the statement is nested too deeply; write it more plainly") from None
    if len(trees) != 1 or trees[0] is None:
        raise InvalidRequest("several statements in one call are refused; make one call for each")
    tree: Node = trees[0]
    if any(True for _ in tree.find_all(exp.Command)):
        raise InvalidRequest("the statement is not understood; write it more plainly")
    return tree


def _refuse_inner_writes(tree: Node) -> None:
    for inner in tree.find_all(exp.Insert, exp.Update, exp.Delete, exp.Merge):
        if inner is not tree and not isinstance(inner.parent, exp.When):
            raise InvalidRequest(
                "a write inside of another statement is refused; make a call of its own for it"
            )


def _same_target(tree: Node, target: Table) -> bool:
    node: Any = tree.this
    if isinstance(node, exp.Schema):
        node = node.this
    return isinstance(node, exp.Table) and _table_of_node(node) == target


def _tables(tree: Node) -> Iterator[Table]:
    """Every relation named, in order; names of common table expressions only where they are in scope."""
    for node in tree.find_all(exp.Table):
        table = _table_of_node(node)
        if table is not None and not (_is_bare(node) and _is_cte(node, _fold(node.this))):
            yield table


def _table_of_node(node: Node) -> Table | None:
    name: Any = node.this
    if not isinstance(name, exp.Identifier):
        return None  # a function in FROM; judged as a function
    if node.args.get("catalog") is not None:
        raise InvalidRequest(
            "a table is named as `table` or `schema.table`, without a database before it; name it so"
        )
    schema = node.args.get("db")
    return table_of(_fold(schema) if isinstance(schema, exp.Identifier) else "", _fold(name))


def _is_bare(node: Node) -> bool:
    return node.args.get("db") is None


def _is_cte(node: Node, name: str) -> bool:
    """Whether a bare name means a common table expression: one of an enclosing WITH that comes before it."""
    inside: Node = node
    while inside is not None:
        outer: Node = inside.parent
        clause = None if outer is None or isinstance(inside, exp.With) else outer.args.get("with_")
        if clause is not None:
            if any(_cte_name(cte) == name for cte in clause.expressions):
                return True
        elif isinstance(outer, exp.With):
            index = next(at for at, cte in enumerate(outer.expressions) if cte is inside)
            # Without RECURSIVE an expression sees only those before it; with it, itself and all of them.
            visible = outer.expressions if outer.args.get("recursive") else outer.expressions[:index]
            if any(_cte_name(cte) == name for cte in visible):
                return True
        inside = outer
    return False


def _cte_name(cte: Node) -> str:
    alias: Any = cte.args.get("alias")
    return _fold(alias.this) if alias is not None and isinstance(alias.this, exp.Identifier) else ""


def _fold(identifier: Node) -> str:
    name: str = identifier.name
    return name if identifier.args.get("quoted") else name.lower()


def _functions(tokens: tuple[Token, ...]) -> Iterator[tuple[str, str]]:
    """Every name before a parenthesis. Some are keywords or aliases; no function has their name, or it is refused too."""
    for at, token in enumerate(tokens[:-1]):
        following = tokens[at + 1]
        if not (token.is_name and following.kind == "punct" and following.value == "("):
            continue
        qualified = at >= 2 and tokens[at - 1].value == "." and tokens[at - 2].is_name  # noqa: PLR2004
        yield (tokens[at - 2].value if qualified else "", token.value)


def _attributes(tokens: tuple[Token, ...]) -> Iterator[str]:
    for at, token in enumerate(tokens[1:], 1):
        if token.is_name and tokens[at - 1].kind == "punct" and tokens[at - 1].value == ".":
            yield token.value


def _operators(tokens: tuple[Token, ...]) -> Iterator[str]:
    for token in tokens:
        if token.kind == "op":
            text = token.value
            # PostgreSQL takes a trailing sign for one of its own unless the operator has one of these
            # characters.
            while len(text) > 1 and text[-1] in "+-" and not set(text) & set("~!@#%^&|`?"):
                text = text[:-1]
            yield text


def _unique(tables: Iterable[Table]) -> tuple[Table, ...]:
    return tuple(dict.fromkeys(tables))


def taint_by(call: Call, resource: SqlResource) -> None:
    """Say that a database which the operator declared untrusted has been read."""
    if resource.untrusted:
        call.taint(f"the database `{resource.name}`")
