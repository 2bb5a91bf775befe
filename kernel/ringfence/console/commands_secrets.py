"""Commands about secrets: set, ls, rm. A secret goes in and never comes out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ringfence.console import render
from ringfence.console.documents import items
from ringfence.console.errors import ConsoleError, ExitCode, os_error_text
from ringfence.console.session import Commands, Session
from ringfence.console.text import safe

if TYPE_CHECKING:
    from collections.abc import Mapping

commands = Commands()

SECRET_BYTES_MAX = 64 << 10


@commands.add(
    "set",
    "ringfence secrets set crm-dsn --from dsn.txt",
    "pass show rates-token | ringfence secrets set rates-token --from -",
)
@click.argument("name")
@click.option(
    "--from",
    "source",
    metavar="FILE|-",
    help="Where the value is. Default: ask on a terminal, else standard input.",
)
def set_secret(session: Session, name: str, source: str | None) -> int:
    """Keep a secret. One line end at its end is dropped.

    Resources that name it use it from the next call on, without `reload`.
    """
    value = _value(source)
    document = session.client().call("SecretSet", name=name, value=value)
    if session.as_json:
        render.emit(document)
    else:
        render.say(f"{safe(name)}: set{_users(document)}")
    return ExitCode.OK


@commands.add("ls", "ringfence secrets ls")
def list_secrets(session: Session) -> int:
    """List the names of the secrets."""
    document = session.client().call("SecretList")
    if session.as_json:
        render.emit(document)
        return ExitCode.OK
    for name in document.get("secrets", []):
        render.say(safe(name))
    if not document.get("secrets"):
        render.note("no secrets; keep one with: ringfence secrets set NAME")
    return ExitCode.OK


@commands.add("rm", "ringfence secrets rm rates-token")
@click.argument("name")
def remove_secret(session: Session, name: str) -> int:
    """Forget a secret. Resources that name it are unavailable from then on."""
    document = session.client().call("SecretRemove", name=name)
    if session.as_json:
        render.emit(document)
    else:
        render.say(f"{safe(name)}: removed{_users(document)}")
    return ExitCode.OK


def _users(document: Mapping[str, Any]) -> str:
    names = ", ".join(safe(name) for name in items(document, "resources"))
    return f"; used by {names}" if names else ""


def _value(source: str | None) -> bytes:
    if source is None and sys.stdin.isatty():
        value = click.prompt("Value", hide_input=True, err=True).encode()
    elif source in (None, "-"):
        value = sys.stdin.buffer.read(SECRET_BYTES_MAX + 2)
    else:
        try:
            with Path(source).open("rb") as file:
                value = file.read(SECRET_BYTES_MAX + 2)
        except OSError as error:
            raise ConsoleError(
                f"`{source}` can't be read: {os_error_text(error)}; check the path", ExitCode.USAGE
            ) from None
    value = value.removesuffix(b"\n").removesuffix(b"\r")
    if not value:
        raise ConsoleError(
            "the secret is empty; give its value on standard input or with `--from`", ExitCode.USAGE
        )
    if len(value) > SECRET_BYTES_MAX:
        raise ConsoleError(
            f"the secret is larger than {SECRET_BYTES_MAX >> 10} KiB; secrets are small", ExitCode.USAGE
        )
    return value
