"""What every command shares: the global options, the connection, and how a command is declared."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from ringfence.console import locate
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.kernel.config import default_data_dir

if TYPE_CHECKING:
    from ringfence.console.client import Client

F = TypeVar("F", bound=Callable[..., int | None])

_NEGATIVE = re.compile(r"-\.?\d")
_GLOBALS = ("data", "connect", "as_json")


def global_options(*, envvar: str | None = None) -> list[click.Option]:
    """Options that every command takes, and the groups above it.

    Args:
        envvar: variable that `--data` falls back to; only the root names one, so that an option beats it.
    """
    return [
        click.Option(
            ["--data"],
            # Not looked at here: whose it is not is told how to get in, with the exit code of a refusal.
            type=click.Path(path_type=Path, readable=False),
            metavar="DIR",
            envvar=envvar,
            help="Data directory of the kernel. Default: $RINGFENCE_DATA, else the user's data directory.",
        ),
        click.Option(
            ["--connect"], metavar="ADDR", help="Operator socket, as unix:/path, instead of --data."
        ),
        click.Option(
            ["--json", "as_json"], is_flag=True, default=None, help="Print JSON; keys: docs/json.md."
        ),
    ]


@dataclass(slots=True, kw_only=True)
class Session:
    """One run of a command.

    Attributes:
        data: data directory of the kernel, absolute.
        connect: address given instead of it.
        as_json: print JSON.
    """

    data: Path
    connect: str | None
    as_json: bool
    context: click.Context
    _client: Client | None = field(default=None, init=False)

    @property
    def address(self) -> str:
        """Where the kernel should listen, as `unix:/path`."""
        return locate.address_of(self.data, self.connect)

    def client(self) -> Client:
        """The connection, opened at the first use and closed with the command.

        Raises:
            ConsoleError: no kernel is reachable.
        """
        if self._client is None:
            self._client = self.dial()
            self.context.call_on_close(self._client.close)
        return self._client

    def dial(self) -> Client:
        """Open a connection of the caller's own, who closes it.

        Raises:
            ConsoleError: no kernel is reachable.
        """
        # gRPC takes a while to import, and commands like `policy lint` never need it.
        module = import_module("ringfence.console.client")
        return cast("type[Client]", module.Client)(self.address)

    @property
    def on_terminal(self) -> bool:
        """Whether a person sits at both ends."""
        return sys.stdin.isatty() and sys.stdout.isatty()


class Redial:
    """A connection for commands that outlive a kernel: after a loss the next call dials anew."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._client: Client | None = None

    def call(self, method: str, timeout_s: float | None = None, /, **fields: Any) -> dict[str, Any]:
        """Call a method that answers once, as `Client.call`.

        Raises:
            ConsoleError: no kernel is reachable, or it refused.
        """
        if self._client is None:
            self._client = self._session.dial()
        try:
            return self._client.call(method, timeout_s, **fields)
        except ConsoleError as error:
            if error.code == ExitCode.UNREACHABLE:
                self.close()
            raise

    def close(self) -> None:
        """Hang up."""
        if self._client is not None:
            self._client.close()
            self._client = None


class Leaf(click.Command):
    """A command. Its help ends with examples."""

    examples: tuple[str, ...] = ()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what follows the command's name."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            number = next((word for word in given if _NEGATIVE.match(word)), None)
            if number is None or not number.startswith(error.option_name):
                raise
            raise click.UsageError(f"`{number}` is below zero; give a value from 0 on", ctx) from None

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they are typed, without wrapping."""
        del ctx
        formatter.write_paragraph()
        formatter.write_text("Example:" if len(self.examples) == 1 else "Examples:")
        for line in self.examples:
            formatter.write(f"  {line}\n")


class Branch(click.Group):
    """A group of commands below the root."""

    def __init__(self, name: str, *, about: str, default: str = "") -> None:
        """Make a group.

        Args:
            name: as it is typed.
            about: its help.
            default: command to run where none is named; empty: none.
        """
        super().__init__(name, params=[*global_options()], help=about, no_args_is_help=False)
        self._default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what follows the group's name."""
        bare = not args or args[0].startswith("-")
        if self._default and bare and not {"-h", "--help", *self.commands} & set(args):
            args = [self._default, *args]
        return super().parse_args(ctx, args)


class Commands:
    """The commands of one module, until they are attached to a group."""

    def __init__(self) -> None:
        self._made: list[Leaf] = []

    def add(self, name: str, *examples: str, own_json: bool = False) -> Callable[[F], F]:
        """Declare a command: its first parameter is the `Session`, it returns its exit code (None: 0).

        Args:
            name: as it is typed.
            *examples: command lines for its help.
            own_json: whether it declares `--json` itself.
        """

        def declare(function: F) -> F:
            @functools.wraps(function)
            def callback(**values: Any) -> int:
                session = _session(
                    click.get_current_context(), {name: values.pop(name, None) for name in _GLOBALS}
                )
                return int(function(session, **values) or 0)

            made = click.command(name, cls=Leaf)(callback)
            made.examples = examples
            made.params.extend(o for o in global_options() if not (own_json and o.name == "as_json"))
            self._made.append(made)
            return function

        return declare

    def attach(self, group: click.Group) -> None:
        """Add the commands to a group."""
        for made in self._made:
            group.add_command(made)


def session_of(context: click.Context) -> Session:
    """The session of a command line that is still being typed."""
    return _session(context, context.params)


def _session(context: click.Context, given: dict[str, Any]) -> Session:
    """Merge the global options: those nearest to the command count."""
    sources = (given, *(parent.params for parent in _parents(context)))
    place = next((source for source in sources if source.get("connect") or source.get("data")), given)
    data: Path = (
        next((source["data"] for source in sources if source.get("data")), None) or default_data_dir()
    )
    return Session(
        data=data.absolute(),
        connect=place.get("connect"),
        as_json=any(source.get("as_json") for source in sources),
        context=context,
    )


def _parents(context: click.Context) -> Iterable[click.Context]:
    parent = context.parent
    while parent is not None:
        yield parent
        parent = parent.parent
