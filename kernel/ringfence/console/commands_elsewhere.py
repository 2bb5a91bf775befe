"""Commands for sandboxes on other machines: `sandbox-host` runs there, `sandbox-certs` makes what both ends prove themselves with."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click
from ringfence.console import render
from ringfence.console.durations import parse_duration_ms
from ringfence.console.errors import ConsoleError, ExitCode, os_error_text
from ringfence.console.session import Commands, Session
from ringfence.policy.units import parse_size

if TYPE_CHECKING:
    from ringfence.sandbox.remote.host import HostSettings

commands = Commands()

_DIRECTORY = click.Path(path_type=Path, file_okay=False)
_UIDS_MIN = 1
_UID_MAX = (1 << 32) - 2


@commands.add(
    "sandbox-host",
    "ringfence sandbox-host --listen 0.0.0.0:7443 --certs /etc/ringfence/host --data /var/lib/ringfence-host",
)
@click.option(
    "--listen", required=True, metavar="ADDR", help="`host:port`, or `fd:N` for an inherited socket."
)
@click.option(
    "--certs", required=True, type=_DIRECTORY, help="This host's certificate, from `sandbox-certs`."
)
@click.option(
    "--lease", default="30s", metavar="TIME", help="How long sandboxes outlive their kernel's connection."
)
@click.option(
    "--provide",
    multiple=True,
    type=_DIRECTORY,
    help="A directory that this host has itself, such as an interpreter; kernels don't send theirs. May be repeated.",
)
@click.option("--uids", default="400000-465535", metavar="A-B", help="Users that agents run as, when root.")
@click.option("--cache", default="8Gi", metavar="SIZE", help="Content kept for each kernel.")
def sandbox_host(
    session: Session,
    listen: str,
    certs: Path,
    lease: str,
    provide: tuple[Path, ...],
    uids: str,
    cache: str,
) -> int:
    """Run sandboxes for kernels on other machines.

    Runs until SIGTERM or Ctrl-C; then everything it runs is ended. Needs no kernel and no database here.
    """
    module = import_module("ringfence.sandbox.remote.host")
    first, count = _uids(uids)
    try:
        lease_ms = parse_duration_ms(lease)
    except ValueError as error:
        raise ConsoleError(f"`--lease`: {error}", ExitCode.USAGE) from None
    cache_bytes = parse_size(cache)
    if cache_bytes is None:
        raise ConsoleError(f"`{cache}` is no size; write one such as `8Gi`", ExitCode.USAGE)
    if lease_ms < 1000:  # noqa: PLR2004 - a second
        raise ConsoleError(f"`{lease}` is too short for a lease; give a second or more", ExitCode.USAGE)
    settings = module.HostSettings(
        certs=certs.absolute(),
        data=session.data,
        lease_s=lease_ms / 1000,
        provides=tuple(path.absolute() for path in provide),
        first_uid=first,
        uids=count,
        cache_bytes=cache_bytes,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    return _serve(session, settings, listen)


def _uids(text: str) -> tuple[int, int]:
    """The first of a range of users, and how many there are."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and _UIDS_MIN <= int(low) <= int(high) <= _UID_MAX):
        raise ConsoleError(
            f"`{text}` is no range of uids above 0; write one such as `400000-465535`", ExitCode.USAGE
        )
    return int(low), int(high) - int(low) + 1


def _serve(session: Session, settings: HostSettings, address: str) -> int:
    serving = import_module("ringfence.sandbox.remote.serving")
    tls = import_module("ringfence.sandbox.remote.tls")
    types = import_module("ringfence.sandbox.types")
    try:
        listener = serving.listen(address)
        where = serving.shown(listener)

        def started() -> None:
            if session.as_json:
                render.emit({"pid": os.getpid(), "listen": where, "data": str(settings.data)})
            else:
                render.say(f"sandbox host (pid {os.getpid()}) listens on {where}")
            sys.stdout.flush()

        asyncio.run(serving.run(settings, listener, started))
    except (tls.CertificateError, types.SandboxError) as error:
        raise ConsoleError(str(error), ExitCode.UNWELL) from None
    except OSError as error:
        where = error.filename or settings.data
        raise ConsoleError(f"`{where}` can't be used: {os_error_text(error)}", ExitCode.UNWELL) from None
    return ExitCode.OK


@commands.add(
    "sandbox-certs",
    "ringfence sandbox-certs certs --host big-machine",
    "ringfence sandbox-certs certs --host big-machine --kernel office --days 7",
)
@click.argument("directory", type=_DIRECTORY)
@click.option("--host", "host", default="sandbox-host", metavar="NAME", help="Name of the sandbox host.")
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    default=("kernel",),
    metavar="NAME",
    help="A kernel that the host serves; may be repeated. Default: kernel.",
)
@click.option("--days", default=30.0, metavar="N", help="How long the certificates count. Default: 30.")
def sandbox_certs(session: Session, directory: Path, host: str, kernels: tuple[str, ...], days: float) -> int:
    """Make certificates for a sandbox host and the kernels it serves.

    DIRECTORY/ca is the private authority, made at the first use: keep it where neither of them runs. Copy
    DIRECTORY/host-NAME to the host and DIRECTORY/kernel-NAME to each kernel. Run again, it renews them.
    """
    issue = import_module("ringfence.sandbox.remote.issue")
    tls = import_module("ringfence.sandbox.remote.tls")
    if not 0 < days <= issue.CA_DAYS:
        raise ConsoleError(f"`--days` must be above 0 and at most {issue.CA_DAYS}", ExitCode.USAGE)
    authority = directory / "ca"
    try:
        if not (authority / issue.CA_KEY_FILE).exists():
            issue.make_authority(authority)
        made: list[dict[str, str]] = []
        ends = [("host", host, kernels), *(("kernel", kernel, (host,)) for kernel in kernels)]
        for role, name, peers in ends:
            place = directory / f"{role}-{name}"
            expires = issue.issue(authority, place, role, name, peers=peers, days=days)
            made.append(
                {
                    "role": role,
                    "name": name,
                    "directory": str(place.absolute()),
                    "expires_at": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
                }
            )
    except tls.CertificateError as error:
        raise ConsoleError(str(error), ExitCode.USAGE) from None
    except OSError as error:
        where = error.filename or directory
        raise ConsoleError(f"`{where}` can't be written: {os_error_text(error)}", ExitCode.UNWELL) from None
    if session.as_json:
        render.emit({"authority": str(authority.absolute()), "certificates": made})
    else:
        render.facts(
            [
                ("authority", str(authority)),
                *((m["role"], f"{m['directory']} until {m['expires_at']}") for m in made),
            ]
        )
    return ExitCode.OK
