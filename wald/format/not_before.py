"""When a record is due: the header ``wald.not-before``, before which no work group delivers it; others ignore it."""

from __future__ import annotations

import json
from collections.abc import Mapping

HEADER = "wald.not-before"
_LIMIT_NS = 1 << 63


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


def with_not_before(headers: Mapping[str, str] | None, due_ns: int) -> dict[str, str]:
    """The same headers for a record that is due then, in ns since 1970."""
    return {**(headers or {}), HEADER: str(due_ns)}
