"""A cursor file: the last sequence a consumer group has processed on a route; everything up to it is done.

    250
    {"log": "<32 hex>", "epoch": 3, "group": "processed", "at": "2026-11-21T10:00:00Z", "crc": "<8 hex>"}

``crc`` is the crc32c of the first line without its newline. A bare number, as ``echo 250 > processed.cursor`` writes
it, is valid too. So a cursor that was cut short is valid, and says less than was processed, never more.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from wald.format.checksum import crc32c
from wald.format.names import SEQUENCE_MAX

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
