"""Becomes a Python program in a process that was forked from a warm interpreter, as if it had been executed.

INVARIANT: nothing here decides about a wall. It runs where the program would otherwise be executed, after all of them stand.

What differs from a fresh interpreter: modules that agents need are imported already; the hash seed and the layout of memory are
those of the zygote; objects from before the fork are out of sight of the garbage collector.
"""

# Standard library only, on strings: pathlib is not loaded here, and need not be.
# ruff: noqa: PTH109, PTH110, PTH100, PTH112, PTH116, PTH117, PTH118, PTH119, PTH120, PTH123, PTH208

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import io
import os
import signal
import site
import sys
import time
import types
from typing import Any, TextIO, cast

from ringfence.sandbox.native import ending, invocation, procname
from ringfence.sandbox.native.invocation import Invocation
from ringfence.sandbox.native.job import Job

_PRELOADED = (
    # What many programs import at once, and what costs each of them a millisecond.
    "hashlib",
    "pathlib",
    "ringfence.agent.runtime",
    "ringfence.agent.aio",
    "ringfence.v1.syscalls_pb2",
)
_REHEARSAL = "ringfence.agent.rehearsal"
_OWN = "ringfence.sandbox"
_MODULE_FRAMES = 2
"""Frames of a traceback that are ours: the entry's, and for `-m` the one that calls runpy."""
_ARCHIVE = b"PK"
_STDERR = 2
_SUFFIXES = tuple(importlib.machinery.all_suffixes())


class Program:
    """What the entry of the interpreter is to execute."""

    def __init__(self, code: types.CodeType, namespace: dict[str, Any], frames: int) -> None:
        self.code = code
        self.namespace = namespace
        self._frames = frames
        self._kept: list[object] = []
        self._last, self._most = "", 0
        self.plain = ending.plain

    def begin(self, *things: object) -> None:
        """Let these live as long as the program: to take them apart means to copy each page that something of them is in."""
        self._kept += things
        self._last, self._most = next(reversed(sys.modules)), len(sys.modules)

    def end(self, code: int) -> None:
        """End the process, after the program has come to its end.

        Raises:
            SystemExit: the interpreter has to do that.
        """
        self.namespace = {}
        ending.end(code, self._last, self._most)
        raise SystemExit(code)

    def show(self, error: BaseException) -> None:
        """Show an error as a fresh interpreter would; it may then be raised and will not be shown again."""
        trace = error.__traceback__
        for _ in range(self._frames):
            trace = trace.tb_next if trace is not None else None
        error.__traceback__ = trace
        sys.excepthook(type(error), error, trace)
        sys.excepthook = _quiet


class Interpreter:
    """This interpreter as it was before it imported anything for others.

    Args:
        before: modules that every start of it has.
    """

    def __init__(self, before: frozenset[str]) -> None:
        # Its home was given to keep out packages of the user's own, which no sandbox sees.
        os.environ.pop("HOME", None)
        self._environment = dict(os.environ)
        # A locale that the interpreter chose by itself shows in the environment of a fresh one too.
        self._coerced = {name: value for name, value in os.environ.items() if name == "LC_CTYPE"}
        self._profile = {
            name: value for name, value in self._environment.items() if name not in self._coerced
        }
        self._path = list(sys.path)
        self._absent = {entry for entry in self._path if not os.path.exists(entry)}
        self._binary = os.stat(sys.executable)
        for name in _PRELOADED:
            importlib.import_module(name)
        added = set(sys.modules) - before
        self._names = {name.partition(".")[0] for name in added} - set(sys.builtin_module_names)
        self._own = [name for name in sys.modules if _ours(name)]
        self._rehearse_calls = importlib.import_module(_REHEARSAL).rehearse
        self._places = _places(self._path, {name for name in added if not _ours(name)})

    def rehearse(self) -> None:
        """Go through what is done once there is a program, without one; nothing that a program can see is changed."""
        here = os.path.dirname(sys.executable)
        argv = [sys.executable, f"{here}/program.py"]
        invocation.parse(argv, self._environment, self._profile)
        self._same(sys.executable)
        self._shadowed(here)
        main = types.ModuleType("__main__")
        main.__dict__.update(__annotations__={}, __builtins__=builtins)
        _program(
            Invocation("code", "import sys", []), main
        )  # the first one makes the types of the syntax tree
        for number, mode, like in ((0, "r", sys.stdin), (1, "w", sys.stdout), (2, "w", sys.stderr)):
            _stream(number, mode, like, unbuffered=False)
        saved = dict(os.environ)
        os.environ.clear()
        os.environ.update(saved)
        site.getusersitepackages()
        procname.rehearse()
        self._rehearse_calls()

    def become(self, job: Job, path: str) -> Program | None:
        """Turn this process into the program, standard streams in place.

        Args:
            job: what to run.
            path: where its interpreter was found.

        Returns:
            What to execute; None: it has to be a fresh interpreter, and nothing was changed.
        """
        asked = invocation.parse(job["argv"], job["env"], self._profile)
        if asked is None or not self._same(path):
            return None
        first = os.path.dirname(os.path.realpath(asked.target)) if asked.kind == "script" else os.getcwd()
        if self._shadowed(first):
            return None
        main = types.ModuleType("__main__")
        main.__dict__.update(__annotations__={}, __builtins__=builtins)
        program = _program(asked, main)
        if program is None:
            return None
        self._environ(job["env"])
        if os.path.isdir(site.getusersitepackages()):
            return None  # executed with the environment that is set already
        sys.path[:] = [
            "" if asked.kind == "code" else first,
            *(entry for entry in self._path if entry in self._absent or os.path.exists(entry)),
        ]
        # What is remembered of directories stays: whoever looks into one compares its time of change first.
        sys.argv = [{"code": "-c", "module": "-m"}.get(asked.kind, asked.target), *asked.arguments]
        sys.orig_argv = list(job["argv"])
        sys.executable = path if os.path.isabs(path) else os.path.abspath(path)
        ours = self._forget_ourselves()
        sys.modules["__main__"] = main
        program.begin(self, ours)
        _signals()
        _streams()
        procname.rename(os.path.basename(path), job["argv"], job["env"])
        return program

    def _same(self, path: str) -> bool:
        """Whether what was found inside is this interpreter, with what it has imported."""
        here = os.path.dirname(os.path.abspath(path))
        if here != os.path.dirname(sys.executable) and sys.prefix != sys.base_prefix:
            return False  # a virtual environment is found by the name that was called
        if not os.path.samestat(os.stat(path), self._binary):
            return False
        return all(_identity(place) == known for place, known in self._places.items())

    def _shadowed(self, first: str) -> bool:
        """Whether the program's directory holds what would be imported instead of what is imported already."""
        try:
            return any(
                name.partition(".")[0] in self._names and ("." not in name or name.endswith(_SUFFIXES))
                for name in os.listdir(first)
            )
        except OSError:
            return True

    def _forget_ourselves(self) -> list[object]:
        """Take our modules from what a program can import; returns them."""
        ours: list[object] = [sys.modules.pop(name, None) for name in self._own]
        package = sys.modules.get("ringfence")
        if package is not None:
            ours.append(package.__dict__.pop("sandbox", None))
        return ours

    def _environ(self, env: dict[str, str]) -> None:
        os.environ.clear()
        os.environ.update(env)
        for name, value in self._coerced.items():
            os.environ.setdefault(name, value)
        site.USER_BASE = site.USER_SITE = None
        if "TZ" in env:
            time.tzset()


