"""The lines that ``wald append`` takes besides plain ones: with a key and a separator, or as JSON objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import groupby
from typing import Any, NamedTuple

from wald.errors import InvalidInput
from wald.format.columns import encode
from wald.format.times import nanoseconds

Encode = Callable[[bytes, str, int], Iterator[bytes]]
"""Whole lines, the name of their source and the number of the first of them in it → payloads, in order."""

_FIELDS = frozenset({"value", "value_hex", "key", "key_hex", "time", "event_time_ns", "headers"})
_ASSIGNED = frozenset(
    {"sequence", "route", "append_time_ns", "append_time", "event_time", "sender", "terminated"}
)  # written by wald read; the log assigns them
_TIME_LIMIT = 1 << 63


class _Fields(NamedTuple):
    value: bytes
    key: bytes | None
    time_ns: int | None
    headers: bytes | None


def keyed_lines(separator: bytes) -> Encode:
    """``KEY <separator> VALUE``; a line without the separator has no key."""

    def keyed(lines: bytes, _name: str, _number: int) -> Iterator[bytes]:
        keys: list[bytes | None] = []
        values = []
        for line in lines.split(b"\n")[:-1]:
            key, found, value = line.partition(separator)
            keys.append(key if found else None)
            values.append(value if found else line)
        yield encode(values, keys=keys)

    return keyed


def json_lines(lines: bytes, name: str, number: int) -> Iterator[bytes]:
    """One JSON object per line.

    Raises:
        InvalidInput: a line is no JSON object, or has a wrong field; the message has its number. The lines before it
            were yielded.
    """
    parsed = []
    wrong = ""
    for position, line in enumerate(lines.split(b"\n")[:-1], start=number):
        try:
            parsed.append(_fields(line))
        except ValueError as error:
            wrong = f"{name}:{position}: {error}"
            break
    # Times are all there or all absent in one payload.
    for timed, records in groupby(parsed, lambda record: record.time_ns is not None):
        values, keys, times, headers = zip(*records, strict=True)
        yield encode(
            values,
            keys=keys if any(key is not None for key in keys) else None,
            times_ns=times if timed else None,
            headers=headers if any(header is not None for header in headers) else None,
        )
    if wrong:
        raise InvalidInput(wrong, hint='a line is like {"key": "a", "value": "b"}')


def _fields(line: bytes) -> _Fields:
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
    return _Fields(_bytes(fields, "value") or b"", key, _time(fields), _headers(fields.get("headers")))


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


def _time(fields: dict[str, Any]) -> int | None:
    if "time" in fields and "event_time_ns" in fields:
        raise ValueError("time and event_time_ns exclude each other")
    given = fields.get("time", fields.get("event_time_ns"))
    if given is None:
        return None
    if isinstance(given, str):
        try:
            given = nanoseconds(datetime.fromisoformat(given))
        except (ValueError, OverflowError):
            raise ValueError(f"time {given!r} is not like 2026-11-21T10:00:00Z") from None
    if isinstance(given, bool) or not isinstance(given, int) or not -_TIME_LIMIT <= given < _TIME_LIMIT:
        raise ValueError(f"time {given!r} is not ns since 1970, within 64 bits")
    return given


def _headers(given: object) -> bytes | None:
    if given is None:
        return None
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise ValueError("headers is not an object of strings")
    try:
        return json.dumps(given, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise ValueError("headers has half of a surrogate pair") from None
