"""Records, their JSON form, and the ``columns`` payload for keyed, timed and binary records.

A columns payload is laid out like Apache Arrow arrays (docs/format.md, "Columns"), so readers wrap the buffers instead
of walking the records.
"""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from wald.format.batch import padded

PREFIX = struct.Struct("<II")
assert PREFIX.size == 8
_CHECK_CHUNK = 1 << 14
NOT_BEFORE = "wald.not-before"  # header with the time before which no work group delivers the record
_TIME_LIMIT_NS = 1 << 63
_EARLIEST_NS = 10**18

Form = Literal["hex", "base64"]  # how JSON shows bytes that are not UTF-8


class Record(NamedTuple):
    """A record of the log.

    Attributes:
        route: name of the route.
        sequence: number in the log, across routes; the first is 1.
        value: the bytes sent; of a line, without its newline.
        append_time_ns: when the daemon accepted it, in nanoseconds since 1970.
        key: the producer's key, if any.
        event_time_ns: the producer's time of the event, if any, in nanoseconds since 1970.
        headers: the producer's headers, if any: a JSON object of strings, as UTF-8.
        terminated: False for a last line without a newline.
    """

    # A tuple is created seven times as fast as a frozen dataclass.
    route: str
    sequence: int
    value: bytes
    append_time_ns: int
    key: bytes | None = None
    event_time_ns: int | None = None
    headers: bytes | None = None
    terminated: bool = True

    def to_json(self, more: Mapping[str, Any] = MappingProxyType({}), *, form: Form = "hex") -> str:
        """Return the record as a JSON object.

        UTF-8 values are text under ``value``, other bytes under ``value_hex`` or ``value_base64``. The same is true of
        keys, and of headers that are not a JSON object of strings.

        Args:
            more: additional fields.
            form: encoding of bytes that are not UTF-8.
        """
        fields: dict[str, Any] = {"sequence": self.sequence, "route": self.route, "append_time_ns": self.append_time_ns}
        if self.event_time_ns is not None:
            fields["event_time_ns"] = self.event_time_ns
        if self.key is not None:
            fields |= text_or_bytes("key", self.key, form)
        if self.headers is not None:
            fields |= _headers(self.headers, form)
        if not self.terminated:
            fields["terminated"] = False
        return json.dumps({**fields, **more} | text_or_bytes("value", self.value, form), ensure_ascii=False)


