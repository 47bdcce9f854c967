"""The ``columns`` payload: keyed, timed and binary records, laid out as Arrow lays out its arrays.

    u32 count, u32 columns present (bits of Column), then each present column, every buffer padded to 8:
    event times  i64[count], ns since 1970
    keys         validity bitmap (bit set: there is a key), offsets i32[count + 1], bytes
    headers      the same; each value a JSON object of strings
    values       offsets i32[count + 1], bytes; always there

Layout and bitmap order are those of the Apache Arrow columnar format (variable-size binary), so a reader wraps the
buffers instead of walking the records.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntFlag
from itertools import accumulate, pairwise

from wald.format.batch import padded

PREFIX = struct.Struct("<II")
assert PREFIX.size == 8
_CHECKED_AT_ONCE = 1 << 14


class Column(IntFlag):
    """Which optional columns a payload has."""

    TIMES = 1
    KEYS = 2
    HEADERS = 4


class BadColumns(ValueError):
    """The payload is not well-formed columns."""


@dataclass(frozen=True, slots=True)
class Binary:
    """One variable-size column, as the Arrow buffers it is made of."""

    validity: memoryview | None
    offsets: memoryview  # i32[count + 1]
    data: memoryview

    def to_list(self) -> list[bytes | None]:
        """The values as Python objects; None for a missing one."""
        ends = self.offsets.cast("i").tolist()
        raw = bytes(self.data)
        values: list[bytes | None] = [raw[start:end] for start, end in pairwise(ends)]
        if self.validity is not None:
            bits = self.validity
            values = [value if bits[i >> 3] >> (i & 7) & 1 else None for i, value in enumerate(values)]
        return values


@dataclass(frozen=True, slots=True)
class Columns:
    """A decoded payload; every buffer is a view of it."""

    count: int
    times: memoryview | None
    keys: Binary | None
    headers: Binary | None
    values: Binary


def encode(
    values: Sequence[bytes],
    *,
    keys: Sequence[bytes | None] | None = None,
    times_ns: Sequence[int] | None = None,
    headers: Sequence[bytes | None] | None = None,
) -> bytes:
    """The payload of these records; every given column has one entry a value."""
    count = len(values)
    present = Column(0)
    parts: list[bytes] = []
    if times_ns is not None:
        present |= Column.TIMES
        parts.append(struct.pack(f"<{count}q", *times_ns))
    for column, entries in ((Column.KEYS, keys), (Column.HEADERS, headers)):
        if entries is not None:
            present |= column
            parts += _binary([entry if entry is not None else b"" for entry in entries], _bitmap(entries))
    parts += _binary(values, None)
    return PREFIX.pack(count, present) + _padded(parts)


def with_first_headers(payload: bytes, headers: bytes) -> bytes:
    """The payload of the same records, of which the first one has these headers in the place of its own."""
    columns = decode(payload)
    present = Column.HEADERS
    parts: list[bytes | memoryview] = []
    if columns.times is not None:
        present |= Column.TIMES
        parts.append(columns.times)
    if columns.keys is not None and columns.keys.validity is not None:
        present |= Column.KEYS
        parts += [columns.keys.validity, columns.keys.offsets, columns.keys.data]
    if columns.headers is None:
        validity = b"\x01" + bytes((columns.count + 7) // 8 - 1)
        offsets = bytes(4) + len(headers).to_bytes(4, "little") * columns.count
        parts += [validity, offsets, headers]
    else:
        entries = [headers, *columns.headers.to_list()[1:]]
        parts += _binary([entry or b"" for entry in entries], _bitmap(entries))
    parts += [columns.values.offsets, columns.values.data]
    return PREFIX.pack(columns.count, present) + _padded(parts)


def first_headers(payload: bytes | memoryview) -> bytes | None:
    """The headers of the first record; None if it has none.

    Raises:
        BadColumns: as of :func:`decode`.
    """
    headers = decode(payload).headers
    if headers is None or headers.validity is None or not headers.validity[0] & 1:
        return None
    return bytes(headers.data[: headers.offsets.cast("i")[1]])


def decode(payload: bytes | memoryview) -> Columns:
    """Wrap the buffers of ``payload``.

    Raises:
        BadColumns: any length, offset or bitmap that does not fit; checked without a loop per record.
    """
    view = memoryview(payload)
    if len(view) < PREFIX.size:
        raise BadColumns("too short for the count")
    count, present = PREFIX.unpack_from(view)
    if present & ~int(Column.TIMES | Column.KEYS | Column.HEADERS):
        raise BadColumns(f"unknown columns {present:#x}")
    if count * 4 > len(view):
        raise BadColumns(f"{len(view)} bytes cannot hold {count} records")
    reader = _Reader(view, count)
    times = reader.take(8 * count) if present & Column.TIMES else None
    keys = reader.binary(nullable=True) if present & Column.KEYS else None
    headers = reader.binary(nullable=True) if present & Column.HEADERS else None
    values = reader.binary(nullable=False)
    if reader.position != len(view):
        raise BadColumns(f"{len(view) - reader.position} bytes follow the last column")
    return Columns(count, times, keys, headers, values)


class _Reader:
    """Takes one buffer after the other off a payload."""

    def __init__(self, view: memoryview, count: int) -> None:
        self.view = view
        self.count = count
        self.position = PREFIX.size

    def take(self, length: int) -> memoryview:
        end = self.position + length
        if self.position + padded(length) > len(self.view):
            raise BadColumns("a column runs past the end")
        taken = self.view[self.position : end]
        self.position += padded(length)
        return taken

    def binary(self, *, nullable: bool) -> Binary:
        validity = self.take((self.count + 7) // 8) if nullable else None
        offsets = self.take(4 * (self.count + 1))
        ends = offsets.cast("i")
        if ends[0] != 0 or not _growing(ends):
            raise BadColumns("offsets do not start at 0 or go backwards")
        return Binary(validity, offsets, self.take(ends[-1]))


def _growing(ends: memoryview) -> bool:
    """Whether no offset is below the one before it; a piece at a time, as Python's integers take much more room."""
    for start in range(0, len(ends), _CHECKED_AT_ONCE):
        piece = ends[start : start + _CHECKED_AT_ONCE + 1].tolist()  # one more: the next piece starts with it
        if sorted(piece) != piece:
            return False
    return True


def _padded(parts: Iterable[bytes | memoryview]) -> bytes:
    return b"".join(buffer for part in parts for buffer in (part, bytes(padded(len(part)) - len(part))))


def _bitmap(entries: Iterable[bytes | None]) -> bytes:
    digits = "".join("0" if entry is None else "1" for entry in entries)
    return int(digits[::-1] or "0", 2).to_bytes((len(digits) + 7) // 8, "little")


def _binary(values: Sequence[bytes], bitmap: bytes | None) -> list[bytes]:
    offsets = struct.pack(f"<{len(values) + 1}i", *accumulate(map(len, values), initial=0))
    data = [offsets, b"".join(values)]
    return data if bitmap is None else [bitmap, *data]
