"""Damage by a disk as a strategy of hypothesis: flip bits, zero or swap sectors, truncate."""

from collections.abc import Callable

from hypothesis import strategies as st

SECTOR = 512

Damage = Callable[[bytes], bytes]


def flip(bits: list[float]) -> Damage:
    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        for bit in bits:
            at = int(bit * 8 * len(data))
            changed[at >> 3] ^= 1 << (at & 7)
        return bytes(changed)

    return change


def zero(where: float) -> Damage:
    def change(data: bytes) -> bytes:
        at = int(where * len(data)) // SECTOR * SECTOR
        return data[:at] + bytes(len(data[at : at + SECTOR])) + data[at + SECTOR :]

    return change


def cut(where: float) -> Damage:
    return lambda data: data[: int(where * len(data))]


def swap(one: float, two: float) -> Damage:
    def change(data: bytes) -> bytes:
        sectors = [data[at : at + SECTOR] for at in range(0, len(data), SECTOR)]
        whole = len(data) // SECTOR or 1
        first, second = int(one * whole), int(two * whole)
        sectors[first], sectors[second] = sectors[second], sectors[first]
        return b"".join(sectors)

    return change


PLACES = st.floats(0, 1, exclude_max=True)
DAMAGE = st.one_of(
    st.builds(flip, st.lists(PLACES, min_size=1, max_size=3)),
    st.builds(zero, PLACES),
    st.builds(cut, PLACES),
    st.builds(swap, PLACES, PLACES),
)
