"""Head line and cursor files: the durable end of the log, and how far each consumer group has processed it.

The head is rewritten in place, so a reader that sees a wrong checksum reads again. A truncated cursor may be valid (a
bare number is), but never claims more than was processed.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from wald.format.checksum import crc32c
from wald.format.names import SEQUENCE_MAX

HEAD_BYTES = 160
_HEAD_LINE = re.compile(
    rb"(seq=(\d{20}) segment=(\d{20}) position=(\d{12}) epoch=(\d{10}) at=(\d{19})) crc=([0-9a-f]{8}) *\n"
)

CURSOR_MAX_BYTES = 4096  # far above any cursor that wald writes
_NUMBER = re.compile(rb"\d{1,20}")
_LOG_ID_BYTES = 16


class Head(NamedTuple):
    """The durable end of the log.

    Attributes:
        sequence: last durable record; 0 in an empty log.
        segment: base sequence of the segment that contains the end.
        position: offset of the end in that segment, in bytes.
        epoch: number of the daemon's run.
        at_ns: append time of the last commit, in ns since 1970.
    """

    sequence: int
    segment: int
    position: int
    epoch: int
    at_ns: int


def encode_head(head: Head) -> bytes:
    text = b"seq=%020d segment=%020d position=%012d epoch=%010d at=%019d" % head
    return (b"%s crc=%08x" % (text, crc32c(text))).ljust(HEAD_BYTES - 1) + b"\n"


def decode_head(data: bytes) -> Head | None:
    """Decode a head line; None if it is torn or invalid."""
    match = _HEAD_LINE.fullmatch(data[:HEAD_BYTES])
    if match is None or crc32c(match[1]) != int(match[7], 16):
        return None
    return Head(*(int(match[group]) for group in range(2, 7)))


class BadCursor(ValueError):
    """Not a cursor: readers must assume that nothing was processed."""


class CursorLines(NamedTuple):
    """Contents of a cursor file. A bare number sets only ``sequence``."""

    sequence: int
    log_id: bytes | None = None
    epoch: int = 0
    group: str = ""
    at: str = ""


def encode_cursor(cursor: CursorLines) -> bytes:
    sequence = b"%d" % cursor.sequence
    if cursor.log_id is None:
        return sequence + b"\n"
    details = {"log": cursor.log_id.hex(), "epoch": cursor.epoch, "group": cursor.group, "at": cursor.at}
    details["crc"] = f"{crc32c(sequence):08x}"
    return sequence + b"\n" + json.dumps(details).encode() + b"\n"


def decode_cursor(data: bytes) -> CursorLines:
    if len(data) > CURSOR_MAX_BYTES:
        raise BadCursor(f"a cursor has at most {CURSOR_MAX_BYTES} bytes, not {len(data)}")
    sequence, _, rest = data.partition(b"\n")
    sequence = sequence.strip()
    if _NUMBER.fullmatch(sequence) is None or int(sequence) > SEQUENCE_MAX:
        raise BadCursor("the first line is not a sequence")
    if not rest.strip():
        return CursorLines(int(sequence))
    try:
        details = json.loads(rest)
        crc, log_id = int(details["crc"], 16), bytes.fromhex(details["log"])
        cursor = CursorLines(int(sequence), log_id, int(details["epoch"]), str(details["group"]), str(details["at"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadCursor(f"the second line was not written by wald ({error})") from error
    if len(log_id) != _LOG_ID_BYTES:
        raise BadCursor(f"a log id has {_LOG_ID_BYTES} bytes, not {len(log_id)}")
    if crc != crc32c(sequence):
        raise BadCursor("the checksum does not match the sequence: the file was partly written")
    return cursor
