"""`doctor`: what this host can enforce, each missing piece with its fix. Needs no kernel."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click
from ringfence.console import render
from ringfence.console.commands_submit import read_text
from ringfence.console.durations import plural, size
from ringfence.console.errors import ConsoleError, ExitCode, os_error_text
from ringfence.console.session import Commands, Session
from ringfence.console.text import pad, safe
from ringfence.policy.problems import ManifestError
from ringfence.sandbox.types import SandboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ringfence.policy.kernel_file import KernelFile
    from ringfence.sandbox.types import Sandbox, Wall

commands = Commands()

_FREE_BYTES_MIN = 1 << 30
_PYTHON_MIN = (3, 11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was tried on this host.

    Attributes:
        name: what.
        ok: whether it is there.
        required: whether a default sandbox or the kernel needs it.
        detail: what was found.
        fix: what to do where it is missing, or for a stronger form of it.
        form: of a wall that can stand in several forms, the one it has here; a manifest may require a stronger one.
    """

    name: str
    ok: bool
    required: bool
    detail: str
    fix: str = ""
    form: str = ""


@commands.add(
    "doctor",
    "ringfence doctor",
    "ringfence doctor --json | jq '.checks[] | select(.ok | not)'",
    "ringfence doctor --config ringfence.yaml",
)
@click.option(
    "--config",
    type=click.Path(dir_okay=False),
    help="A kernel file: also try the docker engine and the sandbox host that it names.",
)
def doctor(session: Session, config: str | None) -> int:
    """Say what this host can enforce, each missing piece with its fix.

    Nothing is assumed, each wall is tried. Works without a kernel. Exit 1: no default sandbox here.
    """
    file = None if config is None else _kernel_file(config)
    checks = [
        *_walls(session.data, file),
        _postgres(),
        _space(session.data),
        _directory(session.data),
        _host(),
    ]
    missing = [check.name for check in checks if check.required and not check.ok]
    if session.as_json:
        render.emit({"ok": not missing, "checks": [asdict(check) for check in checks]})
        return ExitCode.UNWELL if missing else ExitCode.OK
    _show(checks)
    if missing:
        raise ConsoleError(
            f"{plural(len(missing), 'required piece')} missing: {', '.join(missing)}; mend them as listed"
        )
    return ExitCode.OK


def _kernel_file(config: str) -> KernelFile:
    from ringfence.policy.kernel_file import parse_kernel_file  # noqa: PLC0415 - takes longer than most commands do altogether

    try:
        return parse_kernel_file(read_text(config, "kernel file"), config)
    except ManifestError as error:
        raise ConsoleError(str(error), ExitCode.USAGE) from error


def _walls(data: Path, file: KernelFile | None) -> Sequence[Check]:
    try:
        if data.is_dir() and os.access(data, os.W_OK | os.X_OK):
            return _probed(data, file)
        # Asking must not leave a data directory behind; what can be had follows the file system it would lie on.
        place = _existing(data)
        beside = place if os.access(place, os.W_OK | os.X_OK) else None
        with tempfile.TemporaryDirectory(prefix=".ringfence-doctor-", dir=beside) as scratch:
            return _probed(Path(scratch), file)
    except OSError as error:
        return [_failed("sandbox", error, "run `ringfence doctor` as the user that starts the kernel")]


def _probed(data: Path, file: KernelFile | None) -> Sequence[Check]:
    """The walls of the native backend, and of others that the kernel file says enough of; those of the default are required."""
    default = None if file is None else file.sandbox.backend
    walls: Sequence[Wall] = import_module("ringfence.sandbox.native").NativeSandbox(data).walls()
    found = [
        _check(wall, wall.name, required=wall.required and default in {None, "native"}) for wall in walls
    ]
    if file is None:
        return found
    backends = import_module("ringfence.kernel.backends")
    if default == "docker" or file.docker.image:
        found += _of("docker", backends.docker_of(data, file.docker), required=default == "docker")
    if default == "remote" or file.remote.address:
        found += _of("remote", backends.remote_of(data, file.remote), required=default == "remote")
    return found


