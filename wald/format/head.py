"""The head line: the durable end of the log, 160 bytes of text that stay in place.

    seq=<20 digits> segment=<20> position=<12> epoch=<10> at=<19> crc=<8 hex>, spaces, newline

``seq`` is the last durable sequence (0: none), ``segment`` and ``position`` say where the durable bytes end, ``at`` is
the append time of the last commit (ns since 1970), ``crc`` is the crc32c of everything before " crc=". The line is
rewritten in place while readers read it. A reader that gets a torn line, whose crc is wrong, reads again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from wald.format.checksum import crc32c
from wald.format.names import SEQUENCE_MAX

HEAD_BYTES = 160
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
    return (b"%s crc=%08x" % (text, crc32c(text))).ljust(HEAD_BYTES - 1) + b"\n"


def decode_head(data: bytes) -> Head | None:
    """The head in ``data``; None if the line is torn or not one."""
    match = _LINE.fullmatch(data[:HEAD_BYTES])
    if match is None or crc32c(match[1]) != int(match[7], 16):
        return None
    return Head(*(int(match[group]) for group in range(2, 7)))


CURSOR_MAX_BYTES = 4096  # far above what is ever written; a larger file is not a cursor
_NUMBER = re.compile(rb"\d{1,20}")
_LOG_ID_BYTES = 16


class BadCursor(ValueError):
    """The bytes are not a cursor. The reader must assume that nothing was processed."""


@dataclass(frozen=True, slots=True)
class CursorLines:
    """The content of a cursor file; ``log_id`` is None for a bare number, and then there is nothing else."""

    sequence: int
    log_id: bytes | None = None
    epoch: int = 0
    group: str = ""
    at: str = ""


def encode_cursor(cursor: CursorLines) -> bytes:
    """Both lines; the first alone for a bare number."""
    number = b"%d" % cursor.sequence
    if cursor.log_id is None:
        return number + b"\n"
    about = {
        "log": cursor.log_id.hex(),
        "epoch": cursor.epoch,
        "group": cursor.group,
        "at": cursor.at,
        "crc": f"{crc32c(number):08x}",
    }
    return number + b"\n" + json.dumps(about).encode() + b"\n"


def decode_cursor(data: bytes) -> CursorLines:
    """What ``data`` says.

    Raises:
        BadCursor: empty, not a number, a number above 64 bits, or a second line that does not match the first.
    """
    if len(data) > CURSOR_MAX_BYTES:
        raise BadCursor(f"{len(data)} bytes are too many for a cursor")
    number, _, rest = data.partition(b"\n")
    number = number.strip()
    if _NUMBER.fullmatch(number) is None or int(number) > SEQUENCE_MAX:
        raise BadCursor("the first line is not a sequence")
    if not rest.strip():
        return CursorLines(int(number))
    try:
        about = json.loads(rest)
        crc, log_id = int(about["crc"], 16), bytes.fromhex(about["log"])
        cursor = CursorLines(int(number), log_id, int(about["epoch"]), str(about["group"]), str(about["at"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadCursor(f"the second line is not what wald writes ({error})") from error
    if len(log_id) != _LOG_ID_BYTES:
        raise BadCursor(f"a log id has {_LOG_ID_BYTES} bytes, not {len(log_id)}")
    if crc != crc32c(number):
        raise BadCursor("the checksum does not fit the number: the file was half written")
    return cursor
