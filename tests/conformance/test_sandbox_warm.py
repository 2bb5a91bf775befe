"""A program that a warm interpreter becomes sees what a fresh one would, and ends as it would."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ringfence.kernel.environment import interpreter_directories
from ringfence.sandbox.native import NativeSandbox
from ringfence.sandbox.types import ProgramSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.sandbox

PROBE = Path(__file__).with_name("warm_probe.py")
UIDS = [247114, None] if os.geteuid() == 0 else [None]
ENV = {
    "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "TOKEN": "t",
}
IS_WARM = "import sys; print('ringfence.agent.runtime' in sys.modules)"


@dataclass
class Ran:
    reason: str
    code: int
    out: str
    err: str


class Boxes:
    """The same sandbox twice: with warm interpreters, and without."""

    def __init__(self, place: Path, uid: int | None) -> None:
        self.place = place
        self.uid = uid
        self.image = place / "image"
        self.warm = NativeSandbox(place / "warm")
        self.cold = NativeSandbox(place / "cold", warm_environment=None)

    async def run(self, box: NativeSandbox, *argv: str, stdin: bytes = b"", **env: str) -> Ran:
        files = [self.place / name for name in ("out", "err")]
        fds = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in files]
        spec = ProgramSpec(
            agent="a",
            argv=argv,
            env={**ENV, **env},
            image=self.image,
            socket_dir=self.image,
            readonly=interpreter_directories(),
            uid=self.uid,
            stdin=stdin,
            stdout_fd=fds[0],
            stderr_fd=fds[1],
        )
        try:
            program = await box.start(spec)
        finally:
            for fd in fds:
                os.close(fd)
        ended = await program.wait()
        texts = [re.sub("0x[0-9a-f]+", "0x", path.read_text()) for path in files]
        return Ran(ended.reason.value, ended.code, *texts)

    async def is_warm(self, *argv: str, **env: str) -> bool:
        done = await self.run(self.warm, *(argv or ("python", "-c", IS_WARM)), stdin=b"", **env)
        return done.out.strip() == "True"

    async def both(self, *argv: str, stdin: bytes = b"", **env: str) -> Ran:
        """Run it in both and see that they agree."""
        warm = await self.run(self.warm, *argv, stdin=stdin, **env)
        assert warm == await self.run(self.cold, *argv, stdin=stdin, **env)
        return warm


@pytest.fixture(params=UIDS, ids=lambda uid: "own user" if uid else "user namespace")
async def boxes(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Boxes]:
    for directory in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        if directory.stat().st_uid == os.geteuid():
            directory.chmod(0o755)
    found = Boxes(tmp_path, request.param)
    found.image.mkdir()
    yield found
    await found.warm.close()
    await found.cold.close()


async def test_a_warm_program_sees_what_a_fresh_one_sees(boxes: Boxes) -> None:
    (boxes.image / "sub").mkdir()
    for name in ("probe.py", "sub/inner.py"):
        (boxes.image / name).write_bytes(PROBE.read_bytes())
    for argv in (
        ["python", "probe.py", "one", "--two", "-u"],
        ["python3", "./sub/inner.py"],
        ["python", "-u", "-B", "-m", "probe", "x"],
        ["python", "-m", "sub.inner"],
    ):
        ran: list[tuple[dict[str, Any], list[str]]] = []
        for box in (boxes.warm, boxes.cold):
            done = await boxes.run(box, *argv, stdin="given é".encode(), TZ="Europe/Berlin")
            assert (done.reason, done.code, done.err) == ("exit", 0, "")
            facts, own, *rest = done.out.splitlines()
            ran.append((json.loads(facts), rest))
            assert json.loads(own)[0] not in [json.loads(other)[0] for other in seen_of(boxes, own)]
        (warm, warm_end), (cold, cold_end) = ran
        for name in cold:
            assert warm[name] == cold[name], (argv, name)
        assert warm_end == cold_end == ["no newline at the endthread ends", "atexit"]
    assert await boxes.is_warm()
    assert not (await boxes.run(boxes.cold, "python", "-c", IS_WARM)).out.startswith("True")


def seen_of(boxes: Boxes, own: str) -> list[str]:
    """What earlier programs had that must be each one's own: random numbers and keys."""
    seen: list[str] = boxes.__dict__.setdefault("seen", [])
    before = list(seen)
    seen.append(own)
    return before


