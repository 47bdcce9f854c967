"""The lines that ``wald append`` sends as columns: with a key and a separator, as JSON objects, or with a delay."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import groupby
from typing import Any, NamedTuple

from wald.client.payloads import encode_columns
from wald.errors import InvalidInput
from wald.format.columns import encode
from wald.format.not_before import check_number, not_before, with_not_before
from wald.format.times import nanoseconds

Encode = Callable[[bytes, str, int], Iterator[bytes]]
"""Whole lines, the name of their source and the number of the first of them in it → payloads, in order."""

Due = Callable[[], int]
"""When the lines that are sent now are due, in ns since 1970."""

_FIELDS = frozenset({"value", "value_hex", "key", "key_hex", "time", "event_time_ns", "not_before", "headers"})
_ASSIGNED = frozenset(
    {"sequence", "route", "append_time_ns", "append_time", "event_time", "sender", "terminated"}
)  # written by wald read; the log assigns them
_TIME_LIMIT = 1 << 63


class _Fields(NamedTuple):
    value: bytes
    key: bytes | None
    time_ns: int | None
    headers: bytes | None


def plain_lines(due: Due) -> Encode:
    """A line is a value."""

    def plain(lines: bytes, _name: str, _number: int) -> Iterator[bytes]:
        values = lines.split(b"\n")[:-1]
        yield from encode_columns(values, headers=_due_headers(due, len(values)))

    return plain


def keyed_lines(separator: bytes, due: Due | None) -> Encode:
    """``KEY <separator> VALUE``; a line without the separator has no key."""

    def keyed(lines: bytes, _name: str, _number: int) -> Iterator[bytes]:
        keys: list[bytes | None] = []
        values = []
        for line in lines.split(b"\n")[:-1]:
            key, found, value = line.partition(separator)
            keys.append(key if found else None)
            values.append(value if found else line)
        if due is None:
            yield encode(values, keys=keys)  # hardly larger than the lines, so it need not be cut
        else:
            yield from encode_columns(values, keys=keys, headers=_due_headers(due, len(values)))

    return keyed


def json_lines(due: Due | None) -> Encode:
    """One JSON object per line; the times of its own count too."""
    return lambda lines, name, number: _objects(lines, name, number, None if due is None else due())


def _due_headers(due: Due, count: int) -> list[bytes]:
    """The headers of so many records that are sent now."""
    return [_encoded(with_not_before(None, due()))] * count


def _objects(lines: bytes, name: str, number: int, due_ns: int | None) -> Iterator[bytes]:
    """
    Raises:
        InvalidInput: a line is no JSON object, or has a wrong field; the message has its number. The lines before it
            were yielded.
    """
    parsed = []
    wrong = ""
    for position, line in enumerate(lines.split(b"\n")[:-1], start=number):
        try:
            parsed.append(_fields(line, due_ns))
        except ValueError as error:
            wrong = f"{name}:{position}: {error}"
            break
    # Times are all there or all absent in one payload.
    for timed, records in groupby(parsed, lambda record: record.time_ns is not None):
        values, keys, times, headers = zip(*records, strict=True)
        yield from encode_columns(
            values,
            keys=keys if any(key is not None for key in keys) else None,
            times_ns=times if timed else None,
            headers=headers if any(header is not None for header in headers) else None,
        )
    if wrong:
        raise InvalidInput(wrong, hint='a line is like {"key": "a", "value": "b"}')


def _fields(line: bytes, due_ns: int | None) -> _Fields:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    unknown = fields.keys() - _FIELDS - _ASSIGNED
    if unknown:
        raise ValueError(f"unknown field {min(unknown)!r}; there are {', '.join(sorted(_FIELDS))}")
    key = _bytes(fields, "key")
    if "key" in fields and fields["key"] is not None and not isinstance(fields["key"], str):
        raise ValueError("key is not a string")
    if "time" in fields and "event_time_ns" in fields:
        raise ValueError("time and event_time_ns exclude each other")
    time_ns = _time("time", fields.get("time", fields.get("event_time_ns")))
    headers = _headers(fields.get("headers"), _due(fields.get("not_before")), due_ns)
    return _Fields(_bytes(fields, "value") or b"", key, time_ns, headers)


def _bytes(fields: dict[str, Any], name: str) -> bytes | None:
    if f"{name}_hex" in fields:
        if name in fields:
            raise ValueError(f"{name} and {name}_hex exclude each other")
        try:
            return bytes.fromhex(fields[f"{name}_hex"])
        except (ValueError, TypeError):
            raise ValueError(f"{name}_hex is not hexadecimal") from None
    given = fields.get(name)
    if given is None:
        return None
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} has half of a surrogate pair") from None


def _time(name: str, given: object) -> int | None:
    if given is None:
        return None
    if isinstance(given, str):
        try:
            given = nanoseconds(datetime.fromisoformat(given))
        except (ValueError, OverflowError):
            raise ValueError(f"{name} {given!r} is not like 2026-11-21T10:00:00Z") from None
    if isinstance(given, bool) or not isinstance(given, int) or not -_TIME_LIMIT <= given < _TIME_LIMIT:
        raise ValueError(f"{name} {given!r} is not ns since 1970, within 64 bits")
    return given


def _due(given: object) -> int | None:
    due_ns = _time("not_before", given)
    return check_number(due_ns) if isinstance(given, int) and due_ns is not None else due_ns


def _headers(given: object, own_due_ns: int | None, due_ns: int | None) -> bytes | None:
    """Headers with the time when the record is due: its own, else the later one of its headers and the option."""
    if given is not None and (
        not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values())
    ):
        raise ValueError("headers is not an object of strings")
    encoded = None if given is None else _encoded(given)
    if own_due_ns is None and due_ns is not None:
        own_due_ns = max(due_ns, not_before(encoded))
    return encoded if own_due_ns is None else _encoded(with_not_before(given, own_due_ns))


def _encoded(headers: Mapping[str, str]) -> bytes:
    try:
        return json.dumps(headers, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise ValueError("headers has half of a surrogate pair") from None