def _of(name: str, sandbox: Sandbox, *, required: bool) -> list[Check]:
    """The walls of a backend, each named after it."""
    try:
        walls = sandbox.walls()
    except SandboxError as error:
        return [Check(name=name, ok=False, required=required, detail=str(error))]
    return [
        _check(
            wall,
            wall.name if wall.name.startswith(f"{name} ") else f"{name} {wall.name}",
            required=wall.required and required,
        )
        for wall in walls
    ]


def _check(wall: Wall, name: str, *, required: bool) -> Check:
    return Check(name=name, ok=wall.ok, required=required, detail=wall.detail, fix=wall.fix, form=wall.form)


def _postgres() -> Check:
    postgres = import_module("ringfence.kernel.postgres")
    binaries = import_module("ringfence.kernel.postgres.binaries")
    try:
        where = binaries.installed()
    except postgres.PostgresError as error:
        what, _, fix = str(error).partition(": ")
        return Check(name="postgres", ok=False, required=True, detail=what, fix=fix)
    return Check(name="postgres", ok=True, required=True, detail=f"PostgreSQL {binaries.MAJOR} in {where}")


def _space(data: Path) -> Check:
    place = _existing(data)
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return _failed("disk", error, f"make `{place}` readable")
    return Check(
        name="disk",
        ok=free >= _FREE_BYTES_MIN,
        required=True,
        detail=f"{size(free)} free at {place}",
        fix=f"free {size(_FREE_BYTES_MIN)} at `{place}`, or give another directory with `--data`",
    )


def _directory(data: Path) -> Check:
    return _checked("data directory", data, lambda: _directory_problem(data))


def _checked(name: str, path: Path, probe: Callable[[], tuple[str, str] | None]) -> Check:
    try:
        problem = probe()
    except OSError as error:
        return _failed(name, error, f"make `{path}` yours, or give another directory with `--data`")
    if problem is None:
        return Check(name=name, ok=True, required=True, detail=str(path))
    detail, fix = problem
    return Check(name=name, ok=False, required=True, detail=detail, fix=fix)


def _directory_problem(data: Path) -> tuple[str, str] | None:
    """What is wrong with the data directory, and its fix."""
    if not data.exists():
        place = _existing(data)
        if os.access(place, os.W_OK | os.X_OK):
            return None
        return f"{data} is missing and can't be made in {place}", "give a directory of yours with `--data`"
    facts = data.stat()
    if not stat.S_ISDIR(facts.st_mode):
        return f"{data} is not a directory", "give another one with `--data`"
    if facts.st_uid != os.geteuid():
        return f"{data} belongs to uid {facts.st_uid}", "run as that user, or give another one with `--data`"
    # The embedded server of a root kernel has a uid of its own: it passes through, but can't list.
    mode = 0o711 if os.geteuid() == 0 else 0o700
    if stat.S_IMODE(facts.st_mode) & ~mode:
        return (
            f"{data} is open to other users (mode {stat.S_IMODE(facts.st_mode):04o})",
            f"chmod {mode:o} {data}",
        )
    if not os.access(data, os.W_OK | os.X_OK):
        return f"{data} can't be written", f"chmod 700 {data}"
    return None


def _host() -> Check:
    release = os.uname().release
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Check(
        name="host",
        ok=sys.platform == "linux" and sys.version_info >= _PYTHON_MIN,
        required=True,
        detail=f"Linux {release}, Python {version}",
        fix="run on Linux with Python 3.11 or newer",
    )


def _existing(path: Path) -> Path:
    for place in (path, *path.parents):
        if place.exists():
            return place
    return Path("/")


def _failed(name: str, error: OSError, fix: str) -> Check:
    return Check(name=name, ok=False, required=True, detail=os_error_text(error), fix=fix)


def _state(check: Check) -> str:
    if check.ok:
        return "weaker" if check.form and check.fix else "ok"
    return "missing" if check.required else "without"


def _show(checks: Sequence[Check]) -> None:
    column = max(len(check.name) for check in checks)
    for check in checks:
        state = _state(check)
        form = f"{safe(check.form)}: " if check.form else ""
        render.say(
            f"{render.coloured(pad(state, 7), state)}  {pad(safe(check.name), column)}  {form}{safe(check.detail)}"
        )
        if check.fix and (check.form or not check.ok):
            what = "stronger" if check.ok else "fix"
            render.say(f"{'':7}  {'':{column}}  {what}: {safe(check.fix)}")
