"""What the base image holds: the running interpreter, the agent library, a few programs, and the libraries all of it needs.

Everything comes from this host; nothing is fetched. The interpreter is put below `/usr/local`, whatever its place here.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ringfence.sandbox.docker.compiled import compiled
from ringfence.sandbox.types import SandboxError


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PROGRAMS = _words("""
awk base32 base64 basename bash bunzip2 bzip2 cat chmod chown cksum cmp comm cp csplit cut date dd df diff
dirname du echo egrep env expand expr factor false fgrep find flock fmt fold getopt git grep gunzip gzip head
hostname id install join kill less ln ls md5sum mkdir mkfifo mktemp more mv nice nl nohup nproc numfmt od
paste patch printenv printf ps pwd readlink realpath rm rmdir sed seq setsid sh sha1sum sha256sum sha512sum
shuf sleep sort split stat stdbuf sum sync tac tail tar tee test timeout touch tr true truncate tty uname uniq
unlink wc which whoami xargs xz yes zcat zstd
""")
"""Programs of this host that go along where they are there."""

_HERE = "/usr/bin:/bin:/usr/sbin:/sbin"
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_TREES = ("/usr/share/zoneinfo", "/usr/lib/locale/C.utf8", "/usr/lib/git-core", "/usr/share/git-core")
_SKIPPED = {
    *("__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3"),
    *("site-packages", "dist-packages", "pydoc_data"),
}
_NOT_NEEDED = {"grpc_tools"}
"""gRPC imports its compiler where it is there, and does without."""
_SKIPPED_MODULES = ("sitecustomize.py", "usercustomize.py", "EXTERNALLY-MANAGED")
_LIBRARY = re.compile(r"(/\S+) \(0x[0-9a-f]+\)")
_ELF = b"\x7fELF"
_LDD_BATCH = 200
_EXECUTABLE = 0o111
_TEXTS = {
    "etc/passwd": "root:x:0:0::/:/bin/false\nagent:x:1000:1000::/tmp:/bin/sh\n",
    "etc/group": "root:x:0:\nagent:x:1000:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_COMMANDS = {"rf-call": "call", "rf-mcp": "mcp_bridge"}
_COMMAND = "#!/usr/local/bin/python3\nimport sys\n\nfrom ringfence.agent.{} import main\n\nsys.exit(main())\n"
_IMPORTED = """
import json, sys
import ringfence.agent, ringfence.agent.call, ringfence.agent.mcp_bridge
found = {}
for name, module in list(sys.modules.items()):
    place = getattr(module, "__file__", None)
    if place:
        found[name] = place
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One path of the image: a directory, a link, a file of this host, or bytes.

    Attributes:
        mode: permission bits; owner and time are the same for all.
        source: file of this host with the content.
        data: the content itself.
        target: where a link points.
    """

    mode: int
    source: Path | None = None
    data: bytes | None = None
    target: str | None = None


def collect(more: Sequence[Path] = ()) -> dict[str, Entry]:
    """Find everything that belongs into the base image.

    Args:
        more: further files and directories of this host, which keep their paths.

    Returns:
        Entries by path without the leading slash.

    Raises:
        SandboxError: something that is needed isn't there.
    """
    files = _Files()
    files.skeleton()
    files.interpreter()
    files.library()
    for name in PROGRAMS:
        if found := shutil.which(name, path=_HERE):
            files.add(f"usr/bin/{name}", Path(found).resolve(), executable=True)
    for path in (*map(Path, _TREES), *more):
        if path in more and not path.exists():
            raise SandboxError(f"`{path}` is not there; name a file or directory of this host with --add")
        files.add_tree(path)
    files.shared_libraries()
    return files.entries


class _Files:
    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._elf: set[Path] = set()
        self._version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        self._prefix = Path(sys.base_prefix).resolve()
        self._stdlib = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})).resolve()
        self._modules = f"usr/local/lib/{self._version}"

    def skeleton(self) -> None:
        for name in ("dev", "etc", "proc", "run", "sys", "usr/bin", "usr/lib", "usr/local/bin"):
            self._directory(name)
        self.entries["tmp"] = Entry(mode=0o1777)
        for name in _MERGED:
            place = Path("/", name)
            if place.is_symlink():
                self.entries[name] = Entry(mode=0o777, target=f"usr/{name}")
                self._directory(f"usr/{name}")
        for name, text in _TEXTS.items():
            self.entries[name] = Entry(mode=0o644, data=text.encode())
        cache = Path("/etc/ld.so.cache")
        if cache.is_file():
            self.entries["etc/ld.so.cache"] = Entry(mode=0o644, source=cache)

    def interpreter(self) -> None:
        executable = Path(sys.executable).resolve()
        self.add(f"usr/local/bin/{self._version}", executable, executable=True)
        for name in ("usr/local/bin/python3", "usr/local/bin/python"):
            self.entries[name] = Entry(mode=0o777, target=self._version)
        self.entries["usr/bin/python3"] = Entry(mode=0o777, target="/usr/local/bin/python3")
        if not (self._stdlib / "os.py").is_file():
            raise SandboxError(
                f"the standard library of `{executable}` is not in `{self._stdlib}`; run with another Python"
            )
        self._python_tree(self._stdlib, self._modules)

    def library(self) -> None:
        """The agent library and what it imports. Beside the standard library, where every interpreter looks."""
        done = subprocess.run([sys.executable, "-c", _IMPORTED], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise SandboxError(f"the agent library can't be imported: {reason}; install ringfence anew")
        places: dict[str, str] = json.loads(done.stdout)
        for name in sorted(_outermost(places, self._stdlib)):
            path = Path(places[name])
            parts = name.replace(".", "/")
            if path.name == "__init__.py":
                self._python_tree(path.parent, f"{self._modules}/{parts}")
            elif path.suffix == ".py":
                self._module(path, f"{self._modules}/{parts}.py")
            else:
                self.add(f"{self._modules}/{path.name}", path)
        for command, module in _COMMANDS.items():
            text = _COMMAND.format(module)
            self.entries[f"usr/local/bin/{command}"] = Entry(mode=0o755, data=text.encode())

    def add(self, name: str, source: Path, *, executable: bool = False) -> None:
        """One file of this host."""
        self._directory(str(Path(name).parent))
        with source.open("rb") as file:
            if file.read(len(_ELF)) == _ELF:
                self._elf.add(source)
        mode = 0o755 if executable or source.stat().st_mode & _EXECUTABLE else 0o644
        self.entries[name] = Entry(mode=mode, source=source)

    def add_tree(self, top: Path) -> None:
        """A file or directory of this host at its own path; links stay links, what is neither is left out."""
        for path in (top, *(sorted(top.rglob("*")) if top.is_dir() and not top.is_symlink() else ())):
            name = str(_canonical(path)).lstrip("/")
            if path.is_symlink():
                self._directory(str(Path(name).parent))
                self.entries[name] = Entry(mode=0o777, target=str(path.readlink()))
            elif path.is_dir():
                self._directory(name)
            elif path.is_file():
                self.add(name, path)

    def shared_libraries(self) -> None:
        """Whatever the dynamic linker would load for anything in the image."""
        needed = sorted(_needed(sorted(self._elf)))
        home = next((path.parent for path in needed if path.name == "libc.so.6"), None)
        if home is None:
            raise SandboxError(
                "the interpreter is not linked with the C library of GNU; build the image with one that is"
            )
        # Loaded by libc itself when a thread is cancelled.
        beside = home / "libgcc_s.so.1"
        for path in (*needed, *((beside,) if beside.exists() else ())):
            real = path.resolve()
            # What lies with the interpreter goes where every program's libraries are looked for.
            own = real.is_relative_to(self._prefix) and self._prefix != Path("/usr")
            place = _canonical(home / path.name if own else path)
            self.add(str(place).lstrip("/"), real, executable=path.name.startswith("ld-"))

    def _directory(self, name: str) -> None:
        for path in (Path(name), *Path(name).parents):
            if str(path) != "." and str(path) not in self.entries:
                self.entries[str(path)] = Entry(mode=0o755)

    def _python_tree(self, top: Path, name: str) -> None:
        for path in _walk(top):
            inside = f"{name}/{path.relative_to(top)}"
            if path.suffix == ".py":
                self._module(path, inside)
            elif not path.is_symlink() and path.suffix not in (".pyc", ".a", ".pyi"):
                self.add(inside, path)

    def _module(self, path: Path, name: str) -> None:
        """A module and its compiled form, which holds whatever the times of the files are."""
        self._directory(str(Path(name).parent))
        source = path.read_bytes()
        self.entries[name] = Entry(mode=0o644, data=source)
        try:
            place, data = compiled(source, f"/{name}")
        except (SyntaxError, ValueError):
            return  # a template or a test of the compiler
        cached = place.lstrip("/")
        self._directory(str(Path(cached).parent))
        self.entries[cached] = Entry(mode=0o644, data=data)


def _outermost(places: dict[str, str], stdlib: Path) -> set[str]:
    """Names of the packages and modules that don't come with the interpreter, without those inside another."""
    foreign = {
        name
        for name, place in places.items()
        if name != "__main__"
        and not (Path(place).resolve().is_relative_to(stdlib) and "-packages" not in place)
    }
    outermost = {name for name in foreign if not any(name.startswith(f"{other}.") for other in foreign)}
    return outermost - _NOT_NEEDED


