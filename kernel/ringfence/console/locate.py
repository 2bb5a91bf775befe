"""Finds the kernel that a command talks to: by address, or by the data directory it was started with."""

from __future__ import annotations

import errno
import json
import socket
from pathlib import Path

from ringfence.console.documents import as_record
from ringfence.console.errors import ConsoleError, ExitCode, os_error_text
from ringfence.kernel.config import Layout

SOCKET_PATH_BYTES_MAX = 107
_PROBE_S = 10.0


def address_of(data: Path, connect: str | None) -> str:
    """Say where the kernel listens, as `unix:/absolute/path`.

    `connect` decides where given; else the address that the kernel left in the data directory, else the
    socket's usual place there.

    Raises:
        ConsoleError: the address isn't one this version can use, or the data directory may not be read.
    """
    if connect:
        return _unix(connect)
    try:
        known = json.loads((data / "kernel.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        known = None
    except OSError as error:
        raise _refused(str(data), error) from None
    listen = as_record(known).get("listen")
    socket_path = Layout(data=data, run=data / "run").operator_socket
    return listen if isinstance(listen, str) and listen.startswith("unix:") else f"unix:{socket_path}"


def probe(address: str) -> None:
    """Connect once and hang up, so that a failure has its exact cause.

    Raises:
        ConsoleError: nothing listens there (exit 6), or it may not be used by this user (exit 3).
    """
    path = address.removeprefix("unix:")
    if len(path.encode()) > SOCKET_PATH_BYTES_MAX:
        raise unreachable(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.settimeout(_PROBE_S)
        try:
            door.connect(path)
        except PermissionError as error:
            raise _refused(address, error) from None
        except (OSError, ValueError):
            raise unreachable(address) from None


def unreachable(address: str) -> ConsoleError:
    """The error for a kernel that isn't there."""
    return ConsoleError(
        f"no kernel is reachable at `{address}`; start one with `ringfence up`, or name its `--data`",
        ExitCode.UNREACHABLE,
    )


def _unix(connect: str) -> str:
    path = connect.removeprefix("unix:").removeprefix("//") if connect.startswith("unix:") else connect
    if not connect.startswith("unix:") and "/" not in connect:
        raise ConsoleError(
            f"`{connect}` is no address this version can use; give the operator socket as `unix:/path`",
            ExitCode.USAGE,
        )
    if "\0" in path or not path:
        raise ConsoleError(
            f"`{connect}` is not the path of a socket; give it as `unix:/path`", ExitCode.USAGE
        )
    return f"unix:{Path(path).absolute()}"


def _refused(place: str, error: OSError) -> ConsoleError:
    if error.errno in {errno.EACCES, errno.EPERM}:
        return ConsoleError(
            f"`{place}` does not let you in: {os_error_text(error)}; run as the user that started the kernel",
            ExitCode.DENIED,
        )
    return ConsoleError(
        f"`{place}` can't be read: {os_error_text(error)}; check `--data`", ExitCode.UNREACHABLE
    )
