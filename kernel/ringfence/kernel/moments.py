"""Times as people and scripts read them."""

from __future__ import annotations

from datetime import UTC, datetime


def short_time(moment: datetime) -> str:
    """A time to the second, RFC 3339 in UTC."""
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
