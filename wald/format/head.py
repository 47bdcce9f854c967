"""The head line: the durable end of the log, 160 bytes of text that stay in place.

    seq=<20 digits> segment=<20> position=<12> epoch=<10> at=<19> crc=<8 hex>, spaces, newline

``seq`` is the last durable sequence (0: none), ``segment`` and ``position`` say where the durable bytes end, ``at`` is
the append time of the last commit (ns since 1970), ``crc`` is the crc32c of everything before " crc=". The line is
rewritten in place while readers read it. A reader that gets a torn line, whose crc is wrong, reads again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from wald.format.checksum import crc32c

LINE_BYTES = 160
_LINE = re.compile(
    rb"(seq=(\d{20}) segment=(\d{20}) position=(\d{12}) epoch=(\d{10}) at=(\d{19})) crc=([0-9a-f]{8}) *\n"
)


@dataclass(frozen=True, slots=True)
class Head:
    """The durable end of the log."""

    sequence: int
    segment: int
    position: int
    epoch: int
    at_ns: int


def encode_head(head: Head) -> bytes:
    """The 160 bytes of ``head``."""
    text = b"seq=%020d segment=%020d position=%012d epoch=%010d at=%019d" % (
        head.sequence,
        head.segment,
        head.position,
        head.epoch,
        head.at_ns,
    )
    return (b"%s crc=%08x" % (text, crc32c(text))).ljust(LINE_BYTES - 1) + b"\n"


def decode_head(data: bytes) -> Head | None:
    """The head in ``data``; None if the line is torn or not one."""
    match = _LINE.fullmatch(data[:LINE_BYTES])
    if match is None or crc32c(match[1]) != int(match[7], 16):
        return None
    return Head(*(int(match[group]) for group in range(2, 7)))
