"""Runs escape attempts in real sandboxes, and their controls in sandboxes that lack a wall, in namespaces thrown away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.backends import UIDS_ON
from security.escapes.attempts.base import MARKED, TABLE, Attempt
from security.escapes.stage.weaken import weaken

# Of no other test: some attempts use up what is counted by uid.
AGENT_UID, ORDINARY_UID, APART_UID = (uid + UIDS_ON for uid in (247300, 47300, 47301))
LIMITS = {"memory_bytes": 256 << 20, "pids": 64, "disk_bytes": 256 << 20, "timeout_s": 100.0}
MASKS = ["/workspace/private/key", "/workspace/private/old", "/workspace/hidden"]
MARKED_FILTER = frozenset({"marked filter"})
WARM_ENV = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin") or ""
_ESCAPES = Path(__file__).parents[1] / "security" / "escapes"
_SANDBOX = Path(__file__).parents[2] / "sandbox" / "ringfence"
_ROOT = os.geteuid() == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """Who owns what on a stage, as uids of this machine; None: the user who runs the tests."""

    kernel: int | None
    agent: int | None


def owners(mode: str, *, apart: bool) -> Owners:
    """The users of a mode."""
    if not _ROOT:
        return Owners(kernel=None, agent=None)
    if mode != "user":
        return Owners(kernel=APART_UID if apart else 0, agent=AGENT_UID)
    return Owners(kernel=ORDINARY_UID, agent=ORDINARY_UID)


@contextmanager
def stage(who: Owners) -> Iterator[Path]:
    """Everything that a kernel, an agent and a host consist of, in one directory."""
    place = Path(tempfile.mkdtemp(prefix="ringfence-escapes-"))
    try:
        _furnish(place)
        for path in (place, *place.rglob("*")):
            agent = path.relative_to(place).parts[:1] in (
                ("image",),
                ("sockets",),
                ("workspace",),
                ("victim",),
            )
            uid = who.agent if agent and path.name != "setuid-cat" else who.kernel
            if uid is not None:
                os.lchown(path, uid, uid)
        (place / "image" / "setuid-cat").chmod(0o4755)
        yield place
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", str(place)], check=False)
        shutil.rmtree(place)


def _furnish(place: Path) -> None:
    place.chmod(0o755)
    leave_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_SANDBOX, place / "source/ringfence", ignore=leave_out)
    shutil.copytree(_ESCAPES / "stage", place / "stage", ignore=leave_out)
    shutil.copytree(_ESCAPES / "attempts", place / "inside/security/escapes/attempts", ignore=leave_out)
    for name, files in {
        "data": {},
        "image": {"target": "target\n", "spare": "spare\n", "cached": "cached\n" * 1000},
        "sockets": {"syscall.sock": "", "spare": ""},
        "workspace": {
            "private/key": "mask-canary",
            "private/old": "mask-canary",
            "hidden/inner": "mask-canary",
        },
        "victim": {"secret": "host-canary"},
        "other": {"workspace/file": "host-canary"},
    }.items():
        (place / name).mkdir(mode=0o755)
        for relative, text in files.items():
            path = place / name / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name in ("cat", "setuid-cat"):
        shutil.copy("/bin/cat", place / "image" / name)


def interpreter_directories() -> list[str]:
    """Where the interpreter that runs the tests lies."""
    from ringfence.kernel.environment import interpreter_directories as directories

    return [str(path) for path in directories()]


def play(
    mode: str, attempts: Mapping[str, Iterable[str]], taken: frozenset[str] = frozenset()
) -> dict[str, dict[str, Any]]:
    """Run attempts.

    Args:
        mode: `root` or `user`.
        attempts: names of attempts by kind of sandbox.
        taken: walls to take away; then everything runs in namespaces of its own, and never on this host.

    Returns:
        By kind: how the sandbox ended, and the result of each attempt.
    """
    who = owners(mode, apart=bool(taken))
    with stage(who) as place:
        if taken:
            weaken(place / "source", taken)
        canary = f"canary-{uuid.uuid4().hex}"
        order = {
            "place": str(place),
            "backend": "docker" if mode == "docker" else "native",
            "interpreter": interpreter_directories() if mode == "root" else [],
            "warm_env": {**WARM_ENV, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
            "python": PYTHON,
            "uid": AGENT_UID if _ROOT and mode != "user" else None,
            "marker": f"victim-{uuid.uuid4().hex}",
            "canary": canary,
            "limits": LIMITS,
            "masks": MASKS,
            "attempts": {kind: list(names) for kind, names in attempts.items()},
        }
        order["facts"] = {
            "secret": str(place / "victim/secret"),
            "other_file": str(place / "other/workspace/file"),
            "data": str(place / "data"),
            "canary": canary,
            "marker": order["marker"],
            "mask_canary": "mask-canary",
            "pids": LIMITS["pids"],
            "disk": LIMITS["disk_bytes"],
        }
        return _run(place, order, who, apart=bool(taken), mode=mode)


def explode(mode: str) -> dict[str, dict[str, Any]]:
    """Set off every bomb beside an honest agent; gives how each ended."""
    who = owners(mode, apart=False)
    with stage(who) as place:
        order = {
            "place": str(place),
            "python": PYTHON,
            "uid": AGENT_UID if mode == "root" else None,
        }
        return _run(place, order, who, apart=False, mode=mode, script="bombs.py")


def _run(
    place: Path, order: dict[str, Any], who: Owners, *, apart: bool, mode: str, script: str = "host.py"
) -> dict[str, Any]:
    identity: dict[str, Any] = {}
    argv = [PYTHON if mode == "user" and _ROOT else sys.executable, str(place / "stage" / script)]
    if apart:
        kernel = os.geteuid() if who.kernel is None else who.kernel
        group = os.getegid() if who.kernel is None else who.kernel
        # An ordinary user is one in there as well: what belongs to root must not be the agent's own.
        users, groups = f"{kernel}:{kernel}:1", f"{group}:{group}:1"
        if mode == "root":
            users = groups = f"0:{kernel}:1,{AGENT_UID}:{AGENT_UID}:1"
        argv = [PYTHON, str(place / "stage/apart.py"), users, groups, PYTHON, argv[1]]
    elif mode == "user" and _ROOT:
        identity = {"user": ORDINARY_UID, "group": ORDINARY_UID, "extra_groups": []}
    done = subprocess.run(
        argv,
        input=json.dumps(order).encode(),
        capture_output=True,
        env={
            "PYTHONPATH": str(place / "source"),
            "PATH": os.environ["PATH"],
            "PYTHONDONTWRITEBYTECODE": "1",
            **{name: os.environ[name] for name in ("DOCKER_HOST",) if name in os.environ},
        },
        cwd="/",
        check=False,
        timeout=110,
        **identity,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return json.loads(done.stdout)


def of_kind(kind: str, *, alone: bool = False) -> list[Attempt]:
    """Attempts that belong into a kind of sandbox: `program` or `command`."""
    return [
        tried
        for tried in TABLE.values()
        if tried.kind in (kind, "both")
        and tried.alone == alone
        and (not tried.needs or Path(tried.needs).exists())
        and (not tried.machines or os.uname().machine in tried.machines)
    ]


def names(kind: str) -> list[str]:
    """Names of all attempts of a kind of sandbox, those last that end it when they work."""
    of = "command" if kind == "command" else "program"
    return [tried.name for alone in (False, True) for tried in of_kind(of, alone=alone)]


def control_walls(tried: Attempt, mode: str) -> frozenset[str]:
    """What the control of an attempt takes away."""
    return MARKED_FILTER if tried.control_in(mode) == MARKED else tried.walls_in(mode)


def concerns(tried: Attempt, taken: frozenset[str]) -> bool:
    """Whether walls that were taken away have a part in stopping an attempt."""
    return bool(taken & set(tried.walls)) or (taken == MARKED_FILTER and "seccomp filter" in tried.walls)


def control_sets(mode: str, kind: str) -> list[frozenset[str]]:
    """Every set of walls that a control takes away."""
    found = {control_walls(tried, mode) for tried in TABLE.values() if tried.control_in(mode) != "none"}
    return sorted((taken for taken in found if ("masks" in taken) == (kind == "command")), key=sorted)
