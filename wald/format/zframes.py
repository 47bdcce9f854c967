"""Where each Zstandard frame ends, by its own headers (RFC 8878, section 3) and without an index.

A frame says in its header how long its content is, and each of its blocks how long it is itself; so headers are all
that has to be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import zstandard

_MAGIC = (0xFD2FB528).to_bytes(4, "little")
_SKIPPABLE_MAGIC = range(0x184D2A50, 0x184D2A60)
_HEADER_MAX_BYTES = 18
_BLOCK_MAX_BYTES = 128 << 10
_RAW, _RLE, _COMPRESSED = range(3)
_CHECKSUM_BYTES = 4


class BadFrame(ValueError):
    """There is no frame here, or its headers are damaged."""


@dataclass(frozen=True, slots=True)
class FrameSpan:
    """The lengths of a frame, by its headers.

    Attributes:
        stored_bytes: of the frame in the file; more than there are if the file was cut short.
        raw_bytes: of its content; 0: a skippable frame.
    """

    stored_bytes: int
    raw_bytes: int

    @property
    def skippable(self) -> bool:
        return not self.raw_bytes


def span_at(read: Callable[[int, int], bytes], offset: int) -> FrameSpan:
    """The frame that begins at ``offset``.

    Args:
        read: (offset, length) → up to so many bytes.

    Raises:
        BadFrame: there is no frame, or it does not say how long it is.
    """
    opening = read(offset, _HEADER_MAX_BYTES)
    if int.from_bytes(opening[:4], "little") in _SKIPPABLE_MAGIC and len(opening) >= 8:
        return FrameSpan(8 + int.from_bytes(opening[4:8], "little"), 0)
    if not opening.startswith(_MAGIC):
        raise BadFrame("no frame begins here")
    try:
        parameters = zstandard.get_frame_parameters(opening)
        end = offset + zstandard.frame_header_size(opening)
    except zstandard.ZstdError as error:
        raise BadFrame(f"the frame's header is not whole ({error})") from error
    if parameters.content_size in (0, zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
        raise BadFrame("the frame's header does not say how long its content is")
    last = False
    while not last:
        header = read(end, 3)
        if len(header) < 3:
            raise BadFrame("the frame is cut short")
        bits = int.from_bytes(header, "little")
        last, kind, length = bool(bits & 1), bits >> 1 & 3, bits >> 3
        if kind > _COMPRESSED or length > _BLOCK_MAX_BYTES:
            raise BadFrame("a block's header is damaged")
        end += 3 + (1 if kind == _RLE else length)
    return FrameSpan(end + _CHECKSUM_BYTES * parameters.has_checksum - offset, parameters.content_size)
