"""Commands about declared agents elsewhere: ls, card, accept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from ringfence.console import render
from ringfence.console.documents import records
from ringfence.console.errors import ExitCode
from ringfence.console.render import Column
from ringfence.console.session import Commands, Session
from ringfence.console.text import safe

if TYPE_CHECKING:
    from collections.abc import Mapping

commands = Commands()

_PEERS = (
    Column(title="AGENT", flex=True),
    Column(title="URL", flex=True),
    Column(title="CARD"),
    Column(title="TRUSTED"),
    Column(title="STATE", flex=True),
)


@commands.add("ls", "ringfence a2a ls")
def list_peers(session: Session) -> int:
    """List the agents elsewhere that the kernel file declares."""
    found = records(session.client().call("A2aPeers"), "peers")
    if session.as_json:
        render.emit_array(found)
        return ExitCode.OK
    if not found:
        render.note("no agents elsewhere; the kernel file declares them as resources of the type `a2a`")
        return ExitCode.OK
    render.table(_PEERS, [_peer(row) for row in found])
    return ExitCode.OK


def _peer(row: Mapping[str, Any]) -> list[str]:
    card = "changed" if row["changed"] else "taken" if row["seen"] else "-"
    trusted = "yes" if row["trusted"] else "no"
    return [safe(row["name"]), safe(row["url"]), card, trusted, safe(row["unavailable"] or "ok")]


@commands.add("card", "ringfence a2a card clerk --look")
@click.argument("peer")
@click.option("--look", is_flag=True, help="Ask the agent first, and take the card if none was.")
def card(session: Session, peer: str, look: bool) -> int:
    """Show the card of an agent as it was taken.

    With what it shows instead by now.
    """
    found = session.client().call("A2aCard", peer=peer, look=look)
    if session.as_json:
        render.emit(found)
        return ExitCode.OK
    by = found["taken_by"] or "nobody: it was the first"
    render.say(f"taken     {found['hash']} at {found['taken_at']} by {safe(by)}")
    if found["offered_hash"]:
        render.say(f"offered   {found['offered_hash']} since {found['offered_at']}")
        render.say()
        for line in (found["diff"] or "").splitlines():
            render.say(safe(line))
        render.note(f"messages wait; take it: ringfence a2a accept {peer}")
    elif found["card"] is not None:
        render.say()
        for line in render.to_json(found["card"], indent=2).splitlines():
            render.say(safe(line))
    return ExitCode.OK


@commands.add("accept", "ringfence a2a accept clerk")
@click.argument("peer")
@click.option(
    "--hash", "wanted", default="", metavar="HASH", help="Only if this is the one that is shown now."
)
def accept(session: Session, peer: str, wanted: str) -> int:
    """Take the card that an agent shows now. Messages that waited for it go on as rules say."""
    document = session.client().call("A2aAccept", peer=peer, hash=wanted)
    if session.as_json:
        render.emit(document)
    else:
        render.say(f"{safe(peer)}: taken, {document['hash']}")
    return ExitCode.OK
