"""The sealed parts of a ledger: finding, reading and making them.

A part is named by the number of its first line. It never changes, and it is never removed here but where it is a copy:
a crash between the making of a part and the start of a new active file leaves its lines in both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import zstandard

from wald.errors import Damaged
from wald.format.ledger import BadLine, Decoded, decode_ledger, decode_line
from wald.format.ledger_part import (
    CLOCK_ZERO,
    FOOTER_BYTES,
    BadPart,
    Clock,
    PartIndex,
    PartSummary,
    decode_index,
    index_bytes,
)
from wald.format.names import ledger_part_name, parse_ledger_part_name
from wald.format.zframes import BadFrame, FrameSpan, span_at
from wald.store.files.chain import chained, damaged
from wald.store.files.part_index import CLOCK_UNKNOWN, IndexBuilder
from wald.store.files.regular import open_file, open_regular

FRAME_BYTES = 256 << 10
_LEVEL = 3  # eight times as fast as 9, and no larger: lines are much alike


class PartName(NamedTuple):
    """A part by its name: the number of its first line, and its path."""

    line: int
    path: Path


def parts_of(path: Path) -> list[PartName]:
    """The sealed parts of the ledger whose active file is ``path``, oldest first."""
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return []
    ours = f"{path.stem}-"  # a listing has the parts of all ledgers
    parsed = ((name, parse_ledger_part_name(name)) for name in names if name.startswith(ours))
    return sorted(PartName(part[1], path.parent / name) for name, part in parsed if part and part[0] == path.name)


def part_path(path: Path, line: int) -> Path:
    """The part of the ledger ``path`` that begins with line ``line``."""
    return path.with_name(ledger_part_name(path.name, line))


def read_index(part: PartName, clock: Clock) -> PartIndex:
    """What a part holds; its lines are read if its index cannot be.

    Args:
        clock: at the end of the part before.

    Raises:
        Damaged: nor can they.
    """
    try:
        return stored_index(part)
    except BadPart:
        return rebuilt_index(part, clock)


def stored_index(part: PartName) -> PartIndex:
    """The index as it stands in the file.

    Raises:
        BadPart: it is damaged.
    """
    with open_file(part.path) as file:
        length = os.fstat(file.fileno()).st_size
        footer = os.pread(file.fileno(), FOOTER_BYTES, max(0, length - FOOTER_BYTES))
        size = index_bytes(footer)
        if size > length:
            raise BadPart("the index is cut short")
        index = decode_index(os.pread(file.fileno(), size, length - size))
    if index.line != part.line:
        raise BadPart(f"the index is that of line {index.line}")
    return index


def rebuilt_index(part: PartName, clock: Clock) -> PartIndex:
    """The same, made from the lines; arguments and errors as of :func:`read_index`."""
    builder = None
    for span, data in frames_of(part.path):
        builder = builder or IndexBuilder(part.line, _first_prev(part.path, data), clock)
        entries, tip = chained(part.path, data, line=builder.lines + 1, prev=builder.tip, listed=False)
        builder.add(span.stored_bytes, span.raw_bytes, entries, tip)
    if builder is None:
        raise damaged(part.path, 1, "it has no lines")
    return builder.finish()


def summaries(parts: Sequence[PartName], known: Sequence[PartSummary] = ()) -> Iterator[PartSummary]:
    """What the parts of a ledger behind the ``known`` first ones are about; most of them are not opened.

    They are opened from the newest back, up to one that says it of all before it.

    Raises:
        Damaged: of one it cannot be known.
    """
    found: list[PartSummary | None] = []
    for number in range(len(parts) - 1, len(known) - 1, -1):
        try:
            index = stored_index(parts[number])
        except BadPart:
            found.append(None)
            continue
        found.append(index.summary())
        if number and [each.line for each in index.before] == [part.line for part in parts[:number]]:
            found += reversed(index.before[len(known) :])
            break
    clock = CLOCK_ZERO if parts and parts[0].line == 1 else CLOCK_UNKNOWN
    clock = known[-1].clock if known else clock
    for part, stored in zip(parts[len(known) :], reversed(found), strict=True):
        summary = stored or rebuilt_index(part, clock).summary()
        clock = summary.clock
        yield summary


def _first_prev(path: Path, data: bytes) -> str:
    try:
        return str(decode_line(data[: data.find(b"\n")])["prev"])
    except BadLine as error:
        raise damaged(path, 1, str(error)) from error


def frames_of(path: Path) -> Iterator[tuple[FrameSpan, bytes]]:
    """Every frame of lines in a part, by the frames' own headers, and its content.

    Raises:
        Damaged: one cannot be read.
    """
    offset, lines = 0, 0
    with open_file(path) as file:
        length = os.fstat(file.fileno()).st_size
        while offset < length:
            try:
                span = span_at(lambda begin, count: os.pread(file.fileno(), count, begin), offset)
                if not span.skippable:
                    data = decompressed(os.pread(file.fileno(), span.stored_bytes, offset), span.raw_bytes)
            except (BadFrame, zstandard.ZstdError) as error:
                raise damaged(path, lines + 1, f"its frame at offset {offset} is damaged") from error
            if not span.skippable:
                yield span, data
                lines += data.count(b"\n")
            offset += span.stored_bytes


def read_frame(path: Path, offset: int, stored_bytes: int, raw_bytes: int, line: int) -> bytes:
    """The lines of one frame.

    Args:
        line: its first one, counted in the file.

    Raises:
        Damaged: it cannot be read.
    """
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise damaged(path, line, error.strerror or str(error)) from error
    try:
        return decompressed(os.pread(descriptor, stored_bytes, offset), raw_bytes)
    except zstandard.ZstdError as error:
        raise damaged(path, line, f"its frame at offset {offset} is damaged") from error
    finally:
        os.close(descriptor)


def decompressed(stored: bytes, raw_bytes: int) -> bytes:
    """The content of a frame; ZstdError if it is damaged, or longer or shorter than it should be."""
    data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes)
    if len(data) != raw_bytes:
        raise zstandard.ZstdError("another length")
    return data


def first_prev(data: bytes) -> str | None:
    """The digest that the first line carries; None if there is none, or it cannot be read."""
    with suppress(BadLine):
        return str(decode_line(data[: data.find(b"\n")])["prev"]) if b"\n" in data else None
    return None


def without_copies(parts: list[PartName], prev: str | None) -> list[PartName]:
    """The parts of which the active file, whose first line carries ``prev``, does not have the lines as well."""
    for number, part in enumerate(reversed(parts) if prev else ()):
        with suppress(BadPart, Damaged, OSError):
            index = read_index(part, CLOCK_UNKNOWN)
            if index.tip == prev:
                return parts[: len(parts) - number]
            if index.prev == prev:
                return parts[: len(parts) - number - 1]
    return parts


def decode_part(part: PartName, tip: str | None) -> Decoded:
    """Every line of a part that can be read; damage is part of the answer.

    Args:
        tip: the digest of the line before it; None: it is not known.
    """
    try:
        index = stored_index(part)
    except BadPart as error:
        return _decoded_without_index(part, tip, str(error))
    result, offset, line = Decoded([], 0, [], tip or index.prev), 0, 1
    if tip not in (None, index.prev):
        result.broken.append((1, "does not follow the line before it"))
    tips = [*(frame.prev for frame in index.frames[1:]), index.tip]
    for frame, end in zip(index.frames, tips, strict=True):
        try:
            data = read_frame(part.path, offset, frame.stored_bytes, frame.raw_bytes, line)
        except Damaged as error:
            result.broken.append((line, error.message.partition(f"line {line}: ")[2]))
        else:
            decoded = decode_ledger(data, frame.prev)
            result.entries.extend(decoded.entries)
            result.broken.extend((line + number - 1, reason) for number, reason in decoded.broken)
            if decoded.tip != end:
                result.broken.append((line + frame.lines, "does not follow the line before it"))
        offset, line = offset + frame.stored_bytes, line + frame.lines
    return replace(result, whole_bytes=sum(frame.raw_bytes for frame in index.frames), tip=index.tip)


def _decoded_without_index(part: PartName, tip: str | None, reason: str) -> Decoded:
    data, broken = b"", [(0, f"its index is damaged: {reason}")]
    try:
        for _, content in frames_of(part.path):
            data += content
    except Damaged as error:
        broken.append((data.count(b"\n") + 1, error.message.partition(": line ")[2].partition(": ")[2]))
    decoded = decode_ledger(data, tip)
    return replace(decoded, broken=[*broken, *decoded.broken])


def highest_in_parts(path: Path, *events: str) -> int:
    """The highest "last" in the sealed parts of a ledger, in lines of these kinds (none: any); 0 if there is none.

    What is damaged is passed over. A frame or two are read.
    """
    frames = []
    for part in parts_of(path):
        with suppress(Damaged, OSError):
            offset, line = 0, 1
            for frame in read_index(part, CLOCK_UNKNOWN).frames:
                frames.append((frame.high, part.path, offset, frame.stored_bytes, frame.raw_bytes, line, frame.prev))
                offset, line = offset + frame.stored_bytes, line + frame.lines
    highest = 0
    for high, file, offset, stored_bytes, raw_bytes, line, prev in sorted(frames, reverse=True):
        if high <= highest:
            break
        with suppress(Damaged):
            entries, _ = chained(file, read_frame(file, offset, stored_bytes, raw_bytes, line), line=line, prev=prev)
            wanted = (entry.get("last") for entry in entries if not events or entry.get("event") in events)
            highest = max([highest, *(last for last in wanted if isinstance(last, int))])
    return highest


def compressed_frame(data: bytes) -> bytes:
    """A frame of lines as it is stored."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
    return compressor.compress(data)
