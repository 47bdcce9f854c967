"""Ledger lines: JSON with a checksum and a hash chain, and the sealed parts of a rotated ledger.

``prev`` reveals a changed, removed or inserted line; ``crc`` also protects the last line. Lines of one append share
``append``, because a power cut can leave any of their sectors.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from wald.format.checksum import crc32c

Entry = dict[str, Any]  # the JSON of a line

GENESIS = "0" * 64
ABOVE_U64 = 1 << 64  # bound of an open range, minimum of an empty set
NO_SPAN = (ABOVE_U64, -1)
NO_TIMES = ((1 << 63) - 1, -1)
_CHECKSUM_FIELD = re.compile(rb',"crc":"([0-9a-f]{8})"}')
_CHECKSUM_FIELD_BYTES = len(b',"crc":"00000000"}')
_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode  # dumps() would create one for each call
_LONG_LINE_BYTES = 1024  # emptying lists of routes saves time only in longer lines
_ROUTE_LISTS = re.compile(rb'"(routes|dropped)":\[\{[^\]]*\}\]')

_FRAME_HEADER = struct.Struct("<II")  # not from sealed_index, which loads zstandard
INDEX_FRAME_MAGIC = 0x184D2A58
_MAGIC = b"WALDLIX1"
_FOOTER = struct.Struct("<II8s")
FOOTER_BYTES = _FOOTER.size
assert FOOTER_BYTES == 16


class RawJson(str):
    """JSON text copied verbatim into a line, to avoid a dict for each of a thousand routes."""

    __slots__ = ()


class BadLine(ValueError):
    """The line is damaged."""


@dataclass(frozen=True, slots=True)
class DecodedLedger:
    """Contents of a ledger file."""

    entries: list[Entry]  # intact lines
    complete_bytes: int  # end of the last complete line; a torn line may follow
    broken_lines: list[tuple[int, str]]  # numbers, starting at 1, and reasons
    tip: str  # the ``prev`` of the next line


def encode_entry(entry: Entry, prev: str, append: int | None = None) -> bytes:
    fields = entry | ({"prev": prev} if append is None else {"append": append, "prev": prev})
    text = "{" + ",".join(f"{_to_json(key)}:{_value_to_json(value)}" for key, value in fields.items())
    # A path that is not UTF-8 contains surrogates, which JSON escapes preserve.
    encoded = text.encode(errors="backslashreplace")
    return encoded + b',"crc":"%08x"}\n' % crc32c(encoded)


def _value_to_json(value: object) -> str:
    return value if isinstance(value, RawJson) else _to_json(value)


def parse_raw_json(entry: Mapping[str, Any]) -> Entry:
    return {key: json.loads(value) if isinstance(value, RawJson) else value for key, value in entry.items()}


def digest(line: bytes) -> str:
    """Return a line's digest: the ``prev`` of the next."""
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def decode_ledger(data: bytes, tip: str | None = GENESIS, *, with_routes: bool = True) -> DecodedLedger:
    """Decode ledger lines and check their hash chain.

    ``tip`` is the digest of the line before the first; None if unknown. ``with_routes=False`` is much faster, but
    leaves long lists of routes empty.
    """
    complete_bytes = data.rfind(b"\n") + 1
    lines = data[:complete_bytes].split(b"\n")[:-1]
    entries: list[Entry] = []
    broken_lines: list[tuple[int, str]] = []
    decoded = zip(lines, _decode_lines(lines, with_routes=with_routes), strict=True)
    for number, (line, entry) in enumerate(decoded, start=1):
        if isinstance(entry, BadLine):
            broken_lines.append((number, str(entry)))
        else:
            entry.pop("append", None)
            prev = entry.pop("prev")
            if prev != tip and tip is not None:
                broken_lines.append((number, "does not follow the line before it"))
            entries.append(entry)
        tip = digest(line)
    if has_damaged_newline(data[complete_bytes:]):
        broken_lines.append((len(lines) + 1, "the newline is damaged"))
    return DecodedLedger(entries, complete_bytes, broken_lines, tip or GENESIS)


def span_of(entry: Entry) -> tuple[int, int]:
    """Return the span of sequences from a line's ``base`` or ``first`` to ``last``; NO_SPAN without sequences."""
    low = entry.get("base", entry.get("first"))
    high = entry.get("last", low)
    if isinstance(low, int) and isinstance(high, int) and low <= high:
        return low, high
    return NO_SPAN


def decode_entry(line: bytes) -> Entry:
    """Decode one line without its newline, or raise BadLine. Keep ``prev`` and ``append``."""
    end = _CHECKSUM_FIELD.fullmatch(line, max(0, len(line) - _CHECKSUM_FIELD_BYTES))
    if end is None:
        raise BadLine("not a ledger line")
    if int(end[1], 16) != crc32c(line[: end.start()]):
        raise BadLine("checksum mismatch")
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise BadLine("not a ledger line") from None
    if not isinstance(entry, dict) or "prev" not in entry:
        raise BadLine("not a ledger line")
    del entry["crc"]
    return entry


