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
from itertools import accumulate, groupby
from typing import Any

from wald.errors import InvalidInput
from wald.format.protocol import FRAME_MAX_BYTES
from wald.format.records import check_not_before, encode_columns, not_before, with_not_before
from wald.format.times import nanoseconds, require_nanoseconds, timestamp_ns

_FORMS: Mapping[str, tuple[str, Callable[[str], bytes]]] = {  # suffixes of fields with bytes that are not text
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
    found = dict(pairs)
    return found if len(found) == len(pairs) else _DuplicateKeys(pairs)


def _no_json(constant: str) -> None:
    raise ValueError(f"it has {constant}")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_json)
_dumps = partial(json.dumps, ensure_ascii=False, separators=(",", ":"))


_Record = tuple[bytes, bytes | None, int | None, bytes | None]
"""Value, key, event time and headers."""


def json_payloads(lines: bytes, name: str, number: int, due_ns: int | None, *, bare: bool = False) -> Iterator[bytes]:
    """Encode whole JSON lines, except blank lines; yield the payloads in order.

    Each line is an object of fields or, with ``bare``, only a value. ``due_ns`` applies to records without
    ``not_before``. Messages call the first line ``name``:``number``. An invalid line raises InvalidInput after the
    payloads of the lines before it.
    """
    parsed: list[_Record] = []
    wrong = ""
    for position, line in enumerate(lines.split(b"\n")[:-1], start=number):
        if not line or line.isspace():
            continue
        try:
            parsed.append(_bare(line, due_ns) if bare else _fields(line, due_ns))
        except ValueError as error:
            wrong = f"{name}:{position}: {error}"
            break
    for timed, records in groupby(parsed, lambda record: record[2] is not None):
        values, keys, times, headers = zip(*records, strict=True)
        yield from column_payloads(
            values,
            keys=keys if any(key is not None for key in keys) else None,
            times_ns=times if timed else None,
            headers=headers if any(header is not None for header in headers) else None,
        )
    if wrong:
        raise InvalidInput(wrong, case="line-is-not-json" if bare else "line-is-not-a-record")


def _decoded(line: bytes) -> tuple[str, Any]:
    try:
        text = line.removeprefix(codecs.BOM_UTF8).decode()
        return text, _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}: column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None


def _bare(line: bytes, due_ns: int | None) -> _Record:
    text, found = _decoded(line)
    value = found if isinstance(found, str) else text.strip()
    return _bytes({"value": value}, "value") or b"", None, None, _headers(None, None, due_ns)


def _fields(line: bytes, due_ns: int | None) -> _Record:
    text, fields = _decoded(line)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    if isinstance(fields, _DuplicateKeys) or isinstance(fields.get("headers"), _DuplicateKeys):
        raise ValueError("duplicate key")
    unknown = fields.keys() - _FIELDS - _ASSIGNED
    if unknown:
        raise ValueError(f"unknown field {min(unknown)!r}; there are {', '.join(sorted(_FIELDS))}")
    if not isinstance(fields.get("value", ""), str):
        fields["value"] = _value_as_sent(text)
    if not isinstance(fields.get("key"), str | None):
        raise ValueError("key is not a string")
    key = _bytes(fields, "key")
    if "time" in fields and "event_time_ns" in fields:
        raise ValueError("time and event_time_ns are mutually exclusive")
    if "event_time_ns" in fields:  # from wald read, always in nanoseconds
        time_ns = _time("event_time_ns", fields["event_time_ns"])
    else:
        time_ns = _time("time", fields.get("time"), require_nanoseconds)
    headers = _headers(fields.get("headers"), _time("not_before", fields.get("not_before"), check_not_before), due_ns)
    return _bytes(fields, "value") or b"", key, time_ns, headers


def _value_as_sent(line: str) -> str:
    """Return the source text of the field "value" in a JSON object."""
    rest = line[line.index("{") + 1 :]
    while True:
        found, end = _DECODER.raw_decode(rest.lstrip())
        rest = rest.lstrip()[end:].lstrip().removeprefix(":").lstrip()
        _, end = _DECODER.raw_decode(rest)
        if found == "value":
            return rest[:end]
        rest = rest[end:].lstrip().removeprefix(",")


def _bytes(fields: dict[str, Any], name: str) -> bytes | None:
    """Decode the bytes of a field; return None without the field."""
    forms = [form for form in ("", *_FORMS) if name + form in fields]
    if len(forms) > 1:
        raise ValueError(f"{' and '.join(name + form for form in forms)} are mutually exclusive")
    form = forms[0] if forms else ""
    given: Any = fields.get(name + form)
    try:
        if form:
            return _FORMS[form][1](given)
        return None if given is None else given.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} has half of a surrogate pair") from None
    except (ValueError, TypeError):
        raise ValueError(f"{name}{form} is not {_FORMS[form][0]}") from None


