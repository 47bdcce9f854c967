"""Which sequences a bundle holds, in its line of the ledger: routes take turns, so there may be two numbers a record.

``runs`` counts from ``after``: so many sequences of other routes, so many of this one, and so on. Up to 64 numbers are
a JSON list. More are text: base64 of a zstd frame (RFC 8878) of the numbers, u64 each.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence

import zstandard

_LIST_MAX = 64
_LEVEL = 9
_NUMBER_BYTES = 8
assert sys.byteorder == "little"  # array numbers are written as they are in memory


class BadTurns(ValueError):
    """Not the numbers of a line."""


def pack(turns: Sequence[int]) -> list[int] | str:
    """The numbers as they stand in a line."""
    if len(turns) <= _LIST_MAX:
        return list(turns)
    return base64.b64encode(zstandard.ZstdCompressor(level=_LEVEL).compress(array("Q", turns).tobytes())).decode()


def unpack(stored: object, records: int) -> array[int]:
    """The inverse of :func:`pack`.

    Args:
        records: of the bundle; it limits how much is decompressed.

    Raises:
        BadTurns: they do not decode.
    """
    turns: array[int] = array("Q")
    try:
        if isinstance(stored, str):
            limit = 2 * _NUMBER_BYTES * max(1, records)
            frame = base64.b64decode(stored, validate=True)
            if zstandard.frame_content_size(frame) > limit:
                raise BadTurns("more numbers than records")
            turns.frombytes(zstandard.ZstdDecompressor().decompress(frame, max_output_size=limit))
        elif isinstance(stored, list):
            turns.extend(stored)
        else:
            raise BadTurns("no numbers")
    except (ValueError, TypeError, OverflowError, zstandard.ZstdError) as error:
        raise BadTurns(str(error)) from error
    if len(turns) % 2:
        raise BadTurns("an odd number of them")
    return turns
