"""The end of an active ledger file: what was synced, and what a power cut has left behind it."""

from __future__ import annotations

import os

from wald.format.ledger import BadLine, decode_line, ends_wrongly

_SECTOR_BYTES = 512  # what a disk writes at once, at least
_TAIL_BYTES = 64 << 10  # more than any line but that of a segment with a thousand routes


def last_line(descriptor: int, end: int) -> tuple[bytes, int]:
    """The last whole line before ``end``, and where it ends; read from the back, for a ledger only grows."""
    want = _TAIL_BYTES
    while True:
        start = max(0, end - want)
        tail = os.pread(descriptor, end - start, start)
        whole = tail.rfind(b"\n") + 1
        begin = tail.rfind(b"\n", 0, max(0, whole - 1)) + 1
        if start == 0 or (whole and begin):
            return tail[begin:whole], start + whole
        want *= 2


def synced(descriptor: int, length: int) -> tuple[bytes, int]:
    """As :func:`last_line`, without what shows that it was never synced: a lost sector in the last append."""
    line, end = last_line(descriptor, length)
    while lost_a_sector(line, end - len(line)):
        line, end = last_line(descriptor, end - len(line))
    begin = _append(line)
    if begin is not None and 0 <= begin < end:
        offset = begin
        for each in os.pread(descriptor, end - begin, begin).splitlines(keepends=True):
            if lost_a_sector(each, offset):
                return last_line(descriptor, offset)
            offset += len(each)
    return line, end


def _append(line: bytes) -> int | None:
    """The offset of the first line that was written with this one; None if it was written alone, or is damaged."""
    try:
        begin = decode_line(line.removesuffix(b"\n")).get("append")
    except BadLine:
        return None
    return begin if isinstance(begin, int) else None


def lost_a_sector(line: bytes, offset: int) -> bool:
    """Whether a sector of the last line never reached the disk, which leaves zeros up to its end: it was not synced."""
    end, start = offset + len(line), offset
    while start < end:
        stop = min(end, (start // _SECTOR_BYTES + 1) * _SECTOR_BYTES)
        if not any(line[start - offset : stop - offset]):
            return True
        start = stop
    return False


def newline_is_damaged(rest: bytes, offset: int) -> bool:
    """Whether ``rest``, which follows what was synced, was a line once; else it is torn."""
    return ends_wrongly(rest) and not lost_a_sector(rest, offset)


def is_whole(line: bytes) -> bool:
    """Whether the last line is as it was written; where there is none, nothing is wrong with it."""
    try:
        return not line or bool(decode_line(line.removesuffix(b"\n")))
    except BadLine:
        return False
