"""Damage by disks and crashes as functions of bytes, and the memory that a call allocates."""

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path


def flipped(data: bytes, bit: int) -> bytes:
    """Return ``data`` with one bit changed."""
    changed = bytearray(data)
    changed[bit >> 3] ^= 1 << (bit & 7)
    return bytes(changed)


def flip_bit(path: Path, at: int | bytes, more: int = 0) -> None:
    """Change a bit of a file, at a position or ``more`` bytes behind the beginning of a text."""
    data = path.read_bytes()
    place = data.find(at) if isinstance(at, bytes) else at
    assert place >= 0
    path.write_bytes(flipped(data, 8 * (place + more)))


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
