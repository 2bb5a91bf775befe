"""Tells as JSON what a Python program sees of its interpreter and its process. Runs inside a sandbox, warm and executed."""

# It says what it sees in the plainest way, and has nothing to keep secret.
# ruff: noqa: PTH109, PTH123, PTH208, S311

import asyncio
import atexit
import concurrent.futures
import gc
import importlib.util
import inspect
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings

main = sys.modules["__main__"]


def stream(file):
    names = ("name", "mode", "encoding", "errors", "newlines", "line_buffering", "write_through", "closed")
    buffer = file.buffer
    raw = getattr(buffer, "raw", buffer)
    return {
        **{name: getattr(file, name) for name in names},
        "types": [type(file).__name__, type(buffer).__name__, type(raw).__name__],
        "raw": [raw.name, raw.mode, raw.fileno(), raw.closefd, file.isatty()],
        "original": file is getattr(sys, f"__{file.name.strip('<>')}__"),
    }


def lines(path, *names):
    with open(path) as file:
        found = dict(line.split(":", 1) for line in file if ":" in line)
    return {name: found[name].strip() for name in names}


def forked():
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps([threading.current_thread().name, threading.active_count()]).encode())
        os._exit(7)
    _, status = os.wait()
    return [os.waitstatus_to_exitcode(status), json.loads(os.read(read, 1000))]


def square(number):
    return number * number


def pools():
    found = {}
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
            found[method] = list(pool.map(square, [3, 4]))
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found["threads"] = list(threads.map(square, [5, 6]))
    return found


async def loop():
    process = await asyncio.create_subprocess_exec("echo", "sub", stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    return [await asyncio.to_thread(square, 7), out.decode(), type(asyncio.get_running_loop()).__name__]


def facts():
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    handlers = {
        name.name: str(signal.getsignal(name)).partition(" at ")[0]
        for name in signal.valid_signals()
        if isinstance(name, signal.Signals)
    }
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": repr(sys.flags),
        "executable": [sys.executable, sys._base_executable, sys.prefix, sys.base_prefix, sys.exec_prefix],
        "options": [sys.warnoptions, sys._xoptions, sys.dont_write_bytecode, sys.flags.hash_randomization],
        "main": {
            name: repr(value).partition(" object at ")[0]
            for name, value in vars(main).items()
            if name.startswith("__")
        },
        "main order": [name for name in vars(main) if name.startswith("__")],
        "spec": [
            importlib.util.find_spec(name) is not None
            for name in ("grpc", "ringfence.agent", "ringfence.sandbox", "ringfence.kernel", "tests")
        ],
        "ours": [name for name in sys.modules if name.startswith("ringfence.sandbox")],
        "environ": dict(os.environ),
        "environ of libc": subprocess.run(["env"], capture_output=True, text=True, check=False).stdout.split(
            "\n"
        ),
        "proc": [
            open("/proc/self/cmdline").read(),
            sorted(open("/proc/self/environ").read().split("\0")),
            open("/proc/self/comm").read(),
        ],
        "status": lines(
            "/proc/self/status",
            "Name",
            "Umask",
            "Uid",
            "Gid",
            "Groups",
            "Threads",
            "SigBlk",
            "SigIgn",
            "SigCgt",
            "CapEff",
            "CapBnd",
            "NoNewPrivs",
            "Seccomp",
        ),
        "ids": [os.getpid(), os.getppid(), os.getsid(0), os.getpgid(0), os.getuid(), os.getgid()],
        "place": [os.getcwd(), os.listdir("."), os.umask(0o077)],
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "oom": open("/proc/self/oom_score_adj").read(),
        "signals": handlers,
        "wakeup": signal.set_wakeup_fd(-1),
        "streams": [stream(file) for file in (sys.stdin, sys.stdout, sys.stderr)],
        "locale": [
            locale.setlocale(locale.LC_CTYPE),
            locale.getpreferredencoding(),
            sys.getfilesystemencoding(),
            sys.getfilesystemencodeerrors(),
        ],
        "hooks": [
            sys.excepthook is sys.__excepthook__,
            sys.gettrace(),
            sys.getprofile(),
            sys.getrecursionlimit(),
            sys.getswitchinterval(),
        ],
        "threads": [
            threading.current_thread() is threading.main_thread(),
            threading.current_thread().name,
            threading.active_count(),
            threading.get_native_id() == os.getpid(),
            threading.main_thread().ident == threading.get_ident(),
        ],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.callbacks],
        "warnings": [repr(entry) for entry in warnings.filters],
        "logging": [logging.getLogger().handlers, logging.getLogger().level, logging.root.manager.disable],
        "stdin": sys.stdin.read(),
        "fork": forked(),
        "pools": pools(),
        "loop": asyncio.run(loop()),
        "clock": time.process_time() < 5,
        "zone": time.strftime("%Z", time.gmtime(0)) + str(time.tzname),
        "source": inspect.getsource(square),
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
    print(json.dumps([random.random(), multiprocessing.current_process().authkey.hex(), hash("x")]))
    atexit.register(print, "atexit", flush=True)
    threading.Thread(target=lambda: (threading.main_thread().join(), print("thread ends"))).start()
    print("no newline at the end", end="")