def _walk(top: Path) -> Iterator[Path]:
    for path in sorted(top.iterdir()):
        if path.name in _SKIPPED or path.name in _SKIPPED_MODULES or path.name.startswith("config-"):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        elif path.is_file():
            yield path


def _canonical(path: Path) -> Path:
    """The path with its directory resolved: `/lib` is `/usr/lib` on most hosts, and so it is in the image."""
    return path.parent.resolve() / path.name


def _needed(files: Sequence[Path]) -> Iterable[Path]:
    found: set[Path] = set()
    ldd = shutil.which("ldd", path=_HERE)
    if ldd is None:
        raise SandboxError("`ldd` is not installed; install it (it comes with the C library's programs)")
    for start in range(0, len(files), _LDD_BATCH):
        batch = [str(path) for path in files[start : start + _LDD_BATCH]]
        done = subprocess.run([ldd, *batch], capture_output=True, text=True, check=False)
        found.update(Path(match) for match in _LIBRARY.findall(done.stdout))
    return found


def machine_name() -> str:
    """This machine as images name it.

    Raises:
        SandboxError: it has no such name.
    """
    names = {"x86_64": "amd64", "aarch64": "arm64"}
    machine = import_module("platform").machine()
    if machine not in names:
        raise SandboxError(f"there is no system call filter for `{machine}`; run agents on x86_64 or aarch64")
    return names[machine]
