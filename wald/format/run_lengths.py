"""Run lengths: the sequences of one route in a line of a ledger.

The numbers alternate: sequences of other routes, sequences of this one, and so on. Up to 64 numbers are a JSON list;
more are the base64 text of a zstd frame (RFC 8878) of the numbers, u64 each.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence

import zstandard

from wald.format.spans import Span

_LIST_MAX = 64
_LEVEL = 9
_NUMBER_BYTES = 8
assert sys.byteorder == "little"  # array numbers are written as they are in memory


class BadRunLengths(ValueError):
    """Run lengths that do not decode."""


def run_lengths(spans: Iterable[Span], first: int) -> list[int]:
    """Return the run lengths of ``spans``, which are in order, counted from sequence ``first``."""
    lengths, at = [], first
    for begin, last in spans:
        lengths += [begin - at, last + 1 - begin]
        at = last + 1
    return lengths


def spans_of(lengths: Iterable[int], first: int) -> Iterator[Span]:
    """Yield the spans of :func:`run_lengths`, as :func:`unpack` relengths them."""
    numbers, at = iter(lengths), first
    for gap, count in zip(numbers, numbers, strict=True):
        yield at + gap, at + gap + count - 1
        at += gap + count


def pack(lengths: Sequence[int]) -> list[int] | str:
    """Return the numbers in the form in which a line stores them."""
    if len(lengths) <= _LIST_MAX:
        return list(lengths)
    return base64.b64encode(zstandard.ZstdCompressor(level=_LEVEL).compress(array("Q", lengths).tobytes())).decode()


def unpack(stored: object, records: int) -> array[int]:
    """The inverse of :func:`pack`.

    Args:
        records: of the bundle; it limits how much is decompressed.

    Raises:
        BadRunLengths: they do not decode.
    """
    lengths: array[int] = array("Q")
    try:
        if isinstance(stored, str):
            limit = 2 * _NUMBER_BYTES * max(1, records)
            frame = base64.b64decode(stored, validate=True)
            if zstandard.frame_content_size(frame) > limit:
                raise BadRunLengths("more numbers than records")
            lengths.frombytes(zstandard.ZstdDecompressor().decompress(frame, max_output_size=limit))
        elif isinstance(stored, list):
            lengths.extend(stored)
        else:
            raise BadRunLengths("no numbers")
    except (ValueError, TypeError, OverflowError, zstandard.ZstdError) as error:
        raise BadRunLengths(str(error)) from error
    if len(lengths) % 2:
        raise BadRunLengths("an odd number of numbers")
    return lengths
