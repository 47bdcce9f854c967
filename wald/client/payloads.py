"""What a producer sends, cut into payloads of one request each: lines, or values with keys, times and headers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

from wald.errors import InvalidInput
from wald.format.columns import decode, encode
from wald.format.protocol import Publish, parse_request
from wald.format.times import nanoseconds

FRAME_MAX_BYTES = 128 << 10  # of whole records in one request; a unix socket holds about twice that
_RECORD_BYTES = 64  # what a record takes in a request besides its bytes, at most
_TIME_LIMIT_NS = 1 << 63

Value = bytes | str
"""Text is stored as UTF-8."""

Time = datetime | int
"""A moment (one without a time zone is local time), or nanoseconds since 1970."""


class _Record(NamedTuple):
    value: bytes
    key: bytes | None
    time_ns: int
    headers: bytes | None


def frames(payload: bytes) -> Iterator[bytes | memoryview]:
    """Whole lines of ``payload``, as many as fit into :data:`FRAME_MAX_BYTES`, and at least one."""
    if len(payload) <= FRAME_MAX_BYTES:
        yield payload
        return
    view, start = memoryview(payload), 0
    while start < len(payload):
        end = payload.rfind(b"\n", start, start + FRAME_MAX_BYTES) + 1 or payload.find(b"\n", start) + 1
        yield view[start:end]
        start = end


def encode_values(
    values: Sequence[Value],
    *,
    keys: Sequence[Value | None] | None,
    times: Sequence[Time] | None,
    headers: Sequence[Mapping[str, str] | None] | None,
) -> list[bytes]:
    """The records as ``columns`` payloads, as many as fit into :data:`FRAME_MAX_BYTES` each, and at least one.

    Raises:
        InvalidInput: a column has another length than ``values``, or an entry is of another type or cannot be stored.
    """
    if isinstance(values, bytes | str):
        raise InvalidInput("values is a single value", hint="send(route, [value])")
    for name, column in {"keys": keys, "times": times, "headers": headers}.items():
        if isinstance(column, bytes | str):
            raise InvalidInput(f"{name} is a single value", hint=f"{name}: a list with one for each value")
        if column is not None and len(column) != len(values):
            raise InvalidInput(f"{len(values)} values and {len(column)} {name}", hint=f"{name}: one for each value")
    nothing = [None] * len(values)
    times_ns = [0] * len(values) if times is None else list(map(_time_ns, times))
    records = list(map(_record, values, keys or nothing, times_ns, headers or nothing))

    def payload(part: list[_Record]) -> bytes:
        return encode(
            [record.value for record in part],
            keys=None if keys is None else [record.key for record in part],
            times_ns=None if times is None else [record.time_ns for record in part],
            headers=None if headers is None else [record.headers for record in part],
        )

    return list(map(payload, _parts(records)))


def records_in(line: bytes, payload: bytes | memoryview) -> int:
    """How many records a request carries."""
    request = parse_request(line)
    if not isinstance(request, Publish):
        return 0
    return decode(memoryview(payload)).count if request.columns else bytes(payload).count(b"\n")


def _record(value: Value, key: Value | None, time_ns: int, headers: Mapping[str, str] | None) -> _Record:
    return _Record(
        _as_bytes(value),
        None if key is None else _as_bytes(key),
        time_ns,
        None if headers is None else _as_json(headers),
    )


def _parts(records: list[_Record]) -> Iterator[list[_Record]]:
    start = size = 0
    for number, record in enumerate(records):
        length = _RECORD_BYTES + len(record.value) + len(record.key or b"") + len(record.headers or b"")
        if number > start and size + length > FRAME_MAX_BYTES:
            yield records[start:number]
            start, size = number, 0
        size += length
    if start < len(records):
        yield records[start:]


def _as_bytes(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidInput(f"a value or key of type {type(value).__name__}", hint="give bytes or str")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"text that UTF-8 cannot hold: {error.reason}", hint="give bytes") from None


def _time_ns(time: object) -> int:
    time_ns: object = time
    if isinstance(time, datetime):
        with suppress(OverflowError, ValueError):  # in UTC its year is none from 1 to 9999
            time_ns = nanoseconds(time)
    if isinstance(time_ns, bool) or not isinstance(time_ns, int) or not -_TIME_LIMIT_NS <= time_ns < _TIME_LIMIT_NS:
        raise InvalidInput(f"time {time!r} is not a datetime or nanoseconds within 64 bits", hint="time.time_ns()")
    return time_ns


def _as_json(headers: object) -> bytes:
    if not isinstance(headers, Mapping) or not all(isinstance(part, str) for pair in headers.items() for part in pair):
        raise InvalidInput(f"headers {headers!r} are not a mapping of str to str", hint='{"content-type": "text/csv"}')
    return _as_bytes(json.dumps(dict(headers), ensure_ascii=False, separators=(",", ":")))
