"""Packing: blocks into spans that are read in one go, spans into tasks of about the same size; nothing is read here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from wald_spark.blocks import Block


class Sized(Protocol):
    """What takes so many bytes to read."""

    @property
    def raw_bytes(self) -> int: ...


S = TypeVar("S", bound=Sized)

TASKS = 8  # so many at least share what there is to read, …
LEAST_BYTES = 8 << 20  # … unless each had less than this, as a task costs 30 ms of its own


@dataclass(frozen=True, slots=True)
class Span:
    """Records ``first`` to ``last`` of a log."""

    first: int
    last: int
    raw_bytes: int


def spans(blocks: Iterable[Block], *, first: int, last: int, limit_bytes: int) -> Iterator[Span]:
    """Neighbouring blocks joined up to ``limit_bytes``, a larger one by itself, and cut to ``first`` to ``last``.

    What lies between two blocks of one segment is part of their span: whoever reads it passes over it by the index.
    """
    joined: Block | None = None
    for block in blocks:
        if joined is not None and (
            (block.segment == joined.segment or block.first == joined.next)
            and joined.raw_bytes + block.raw_bytes <= limit_bytes
        ):
            joined = Block(block.segment, joined.first, block.next, joined.raw_bytes + block.raw_bytes)
            continue
        if joined is not None:
            yield _cut(joined, first, last)
        joined = block
    if joined is not None:
        yield _cut(joined, first, last)


def _cut(block: Block, first: int, last: int) -> Span:
    return Span(max(block.first, first), min(block.next - 1, last), block.raw_bytes)


def fair_share(total_bytes: int, most_bytes: int) -> int:
    """What one task is to read where it may read up to ``most_bytes`` and there are ``total_bytes`` for all."""
    return min(most_bytes, max(total_bytes // TASKS, LEAST_BYTES))


def shared(pieces: Sequence[S], *, most_bytes: int) -> list[tuple[S, ...]]:
    """``pieces`` as tasks, each of which reads its fair share."""
    return packed(pieces, limit_bytes=fair_share(sum(piece.raw_bytes for piece in pieces), most_bytes))


def packed(pieces: Sequence[S], *, limit_bytes: int) -> list[tuple[S, ...]]:
    """``pieces`` in their order, in tuples of up to ``limit_bytes``; a larger one by itself."""
    tasks: list[tuple[S, ...]] = []
    room = 0
    for piece in pieces:
        if tasks and piece.raw_bytes <= room:
            tasks[-1] = (*tasks[-1], piece)
        else:
            tasks.append((piece,))
            room = limit_bytes
        room -= piece.raw_bytes
    return tasks
