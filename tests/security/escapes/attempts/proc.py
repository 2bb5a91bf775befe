"""Attempts through /proc: the host's processes, the sandbox's own first process, the machine's switches."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from security.escapes.attempts.base import REACHES, Stopped, add, attempt, read

PIDS = ("pid namespace",)
PROC = ("sealed /proc",)
INIT = ("undumpable first process", "landlock")


def victim(facts: Any) -> str:
    """The pid of the host's process as seen here. Raises `Stopped`: it is not seen."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if facts["marker"].encode() in read(f"/proc/{name}/cmdline"):
                    return name
    raise Stopped("no such process")


# -- the host's processes -----------------------------------------------------------------------------------------------


@attempt(*PIDS)
def see_host_processes(facts: Any) -> str:
    """See a process of the host, its name and its arguments"""
    return victim(facts)


def _of_victim(name: str, text: str, take: Callable[[str, Any], str], *more: str) -> None:
    # In a user namespace of its own a process has no rights over one outside it, whatever it sees.
    add(
        name,
        lambda facts: take(f"/proc/{victim(facts)}", facts),
        (*PIDS, *more),
        user_control=REACHES if more else "",
        what=text,
    )


def _canary(data: bytes, facts: Any) -> str:
    if facts["canary"].encode() not in data:
        raise Stopped("it is not there")
    return facts["canary"]


def _memory(top: str, facts: Any) -> str:
    with open(f"{top}/mem", "rb", buffering=0) as file:
        file.seek(facts["victim_address"])
        return _canary(file.read(200), facts)


_of_victim(
    "environment_of_host_process",
    "Read the environment of a process of the host",
    lambda top, facts: _canary(read(f"{top}/environ", 65536), facts),
    "landlock",
)
_of_victim("memory_of_host_process", "Read the memory of a process of the host", _memory, "landlock")
_of_victim(
    "root_of_host_process",
    "Open a file by the root of a process of the host",
    lambda top, facts: repr(read(f"{top}/root{facts['secret']}")),
    "landlock",
)
_of_victim(
    "directory_of_host_process",
    "Open a file by the working directory of a process of the host",
    lambda top, facts: str(os.listdir(f"{top}/cwd/")),
    "landlock",
)
_of_victim(
    "descriptors_of_host_process",
    "List the descriptors of a process of the host",
    lambda top, facts: str(os.listdir(f"{top}/fd")),
)


# -- the first process inside ---------------------------------------------------------------------------------------------


def _of_first(name: str, text: str, take: Callable[[str], object]) -> None:
    # Not simply pid 1: without a pid namespace that is another process, which none of these walls is about.
    add(name, lambda facts: repr(take(f"/proc/{facts['first']}"))[:200], INIT, what=text)


def _write_memory(top: str) -> str:
    with open(f"{top}/maps") as maps:
        start = next(int(line.split("-")[0], 16) for line in maps if " rw-p " in line)
    with open(f"{top}/mem", "r+b", buffering=0) as file:
        file.seek(start)
        word = file.read(8)
        file.seek(start)
        file.write(word)
    return "written"


_of_first(
    "environment_of_first_process",
    "Read the environment of the sandbox's first process",
    lambda top: read(f"{top}/environ"),
)
_of_first(
    "memory_of_first_process",
    "Write the memory of the sandbox's first process, which holds the link outside",
    _write_memory,
)
_of_first(
    "descriptors_of_first_process",
    "List the descriptors of the sandbox's first process",
    lambda top: os.listdir(f"{top}/fd"),
)
_of_first(
    "directory_of_first_process",
    "Use the working directory of the sandbox's first process",
    lambda top: os.listdir(f"{top}/cwd/"),
)
_of_first(
    "root_of_first_process",
    "Use the root of the sandbox's first process",
    lambda top: os.listdir(f"{top}/root"),
)
_of_first(
    "map_files_of_first_process",
    "Open what the sandbox's first process has mapped",
    lambda top: os.listdir(f"{top}/map_files"),
)


@attempt(*INIT)
def namespaces_of_first_process(facts: Any) -> str:
    """Name the namespaces of the sandbox's first process"""
    return os.readlink(f"/proc/{facts['first']}/ns/mnt")


# -- the machine ------------------------------------------------------------------------------------------------------------


def _switch(path: str) -> Callable[[Any], str]:
    def run(_facts: Any) -> str:
        # Opened for writing and closed again: winning must not change anything.
        os.close(os.open(path, os.O_WRONLY))
        return path

    return run


@attempt(*PROC, "capabilities")
def network_switches(facts: Any) -> str:
    """Change a setting below /proc/sys/net"""
    name = "/proc/sys/net/ipv4/ip_forward"
    with open(name, "r+b", buffering=0) as file:
        file.write(file.read(1))
    return name


# No control: they belong to the machine's root, who is in no namespace that can be thrown away. What seals them is the
# seal of `network_switches`.
for _name, _path in {
    "core_pattern": "/proc/sys/kernel/core_pattern",
    "modprobe_path": "/proc/sys/kernel/modprobe",
    "binfmt_misc": "/proc/sys/fs/binfmt_misc/register",
    "drop_caches": "/proc/sys/vm/drop_caches",
    "panic_switch": "/proc/sys/kernel/panic",
    "sysrq_trigger": "/proc/sysrq-trigger",
    "irq_affinity": "/proc/irq/default_smp_affinity",
}.items():
    add(_name, _switch(_path), PROC, control="none", needs=_path, what=f"Open {_path} for writing")


@attempt(*PROC)
def kernel_symbols(facts: Any) -> str:
    """Read what /proc tells about the machine's kernel: symbols, keys, timers, memory, modules, command line"""
    won = []
    for name in (
        "kallsyms",
        "keys",
        "key-users",
        "cmdline",
        "iomem",
        "interrupts",
        "softirqs",
        "zoneinfo",
        "diskstats",
        "swaps",
    ):
        with suppress(OSError):
            if read(f"/proc/{name}"):
                won.append(name)
    if not won:
        raise Stopped("all empty")
    return str(won)
