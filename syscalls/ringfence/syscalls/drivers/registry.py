"""Finds a driver by the name that the kernel file gives: one that comes along, or one that another package registers."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, cast

from ringfence.syscalls.drivers.protocol import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfence.syscalls.drivers.protocol import ObjectDriver, Options

GROUP: Final = "ringfence.drivers"
"""Entry points of this group are drivers: each names a callable that takes the options and gives a driver."""


class BadOptions(DriverError):
    """The operator's options for a driver are wrong; `str()` says which and how to mend them."""


def open_driver(name: str, options: Options) -> ObjectDriver:
    """Make a driver; nothing is connected yet.

    Args:
        name: `s3`, or an entry point of the group `ringfence.drivers`.
        options: the operator's, with secrets filled in.

    Raises:
        BadOptions: there is no such driver, what it needs is not installed, or it refuses its options.
    """
    if name == "s3":
        from ringfence.syscalls.drivers.s3 import S3Objects  # noqa: PLC0415 - imports an extra

        return S3Objects(options)
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        known = sorted({"s3", *(point.name for point in entry_points(group=GROUP))})
        raise BadOptions(f"no driver `{name}` is installed; there are: {', '.join(known)}")
    try:
        make = cast("Callable[[Options], ObjectDriver]", found[0].load())
        return make(options)
    except BadOptions:
        raise
    except Exception as error:  # a foreign driver must not stop the kernel
        raise BadOptions(f"the driver `{name}` can't be used: {type(error).__name__}") from error
