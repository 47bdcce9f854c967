"""Times as text in UTC, and as nanoseconds since 1970; neither the locale nor the zone of the machine matters."""

from __future__ import annotations

from datetime import UTC, datetime

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def utc(time_ns: int, digits: int = 0) -> str:
    """A time as text (RFC 3339), with so many ``digits`` of the second's fraction; what follows them is cut off.

    >>> utc(1_700_000_000_000_000_001), utc(1_700_000_000_000_000_001, 9)
    ('2023-11-14T22:13:20Z', '2023-11-14T22:13:20.000000001Z')
    """
    seconds, fraction = divmod(time_ns, 1_000_000_000)
    fraction_text = f".{fraction:09d}"[: digits + 1] if digits else ""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}{fraction_text}Z"


def nanoseconds(moment: datetime) -> int:
    """A time in nanoseconds since 1970; one without a time zone is local time."""
    elapsed = moment.astimezone(UTC) - _EPOCH
    return ((elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds) * 1000
