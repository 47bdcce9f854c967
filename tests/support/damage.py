"""Damage by disks and crashes as functions of bytes, and the memory that a call takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator


def flipped(data: bytes, bit: int) -> bytes:
    """``data`` with one bit changed."""
    changed = bytearray(data)
    changed[bit >> 3] ^= 1 << (bit & 7)
    return bytes(changed)


def every_flip(data: bytes) -> Iterator[bytes]:
    """``data`` with each of its bits changed, one at a time."""
    return (flipped(data, bit) for bit in range(8 * len(data)))


def every_truncation(data: bytes) -> Iterator[bytes]:
    """``data`` cut at each of its bytes, the empty rest first."""
    return (data[:length] for length in range(len(data)))


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory (bytes) that ``call`` held at once."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