ENDS = {
    "plain": "x = 1",
    "exit 0": "import sys; sys.exit()",
    "exit 3": "import sys; sys.exit(3)",
    "exit with text": "import sys; sys.exit('gone wrong')",
    "exit in a thread": "import sys, threading; t = threading.Thread(target=lambda: sys.exit(4)); t.start(); t.join()",
    "an error": "def f(): return 1 / 0\ndef g(): f()\ng()",
    "an error with a cause": "try:\n  {}['a']\nexcept KeyError as e:\n  raise ValueError('b') from e",
    "a group of errors": "raise ExceptionGroup('all', [ValueError(1), TypeError(2)])",
    "an error in a thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='w'); t.start(); t.join()",
    "a hook of its own": "import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[2].tb_frame.f_code.co_name)\n1 / 0",
    "interrupted": "raise KeyboardInterrupt",
    "a signal": "import os; os.kill(os.getpid(), 15)",
    "SIGINT": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)",
    "os._exit": "import os; print('lost', end=''); os._exit(5)",
    "abort": "import os; os.abort()",
    "atexit": "import atexit\n@atexit.register\ndef last(): print('last'); 1 / 0",
    "no syntax": "def f(:\n  pass",
    "a NUL": "x = '\\0'; print(repr(x))",
    "not UTF-8": None,
    "an encoding": "# coding: latin-1\nprint(ascii('é'))",
    "a warning": "import warnings; warnings.warn('careful'); import os; os.popen",
    "imports": "import json, no_such_module",
    "pipe": "import sys\nfor n in range(10): print(n)\nsys.stdout.close()",
    "globals": "print(sorted(n for n in globals() if n != 'print')); print(__name__, __doc__)",
    "exec": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "recursion": "def f(): f()\ntry: f()\nexcept RecursionError as e: print(e)",
}


IN_EVERY_WAY = ("exit 3", "an error", "a group of errors", "interrupted", "atexit", "no syntax", "globals")


@pytest.mark.parametrize("how", ["script", "module", "code"])
@pytest.mark.parametrize("boxes", UIDS[:1], indirect=True)
async def test_every_end_is_that_of_a_fresh_interpreter(boxes: Boxes, how: str) -> None:
    for name in ENDS if how == "script" else IN_EVERY_WAY:
        text = ENDS[name]
        (boxes.image / "it.py").write_bytes(b"print('\xe9')" if text is None else text.encode())
        argv = {"script": ["it.py"], "module": ["-m", "it"], "code": ["-c", text or ""]}[how]
        done = await boxes.both("python", *argv)
        assert "zygote" not in done.err, name
    assert await boxes.is_warm()


@pytest.mark.parametrize("boxes", UIDS[:1], indirect=True)
async def test_what_differs_from_the_usual_is_executed(boxes: Boxes) -> None:
    assert await boxes.is_warm()
    assert await boxes.is_warm("python", "-u", "-B", "-c", IS_WARM)
    assert await boxes.is_warm("python", "-uB", "-c", IS_WARM, PYTHONUNBUFFERED="")
    for env in (
        {"PYTHONPATH": "/program"},
        {"PYTHONHASHSEED": "0"},
        {"PYTHONMALLOC": "debug"},
        {"PYTHONUNBUFFERED": ""},
        {"LANG": "C"},
        {"LC_ALL": "C.UTF-8"},
        {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "upb"},
        {"LD_BIND_NOW": "1"},
    ):
        assert not await boxes.is_warm("python", "-c", IS_WARM, **env), env
    for option in (["-I"], ["-E"], ["-s"], ["-S"], ["-O"], ["-X", "utf8"], ["-W", "error"], ["-v"], ["-i"]):
        assert not await boxes.is_warm("python", *option, "-c", IS_WARM), option
    assert (await boxes.both("python", "-c", "import sys; print(sys.flags)", PYTHONHASHSEED="3")).code == 0
    assert (await boxes.both("sh", "-c", "echo $0 $TOKEN")).out == "sh t\n"
    assert (await boxes.both("python", "missing.py")).code == 2
    assert (await boxes.both("python", "-m", "missing")).code == 1


@pytest.mark.parametrize("boxes", UIDS[:1], indirect=True)
async def test_a_file_that_hides_an_imported_module_is_imported(boxes: Boxes) -> None:
    text = "import json; print(getattr(json, 'MINE', 0))"
    (boxes.image / "it.py").write_text(text)
    (boxes.image / "json.yaml").write_text("harmless")
    assert (await boxes.both("python", "it.py")).out == "0\n"
    assert await boxes.is_warm()
    (boxes.image / "json").mkdir()
    (boxes.image / "json" / "__init__.py").write_text("MINE = 2")
    assert (await boxes.both("python", "it.py")).out == "2\n"
    assert (await boxes.both("python", "-m", "it")).out == "2\n"
    assert (await boxes.both("python", "-c", text)).out == "2\n"
    assert not await boxes.is_warm()


