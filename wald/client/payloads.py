"""Payloads of requests, from Python values and from JSON lines."""

from __future__ import annotations

import base64
import codecs
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import accumulate, repeat
from typing import Any

from wald.errors import InvalidInput
from wald.format.protocol import FRAME_MAX_BYTES
from wald.format.records import check_not_before, encode_columns, not_before, with_not_before
from wald.format.times import nanoseconds, require_nanoseconds, timestamp_ns

_FORMS: Mapping[str, tuple[str, Callable[[str], bytes]]] = {  # by the suffix of a field with non-text bytes
    "_hex": ("hexadecimal", bytes.fromhex),
    "_base64": ("base64", partial(base64.b64decode, validate=True)),
}
_FIELDS = frozenset(
    [f"{name}{form}" for name in ("value", "key") for form in ("", *_FORMS)]
    + ["time", "event_time_ns", "not_before", "headers"]
)
_ASSIGNED = frozenset(
    {"sequence", "route", "append_time_ns", "append_time", "event_time", "sender", "terminated"}
)  # assigned by the log; ignored, so that the output of wald read is valid input
_TIME_LIMIT = 1 << 63


class _DuplicateKeys(dict[str, Any]):
    """JSON object with a repeated key, whose last value counts."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else _DuplicateKeys(pairs)


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON value")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_reject_constant)
_dumps = partial(json.dumps, ensure_ascii=False, separators=(",", ":"))

Fields = tuple[bytes, bytes | None, int | None, bytes | None]
"""Value, key, event time and headers."""


def json_payloads(lines: bytes, name: str, number: int, due_ns: int | None, *, bare: bool = False) -> Iterator[bytes]:
    """Encode whole JSON lines, except blank lines; yield the payloads in order.

    Each line is an object of fields or, with ``bare``, a value. ``due_ns`` applies to records without ``not_before``.
    Messages call the first line ``name``:``number``. An invalid line raises InvalidInput after the payloads of earlier
    lines.
    """
    parsed: list[Fields] = []
    message = ""
    for position, line in enumerate(lines.split(b"\n")[:-1], start=number):
        if not line or line.isspace():
            continue
        try:
            parsed.append(_parse_value(line, due_ns) if bare else _parse_fields(line, due_ns))
        except ValueError as error:
            message = f"{name}:{position}: {error}"
            break
    yield from record_payloads(parsed)
    if message:
        raise InvalidInput(message, case="line-is-not-json" if bare else "line-is-not-a-record")


def _decode_json(line: bytes) -> tuple[str, Any]:
    try:
        text = line.removeprefix(codecs.BOM_UTF8).decode()
        return text, _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}: column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None


def _parse_value(line: bytes, due_ns: int | None) -> Fields:
    text, decoded = _decode_json(line)
    value = decoded if isinstance(decoded, str) else text.strip()
    return _decode_field({"value": value}, "value") or b"", None, None, _headers_with_due_time(None, None, due_ns)


def _parse_fields(line: bytes, due_ns: int | None) -> Fields:
    text, fields = _decode_json(line)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    if isinstance(fields, _DuplicateKeys) or isinstance(fields.get("headers"), _DuplicateKeys):
        raise ValueError("duplicate key")
    unknown = fields.keys() - _FIELDS - _ASSIGNED
    if unknown:
        raise ValueError(f"unknown field {min(unknown)!r}; valid fields are {', '.join(sorted(_FIELDS))}")
    if not isinstance(fields.get("value", ""), str):
        fields["value"] = _source_of_value(text)
    if not isinstance(fields.get("key"), str | None):
        raise ValueError("key is not a string")
    key = _decode_field(fields, "key")
    if "time" in fields and "event_time_ns" in fields:
        raise ValueError("time and event_time_ns are mutually exclusive")
    if "event_time_ns" in fields:  # from wald read, always in nanoseconds
        time_ns = _parse_time("event_time_ns", fields["event_time_ns"])
    else:
        time_ns = _parse_time("time", fields.get("time"), require_nanoseconds)
    own_due_ns = _parse_time("not_before", fields.get("not_before"), check_not_before)
    headers = _headers_with_due_time(fields.get("headers"), own_due_ns, due_ns)
    return _decode_field(fields, "value") or b"", key, time_ns, headers


def _source_of_value(line: str) -> str:
    """Return the source text of the field "value" in a JSON object."""
    rest = line[line.index("{") + 1 :]
    while True:
        name, end = _DECODER.raw_decode(rest.lstrip())
        rest = rest.lstrip()[end:].lstrip().removeprefix(":").lstrip()
        _, end = _DECODER.raw_decode(rest)
        if name == "value":
            return rest[:end]
        rest = rest[end:].lstrip().removeprefix(",")


def _decode_field(fields: dict[str, Any], name: str) -> bytes | None:
    forms = [form for form in ("", *_FORMS) if name + form in fields]
    if len(forms) > 1:
        raise ValueError(f"{' and '.join(name + form for form in forms)} are mutually exclusive")
    form = forms[0] if forms else ""
    value: Any = fields.get(name + form)
    try:
        if form:
            return _FORMS[form][1](value)
        return None if value is None else value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} contains half of a surrogate pair") from None
    except (ValueError, TypeError):
        raise ValueError(f"{name}{form} is not {_FORMS[form][0]}") from None


def _parse_time(name: str, time: object, check: Callable[[int], int] | None = None) -> int | None:
    """Parse a time into nanoseconds. ``check`` rejects numbers in a wrong unit."""
    if time is None:
        return None
    time_ns = time
    if isinstance(time, str):
        try:
            time_ns = timestamp_ns(time)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    if isinstance(time_ns, bool) or not isinstance(time_ns, int) or not -_TIME_LIMIT <= time_ns < _TIME_LIMIT:
        raise ValueError(f"{name} {time_ns!r} is not a time in ns since 1970 that fits in 64 bits")
    return time_ns if check is None or isinstance(time, str) else check(time_ns)


def _headers_with_due_time(headers: object, own_due_ns: int | None, due_ns: int | None) -> bytes | None:
    """Encode headers. The due time is ``own_due_ns`` or, without it, the later of the header's and ``due_ns``."""
    if not isinstance(headers, dict | None) or not all(isinstance(value, str) for value in (headers or {}).values()):
        raise ValueError("headers is not a JSON object with string values")
    encoded = None if headers is None else encode_headers(headers)
    if own_due_ns is None and due_ns is not None:
        own_due_ns = max(due_ns, not_before(encoded))
    return encoded if own_due_ns is None else encode_headers(with_not_before(headers, own_due_ns))


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Encode headers for storage. Raise ValueError for half of a surrogate pair."""
    try:
        return _dumps(headers).encode()
    except UnicodeEncodeError:
        raise ValueError("headers contain half of a surrogate pair") from None


_FIXED_BYTES = 256  # maximum overhead of a payload, including the gate's additions
_RECORD_BYTES = 24  # overhead of a record: a time, three offsets, validity bits

Value = bytes | str
"""Text is stored as UTF-8."""

Time = datetime | int
"""Datetime (local time if it has no zone), or nanoseconds since 1970."""


def encode_values(
    values: Sequence[Value],
    *,
    keys: Sequence[Value | None] | None = None,
    times: Sequence[Time | None] | None = None,
    headers: Sequence[Mapping[str, str] | None] | None = None,
    not_before: Sequence[Time | None] | None = None,
) -> Iterator[bytes]:
    """Encode the arguments of ``Producer.send``. Invalid arguments raise InvalidInput before the iteration."""
    if isinstance(values, bytes | str):
        raise InvalidInput("values must be a list of values, not a single value", case="values-are-not-a-list")
    for name, column in {"keys": keys, "times": times, "headers": headers, "not_before": not_before}.items():
        if isinstance(column, bytes | str):
            raise InvalidInput(
                f"{name} must be a list of values, not a single value", case="column-is-not-a-list", name=name
            )
        if column is not None and len(column) != len(values):
            raise InvalidInput(
                f"values has {len(values)} entries, but {name} has {len(column)}",
                case="unequal-lengths",
                name=name,
            )
    encoded = None
    if headers is not None or not_before is not None:
        absent = repeat(None)
        pairs = zip(absent if headers is None else headers, absent if not_before is None else not_before, strict=False)
        encoded = [_as_json(*pair) for pair in pairs]
    return column_payloads(
        list(map(_as_bytes, values)),
        keys=None if keys is None else [None if key is None else _as_bytes(key) for key in keys],
        times_ns=None if times is None else [None if time is None else _time_ns(time) for time in times],
        headers=encoded,
    )


def record_payloads(records: Sequence[Fields]) -> Iterator[bytes]:
    """Split records as :func:`column_payloads` does; a column without an entry is left out."""
    if records:
        values, *columns = zip(*records, strict=True)
        keys, times_ns, headers = (each if any(entry is not None for entry in each) else None for each in columns)
        yield from column_payloads(values, keys=keys, times_ns=times_ns, headers=headers)


def column_payloads(
    values: Sequence[bytes],
    *,
    keys: Sequence[bytes | None] | None = None,
    times_ns: Sequence[int | None] | None = None,
    headers: Sequence[bytes | None] | None = None,
) -> Iterator[bytes]:
    """Split records into payloads of up to :data:`FRAME_MAX_BYTES`, or of one longer record.

    In each payload, either all records have a time or none does.
    """
    lengths = [_RECORD_BYTES + len(value) for value in values]
    for column in (keys, headers):
        if column is not None:
            lengths = [length + len(entry or b"") for length, entry in zip(lengths, column, strict=True)]
    ends = list(accumulate(lengths))
    start = start_bytes = 0
    while start < len(ends):
        end = max(start + 1, bisect_right(ends, start_bytes + FRAME_MAX_BYTES - _FIXED_BYTES, start))
        times = None
        if times_ns is not None:
            has_time = times_ns[start] is not None
            end = next((index for index in range(start, end) if (times_ns[index] is not None) != has_time), end)
            times = [time_ns for time_ns in times_ns[start:end] if time_ns is not None]
        yield encode_columns(
            values[start:end],
            keys=None if keys is None else keys[start:end],
            times_ns=times or None,
            headers=None if headers is None else headers[start:end],
        )
        start, start_bytes = end, ends[end - 1]


def _as_bytes(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InvalidInput(f"a value or key is {type(value).__name__}, not bytes or str", case="neither-bytes-nor-text")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"text that UTF-8 cannot encode: {error.reason}", case="text-without-utf-8") from None


def _time_ns(time: object, check: Callable[[int], int] = require_nanoseconds) -> int:
    time_ns: object = time
    if isinstance(time, datetime):
        with suppress(OverflowError, ValueError):  # the year in UTC is outside 1 to 9999
            time_ns = nanoseconds(time)
    if isinstance(time_ns, bool) or not isinstance(time_ns, int) or not -_TIME_LIMIT <= time_ns < _TIME_LIMIT:
        raise InvalidInput(f"time must be a datetime or 64-bit nanoseconds, not {time!r}", case="time-is-not-valid")
    try:
        return time_ns if isinstance(time, datetime) else check(time_ns)
    except ValueError as error:
        raise InvalidInput(
            str(error), case="due-time-is-not-valid" if check is check_not_before else "time-is-not-valid"
        ) from None


def _as_json(headers: object, due: Time | None) -> bytes | None:
    if headers is None and due is None:
        return None
    mapping = {} if headers is None else headers
    if not isinstance(mapping, Mapping) or not all(isinstance(part, str) for pair in mapping.items() for part in pair):
        raise InvalidInput(f"headers {headers!r} are not a mapping of str to str", case="headers-are-not-a-mapping")
    fields = dict(mapping) if due is None else with_not_before(mapping, _time_ns(due, check_not_before))
    return _as_bytes(_dumps(fields))
