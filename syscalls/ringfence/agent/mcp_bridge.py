"""`rf-mcp`: an MCP server on standard input and output, for any MCP client inside a sandbox.

It passes lines on to the kernel, which is the server, and knows nothing of what they say. Exit status: 0 the client is
done, 1 the kernel ended it, 2 wrong usage, 6 no kernel reachable.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ringfence.agent import status, wire
from ringfence.agent.errors import KernelGone
from ringfence.agent.link import Link
from ringfence.v1.doors_pb2 import McpRequest, McpResponse

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

METHOD: Final = "/ringfence.v1.DoorService/Mcp"
NAMES: Final = ("RINGFENCE_SOCKET", "RINGFENCE_TOKEN")
READ_BYTES: Final = 1 << 16
DONE: Final = 0
ENDED: Final = 1
USAGE: Final = 2
NO_KERNEL: Final = 6
_USAGE: Final = "usage: rf-mcp\n\nServe MCP on standard input and output: the kernel's calls as tools. Started by MCP clients, inside a sandbox.\n"


def environment() -> dict[str, str]:
    """What says where the kernel is: MCP clients give programs that they start little of their own environment."""
    found = dict(os.environ)
    process = os.getppid()
    while process > 0 and not all(name in found for name in NAMES):
        try:
            pairs = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            process = int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
        for pair in pairs:
            name, _, value = os.fsdecode(pair).partition("=")
            if name in NAMES:
                found.setdefault(name, value)
    return found


def _feed(link: Link, source: int) -> None:
    """Pass on what the client says, line by line, until it says no more."""
    # Not through a buffered file: this thread may still be reading when the program ends, and would hold its lock.
    left = b""
    while data := os.read(source, READ_BYTES):
        *lines, left = (left + data).split(b"\n") if b"\n" in data else (left + data,)
        for line in lines:
            _pass_on(link, line)
    _pass_on(link, left)
    link.finish()


def _pass_on(link: Link, line: bytes) -> None:
    said = line.strip()
    if said:
        link.send(McpRequest(data=said).SerializeToString())


def serve(settings: wire.Settings, source: int, target: BinaryIO) -> None:
    """Pass messages on, in both directions, until one side ends.

    Raises:
        Ended: the kernel ended it; `OK`: the client was first.
    """
    link = Link(settings, METHOD, [("authorization", f"Bearer {settings.token}")])
    threading.Thread(target=_feed, args=(link, source), daemon=True).start()
    try:
        while True:
            target.write(McpResponse.FromString(link.receive()).data + b"\n")
            target.flush()
    finally:
        link.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given:
        wanted = given in (["-h"], ["--help"])
        (sys.stdout if wanted else sys.stderr).write(_USAGE)
        return DONE if wanted else USAGE
    try:
        serve(wire.settings_from_environment(environment()), sys.stdin.fileno(), sys.stdout.buffer)
    except KernelGone as error:
        sys.stderr.write(f"rf-mcp: KernelGone: {error.message}\n")
        return NO_KERNEL
    except BrokenPipeError:
        return DONE
    except status.Ended as ended:
        if ended.code == "OK":
            return DONE
        failure = status.failure_of(ended)
        text = ended.detail if failure is None else f"{failure.reason}: {failure.message}"
        sys.stderr.write(f"rf-mcp: {text}\n")
        return NO_KERNEL if ended.code == "UNAVAILABLE" else ENDED
    return DONE


if __name__ == "__main__":
    sys.exit(main())
