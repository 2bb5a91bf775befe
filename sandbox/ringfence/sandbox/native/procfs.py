"""The `/proc` of a sandbox: of its own processes, with what tells about the host or changes it covered."""

# The launcher works on strings and descriptors and has to start fast; pathlib would cost it as much as all its own code.
# ruff: noqa: PTH110, PTH112

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


def mount(root: str) -> None:
    """Mount it at `/proc` of the new root.

    Raises:
        OSError: a part of it can't be covered.
    """
    linux.mount("proc", f"{root}/proc", "proc", _PLAIN)
    for name in _PROC_READ_ONLY:
        path = f"{root}/proc/{name}"
        if os.path.exists(path):
            linux.bind(path, path, _INERT)
    for name in _PROC_HIDDEN_FILES:
        path = f"{root}/proc/{name}"
        if os.path.exists(path):
            linux.mount("/dev/null", path, None, linux.MS_BIND)
    for name in _PROC_HIDDEN_DIRECTORIES:
        path = f"{root}/proc/{name}"
        if os.path.isdir(path):
            linux.mount("tmpfs", path, "tmpfs", _PLAIN | linux.MS_RDONLY, "size=4k,mode=555")
