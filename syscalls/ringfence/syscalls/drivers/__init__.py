"""Drivers of resources whose changes can be taken back: the public protocol, and those that come along.

A driver says how things of one kind of resource stand (`describe`), keeps one of them (`snapshot`), tells whether it still
stands so (`verify`) and brings it back (`restore`). A driver of objects does the work of the `object.*` calls beside that. See
docs/drivers.md for a complete one.
"""

from __future__ import annotations

from ringfence.syscalls.drivers.protocol import (
    ABSENT,
    Changed,
    Driver,
    DriverError,
    Listed,
    ObjectDriver,
    Objects,
    Options,
    Page,
    Snapshot,
    Stat,
)
from ringfence.syscalls.drivers.registry import GROUP, BadOptions, open_driver

__all__ = [
    "ABSENT",
    "GROUP",
    "BadOptions",
    "Changed",
    "Driver",
    "DriverError",
    "Listed",
    "ObjectDriver",
    "Objects",
    "Options",
    "Page",
    "Snapshot",
    "Stat",
    "open_driver",
]
