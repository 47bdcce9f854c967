"""Files of a ledger: its sealed parts, and the end of its current file.

A part never changes; its index bounds the sequences in each frame. A power cut may leave an unacknowledged fragment of
the last append in the current file: readers ignore it, and the owner truncates it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import zstandard

from wald.errors import Damaged
from wald.files.safe_open import open_file, read_regular
from wald.format.ledger_lines import (
    FOOTER_BYTES,
    GENESIS,
    BadLine,
    BadPart,
    Entry,
    PartIndex,
    decode_entries,
    decode_entry,
    decode_part_index,
    has_damaged_newline,
    part_index_bytes,
)
from wald.format.names import parse_ledger_part_name
from wald.format.sealed_index import BadFrame, read_frame_lengths

FRAME_BYTES = 256 << 10
_SECTOR_BYTES = 512  # a disk writes at least this
_TAIL_BYTES = 64 << 10  # longer than most lines


class PartName(NamedTuple):
    """A sealed part, and the number of its first line."""

    line: int
    path: Path


def parts_of(path: Path) -> list[PartName]:
    """List the sealed parts of a ledger, oldest first."""
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return []
    ours = f"{path.stem}-"
    parsed = ((name, parse_ledger_part_name(name)) for name in names if name.startswith(ours))
    return sorted(PartName(part[1], path.parent / name) for name, part in parsed if part and part[0] == path.name)


def stored_index(part: PartName) -> PartIndex:
    with open_file(part.path) as file:
        length = os.fstat(file.fileno()).st_size
        size = part_index_bytes(os.pread(file.fileno(), FOOTER_BYTES, max(0, length - FOOTER_BYTES)))
        if size > length:
            raise BadPart("the index is cut short")
        index = decode_part_index(os.pread(file.fileno(), size, length - size))
    if index.line != part.line:
        raise BadPart(f"the index is that of line {index.line}")
    return index


def read_index(part: PartName) -> PartIndex:
    """Read an index, or rebuild a damaged one from the lines."""
    with suppress(BadPart):
        return stored_index(part)
    index: PartIndex | None = None
    for stored_bytes, data in frames_of(part.path):
        if index is None:
            prev = first_prev(data) or ""
            index = PartIndex(part.line, 0, prev, prev)
        entries, tip = chained(part.path, data, line=index.lines + 1, prev=index.tip, listed=False)
        index.add(stored_bytes, len(data), entries, tip)
    if index is None:
        raise damaged(part.path, 1, "it has no lines")
    return index


def frames_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the stored length and the lines of each frame, without the index."""
    stored, offset, lines = read_regular(path), 0, 0
    while offset < len(stored):
        try:
            span = read_frame_lengths(lambda begin, count: stored[begin : begin + count], offset)
            data = b"" if span.skippable else decompress_lines(stored[offset:][: span.stored_bytes], span.raw_bytes)
        except (BadFrame, zstandard.ZstdError) as error:
            raise damaged(path, lines + 1, f"its frame at offset {offset} is damaged") from error
        if not span.skippable:
            yield span.stored_bytes, data
            lines += data.count(b"\n")
        offset += span.stored_bytes


def decompress_lines(stored: bytes, raw_bytes: int) -> bytes:
    data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes)
    if len(data) != raw_bytes:
        raise zstandard.ZstdError("wrong length")
    return data


def chained(path: Path, data: bytes, *, line: int, prev: str | None, listed: bool = True) -> tuple[list[Entry], str]:
    """Decode lines, the first of which is number ``line`` of ``path``; return them and the digest of the last one.

    The lines must follow digest ``prev``, if known. ``listed`` as in :func:`decode_entries`.
    """
    texts = data.split(b"\n")[:-1]
    try:
        entries = decode_entries(texts, listed=listed)
    except BadLine as error:
        raise damaged(path, line + error.number, str(error)) from error
    for number, (entry, text) in enumerate(zip(entries, texts, strict=True), start=line):
        entry.pop("append", None)
        if entry.pop("prev") != prev and prev is not None:
            raise damaged(path, number, "does not follow the line before it")
        prev = sha256(text).hexdigest()
    return entries, prev or GENESIS


