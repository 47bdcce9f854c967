"""Ledger lines with checksums, their chain, and the parts of a rotated ledger.

A line of JSON with a checksum, which tells a whole line from a half-written one.

``crc`` is the CRC-32C of the same line without that field.

Ledger lines, and the index of a sealed part.

A line is JSON without spaces, ``{"event": …, …, "prev": "<64 hex>", "crc": "<8 hex>"}``. ``prev`` is the sha256
of the previous line without its newline, 64 zeros in the first line. It shows that a line was changed, removed or
inserted. ``crc`` is the crc32c of everything before ``,"crc"``, so it covers the last line too. Lines that one append
wrote together have in ``append`` the offset of the first of them, because a power cut can leave any of their sectors
without the others.

A sealed part stores lines in zstd frames. Its last frame is an index:

    frames        zstd frames of about 256 KiB of whole lines, each with its content size and checksum (RFC 8878)
    index frame   u32 0x184D2A58, u32 content length, content
    content       JSON, u32 length of the JSON, u32 crc32c of the JSON, 8 bytes WALDLIX1

    JSON          {"line", "lines", "prev", "tip", "frames", "before"}
      line        number of its first line in the ledger, from 1; lines: how many lines it has
      prev, tip   digests of the line before it and of its last line
      frames      [[stored bytes, raw bytes, lines, low, high, earliest, latest, prev], …]: the lowest and the highest
                  sequence in the lines (low > high without one), their earliest and latest time "at", and the digest of
                  the line before the frame
      before      [low, high] of the previous part, for readers that cannot read it; null without one

Readers rebuild a damaged index from the lines.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wald.format.checksum import crc32c
from wald.format.sealed_index import SKIPPABLE
from wald.format.spans import Span


def encode_line(fields: Mapping[str, Any]) -> bytes:
    """The line of ``fields``, which are not empty and have no "crc" of their own."""
    text = json.dumps(fields).encode()
    return b'%b, "crc": "%08x"}\n' % (text[:-1], crc32c(text))


def decode_line(line: bytes) -> dict[str, Any] | None:
    """The fields of a line; None if it is half-written, or something else."""
    try:
        fields = json.loads(line)
        crc = fields.pop("crc")
        return fields if crc == f"{crc32c(json.dumps(fields).encode()):08x}" else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


Entry = dict[str, Any]
"""A line of a ledger; ``Any``: it is JSON."""

GENESIS = "0" * 64
NO_SEQUENCE = 1 << 64
NO_SPAN: Span = (NO_SEQUENCE, -1)
NO_TIMES: Span = ((1 << 63) - 1, -1)
_END = re.compile(rb',"crc":"([0-9a-f]{8})"}')
_END_BYTES = len(b',"crc":"00000000"}')
_encoded = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode  # dumps would create one for each call
_LONG_BYTES = 1024  # removing the lists of routes pays for longer lines only
_LISTS = re.compile(rb'"(routes|dropped)":\[\{[^\]]*\}\]')

INDEX_FRAME_MAGIC = 0x184D2A58
_MAGIC = b"WALDLIX1"
_FOOTER = struct.Struct("<II8s")
FOOTER_BYTES = _FOOTER.size
assert FOOTER_BYTES == 16


class RawJson(str):
    """JSON text, copied unchanged into a line. It spares a dict for each of a thousand routes."""

    __slots__ = ()


class BadLine(ValueError):
    """The line is damaged.

    Attributes:
        number: its index among several lines, from 0.
    """

    def __init__(self, reason: str, number: int = 0) -> None:
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True, slots=True)
class DecodedLedger:
    """A decoded file of a ledger.

    Attributes:
        entries: the intact lines, in order.
        whole_bytes: end of the last complete line. A torn line may follow.
        broken: (line number from 1, reason) for each line that is damaged or does not fit the chain.
        tip: the ``prev`` of the next line.
    """

    entries: list[Entry]
    whole_bytes: int
    broken: list[tuple[int, str]]
    tip: str


def encode_entry(entry: Entry, prev: str, append: int | None = None) -> bytes:
    """Encode ``entry`` as the line after the one with digest ``prev``; ``append`` as in the module docstring."""
    whole = entry | ({"prev": prev} if append is None else {"append": append, "prev": prev})
    if any(isinstance(value, RawJson) for value in entry.values()):
        text = f"{{{','.join(f'{_json(key)}:{_json(value)}' for key, value in whole.items())}"
    else:
        text = _json(whole)[:-1]
    # A path that is not UTF-8 contains surrogates, which JSON escapes preserve.
    covered = text.encode(errors="backslashreplace")
    return covered + b',"crc":"%08x"}\n' % crc32c(covered)


def _json(value: object) -> str:
    return value if isinstance(value, RawJson) else _encoded(value)


def parse_raw_json(entry: Mapping[str, Any]) -> Entry:
    """Replace JSON text in ``entry`` with the values."""
    return {key: json.loads(value) if isinstance(value, RawJson) else value for key, value in entry.items()}


def digest(line: bytes) -> str:
    """Return the ``prev`` of the line after ``line``."""
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def decode_ledger(data: bytes, tip: str | None = GENESIS) -> DecodedLedger:
    """Decode every line of a file and check the chain. Damage is part of the result.

    ``tip`` is the digest of the line before the file; None if it is unknown.
    """
    whole = data.rfind(b"\n") + 1
    entries: list[Entry] = []
    broken: list[tuple[int, str]] = []
    number = 0
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
        try:
            entry = decode_entry(line)
        except BadLine as error:
            broken.append((number, str(error)))
        else:
            entry.pop("append", None)
            prev = entry.pop("prev")
            if prev != tip and tip is not None:
                broken.append((number, "does not follow the line before it"))
            entries.append(entry)
        tip = digest(line)
    if has_damaged_newline(data[whole:]):
        broken.append((number + 1, "its newline is damaged"))
    return DecodedLedger(entries, whole, broken, tip or GENESIS)


def span_of(entry: Entry) -> Span:
    """Return the sequences in a line: ``base`` or ``first`` to ``last``, or ``base`` alone; NO_SPAN without any."""
    low = entry.get("base", entry.get("first"))
    high = entry.get("last", low)
    if isinstance(low, int) and isinstance(high, int) and low <= high:
        return low, high
    return NO_SPAN


def decode_entry(line: bytes) -> Entry:
    """Decode one line without its newline, including ``prev`` and ``append``.

    Raises:
        BadLine: it is damaged.
    """
    end = _END.fullmatch(line, max(0, len(line) - _END_BYTES))
    if end is None:
        raise BadLine("not a ledger line")
    if int(end[1], 16) != crc32c(line[: end.start()]):
        raise BadLine("its checksum is wrong")
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise BadLine("not a ledger line") from None
    if not isinstance(entry, dict) or "prev" not in entry:
        raise BadLine("not a ledger line")
    del entry["crc"]
    return entry


def decode_entries(lines: Sequence[bytes], *, listed: bool = True) -> list[Entry]:
    """Decode several lines at once, in half the time of :func:`decode_line`.

    With ``listed=False`` long lists of routes are left empty, which is much faster.

    Raises:
        BadLine: a line is damaged.
    """
    try:
        return _decode_whole(lines, listed=listed)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return list(_decode_each(lines))  # a damaged line, or a name with brackets in a list that was left out


def _decode_whole(lines: Sequence[bytes], *, listed: bool) -> list[Entry]:
    for line in lines:
        if not line.endswith(b',"crc":"%08x"}' % crc32c(line[:-_END_BYTES])):
            raise ValueError("damaged")
    text = b"[%s]" % b",".join(lines)
    if not listed and len(text) > _LONG_BYTES * len(lines):
        text = _LISTS.sub(rb'"\1":[]', text)
    entries: list[Entry] = json.loads(text)
    for entry, line in zip(entries, lines, strict=True):
        if entry.pop("crc") != line[-10:-2].decode() or "prev" not in entry:
            raise ValueError("not ledger lines")
    return entries


def _decode_each(lines: Sequence[bytes]) -> Iterator[Entry]:
    for number, line in enumerate(lines):
        try:
            yield decode_entry(line)
        except BadLine as error:
            raise BadLine(str(error), number) from None


def has_damaged_newline(rest: bytes) -> bool:
    """Return True if the bytes after the last newline contain a complete line, whose newline is therefore damaged."""
    end = _END.search(rest)
    return end is not None and end.end() < len(rest) and int(end[1], 16) == crc32c(rest[: end.start()])


class BadPart(ValueError):
    """The index of the part is damaged, or the file is not a part of a ledger."""


class PartFrame(NamedTuple):
    """One zstd frame of whole lines; fields as in the module docstring."""

    stored_bytes: int
    raw_bytes: int
    lines: int
    low: int
    high: int
    earliest_ns: int
    latest_ns: int
    prev: str


@dataclass(slots=True)
class PartIndex:
    """The index of a sealed part; fields as in the module docstring."""

    line: int
    lines: int
    prev: str
    tip: str
    frames: list[PartFrame] = field(default_factory=list)
    before: Span | None = None

    def add(self, stored_bytes: int, raw_bytes: int, entries: Sequence[Entry], tip: str) -> None:
        """Add a frame that contains ``entries``, whose last line has the digest ``tip``."""
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
    def span(self) -> Span:
        return min(frame.low for frame in self.frames), max(frame.high for frame in self.frames)


def encode_part_index(index: PartIndex) -> bytes:
    """Encode the index frame."""
    content = {name: getattr(index, name) for name in PartIndex.__dataclass_fields__}
    text = _encoded(content).encode()
    footer = _FOOTER.pack(len(text), crc32c(text), _MAGIC)
    return SKIPPABLE.pack(INDEX_FRAME_MAGIC, len(text) + len(footer)) + text + footer


def part_index_bytes(footer: bytes) -> int:
    """Return the length of the index frame, given the last bytes of the file.

    Raises:
        BadPart: no index frame ends there.
    """
    if len(footer) != FOOTER_BYTES or not footer.endswith(_MAGIC):
        raise BadPart("no index ends here")
    return SKIPPABLE.size + int(_FOOTER.unpack(footer)[0]) + FOOTER_BYTES


def decode_part_index(frame: bytes) -> PartIndex:
    """Decode the index frame.

    Raises:
        BadPart: it is damaged.
    """
    magic, length = SKIPPABLE.unpack_from(frame)
    text = frame[SKIPPABLE.size : -FOOTER_BYTES]
    known, checksum, _ = _FOOTER.unpack(frame[-FOOTER_BYTES:])
    if magic != INDEX_FRAME_MAGIC or length != len(frame) - SKIPPABLE.size or known != len(text):
        raise BadPart("the length of the index frame is wrong")
    if checksum != crc32c(text):
        raise BadPart("the checksum of the index is wrong")
    try:
        found = json.loads(text)
        frames = [PartFrame._make(each) for each in found["frames"]]
        before = found["before"] and (found["before"][0], found["before"][1])
        return PartIndex(found["line"], found["lines"], found["prev"], found["tip"], frames, before)
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise BadPart("not the index of a part of a ledger") from error
