"""Tells a service manager how far the kernel is: one datagram to `NOTIFY_SOCKET`, as systemd's sd_notify does."""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send a state such as `READY=1`. Without a service manager that asks, or when it is gone, nothing happens."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place.startswith(("/", "@")):
        return
    address = "\0" + place[1:] if place.startswith("@") else place
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.connect(address)
            sender.send(state.encode())
    except OSError as error:
        log.warning("the service manager can't be told `%s`: %s", state, error)
