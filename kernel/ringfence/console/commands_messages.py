"""The command that writes to agents: send."""

from __future__ import annotations

import click
from ringfence.console import render
from ringfence.console.commands_submit import read_text
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.console.session import Commands, Session
from ringfence.console.text import safe

commands = Commands()

_NO_FILE = "\0"
"""What `--json` without a value stands for; no file has this name."""


@commands.add(
    "send",
    "ringfence send invoice-bot 'the July invoices are in'",
    "ringfence send invoice-bot --json order.json",
    "echo '{\"order\": 7}' | ringfence send invoice-bot --json -",
    own_json=True,
)
@click.argument("agent")
@click.argument("text", required=False)
@click.option(
    "--json",
    "json_file",
    metavar="FILE|-",
    is_flag=False,
    flag_value=_NO_FILE,
    help="Send this file's JSON value instead of TEXT. Without a file: print JSON; keys: docs/json.md.",
)
def send(session: Session, agent: str, text: str | None, json_file: str | None) -> int:
    """Put a message into an agent's mailbox; prints the message's id.

    The agent gets it from `messages.receive`. One that sleeps for a message is woken.
    """
    as_json = session.as_json or json_file == _NO_FILE
    file = None if json_file == _NO_FILE else json_file
    if (text is None) == (file is None):
        raise ConsoleError("give either the TEXT to send or `--json FILE`", ExitCode.USAGE)
    message = {"text": text} if file is None else {"json": read_text(file, "message").encode()}
    document = session.client().call("Send", agent=agent, **message)
    if as_json:
        render.emit(document)
    else:
        render.say(safe(document["id"]))
    return ExitCode.OK
