"""The shares of a run: which records go into each of its bundles, found without all of them in one place.

Whoever reads a piece tells how much there is in each stretch of it; where a bundle ends inside a stretch, just that is
read again. The ends are those of :class:`wald_archive.api.BundleBatches`: how records are batched does not matter to
them, as each record adds the same wherever it stands.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from wald.store.reading.batches import Batch
from wald_archive.api import Size, split

STRETCH_BYTES = 1 << 20  # of payload: what is read again for an end in it, and 24 bytes on the way to the driver


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive records ``first`` to ``last`` of a route, and what they add to a bundle."""

    first: int
    last: int
    adds: int


@dataclass(frozen=True, slots=True)
class Share:
    """Records of one bundle: those of the route from ``first`` to ``last``; ``after``: the last of the one before."""

    after: int
    first: int
    last: int


def stretches(batches: Iterable[Batch], size: Size, *, limit_bytes: int = STRETCH_BYTES) -> Iterator[Stretch]:
    """All of ``batches``, in stretches of up to ``limit_bytes``; a larger batch is one by itself."""
    stretch: Stretch | None = None
    room = 0
    for batch in batches:
        adds = size.of(batch)
        if stretch is not None and len(batch.payload) <= room:
            stretch = Stretch(stretch.first, batch.last_sequence, stretch.adds + adds)
        else:
            if stretch is not None:
                yield stretch
            stretch, room = Stretch(batch.first_sequence, batch.last_sequence, adds), limit_bytes
        room -= len(batch.payload)
    if stretch is not None:
        yield stretch


def encode(measured: Iterable[Stretch]) -> bytes:
    """24 bytes for each."""
    return array("Q", [number for each in measured for number in (each.first, each.last, each.adds)]).tobytes()


def decode(data: bytes) -> Iterator[Stretch]:
    """The inverse of :func:`encode`."""
    numbers = iter(memoryview(data).cast("Q"))
    return (Stretch(first, last, adds) for first, last, adds in zip(numbers, numbers, numbers, strict=True))


def shares(
    measured: Iterable[Stretch], size: Size, *, after: int, read: Callable[[Stretch], Iterable[Batch]]
) -> Iterator[Share]:
    """What each bundle holds.

    Args:
        measured: the whole run, in order.
        after: the last record that was packed before it.
        read: gives the records of a stretch.
    """
    first = last = 0  # of the bundle so far; 0: it is empty
    room = size.limit
    for stretch in measured:
        if stretch.adds <= room:
            first, last = first or stretch.first, stretch.last
            room -= stretch.adds
            continue
        for batch in read(stretch):
            rest: Batch | None = batch
            while rest is not None:
                count = size.fitting(rest, room) if first else max(1, size.fitting(rest, room))
                head, rest = split(rest, count)
                if head is not None:
                    first, last = first or head.first_sequence, head.last_sequence
                    room -= size.of(head)
                if rest is not None:
                    yield Share(after, first, last)
                    after, first, room = last, 0, size.limit
    if first:
        yield Share(after, first, last)
