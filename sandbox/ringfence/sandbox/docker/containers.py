"""What a container is asked for: every wall that the engine can raise, and nothing that the image would like to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfence.sandbox.docker.places import LINK_NAME, START_DIR, START_MODULE
from ringfence.sandbox.docker.profile import profile
from ringfence.sandbox.types import Limits

_FIRST = f"import sys; sys.path.insert(0, '{START_DIR}'); import {START_MODULE}; {START_MODULE}.main('{START_DIR}/{LINK_NAME}')"
# Imported, for a script that is run is compiled each time.
_ENTRY = ("python3", "-I", "-S", "-B", "-X", "utf8", "-c", _FIRST)
_TMP_INODES = 65536
_TMP_LEAST_BYTES = 16 << 20
_SHM_BYTES = 16 << 20
_CPU_PERIOD_US = 100_000
_CPU_QUOTA_LEAST_US = 1000
_OWN_KERNEL_THREADS = 256
"""Threads that a runtime with a kernel of its own may take for itself; they count towards the group's limit."""
_NOFILE = 1024
_CORE_BYTES = 1
_MASKED = (
    *("/proc/acpi", "/proc/asound", "/proc/cmdline", "/proc/config.gz", "/proc/diskstats", "/proc/driver"),
    *(
        "/proc/dynamic_debug",
        "/proc/interrupts",
        "/proc/iomem",
        "/proc/ioports",
        "/proc/kallsyms",
        "/proc/kcore",
    ),
    *(
        "/proc/key-users",
        "/proc/keys",
        "/proc/kmsg",
        "/proc/kpagecgroup",
        "/proc/kpagecount",
        "/proc/kpageflags",
    ),
    *("/proc/latency_stats", "/proc/modules", "/proc/pagetypeinfo", "/proc/partitions", "/proc/pressure"),
    *(
        "/proc/sched_debug",
        "/proc/scsi",
        "/proc/slabinfo",
        "/proc/softirqs",
        "/proc/swaps",
        "/proc/timer_list",
    ),
    *("/proc/timer_stats", "/proc/tty", "/proc/vmallocinfo", "/proc/zoneinfo", "/sys"),
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/mtrr", "/proc/sys", "/proc/sysrq-trigger")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A file or directory of this host inside, read-only."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """An overlay that the engine mounts for one container.

    Attributes:
        name: unique on the engine.
        target: the place inside.
        options: of the mount.
    """

    name: str
    target: str
    options: str
    readonly: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One container.

    Attributes:
        image: `sha256:…` or `NAME@sha256:…`.
        runtime: the engine's name of it.
        shown: what of this host is seen inside.
        volumes: overlays for it.
        tcp: whether its program has doors on the loopback.
    """

    image: str
    runtime: str
    uid: int
    limits: Limits
    labels: Mapping[str, str]
    shown: Sequence[Shown]
    volumes: Sequence[Volume] = ()
    tcp: bool = False


def container(box: Box) -> dict[str, Any]:
    """The engine's request for a container."""
    limits = box.limits
    quota = max(int(limits.cpu * _CPU_PERIOD_US), _CPU_QUOTA_LEAST_US)
    host: dict[str, Any] = {
        "Runtime": box.runtime,
        "NetworkMode": "none",
        "ReadonlyRootfs": True,
        "Privileged": False,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true", f"seccomp={profile(tcp=box.tcp)}"],
        "IpcMode": "private",
        "CgroupnsMode": "private",
        # The agent's files belong to its uid on this host, so that uid has to be the same inside.
        "UsernsMode": "host",
        "Memory": limits.memory_bytes,
        "MemorySwap": limits.memory_bytes,
        "PidsLimit": limits.pids + 1 if box.runtime == "runc" else 2 * limits.pids + _OWN_KERNEL_THREADS,
        "CpuPeriod": _CPU_PERIOD_US,
        "CpuQuota": quota,
        "Tmpfs": {"/tmp": _tmpfs(limits)},  # noqa: S108 - the sandbox's own
        "ShmSize": min(_SHM_BYTES, limits.disk_bytes),
        "Mounts": _mounts(box),
        "Ulimits": _ulimits(limits),
        "MaskedPaths": list(_MASKED),
        "ReadonlyPaths": list(_READ_ONLY),
        "LogConfig": {"Type": "none"},
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
        "Init": False,
    }
    return {
        "Image": box.image,
        "Entrypoint": list(_ENTRY),
        "Cmd": [],
        "User": f"{box.uid}:{box.uid}",
        "WorkingDir": "/",
        "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
        "Hostname": "sandbox",
        "Labels": dict(box.labels),
        "NetworkDisabled": True,
        "Healthcheck": {"Test": ["NONE"]},
        # An engine that stops waits for nobody.
        "StopSignal": "SIGKILL",
        "HostConfig": host,
    }


def overlay(volume: Volume, labels: Mapping[str, str]) -> dict[str, Any]:
    """The engine's request for a volume that it mounts as an overlay."""
    options = f"nosuid,nodev,{'ro,' if volume.readonly else ''}{volume.options}"
    return {
        "name": volume.name,
        "driver": "local",
        "driver_opts": {"type": "overlay", "device": "overlay", "o": options},
        "labels": dict(labels),
    }


def _tmpfs(limits: Limits) -> str:
    size = min(limits.disk_bytes, max(_TMP_LEAST_BYTES, limits.memory_bytes // 2))
    return f"rw,nosuid,nodev,exec,size={size},nr_inodes={_TMP_INODES},mode=1777"


def _mounts(box: Box) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "Type": "volume",
            "Source": volume.name,
            "Target": volume.target,
            # A read-only one is mounted so by itself, without an upper layer. If the runtime made it so once more, it would forget
            # the other restrictions.
            # An image's own files at that place would be copied into it.
            "VolumeOptions": {"NoCopy": True},
        }
        for volume in box.volumes
    ]
    found.extend(
        {
            "Type": "bind",
            "Source": str(shown.source),
            "Target": shown.target,
            "ReadOnly": True,
            # What is mounted below it on this host would be writable inside, and is not what was named.
            "BindOptions": {"Propagation": "rprivate", "NonRecursive": True},
        }
        for shown in box.shown
    )
    return found


def _ulimits(limits: Limits) -> list[dict[str, Any]]:
    values = {
        "core": _CORE_BYTES,
        "fsize": limits.disk_bytes,
        "memlock": 1 << 20,
        "msgqueue": 0,
        "nofile": _NOFILE,
        "rtprio": 0,
        "sigpending": 1024,
    }
    return [{"Name": name, "Soft": value, "Hard": value} for name, value in values.items()]
