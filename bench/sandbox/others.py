"""The same programs without a sandbox of ours: bare, in bubblewrap, in sandlock and in nono."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.host import BenchError
from bench.sandbox.place import INSIDE, Door, Place

BARE = "bare"
BUBBLEWRAP = "bubblewrap"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
TMP = "/tmp"  # noqa: S108 - the sandbox's own
WAIT_S = 60


def bubblewrap() -> str:
    """Its program; empty: not installed."""
    return shutil.which("bwrap") or ""


def environment(place: Place, door: Door | None, directory: str) -> dict[str, str]:
    """What the sandboxed program is given, for one that sees the door's directory at `directory`."""
    return {**place.environment, **(door.environment(directory) if door is not None else {})}


def bare(place: Place, argv: Sequence[str], door: Door | None = None) -> subprocess.Popen[bytes]:
    """Start a program as a shell would."""
    return subprocess.Popen(
        argv,
        cwd=place.image,
        env=environment(place, door, str(door.directory) if door else ""),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def boxed(place: Place, argv: Sequence[str], door: Door | None = None) -> subprocess.Popen[bytes]:
    """Start a program in bubblewrap, shown what ours is shown."""
    words = [
        bubblewrap(),
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--tmpfs",
        TMP,
    ]
    for path in (*SYSTEM, *(str(path) for path in place.readonly)):
        words += ["--ro-bind-try", path, path]
    words += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", str(place.image), "/program"]
    words += ["--ro-bind", str(door.directory if door else place.closed), INSIDE, "--chdir", "/program"]
    for name, value in environment(place, door, INSIDE).items():
        words += ["--setenv", name, value]
    return subprocess.Popen(
        [*words, "--", *argv],
        cwd="/",
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def seconds_to_line(start: Callable[[], subprocess.Popen[bytes]], expected: Sequence[str]) -> float:
    """From before the start until a program has said its first line; then it is ended."""
    began = time.perf_counter()
    process = start()
    assert process.stdout is not None
    with process, process.stdout as output:
        line = output.readline().decode(errors="replace").strip()
        taken = time.perf_counter() - began
        rest = b"" if line in expected else output.read(2000)
        process.kill()
    if line not in expected:
        said = (line + " " + rest.decode(errors="replace")).split("\n")
        raise BenchError(f"`{process.args[0]}` said {' '.join(said)[-300:]!r}")  # type: ignore[index] # a list here
    return taken


def seconds_to_end(start: Callable[[], subprocess.Popen[bytes]]) -> float:
    """From before the start until a program has ended well."""
    began = time.perf_counter()
    process = start()
    said = process.communicate(timeout=WAIT_S)[0]
    if process.returncode:
        raise BenchError(f"`{process.args[0]}` failed: {said[-200:]!r}")  # type: ignore[index] # a list here
    return time.perf_counter() - began


# -- sandboxes that come as Python packages ---------------------------------------------------------------------------


def version(package: str, module: str) -> str:
    """Of an installed package; empty: it is not installed."""
    if importlib.util.find_spec(module) is None:
        return ""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "?"


def _readable(place: Place) -> list[str]:
    wanted = [*SYSTEM, *(str(path) for path in place.readonly), str(place.image), "/etc", "/proc", "/dev"]
    return [path for path in wanted if Path(path).exists()]


def sandlock(place: Place, argv: Sequence[str]) -> float:
    """Seconds for a program from start to end."""
    module: Any = importlib.import_module("sandlock")
    began = time.perf_counter()
    box = module.Sandbox(
        fs_readable=_readable(place),
        fs_writable=[TMP, "/dev/null"],
        clean_env=True,
        env=dict(place.environment),
    )
    done = box.run([str(shutil.which(argv[0]) or argv[0]), *argv[1:]])
    taken = time.perf_counter() - began
    if done.exit_code:
        raise BenchError(
            f"sandlock's program ended with {done.exit_code}: {bytes(done.stderr or b'')[-200:]!r}"
        )
    return taken


def nono(place: Place, argv: Sequence[str]) -> float:
    """The same in nono."""
    module: Any = importlib.import_module("nono_py")
    began = time.perf_counter()
    capabilities = module.CapabilitySet()
    for path in _readable(place):
        (capabilities.allow_path if Path(path).is_dir() else capabilities.allow_file)(
            path, module.AccessMode.READ
        )
    capabilities.allow_path(TMP, module.AccessMode.READ_WRITE)
    capabilities.block_network()
    words = [str(shutil.which(argv[0]) or argv[0]), *argv[1:]]
    done = module.sandboxed_exec(
        capabilities, words, cwd=str(place.image), env=list(place.environment.items())
    )
    taken = time.perf_counter() - began
    if done.exit_code:
        raise BenchError(f"nono's program ended with {done.exit_code}: {bytes(done.stderr or b'')[-200:]!r}")
    return taken


PEERS: dict[str, tuple[str, str, Callable[[Place, Sequence[str]], float]]] = {
    "sandlock": ("sandlock", "sandlock", sandlock),
    "nono": ("nono-py", "nono_py", nono),
}
"""By name: package, module, and how long a program takes from start to end."""


def interpreter() -> str:
    """The one that agents get, as a program outside of a sandbox calls it."""
    return os.fspath(sys.executable)
