"""Ledger lines: JSON with a checksum and a hash chain, and the sealed parts of a rotated ledger.

``prev`` reveals a changed, removed or inserted line; ``crc`` also protects the last line. A power cut can leave any
sectors of the lines that share ``append``.
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
_END = re.compile(rb',"crc":"([0-9a-f]{8})"}')
_END_BYTES = len(b',"crc":"00000000"}')
_encoded = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode  # dumps() creates one on each call
_LONG_BYTES = 1024  # removing lists of routes saves time only in longer lines
_LISTS = re.compile(rb'"(routes|dropped)":\[\{[^\]]*\}\]')

_SKIPPABLE = struct.Struct("<II")  # not from sealed_index, which loads zstandard
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
    whole_bytes: int  # end of the last complete line; a torn line may follow
    broken: list[tuple[int, str]]  # line number, starting at 1, and reason
    tip: str  # the ``prev`` of the next line


def encode_entry(entry: Entry, prev: str, append: int | None = None) -> bytes:
    whole = entry | ({"prev": prev} if append is None else {"append": append, "prev": prev})
    text = "{" + ",".join(f"{_encoded(key)}:{_json(value)}" for key, value in whole.items())
    # A path that is not UTF-8 contains surrogates, which JSON escapes preserve.
    covered = text.encode(errors="backslashreplace")
    return covered + b',"crc":"%08x"}\n' % crc32c(covered)


def _json(value: object) -> str:
    return value if isinstance(value, RawJson) else _encoded(value)


def parse_raw_json(entry: Mapping[str, Any]) -> Entry:
    return {key: json.loads(value) if isinstance(value, RawJson) else value for key, value in entry.items()}


def digest(line: bytes) -> str:
    """Return the digest of a line, which the next line stores as ``prev``."""
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def decode_ledger(data: bytes, tip: str | None = GENESIS, *, listed: bool = True) -> DecodedLedger:
    """Decode ledger lines and check their hash chain.

    ``tip`` is the digest of the line before the first; None if unknown. ``listed=False`` leaves long lists of routes
    empty, which is much faster.
    """
    whole = data.rfind(b"\n") + 1
    lines = data[:whole].split(b"\n")[:-1]
    entries: list[Entry] = []
    broken: list[tuple[int, str]] = []
    for number, (line, entry) in enumerate(zip(lines, _decode_lines(lines, listed=listed), strict=True), start=1):
        if isinstance(entry, BadLine):
            broken.append((number, str(entry)))
        else:
            entry.pop("append", None)
            prev = entry.pop("prev")
            if prev != tip and tip is not None:
                broken.append((number, "does not follow the line before it"))
            entries.append(entry)
        tip = digest(line)
    if has_damaged_newline(data[whole:]):
        broken.append((len(lines) + 1, "its newline is damaged"))
    return DecodedLedger(entries, whole, broken, tip or GENESIS)


def span_of(entry: Entry) -> tuple[int, int]:
    """Return a line's span of sequences, ``base`` or ``first`` to ``last``; NO_SPAN without sequences."""
    low = entry.get("base", entry.get("first"))
    high = entry.get("last", low)
    if isinstance(low, int) and isinstance(high, int) and low <= high:
        return low, high
    return NO_SPAN


def decode_entry(line: bytes) -> Entry:
    """Decode one line without its newline, or raise BadLine. Keeps ``prev`` and ``append``."""
    end = _END.fullmatch(line, max(0, len(line) - _END_BYTES))
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


def _decode_lines(lines: Sequence[bytes], *, listed: bool) -> list[Entry | BadLine]:
    """Decode lines. If all are intact, this is twice as fast as :func:`decode_entry` for each."""
    with suppress(AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return _decode_intact(lines, listed=listed)
    decoded: list[
        Entry | BadLine
    ] = []  # slow path: a line is damaged, or a name inside a stripped list contains a bracket
    for line in lines:
        try:
            decoded.append(decode_entry(line))
        except BadLine as error:
            decoded.append(error)
    return decoded


def _decode_intact(lines: Sequence[bytes], *, listed: bool) -> list[Entry | BadLine]:
    for line in lines:
        if not line.endswith(b',"crc":"%08x"}' % crc32c(line[:-_END_BYTES])):
            raise ValueError("damaged")
    text = b"[%s]" % b",".join(lines)
    if not listed and len(text) > _LONG_BYTES * len(lines):
        text = _LISTS.sub(rb'"\1":[]', text)
    entries: list[Any] = json.loads(text)
    for entry, line in zip(entries, lines, strict=True):
        if entry.pop("crc") != line[-10:-2].decode() or "prev" not in entry:
            raise ValueError("not ledger lines")
    return entries


def has_damaged_newline(rest: bytes) -> bool:
    """Return True if the bytes after the last newline contain a complete line, whose newline must be damaged."""
    end = _END.search(rest)
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
    """Damaged index, or not a ledger part."""


class PartFrame(NamedTuple):
    """One zstd frame of whole lines."""

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
    before: tuple[int, int] | None = None  # sequences of the previous part, in case that part is unreadable

    def add(self, stored_bytes: int, raw_bytes: int, entries: Sequence[Entry], tip: str) -> None:
        (low, high), (earliest_ns, latest_ns) = NO_SPAN, NO_TIMES
        for entry in entries:
            span, at = span_of(entry), entry.get("at")
            low, high = min(low, span[0]), max(high, span[1])
            if isinstance(at, int):
                earliest_ns, latest_ns = min(earliest_ns, at), max(latest_ns, at)
        bounds = low, high, earliest_ns, latest_ns
        self.frames.append(PartFrame(stored_bytes, raw_bytes, len(entries), *bounds, self.tip))
        self.lines += len(entries)
        self.tip = tip

    @property
    def span(self) -> tuple[int, int]:
        return min(frame.low for frame in self.frames), max(frame.high for frame in self.frames)


def encode_part_index(index: PartIndex) -> bytes:
    text = _encoded(asdict(index)).encode()
    footer = _FOOTER.pack(len(text), crc32c(text), _MAGIC)
    return _SKIPPABLE.pack(INDEX_FRAME_MAGIC, len(text) + len(footer)) + text + footer


def part_index_bytes(footer: bytes) -> int:
    """Return the length of the index frame that ends with ``footer``."""
    if len(footer) != FOOTER_BYTES or not footer.endswith(_MAGIC):
        raise BadPart("the file does not end with an index")
    return _SKIPPABLE.size + int(_FOOTER.unpack(footer)[0]) + FOOTER_BYTES


def decode_part_index(frame: bytes) -> PartIndex:
    magic, length = _SKIPPABLE.unpack_from(frame)
    text = frame[_SKIPPABLE.size : -FOOTER_BYTES]
    known, checksum, _ = _FOOTER.unpack(frame[-FOOTER_BYTES:])
    if magic != INDEX_FRAME_MAGIC or length != len(frame) - _SKIPPABLE.size or known != len(text):
        raise BadPart("the length of the index frame is wrong")
    if checksum != crc32c(text):
        raise BadPart("the checksum of the index is wrong")
    try:
        found = json.loads(text)
        frames = [PartFrame._make(each) for each in found["frames"]]
        before = found["before"] and (found["before"][0], found["before"][1])
        return PartIndex(found["line"], found["lines"], found["prev"], found["tip"], frames, before)
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise BadPart("not the index of a ledger part") from error
