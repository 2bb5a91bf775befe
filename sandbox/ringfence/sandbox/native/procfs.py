"""The `/proc` of a sandbox: of its own processes, with what tells about the host or changes it covered."""

# The launcher works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH208

from __future__ import annotations

import os

from ringfence.sandbox.native import linux

_PROC_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs", "asound", "mtrr")
_PROC_HIDDEN_FILES = (
    *(
        "kcore",
        "kmsg",
        "keys",
        "key-users",
        "kallsyms",
        "timer_list",
        "timer_stats",
        "sched_debug",
        "latency_stats",
    ),
    *(
        "modules",
        "slabinfo",
        "vmallocinfo",
        "kpagecgroup",
        "kpagecount",
        "kpageflags",
        "config.gz",
        "cmdline",
    ),
    *(
        "interrupts",
        "softirqs",
        "iomem",
        "ioports",
        "pagetypeinfo",
        "zoneinfo",
        "swaps",
        "partitions",
        "diskstats",
    ),
)
_PROC_HIDDEN_DIRECTORIES = ("acpi", "scsi", "driver", "tty", "dynamic_debug", "pressure")
_INERT = linux.ATTR_RDONLY | linux.ATTR_NOSUID | linux.ATTR_NODEV | linux.ATTR_NOEXEC
_PLAIN = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC


def mount() -> None:
    """Mount it at `proc` of the new root, which this process stands in.

    Raises:
        OSError: a part of it can't be covered.
    """
    linux.mount("proc", "./proc", "proc", _PLAIN)
    # One look instead of one for each name: most of them are absent. Nothing runs in there yet that could add any.
    there = frozenset(os.listdir("./proc"))
    for name in there.intersection(_PROC_READ_ONLY):
        linux.bind(f"./proc/{name}", f"./proc/{name}", _INERT)
    for name in there.intersection(_PROC_HIDDEN_FILES):
        linux.mount("./dev/null", f"./proc/{name}", None, linux.MS_BIND)
    nothing = ""
    for name in there.intersection(_PROC_HIDDEN_DIRECTORIES):
        if nothing:
            linux.mount(nothing, f"./proc/{name}", None, linux.MS_BIND)  # as restricted as the first one
        else:
            nothing = f"./proc/{name}"
            linux.mount("tmpfs", nothing, "tmpfs", _PLAIN | linux.MS_RDONLY, "size=4k,mode=555")