def _time(name: str, given: object, check: Callable[[int], int] | None = None) -> int | None:
    """Parse a time into nanoseconds. ``check`` rejects numbers in a wrong unit."""
    if given is None:
        return None
    time_ns = given
    if isinstance(given, str):
        try:
            time_ns = timestamp_ns(given)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    if isinstance(time_ns, bool) or not isinstance(time_ns, int) or not -_TIME_LIMIT <= time_ns < _TIME_LIMIT:
        raise ValueError(f"{name} {time_ns!r} is not a 64-bit integer of ns since 1970")
    return time_ns if check is None or isinstance(given, str) else check(time_ns)


def _headers(given: object, own_due_ns: int | None, due_ns: int | None) -> bytes | None:
    """Encode headers with a due time: the field's or, without a field, the later of the header's and ``due_ns``."""
    if given is not None and (
        not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values())
    ):
        raise ValueError("headers is not a JSON object with string values")
    encoded = None if given is None else encoded_headers(given)
    if own_due_ns is None and due_ns is not None:
        own_due_ns = max(due_ns, not_before(encoded))
    return encoded if own_due_ns is None else encoded_headers(with_not_before(given, own_due_ns))


def encoded_headers(headers: Mapping[str, str]) -> bytes:
    """Encode headers for storage. Raise ValueError for half of a surrogate pair."""
    try:
        return _dumps(headers).encode()
    except UnicodeEncodeError:
        raise ValueError("headers has half of a surrogate pair") from None


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
        raise InvalidInput("values must be a sequence, not a single value", case="values-are-not-a-list")
    columns = {"keys": keys, "times": times, "headers": headers, "not_before": not_before}
    for name, column in columns.items():
        if isinstance(column, bytes | str):
            raise InvalidInput(f"{name} must be a sequence, not a single value", case="column-is-not-a-list", name=name)
        if column is not None and len(column) != len(values):
            raise InvalidInput(
                f"{len(values)} values but {len(column)} {name}", case="column-of-another-length", name=name
            )
    encoded = None
    if headers is not None or not_before is not None:
        nothing = [None] * len(values)
        encoded = list(
            map(_as_json, nothing if headers is None else headers, nothing if not_before is None else not_before)
        )
    return column_payloads(
        list(map(_as_bytes, values)),
        keys=None if keys is None else [None if key is None else _as_bytes(key) for key in keys],
        times_ns=None if times is None else [None if time is None else _time_ns(time) for time in times],
        headers=encoded,
    )


def column_payloads(
    values: Sequence[bytes],
    *,
    keys: Sequence[bytes | None] | None = None,
    times_ns: Sequence[int | None] | None = None,
    headers: Sequence[bytes | None] | None = None,
) -> Iterator[bytes]:
    """Split records into payloads of up to :data:`FRAME_MAX_BYTES`, or of one longer record.

    In each payload, all records have a time or none does.
    """
    lengths = [_RECORD_BYTES + len(value) for value in values]
    for column in (keys, headers):
        if column is not None:
            lengths = [length + len(entry or b"") for length, entry in zip(lengths, column, strict=True)]
    ends = list(accumulate(lengths))
    start = before = 0
    while start < len(ends):
        end = max(start + 1, bisect_right(ends, before + FRAME_MAX_BYTES - _FIXED_BYTES, start))
        times = None
        if times_ns is not None:
            untimed = times_ns[start] is None
            end = next((at for at in range(start, end) if (times_ns[at] is None) != untimed), end)
            times = [time_ns for time_ns in times_ns[start:end] if time_ns is not None]
        yield encode_columns(
            values[start:end],
            keys=None if keys is None else keys[start:end],
            times_ns=times or None,
            headers=None if headers is None else headers[start:end],
        )
        start, before = end, ends[end - 1]


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
        raise InvalidInput(f"time {time!r} is not a datetime or nanoseconds within 64 bits", case="time-is-not-valid")
    try:
        return time_ns if isinstance(time, datetime) else check(time_ns)
    except ValueError as error:
        raise InvalidInput(
            str(error),
            case="due-time-is-not-valid" if check is check_not_before else "time-is-not-valid",
        ) from None


def _as_json(headers: object, due: Time | None) -> bytes | None:
    if headers is None and due is None:
        return None
    given = {} if headers is None else headers
    if not isinstance(given, Mapping) or not all(isinstance(part, str) for pair in given.items() for part in pair):
        raise InvalidInput(f"headers {headers!r} are not a mapping of str to str", case="headers-are-not-a-mapping")
    every = dict(given) if due is None else with_not_before(given, _time_ns(due, check_not_before))
    return _as_bytes(_dumps(every))
