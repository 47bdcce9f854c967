"""A time as the archive shows it: UTC, to the nanosecond, the same whatever the locale and the time zone."""

from __future__ import annotations

from datetime import UTC, datetime


def iso(time_ns: int) -> str:
    """A moment, ns since 1970.

    >>> iso(1_700_000_000_000_000_001)
    '2023-11-14T22:13:20.000000001Z'
    """
    seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{nanoseconds:09d}Z"
