"""What people run works behind the walls: a filter that refuses too much shows here."""

from __future__ import annotations

import errno
import json
import platform
import shutil
from typing import TYPE_CHECKING

import pytest
from ringfence.sandbox.native import calls

if TYPE_CHECKING:
    from conftest import Box

FILES = {
    "main.c": '#include <pthread.h>\n#include <stdio.h>\nstatic void *run(void *x) { puts("thread"); return x; }\n'
    "int main(void) { pthread_t t; return pthread_create(&t, 0, run, 0) || pthread_join(t, 0); }\n",
    "Makefile": "main: main.c\n\tcc -O2 -o $@ $< -pthread\n",
    "many.py": """
import asyncio, concurrent.futures, ctypes, mmap, multiprocessing, os, pathlib, select, shutil, signal, socket, sqlite3, subprocess
import tempfile, threading, zoneinfo

def square(x): return x * x

async def main():
    server = await asyncio.start_unix_server(lambda r, w: w.close(), "/tmp/door")
    await asyncio.open_unix_connection("/tmp/door")
    server.close()
    done = await asyncio.create_subprocess_exec("true")
    assert await done.wait() == 0

if __name__ == "__main__":
    asyncio.run(main())
    with multiprocessing.Pool(2) as pool: assert pool.map(square, range(4)) == [0, 1, 4, 9]
    with concurrent.futures.ThreadPoolExecutor(4) as pool: assert sum(pool.map(square, range(9))) == 204
    base = sqlite3.connect("base.db"); base.execute("pragma journal_mode=wal"); base.execute("create table t (x)"); base.close()
    shutil.copytree(".", "/tmp/copy", symlinks=True); shutil.move("/tmp/copy", "/tmp/moved")
    a, b = socket.socketpair(); a.sendall(b"x"); assert b.recv(1) == b"x"
    signal.setitimer(signal.ITIMER_REAL, 60); os.sched_setaffinity(0, os.sched_getaffinity(0))
    with tempfile.TemporaryFile() as file: file.truncate(4096); mmap.mmap(file.fileno(), 4096)
    assert subprocess.run("echo $((2 + 3))", shell=True, capture_output=True, text=True).stdout == "5\\n"
    print("fine")
""",
    "main.js": """
const fs = require('fs'), {Worker, isMainThread} = require('worker_threads'), child = require('child_process');
if (!isMainThread) { return; }
fs.watch('.', () => {}).close();
require('net').createServer().listen('/tmp/door', function () { this.close(); });
new Worker(__filename).on('exit', async () => {
  await fs.promises.writeFile('out', child.execFileSync('cat', ['Makefile']));
  console.log('fine', WebAssembly.validate(Uint8Array.of(0, 97, 115, 109, 1, 0, 0, 0)));
});
""",
}
GIT = """
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@example.com GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@example.com
git init -q -b main && git add . && git commit -qm one && git checkout -qb other && echo x >> Makefile && git commit -qam two &&
git checkout -q main && git merge -q other && git gc -q && git clone -q . /tmp/clone && git -C /tmp/clone log --format=%s
"""
COREUTILS = """
set -e
seq 20000 | sort -rn --parallel=2 | uniq | wc -l; cp -a . /tmp/all; mv /tmp/all/main.c /tmp/all/m.c; ln -s m.c /tmp/all/l; ln /tmp/all/m.c /tmp/all/h
tar czf /tmp/all.tgz -C /tmp all; mkdir /tmp/out; tar xzf /tmp/all.tgz -C /tmp/out; find /tmp/out -name h -exec chmod 600 {} + -exec touch -d 2020-01-01 {} +
dd if=/dev/zero of=/tmp/zero bs=64k count=4 status=none; truncate -s 1M /tmp/zero; split -n 4 /tmp/zero /tmp/part.; sha256sum < /tmp/zero; mktemp -d; mkfifo /tmp/pipe
df /tmp > /dev/null; du -s . > /dev/null; nproc > /dev/null; date > /dev/null; id -u > /dev/null; timeout 9 sed s/a/b/ Makefile | awk 'END {print NR}'
sync /tmp/zero; install -m 700 Makefile /tmp/made; diff Makefile /tmp/made; (sleep 100 & kill $!); nice true; yes | head -n 1; rm -rf /tmp/out; echo fine
"""
SCRIPTS = {
    "python3": "python3 many.py",
    "git": GIT,
    "node": "node main.js",
    "gcc": "make -s && ./main",
    "tar": COREUTILS,
    "perl": "perl -MSocket -e 'socketpair(A, B, AF_UNIX, SOCK_STREAM, 0) or die; print `echo fine`'",
    "bash": "bash -c 'set -o pipefail; x=$(cat <(echo fine) | tee /tmp/t); echo $x; (exec 3<>/tmp/t; flock 3; read -r y <&3; true) & wait'",
}
LAST = {"git": "one", "gcc": "thread", "node": "fine true"}


@pytest.mark.parametrize("tool", sorted(SCRIPTS))
def test_ordinary_programs_run(box: Box, tool: str) -> None:
    if shutil.which(tool, path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip(f"{tool} is not installed")
    if tool in box.kind.without:
        pytest.skip(f"does not apply: {tool} is not in the sandbox's own image")
    workspace = box.directory(box.fresh("workspace"), FILES)
    env = {"HOME": "/tmp", "LANG": "C.UTF-8"}
    limits = {"memory_bytes": 2 << 30, "pids": 256, "timeout_s": 120}
    done = box.run(SCRIPTS[tool], workspace, env=env, limits=limits)
    assert (done.reason, done.code, done.err) == ("exit", 0, "")
    assert done.out.splitlines()[-1] == LAST.get(tool, "fine")


KNOCK = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for number in json.loads(sys.argv[2]):
    ctypes.set_errno(0)
    answer = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)
    found[number] = ctypes.get_errno() if answer == -1 else -1
print(json.dumps(found))
"""


def test_what_is_refused_on_paper_is_refused_by_linux(box: Box) -> None:
    """Also every number that is in no table; the emulator of the unit tests and the real thing agree."""
    numbers = calls.numbers(calls.X86_64 if platform.machine() == "x86_64" else calls.AARCH64)
    wanted = {number: errno.EPERM for name, number in numbers.items() if name in calls.REFUSED}
    wanted |= {number: errno.ENOSYS for name, number in numbers.items() if name in calls.ABSENT}
    wanted |= {number: errno.ENOSYS for number in range(600) if number not in numbers.values()}
    for name in ("uretprobe", "uprobe"):
        # Linux looks at these two before any filter, and kills whoever did not come from a probe of the host's.
        wanted.pop(numbers.get(name, -1), None)
    program = box.python(KNOCK, json.dumps(sorted(wanted)))
    assert program.wait() == ("exit", 0), program.stderr.read_text()
    found = {int(number): error for number, error in json.loads(program.stdout.read_text()).items()}
    if box.kind.backend == "docker":
        # Engines before 23 take no error of their own for what is in no list, and their library may not know the newest calls.
        refused = {errno.EPERM, errno.ENOSYS}
        found |= {n: wanted[n] for n, error in found.items() if {error, wanted[n]} <= refused}
    assert found == wanted
