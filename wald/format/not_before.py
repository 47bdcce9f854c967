"""When a record is due: the header ``wald.not-before``, before which no work group delivers it; others ignore it."""

from __future__ import annotations

import json
from collections.abc import Mapping

HEADER = "wald.not-before"
_LIMIT_NS = 1 << 63
_EARLIEST_NS = 10**18


def not_before(headers: bytes | None) -> int:
    """When a record with these headers is due, in ns since 1970; 0 if they do not say, or no time within 64 bits.

    >>> not_before(b'{"wald.not-before": "1700000000000000000"}')
    1700000000000000000
    """
    if headers is None or HEADER.encode() not in headers:
        return 0
    try:
        due_ns = int(json.loads(headers)[HEADER])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):  # whatever a producer may have sent
        return 0
    return due_ns if -_LIMIT_NS <= due_ns < _LIMIT_NS else 0


def check_number(due_ns: int) -> int:
    """Return a number that a producer gives, if it can be meant as ns since 1970.

    Raises:
        ValueError: in ns it would be long past; it may be in seconds, milliseconds or microseconds.

    >>> check_number(1_700_000_000)
    Traceback (most recent call last):
    ...
    ValueError: not_before 1700000000 is before 2001-09-09 in ns since 1970, so it is in another unit
    """
    if due_ns < _EARLIEST_NS:
        raise ValueError(f"not_before {due_ns} is before 2001-09-09 in ns since 1970, so it is in another unit")
    return due_ns


def with_not_before(headers: Mapping[str, str] | None, due_ns: int) -> dict[str, str]:
    """The same headers for a record that is due then, in ns since 1970."""
    return {**(headers or {}), HEADER: str(due_ns)}