def _decode_lines(lines: Sequence[bytes], *, with_routes: bool) -> list[Entry | BadLine]:
    """Decode lines: if all are intact, twice as fast as :func:`decode_entry` on each."""
    with suppress(AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return _decode_intact(lines, with_routes=with_routes)
    # Slow path: a line is damaged, or a name inside an emptied list contains a bracket.
    decoded: list[Entry | BadLine] = []
    for line in lines:
        try:
            decoded.append(decode_entry(line))
        except BadLine as error:
            decoded.append(error)
    return decoded


def _decode_intact(lines: Sequence[bytes], *, with_routes: bool) -> list[Entry | BadLine]:
    for line in lines:
        if not line.endswith(b',"crc":"%08x"}' % crc32c(line[:-_CHECKSUM_FIELD_BYTES])):
            raise ValueError("damaged")
    text = b"[%s]" % b",".join(lines)
    if not with_routes and len(text) > _LONG_LINE_BYTES * len(lines):
        text = _ROUTE_LISTS.sub(rb'"\1":[]', text)
    entries: list[Any] = json.loads(text)
    for entry, line in zip(entries, lines, strict=True):
        if entry.pop("crc") != line[-10:-2].decode() or "prev" not in entry:
            raise ValueError("not ledger lines")
    return entries


def has_damaged_newline(rest: bytes) -> bool:
    """Return True if the bytes after the last newline begin with a complete line: its newline is damaged."""
    end = _CHECKSUM_FIELD.search(rest)
    return end is not None and end.end() < len(rest) and int(end[1], 16) == crc32c(rest[: end.start()])


def encode_line(fields: Mapping[str, Any]) -> bytes:
    """Encode ``fields``, which must not be empty or contain "crc", as a line with a checksum."""
    text = json.dumps(fields).encode()
    return b'%b, "crc": "%08x"}\n' % (text[:-1], crc32c(text))


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Invert :func:`encode_line`; None for a damaged or half-written line."""
    try:
        fields = json.loads(line)
        crc = fields.pop("crc")
        return fields if crc == f"{crc32c(json.dumps(fields).encode()):08x}" else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


class BadPart(ValueError):
    """Not a ledger part, or its index is damaged."""


class PartFrame(NamedTuple):
    """A zstd frame of complete lines."""

    stored_bytes: int
    raw_bytes: int
    lines: int
    low: int  # lowest sequence; above ``high`` if there is none
    high: int
    earliest_ns: int  # earliest "at" of the lines
    latest_ns: int
    prev: str  # digest of the line before the frame


@dataclass(slots=True)
class PartIndex:
    """Index of a sealed part."""

    line: int  # number of its first line, from 1
    lines: int
    prev: str  # digest of the line before it
    tip: str  # digest of its last line
    frames: list[PartFrame] = field(default_factory=list)
    before: tuple[int, int] | None = None  # sequences of the previous part, in case it is unreadable

    def add(self, stored_bytes: int, raw_bytes: int, entries: Sequence[Entry], tip: str) -> None:
        (low, high), (earliest_ns, latest_ns) = NO_SPAN, NO_TIMES
        for entry in entries:
            span, at_ns = span_of(entry), entry.get("at")
            low, high = min(low, span[0]), max(high, span[1])
            if isinstance(at_ns, int):
                earliest_ns, latest_ns = min(earliest_ns, at_ns), max(latest_ns, at_ns)
        bounds = low, high, earliest_ns, latest_ns
        self.frames.append(PartFrame(stored_bytes, raw_bytes, len(entries), *bounds, self.tip))
        self.lines += len(entries)
        self.tip = tip

    @property
    def span(self) -> tuple[int, int]:
        return min(frame.low for frame in self.frames), max(frame.high for frame in self.frames)


def encode_part_index(index: PartIndex) -> bytes:
    text = _to_json(asdict(index)).encode()
    footer = _FOOTER.pack(len(text), crc32c(text), _MAGIC)
    return _FRAME_HEADER.pack(INDEX_FRAME_MAGIC, len(text) + len(footer)) + text + footer


def part_index_bytes(footer: bytes) -> int:
    """Return the length of the index frame that ends with ``footer``."""
    if len(footer) != FOOTER_BYTES or not footer.endswith(_MAGIC):
        raise BadPart("the file does not end with an index")
    return _FRAME_HEADER.size + int(_FOOTER.unpack(footer)[0]) + FOOTER_BYTES


def decode_part_index(frame: bytes) -> PartIndex:
    magic, frame_bytes = _FRAME_HEADER.unpack_from(frame)
    text = frame[_FRAME_HEADER.size : -FOOTER_BYTES]
    text_bytes, checksum, _ = _FOOTER.unpack(frame[-FOOTER_BYTES:])
    if magic != INDEX_FRAME_MAGIC or frame_bytes != len(frame) - _FRAME_HEADER.size or text_bytes != len(text):
        raise BadPart("the length of the index frame is wrong")
    if checksum != crc32c(text):
        raise BadPart("the checksum of the index is wrong")
    try:
        fields = json.loads(text)
        frames = [PartFrame._make(each) for each in fields["frames"]]
        before = fields["before"] and (fields["before"][0], fields["before"][1])
        return PartIndex(fields["line"], fields["lines"], fields["prev"], fields["tip"], frames, before)
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise BadPart("the index is not that of a ledger part") from error