async def test_no_program_finds_what_belongs_to_another(boxes: Boxes) -> None:
    secret = f"secret-{os.urandom(8).hex()}"
    look = """
import re
found = set()
for line in open("/proc/self/maps"):
    area, rights, *_ = line.split()
    if "r" in rights and "[v" not in line:
        start, end = (int(part, 16) for part in area.split("-"))
        with open("/proc/self/mem", "rb") as memory:
            memory.seek(start)
            try: found.update(re.findall(rb"secret-[0-9a-f]{16}", memory.read(end - start)))
            except OSError: pass
print(*sorted(each.decode() for each in found))
"""
    (boxes.image / "look.py").write_text(look)
    mine = await boxes.run(boxes.warm, "python", "look.py", MINE=secret)
    assert mine.out.split() == [secret], "the search itself finds nothing"
    await boxes.run(
        boxes.warm, "python", "-c", f"x = {secret!r}", secret, stdin=secret.encode(), OTHER=secret
    )
    other = await boxes.run(boxes.warm, "python", "look.py")
    assert (other.out, other.err) == ("\n", "")
    assert await boxes.is_warm()


async def test_many_at_once(boxes: Boxes) -> None:
    async def one(number: int) -> str:
        return (await boxes.run(boxes.warm, "python", "-c", f"print({number})")).reason

    # Output files are shared here, so only the ends are looked at.
    assert set(await asyncio.gather(*(one(number) for number in range(20)))) == {"exit"}


LAST_WORDS = {
    "what it holds is let go of": """
import atexit, sys, threading, time
class Last:
    def __init__(self, name): self.name = name
    def __del__(self): print("let go of", self.name, helper())
def helper(): return "with its names"
one, two = Last("one"), Last("two")
two.itself = two
unflushed = open(1, "w", closefd=False)
unflushed.write("not flushed\\n")
def held(argument=open(1, "w", closefd=False)): argument.write("in a default\\n")
held.held = held
held()
import json
json.kept = open(1, "w", closefd=False)
json.kept.write("in a module of others\\n")
atexit.register(print, "first registered")
atexit.register(print, "second registered")
threading.Thread(target=lambda: (time.sleep(0.05), print("a thread"))).start()
print("no newline at its end", end="")
""",
    "a module of its own": """
import sys, types
sys.path.insert(0, "/tmp")
open("/tmp/own.py", "w").write("import weakref\\nclass A:\\n  def __del__(self): print('own', weakref)\\na = A()\\nfile = open(1, 'w', closefd=False)\\nfile.write('own file')")
import own
sys.kept = own
print("imported")
""",
    "a status": "import sys\ndef f():\n  file = open(1, 'w', closefd=False); file.write('x'); sys.exit(3)\nf()",
    "none": "import sys; sys.exit()",
    "a text": "import sys; sys.exit('a text')",
    "a status that is none": "import sys; sys.exit(-1)",
    "too large a status": "import sys; sys.exit(1 << 70)",
    "true": "import sys; sys.exit(True)",
    "a daemon": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start(); print('on')",
    "a closed stream": "import sys; print('x'); sys.stdout.close()",
    "no stream": "import os, sys; os.close(1); sys.stdout = open(1, 'w', closefd=False); print('x')",
    "files of libc": "import ctypes; ctypes.CDLL(None).printf(b'by libc\\n')",
    "an error at the end": "import atexit\n@atexit.register\ndef f(): 1 / 0",
    "a child": "import os\nprint('once', flush=True)\nif os.fork() == 0: print('in it')\nelse: os.wait(); print('after it')",
    "an error": "1 / 0",
    "without a module that was there": "import sys\ndel sys.modules[next(reversed(sys.modules))]\nprint('on')",
    "with one that came back": """
import sys
name = next(reversed(sys.modules))
sys.modules[name] = sys.modules.pop(name)
open("/tmp/late.py", "w").write("class A:\\n  def __del__(self): print('late')\\na = A()")
sys.path.insert(0, "/tmp")
import late
sys.kept = late
sys.modules[name] = sys.modules.pop(name)
""",
}


@pytest.mark.parametrize("name", LAST_WORDS)
async def test_a_warm_program_ends_as_a_fresh_one(boxes: Boxes, name: str) -> None:
    (boxes.image / "end.py").write_text(LAST_WORDS[name])
    ran = await boxes.both("python", "end.py")
    assert ran.reason == "exit"
    assert await boxes.is_warm()