def record_from_json(line: bytes | str) -> Record:
    """Parse the JSON of :meth:`Record.to_json`, or raise ValueError. Spaces in headers are lost."""
    try:
        fields: dict[str, Any] = json.loads(line)
        value, headers = _parse_bytes(fields, "value"), fields.get("headers")
        if value is None:
            raise ValueError("the record has no value")
        if isinstance(headers, dict):
            fields = fields | {"headers": json.dumps(headers, ensure_ascii=False, separators=(",", ":"))}
        return Record(
            str(fields["route"]),
            int(fields["sequence"]),
            value,
            int(fields["append_time_ns"]),
            _parse_bytes(fields, "key"),
            None if fields.get("event_time_ns") is None else int(fields["event_time_ns"]),
            _parse_bytes(fields, "headers"),
            terminated=bool(fields.get("terminated", True)),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the JSON is not a record ({error!r})") from error


def _headers(raw: bytes, form: Form) -> dict[str, Any]:
    try:
        headers = json.loads(raw.decode())
        if isinstance(headers, dict) and all(isinstance(value, str) for value in headers.values()):
            json.dumps(headers, ensure_ascii=False).encode()  # fails for a lone surrogate
            return {"headers": headers}
    except (ValueError, RecursionError):
        pass
    return text_or_bytes("headers", raw, form)


def text_or_bytes(name: str, value: bytes, form: Form = "hex") -> dict[str, str]:
    """Return a JSON field: text if ``value`` is UTF-8, otherwise hex or base64."""
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_{form}": value.hex() if form == "hex" else b64encode(value).decode()}


def _parse_bytes(fields: dict[str, Any], name: str) -> bytes | None:
    """Invert :func:`text_or_bytes`; None if the field is missing."""
    if f"{name}_hex" in fields:
        return bytes.fromhex(fields[f"{name}_hex"])
    return str(fields[name]).encode() if name in fields else None


class Column(IntFlag):
    """Optional columns of a payload."""

    TIMES = 1
    KEYS = 2
    HEADERS = 4


class BadColumns(ValueError):
    """The columns payload is malformed."""


class BinaryColumn(NamedTuple):
    """The Arrow buffers of one variable-size column."""

    validity: memoryview | None
    offsets: memoryview  # i32[count + 1]
    data: memoryview

    def to_list(self) -> list[bytes | None]:
        ends = self.offsets.cast("i").tolist()
        raw = bytes(self.data)
        values: list[bytes | None] = [raw[start:end] for start, end in pairwise(ends)]
        if self.validity is not None:
            bits = self.validity
            values = [value if bits[i >> 3] >> (i & 7) & 1 else None for i, value in enumerate(values)]
        return values


@dataclass(frozen=True, slots=True)
class DecodedColumns:
    """A columns payload as views of its buffers."""

    count: int
    times: memoryview | None
    keys: BinaryColumn | None
    headers: BinaryColumn | None
    values: BinaryColumn


def encode_columns(
    values: Sequence[bytes],
    *,
    keys: Sequence[bytes | None] | None = None,
    times_ns: Sequence[int] | None = None,
    headers: Sequence[bytes | None] | None = None,
) -> bytes:
    """Encode columns, which have one entry for each value."""
    count = len(values)
    columns_present = Column(0)
    parts: list[bytes] = []
    if times_ns is not None:
        columns_present |= Column.TIMES
        parts.append(struct.pack(f"<{count}q", *times_ns))
    for column, entries in ((Column.KEYS, keys), (Column.HEADERS, headers)):
        if entries is not None:
            columns_present |= column
            parts += _nullable(entries)
    parts += _binary(values)
    return PREFIX.pack(count, columns_present) + _padded(parts)


def with_first_headers(payload: bytes, headers: bytes) -> bytes:
    """Return the payload with the first record's headers replaced."""
    columns = decode_columns(payload)
    count, columns_present = PREFIX.unpack_from(payload)
    if columns.headers is None:
        validity = b"\x01" + bytes((count + 7) // 8 - 1)
        header_buffers: list[bytes] = [validity, bytes(4) + len(headers).to_bytes(4, "little") * count, headers]
    else:
        header_buffers = _nullable([headers, *columns.headers.to_list()[1:]])
    buffers_before = [buffer for buffer in (columns.times, *(columns.keys or ())) if buffer is not None]
    parts = [*buffers_before, *header_buffers, columns.values.offsets, columns.values.data]
    return PREFIX.pack(count, columns_present | Column.HEADERS) + _padded(parts)


def first_headers(payload: bytes | memoryview) -> bytes | None:
    """Return the first record's headers, if any, or raise BadColumns."""
    headers = decode_columns(payload).headers
    if headers is None or headers.validity is None or not headers.validity[0] & 1:
        return None
    return bytes(headers.data[: headers.offsets.cast("i")[1]])


def decode_columns(payload: bytes | memoryview) -> DecodedColumns:
    """Decode a columns payload without a loop over its records, or raise BadColumns."""
    view = memoryview(payload)
    if len(view) < PREFIX.size:
        raise BadColumns("the payload is too short for the count of records")
    count, columns_present = PREFIX.unpack_from(view)
    if columns_present & ~int(Column.TIMES | Column.KEYS | Column.HEADERS):
        raise BadColumns(f"the columns {columns_present:#x} include an unknown column")
    if count * 4 > len(view):
        raise BadColumns(f"{len(view)} bytes cannot hold {count} records")
    reader = _ColumnReader(view, count)
    times = reader.read(8 * count) if columns_present & Column.TIMES else None
    keys = reader.binary(nullable=True) if columns_present & Column.KEYS else None
    headers = reader.binary(nullable=True) if columns_present & Column.HEADERS else None
    values = reader.binary(nullable=False)
    if reader.position != len(view):
        raise BadColumns(f"{len(view) - reader.position} bytes follow the last column")
    return DecodedColumns(count, times, keys, headers, values)


class _ColumnReader:
    def __init__(self, view: memoryview, count: int) -> None:
        self.view = view
        self.count = count
        self.position = PREFIX.size

    def read(self, length: int) -> memoryview:
        end = self.position + length
        if self.position + padded(length) > len(self.view):
            raise BadColumns("a column runs past the end of the payload")
        buffer = self.view[self.position : end]
        self.position += padded(length)
        return buffer

    def binary(self, *, nullable: bool) -> BinaryColumn:
        validity = self.read((self.count + 7) // 8) if nullable else None
        offsets = self.read(4 * (self.count + 1))
        ends = offsets.cast("i")
        if ends[0] != 0 or not _is_sorted(ends):
            raise BadColumns("the offsets do not start at 0 or are not sorted")
        return BinaryColumn(validity, offsets, self.read(ends[-1]))


def _is_sorted(ends: memoryview) -> bool:
    """Check the offsets in pieces, because Python's integers take more memory."""
    for start in range(0, len(ends), _CHECK_CHUNK):
        piece = ends[start : start + _CHECK_CHUNK + 1].tolist()  # includes the first of the next piece
        if sorted(piece) != piece:
            return False
    return True


def _padded(parts: Iterable[bytes | memoryview]) -> bytes:
    return b"".join(buffer for part in parts for buffer in (part, bytes(padded(len(part)) - len(part))))


def _nullable(entries: Sequence[bytes | None]) -> list[bytes]:
    digits = "".join("0" if entry is None else "1" for entry in entries)
    bitmap = int(digits[::-1] or "0", 2).to_bytes((len(digits) + 7) // 8, "little")
    return [bitmap, *_binary([entry or b"" for entry in entries])]


def _binary(values: Sequence[bytes]) -> list[bytes]:
    return [struct.pack(f"<{len(values) + 1}i", *accumulate(map(len, values), initial=0)), b"".join(values)]


def not_before(headers: bytes | None) -> int:
    """Return the time in the header "wald.not-before", in ns since 1970; 0 if missing or invalid.

    >>> not_before(b'{"wald.not-before": "1700000000000000000"}')
    1700000000000000000
    """
    if headers is None or NOT_BEFORE.encode() not in headers:
        return 0
    try:
        due_ns = int(json.loads(headers)[NOT_BEFORE])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):  # producers may send anything
        return 0
    return due_ns if -_TIME_LIMIT_NS <= due_ns < _TIME_LIMIT_NS else 0


def check_not_before(due_ns: int) -> int:
    """Return a due time unchanged, or raise ValueError if it is too early to be in ns since 1970."""
    if due_ns < _EARLIEST_NS:
        raise ValueError(
            f"not_before {due_ns} would be before 2001-09-09 as ns since 1970; it is probably in another unit"
        )
    return due_ns


def with_not_before(headers: Mapping[str, str] | None, due_ns: int) -> dict[str, str]:
    return {**(headers or {}), NOT_BEFORE: str(due_ns)}
