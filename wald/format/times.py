"""Times as text and as nanoseconds since 1970, and the times and positions that people type (docs/reading.md)."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime, time, timedelta, timezone

from wald.errors import InvalidInput

TIME_EXAMPLES = ("2026-11-21T10:00:00Z", "14:00", "yesterday", "5m")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Compiled at first use, as few commands need them.
_RELATIVE = r"(?a:(?:-(?!.*ago))?(?P<number>\d{1,9}(?:\.\d{1,6})?) ?(?P<unit>[smhdw])(?: ago)?)"
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_CLOCK_TIME = r"(?P<clock>\d\d:\d\d(?::\d\d(?:\.\d+)?)?)"
_DAY = rf"(?a:(?P<name>today|yesterday)(?: {_CLOCK_TIME})?|{_CLOCK_TIME.replace('clock', 'alone')})"
_RFC_3339 = (
    r"(?a:(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):([0-5]\d|60)(?:\.(\d+))?"
    r"(?:[Zz]|([+-])([01]\d|2[0-3]):([0-5]\d)))"
)
_OTHER_UNITS_MAX = 10**17  # March 1973 in ns; in the future in s, ms and µs
_LATEST_NS = 253_402_300_800 * 10**9  # the year 10000, which datetime does not support


def utc(time_ns: int, digits: int = 0) -> str:
    """Format a time as in RFC 3339, with ``digits`` fractional digits.

    >>> utc(1_700_000_000_000_000_001), utc(1_700_000_000_000_000_001, 9)
    ('2023-11-14T22:13:20Z', '2023-11-14T22:13:20.000000001Z')
    """
    seconds, fraction = divmod(time_ns, 1_000_000_000)
    fraction_text = f".{fraction:09d}"[: digits + 1] if digits else ""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}{fraction_text}Z"


def utc_or_unknown(time_ns: object) -> str:
    """Format a time from a ledger line, which may be invalid."""
    if isinstance(time_ns, int) and 0 <= time_ns < _LATEST_NS:
        return utc(time_ns)
    return "an unknown time"


def nanoseconds(moment: datetime) -> int:
    """Convert a time to nanoseconds since 1970. A time without a zone is local."""
    elapsed = moment.astimezone(UTC) - _EPOCH
    return ((elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds) * 1000


def timestamp_ns(text: str) -> int:
    """Parse an RFC 3339 time with a zone, or raise ValueError.

    A leap second counts as the next second; digits after the ninth are ignored.

    >>> timestamp_ns("2026-11-21T10:00:00.000000001+01:00"), timestamp_ns("2016-12-31t23:59:60z")
    (1795251600000000001, 1483228800000000000)
    """
    match = re.fullmatch(_RFC_3339, text)
    invalid = ValueError(f"{text!r} is not like 2026-11-21T10:00:00Z, with a zone")
    if match is None:
        raise invalid
    try:
        year, month, day, hour, minute, second = map(int, match.groups()[:6])
        fraction, sign, hours, minutes = match.groups()[6:]
        offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0))
        zone = timezone(-offset if sign == "-" else offset)
        whole_ns = nanoseconds(datetime(year, month, day, hour, minute, tzinfo=zone)) + second * 10**9
    except (ValueError, OverflowError):  # no such day, or out of range
        raise invalid from None
    return whole_ns + int((fraction or "")[:9].ljust(9, "0"))


def require_nanoseconds(number: int) -> int:
    """Return an event time unchanged, or raise ValueError if it seems to have another unit."""
    if 0 < number <= _OTHER_UNITS_MAX:
        advice = "write the time like 2026-11-21T10:00:00Z"
        raise ValueError(f"time {number} ns is before March 1973; if the unit is not ns, {advice}")
    return number


def parse_time(text: str, now: datetime) -> datetime:
    """Parse a time that a user typed at ``now``, whose zone defines "today", or raise ValueError.

    A result without a zone is local time, as for :func:`nanoseconds`. A local time that occurs twice means the
    first; one that the clock skips is moved back by the skipped period.

    >>> now = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)
    >>> [parse_time(text, now).isoformat() for text in ("5m", "yesterday 14:00")]
    ['2026-11-21T09:55:00+00:00', '2026-11-20T14:00:00']
    """
    stripped = text.strip()
    try:
        if stripped == "now":
            result = now
        elif ago := re.fullmatch(_RELATIVE, stripped):
            result = now.astimezone(UTC) - timedelta(**{_UNITS[ago["unit"]]: float(ago["number"])})
        elif day := re.fullmatch(_DAY, stripped):
            date = now.date() - timedelta(days=day["name"] == "yesterday")
            result = datetime.combine(date, time.fromisoformat(day["clock"] or day["alone"] or "00:00"))
        else:
            result = datetime.fromisoformat(stripped)
        nanoseconds(result)  # may be out of range in UTC
    except OverflowError:
        raise ValueError(f"not a time: {text!r}") from None
    return result


def is_relative(text: str) -> bool:
    """Return True if the time counts back from now, like "5m"."""
    return re.fullmatch(_RELATIVE, text.strip()) is not None


def is_absolute(text: str) -> bool:
    """Return True if ``text`` means the same time whenever it is parsed."""
    text = text.strip()
    return text != "now" and not is_relative(text) and re.fullmatch(_DAY, text) is None


def parse_time_option(option: str, text: str, now: datetime, examples: Sequence[str] = TIME_EXAMPLES) -> datetime:
    if text.isdecimal():
        raise InvalidInput(
            f"{option} {text}: a number alone is a sequence, not a time",
            case="not-a-time",
            option=option,
            examples=examples,
        )
    with suppress(ValueError):
        return parse_time(text, now)
    raise InvalidInput(f"{option} {text}: not a time", case="not-a-time", option=option, examples=examples)


def parse_position_option(option: str, text: str, now: datetime, names: Collection[str] = ()) -> int | datetime:
    """Parse a sequence or a time. ``names`` are further examples for the error message."""
    if text.isdecimal() and text.isascii():
        return int(text)
    with suppress(ValueError):
        return parse_time(text, now)
    examples = "250", *TIME_EXAMPLES, *names
    raise InvalidInput(
        f"{option} {text}: neither a sequence nor a time", case="not-a-time", option=option, examples=examples
    )