def _ours(module: str) -> bool:
    return module == _OWN or module.startswith(f"{_OWN}.")


def _places(path: list[str], modules: set[str]) -> dict[str, tuple[int, int] | None]:
    """The directories that modules came from."""
    files = [getattr(sys.modules[name], "__file__", None) or "" for name in modules if name in sys.modules]
    files.append(os.__file__)
    wanted = [entry for entry in path if any(file.startswith(f"{entry}/") for file in files)]
    return {entry: _identity(entry) for entry in wanted}


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _program(asked: Invocation, main: types.ModuleType) -> Program | None:
    if asked.kind == "module":
        code = compile(f"import runpy; runpy._run_module_as_main({asked.target!r})", "<string>", "exec")
        # Runs in a namespace of its own; runpy takes that of `__main__`.
        main.__dict__.update(__loader__=importlib.machinery.BuiltinImporter)
        return Program(code, {"__name__": "ringfence"}, _MODULE_FRAMES)
    filename = "<string>"
    source: str | bytes = asked.target
    loader: Any = importlib.machinery.BuiltinImporter
    if asked.kind == "script":
        filename = os.path.join(os.getcwd(), asked.target)  # not made shorter: a fresh one doesn't either
        try:
            with open(filename, "rb") as file:
                source = file.read()
        except OSError:
            return None
        if source.startswith(_ARCHIVE):
            return None
        loader = importlib.machinery.SourceFileLoader("__main__", filename)
        main.__dict__.update(__file__=filename, __cached__=None)
    try:
        code = compile(source, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None  # a fresh interpreter says it best
    main.__dict__.update(__loader__=loader)
    return Program(code, main.__dict__, _MODULE_FRAMES - 1)


def _signals() -> None:
    """As a fresh interpreter sets them."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _streams() -> None:
    """New objects for the standard streams, as a fresh interpreter makes them in the same environment."""
    unbuffered = cast("io.TextIOWrapper", sys.stdout).write_through
    sys.stdin = sys.__stdin__ = _stream(0, "r", sys.stdin, unbuffered=unbuffered)
    sys.stdout = sys.__stdout__ = _stream(1, "w", sys.stdout, unbuffered=unbuffered)
    sys.stderr = sys.__stderr__ = _stream(2, "w", sys.stderr, unbuffered=unbuffered)


def _stream(descriptor: int, mode: str, like: TextIO, *, unbuffered: bool) -> TextIO:
    raw = io.FileIO(descriptor, mode, closefd=False)
    raw.name = {0: "<stdin>", 1: "<stdout>", 2: "<stderr>"}[descriptor]
    buffer: Any = raw
    if mode == "r":
        buffer = io.BufferedReader(raw)
    elif not unbuffered:
        buffer = io.BufferedWriter(raw)
    text = io.TextIOWrapper(
        buffer,
        encoding=like.encoding,
        errors=like.errors,
        newline="\n",
        line_buffering=not unbuffered and (raw.isatty() or descriptor == _STDERR),
        write_through=unbuffered,
    )
    text.mode = mode  # type: ignore[misc] # so does the interpreter
    return text


def _quiet(*_: object) -> None:
    """Nothing is left to be shown."""