def damaged(path: Path, number: int, reason: str) -> Damaged:
    return Damaged(
        f"{path}: line {number}: {reason}; nothing is decided by this ledger",
        case="ledger-damaged",
        root=path.parents[1],
    )


def first_entry(data: bytes) -> Entry | None:
    """Decode the first line; None if it is unreadable."""
    return _entry_of(data[: data.find(b"\n")]) if b"\n" in data else None


def first_prev(data: bytes) -> str | None:
    entry = first_entry(data)
    return None if entry is None else str(entry["prev"])


def _entry_of(line: bytes) -> Entry | None:
    with suppress(BadLine):
        return decode_entry(line.removesuffix(b"\n"))
    return None


def without_copies(parts: list[PartName], prev: str | None) -> list[PartName]:
    """Leave out parts with the lines of the current file, whose first line carries ``prev``."""
    for number, part in enumerate(reversed(parts) if prev else ()):
        with suppress(Damaged, OSError):
            index = read_index(part)
            if index.tip == prev:
                return parts[: len(parts) - number]
            if index.prev == prev:
                return parts[: len(parts) - number - 1]
    return parts


def tip_of(parts: list[PartName]) -> str | None:
    """Return the digest of the last line; None if it is unreadable."""
    with suppress(Damaged, OSError):
        return read_index(parts[-1]).tip if parts else None
    return None


def read_current(path: Path) -> tuple[bytes, int]:
    """Return the current file's synced lines, then a last line with a damaged newline, and where the former end."""
    try:
        file = open_file(path)
    except FileNotFoundError:
        return b"", 0
    with file:
        length = os.fstat(file.fileno()).st_size
        _, end = synced_line(file.fileno(), length)
        data = file.read(length)
    return (data, end) if newline_is_damaged(data[end:], end) else (data[:end], end)


def last_line(descriptor: int, end: int) -> tuple[bytes, int]:
    """Return the last complete line before ``end``, and its end."""
    want = _TAIL_BYTES
    while True:
        start = max(0, end - want)
        tail = os.pread(descriptor, end - start, start)
        whole = tail.rfind(b"\n") + 1
        begin = tail.rfind(b"\n", 0, max(0, whole - 1)) + 1
        if start == 0 or (whole and begin):
            return tail[begin:whole], start + whole
        want *= 2


def synced_line(descriptor: int, length: int) -> tuple[bytes, int]:
    """Return the last synced line, and its end: a lost sector shows that an append was not synced."""
    line, end = last_line(descriptor, length)
    while _lost_a_sector(line, end - len(line)):
        line, end = last_line(descriptor, end - len(line))
    offset = (_entry_of(line) or {}).get("append")
    if isinstance(offset, int) and 0 <= offset < end:
        for each in os.pread(descriptor, end - offset, offset).splitlines(keepends=True):
            if _lost_a_sector(each, offset):
                return last_line(descriptor, offset)
            offset += len(each)
    return line, end


def _lost_a_sector(line: bytes, offset: int) -> bool:
    """Return True if a sector of the line is all zeros, so it never reached the disk."""
    end, start = offset + len(line), offset
    while start < end:
        stop = min(end, (start // _SECTOR_BYTES + 1) * _SECTOR_BYTES)
        if not any(line[start - offset : stop - offset]):
            return True
        start = stop
    return False


def newline_is_damaged(rest: bytes, offset: int) -> bool:
    """Return True if ``rest``, behind the synced lines, was a complete line; otherwise it is torn."""
    return has_damaged_newline(rest) and not _lost_a_sector(rest, offset)


def is_intact(line: bytes) -> bool:
    return not line or _entry_of(line) is not None
