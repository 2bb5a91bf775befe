"""Commands about the kernel itself: up, down, status, reload; and demo, which brings its own."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from ringfence.console import detach as background
from ringfence.console import render
from ringfence.console.documents import items, record, records
from ringfence.console.durations import asked_ms, plural
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.console.session import Commands, Session
from ringfence.kernel.config import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

commands = Commands()

_STATUS_TIMEOUT_S = 15.0
_FILE = click.Path(path_type=Path)
_DOORS = ("callback", "a2a")


@commands.add("up", "ringfence up --config ringfence.yaml --detach", "ringfence up --data /srv/ringfence")
@click.option("--config", type=_FILE, metavar="FILE", help="Kernel file with resources, ceilings and roles.")
@click.option(
    "--dsn",
    envvar="RINGFENCE_DSN",
    metavar="DSN",
    help="PostgreSQL to use instead of the embedded one. Better in $RINGFENCE_DSN: command lines are public.",
)
@click.option(
    "--store",
    envvar="RINGFENCE_STORE",
    metavar="URL",
    help="Store that several nodes share: a directory, or `s3://BUCKET/PREFIX?endpoint=URL`.",
)
@click.option("--detach", is_flag=True, help="Start in the background; return once it answers.")
@click.option("--listen", metavar="ADDR", help="Not in this release: operators use the unix socket alone.")
def up(
    session: Session,
    config: Path | None,
    dsn: str | None,
    store: str | None,
    detach: bool,
    listen: str | None,
) -> int:
    """Start the kernel.

    Runs until `ringfence down`, SIGTERM or Ctrl-C. Works as root and as an ordinary user.
    """
    if session.connect:
        raise ConsoleError(
            "`up` starts a kernel and connects to none; give `--data` instead of `--connect`", ExitCode.USAGE
        )
    if config is not None:
        config = config.absolute()
        if not config.is_file():
            raise ConsoleError(f"`{config}` is not a file; `--config` takes the kernel file", ExitCode.USAGE)
    if detach:
        arguments = [
            *(["--config", str(config)] if config is not None else []),
            *(["--store", store] if store is not None else []),
            *(["--listen", listen] if listen is not None else []),
        ]
        status = background.start_in_background(session, arguments, dsn)
        for problem in items(record(status, "telemetry"), "problems"):
            render.note(f"telemetry: {problem}")
        _announce(session, {key: status.get(key) for key in ("pid", "listen", "data")})
        for _, text in _unavailable(record(status, "config")):
            render.note(f"unavailable: {text}")
        for name, problem in _unheard(status):
            render.note(f"{name}: {problem}")
        return ExitCode.OK
    settings = Settings(data=session.data, dsn=dsn or None, store=store or None, config=config, listen=listen)
    return _run(session, settings)


@commands.add("down", "ringfence down --drain 30s")
@click.option(
    "--drain",
    default="10s",
    show_default=True,
    metavar="SECONDS",
    help="How long running calls may take to finish.",
)
def down(session: Session, drain: str) -> int:
    """Stop the kernel in order; returns when it is gone.

    No new calls; running calls finish or are parked, agents freeze, state is on disk.
    """
    drain_ms = asked_ms(drain, bare_unit="s")
    client = session.client()
    pid = client.call("Status", _STATUS_TIMEOUT_S).get("pid")
    pidfd = background.pidfd_of(pid)
    try:
        try:
            answer = client.call("Shutdown", drain_ms=drain_ms)
        except ConsoleError as error:
            # It may be gone before its answer is through. Whether it really is, is what is waited for.
            if not getattr(error, "lost", False):
                raise
            answer = {}
        background.wait_until_gone(pidfd, session)
    finally:
        if pidfd is not None:
            os.close(pidfd)
    if session.as_json:
        render.emit({**answer, "pid": pid, "state": "stopped"})
    else:
        render.say(f"stopped (pid {pid})")
    return ExitCode.OK


@commands.add("status", "ringfence status --json")
def status(session: Session) -> int:
    """Show the kernel's health; exit 1 when something is wrong with it.

    A resource whose secret is not set is `unavailable`: calls on it are refused until it is set.
    """
    document = session.client().call("Status", _STATUS_TIMEOUT_S)
    if session.as_json:
        render.emit(document)
    else:
        render.facts(_status_facts(document))
    return ExitCode.OK if _is_well(document) else ExitCode.UNWELL


@commands.add("reload", "ringfence reload")
def reload(session: Session) -> int:
    """Read the kernel file again; a bad one keeps the last good one.

    A resource whose secret is not set is named, and calls on it are refused until it is. So is a door whose
    address is taken: nobody is heard there until it is free and the file is read again.
    """
    document = session.client().call("Reload")
    if session.as_json:
        render.emit(document)
    else:
        names = ", ".join(str(name) for name in items(document, "resources"))
        render.facts(
            [
                ("config", document.get("file") or "none"),
                ("loaded", document.get("loaded_at")),
                ("resources", names or "none"),
                *_unavailable(document),
                *_unheard(document),
                *(("given up", rule) for rule in items(document, "given_up")),
            ]
        )
    return ExitCode.OK


@commands.add("demo", "ringfence demo")
def demo(session: Session) -> int:
    """Run the main job on real input and check every claim.

    Submits a real agent, lets it work, kills it, resumes it, revokes, rolls back, and shows each result. Uses
    a kernel and data directory of its own unless --data is given; leaves nothing running.
    """
    try:
        module = import_module("ringfence.console.demo")
    except ModuleNotFoundError as error:
        raise ConsoleError(
            f"this installation has no demo: `{error.name}` is missing; install ringfence anew",
            ExitCode.UNWELL,
        ) from None
    given = any(parent.params.get("data") for parent in (session.context, session.context.parent) if parent)
    return int(module.main(data=session.data if given else None, as_json=session.as_json))


def _run(session: Session, settings: Settings) -> int:
    # The kernel pulls in everything; the other commands must not wait for that.
    gc.disable()  # What is loaded stays, and looking through it again and again takes a fifth of the time.
    try:
        module = import_module("ringfence.kernel.main")
    finally:
        gc.enable()
    import_module("ringfence.kernel.kernel_log").set_up(session.data)

    def announce(line: str) -> None:
        if session.as_json:
            _announce(session, {"pid": os.getpid(), "listen": session.address, "data": str(session.data)})
        else:
            render.say(line)
        sys.stdout.flush()

    try:
        return int(module.run(settings, announce))
    except module.StartError as error:
        raise ConsoleError(str(error), error.exit_code) from None


def _announce(session: Session, document: Mapping[str, Any]) -> None:
    if session.as_json:
        render.emit(document)
    else:
        render.facts([(key, document.get(key)) for key in ("listen", "pid", "data")])


def _is_well(document: Mapping[str, Any]) -> bool:
    database = record(document, "database")
    config = record(document, "config")
    told = all(not hook.get("failing_since") for hook in records(document, "webhooks"))
    heard = not _unheard(document)
    good = database.get("state") == "ok" and not config.get("error") and not config.get("unavailable")
    return good and told and heard


def _unheard(document: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Doors that are declared and can't be opened, with what stands in the way."""
    found = [(name, record(document, name).get("problem")) for name in _DOORS]
    return [(name, problem) for name, problem in found if problem]


