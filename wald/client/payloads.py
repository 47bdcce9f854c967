"""What a producer sends, cut into payloads of one request each: lines, or values with keys, times and headers."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import accumulate, groupby

from wald.errors import InvalidInput
from wald.format.protocol import Publish, parse_request
from wald.format.times import nanoseconds, require_nanoseconds

FRAME_MAX_BYTES = 128 << 10  # of whole records in one request; a unix socket holds about twice that
_FIXED_BYTES = 256  # of columns besides their records: count, last offsets, padding, and what the gate may add; at most
_RECORD_BYTES = 24  # of a record besides its bytes: a time, three offsets, its bits
_TIME_LIMIT_NS = 1 << 63

Value = bytes | str
"""Text is stored as UTF-8."""

Time = datetime | int
"""A moment (one without a time zone is local time, as everywhere in Python), or nanoseconds since 1970."""


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
    keys: Sequence[Value | None] | None = None,
    times: Sequence[Time | None] | None = None,
    headers: Sequence[Mapping[str, str] | None] | None = None,
    not_before: Sequence[Time | None] | None = None,
) -> Iterator[bytes]:
    """The records as payloads, as :func:`encode_columns` makes them.

    Raises:
        InvalidInput: a column has another length than ``values``, or an entry is of another type or cannot be stored.
    """
    if isinstance(values, bytes | str):
        raise InvalidInput("values is a single value", case="values-are-not-a-list")
    columns = {"keys": keys, "times": times, "headers": headers, "not_before": not_before}
    for name, column in columns.items():
        if isinstance(column, bytes | str):
            raise InvalidInput(f"{name} is a single value", case="column-is-not-a-list", name=name)
        if column is not None and len(column) != len(values):
            raise InvalidInput(
                f"{len(values)} values and {len(column)} {name}", case="column-of-another-length", name=name
            )
    nothing = [None] * len(values)
    encoded = None
    if headers is not None or not_before is not None:
        dues = nothing if not_before is None else not_before
        encoded = list(map(_as_json, nothing if headers is None else headers, dues))
    return encode_columns(
        list(map(_as_bytes, values)),
        keys=None if keys is None else [None if key is None else _as_bytes(key) for key in keys],
        times_ns=None if times is None else list(map(_event_time_ns, times)),
        headers=encoded,
    )


def encode_columns(
    values: Sequence[bytes],
    *,
    keys: Sequence[bytes | None] | None = None,
    times_ns: Sequence[int | None] | None = None,
    headers: Sequence[bytes | None] | None = None,
) -> Iterator[bytes]:
    """Yield the records as ``columns`` payloads: as many as fit into :data:`FRAME_MAX_BYTES`, and at least one each.

    Within a payload, either all records have a time or none does.
    """
    from wald.format.columns import encode

    for part in _parts(values, times_ns, keys, headers):
        times = None if times_ns is None else [time_ns for time_ns in times_ns[part] if time_ns is not None]
        yield encode(
            values[part],
            keys=None if keys is None else keys[part],
            times_ns=times or None,
            headers=None if headers is None else headers[part],
        )


def records_in(line: bytes, payload: bytes | memoryview) -> int:
    """How many records a request carries."""
    from wald.format.columns import decode

    request = parse_request(line)
    if not isinstance(request, Publish):
        return 0
    return decode(memoryview(payload)).count if request.columns else bytes(payload).count(b"\n")


def _parts(
    values: Sequence[bytes], times_ns: Sequence[int | None] | None, *columns: Sequence[bytes | None] | None
) -> Iterator[slice]:
    """Yield the slice of the records for each payload."""
    start = 0
    untimed = [time_ns is None for time_ns in times_ns] if times_ns is not None else [True] * len(values)
    for _, run in groupby(untimed):
        end = start + len(list(run))
        for part in _sized_parts(values[start:end], *(column and column[start:end] for column in columns)):
            yield slice(start + part.start, start + part.stop)
        start = end


def _sized_parts(values: Sequence[bytes], *columns: Sequence[bytes | None] | None) -> Iterator[slice]:
    lengths = [_RECORD_BYTES + len(value) for value in values]
    for column in columns:
        if column is not None:
            lengths = [length + len(entry or b"") for length, entry in zip(lengths, column, strict=True)]
    ends = list(accumulate(lengths))
    start = before = 0
    while start < len(ends):
        end = max(start + 1, bisect_right(ends, before + FRAME_MAX_BYTES - _FIXED_BYTES, start))
        yield slice(start, end)
        start, before = end, ends[end - 1]


def _as_bytes(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidInput(f"a value or key of type {type(value).__name__}", case="neither-bytes-nor-text")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"text that UTF-8 cannot encode: {error.reason}", case="text-without-utf-8") from None


def _time_ns(time: object) -> int:
    time_ns: object = time
    if isinstance(time, datetime):
        with suppress(OverflowError, ValueError):  # in UTC its year is none from 1 to 9999
            time_ns = nanoseconds(time)
    if isinstance(time_ns, bool) or not isinstance(time_ns, int) or not -_TIME_LIMIT_NS <= time_ns < _TIME_LIMIT_NS:
        raise InvalidInput(f"time {time!r} is not a datetime or nanoseconds within 64 bits", case="time-is-not-valid")
    return time_ns


def _event_time_ns(time: object) -> int | None:
    if time is None:
        return None
    time_ns = _time_ns(time)
    if not isinstance(time, datetime):
        try:
            require_nanoseconds(time_ns)
        except ValueError as error:
            raise InvalidInput(f"time {error}", case="event-time-is-not-valid") from None
    return time_ns


def _due_ns(due: Time) -> int:
    from wald.format.not_before import check_number

    due_ns = _time_ns(due)
    if isinstance(due, datetime):
        return due_ns
    try:
        return check_number(due_ns)
    except ValueError as error:
        raise InvalidInput(str(error), case="due-time-is-not-valid") from None


def _as_json(headers: object, due: Time | None) -> bytes | None:
    from wald.format.not_before import with_not_before

    if headers is None and due is None:
        return None
    given = {} if headers is None else headers
    if not isinstance(given, Mapping) or not all(isinstance(part, str) for pair in given.items() for part in pair):
        raise InvalidInput(f"headers {headers!r} are not a mapping of str to str", case="headers-are-not-a-mapping")
    every = dict(given) if due is None else with_not_before(given, _due_ns(due))
    return _as_bytes(json.dumps(every, ensure_ascii=False, separators=(",", ":")))
