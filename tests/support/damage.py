"""Damage by disks and crashes as functions of bytes, and the memory that a call allocates."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator


def flipped(data: bytes, bit: int) -> bytes:
    """Return ``data`` with one bit changed."""
    changed = bytearray(data)
    changed[bit >> 3] ^= 1 << (bit & 7)
    return bytes(changed)


def every_flip(data: bytes) -> Iterator[bytes]:
    """Yield ``data`` with each of its bits changed, one at a time."""
    return (flipped(data, bit) for bit in range(8 * len(data)))


def every_truncation(data: bytes) -> Iterator[bytes]:
    """Yield ``data`` truncated at each byte, starting with the empty prefix."""
    return (data[:length] for length in range(len(data)))


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the peak memory of ``call`` in bytes."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