def _outreach(document: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Who is told outside, and where decisions and tasks are heard."""
    lines: list[tuple[str, object]] = []
    for hook in records(document, "webhooks"):
        parts = [f"{hook.get('name')}: {hook.get('url')}"]
        if hook.get("waiting"):
            parts.append(f"{hook['waiting']} waiting since {hook.get('oldest_at')}")
        if hook.get("dropped"):
            parts.append(f"{hook['dropped']} dropped")
        if hook.get("failing_since"):
            parts.append(f"fails since {hook['failing_since']}: {hook.get('error')}")
        lines.append(("webhook", "; ".join(parts)))
    for name in _DOORS:
        door = record(document, name)
        if door:
            lines.append((name, door.get("problem") or door.get("listen")))
    return lines


def _scheduler_text(scheduler: Mapping[str, Any]) -> str | None:
    most = record(scheduler, "limits").get("agents")
    live, waiting = scheduler.get("live") or 0, scheduler.get("waiting") or 0
    if most is None and not waiting:
        return None
    of = "" if most is None else f" of {most}"
    return f"{live}{of} agents live, {waiting} wait{'s' if waiting == 1 else ''} for a turn"


def _telemetry_text(telemetry: Mapping[str, Any]) -> str | None:
    sent = [name for name in ("traces", "metrics") if telemetry.get(name)]
    return (
        "; ".join([*([f"sends {' and '.join(sent)}"] if sent else []), *items(telemetry, "problems")]) or None
    )


def _status_facts(document: Mapping[str, Any]) -> list[tuple[str, object]]:
    database = record(document, "database")
    agents = record(document, "agents")
    config = record(document, "config")
    kind = "embedded" if database.get("embedded") else "external"
    return [
        ("pid", document.get("pid")),
        ("version", document.get("version")),
        ("listen", document.get("listen")),
        ("data", document.get("data")),
        (
            "database",
            f"{database.get('state', '')} ({kind}, PostgreSQL {database.get('version', 'unknown')})".strip(),
        ),
        ("agents", ", ".join(f"{state} {number}" for state, number in agents.items()) or "none"),
        ("config", config.get("file") or "none"),
        ("loaded", config.get("loaded_at")),
        ("error", config.get("error")),
        ("scheduler", _scheduler_text(record(document, "scheduler"))),
        ("telemetry", _telemetry_text(record(document, "telemetry"))),
        *(("counted", _closeness_text(model)) for model in records(document, "models")),
        *_unavailable(config),
        *_outreach(document),
    ]


def _closeness_text(model: Mapping[str, Any]) -> str:
    """How close counts of a model's prompts have been."""
    ratio, calls = model.get("ratio"), int(model.get("calls") or 0)
    said = f"{ratio:.3f} of its count" if isinstance(ratio, float) else "nothing"
    return (
        f"{model.get('model')} at {model.get('resource')} with {model.get('tokenizer')}: the host says {said} "
        f"over {plural(calls, 'call')}, {model.get('worst') or 'none'} at worst; reserved by {model.get('factor')}"
    )


def _unavailable(document: Mapping[str, Any]) -> list[tuple[str, object]]:
    found = records(document, "unavailable")
    return [("unavailable", f"{item.get('name')}: {item.get('reason')}") for item in found]
