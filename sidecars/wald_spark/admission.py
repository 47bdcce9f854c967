"""Admission: how much of what has come since is read at one trigger, so that no log starves.

Each log gets an equal share of what may be read, and what one does not need, the others get. Something is read at every
trigger: the log that is first in turn gets one record, however long it is, where no log's next one fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one trigger may read; None: all there is.

    Attributes:
        records: of the routes that are read.
        raw_bytes: as they are in a segment before it is compressed.
    """

    records: int | None = None
    raw_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive records that are wanted, ``count`` from ``first`` on; if none, more bytes of a long one before."""

    first: int
    count: int
    raw_bytes: int

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def between(self, first: int, last: int) -> Run:
        """The records numbered so, of which there must be one; each has its share of the bytes."""
        first, last = max(first, self.first), min(last, self.last)
        count = last - first + 1
        return self if count == self.count else Run(first, count, self.raw_bytes * count // self.count)


@dataclass(frozen=True, slots=True)
class Backlog:
    """What has come since in one log.

    Attributes:
        start, end: it is numbered start < s ≤ end.
        runs: what of it is wanted, in order; read only as far as needed.
    """

    start: int
    end: int
    runs: Iterable[Run]


def admit(backlogs: Sequence[Backlog], limits: Limits, *, turn: int) -> list[int]:
    """The last sequence that this trigger reads of each.

    Args:
        backlogs: none of them empty.
        turn: grows with each trigger: the logs take turns in being the first.
    """
    if limits == Limits() or not backlogs:
        return [backlog.end for backlog in backlogs]
    lanes = [_Lane(backlog.start, backlog, iter(backlog.runs)) for backlog in backlogs]
    shift = turn % len(lanes)
    in_turn = [*lanes[shift:], *lanes[:shift]]
    _share_out(in_turn, _Room.of(limits))
    if all(lane.end == lane.backlog.start for lane in lanes):
        in_turn[0].take_one()
    return [lane.end for lane in lanes]


@dataclass(slots=True)
class _Room:
    """What may still be read."""

    records: int
    raw_bytes: int

    @classmethod
    def of(cls, limits: Limits) -> _Room:
        return cls(limits.records or _ENDLESS, limits.raw_bytes or _ENDLESS)

    def share(self, count: int) -> _Room:
        """One of ``count`` equal ones, which has room for a record where there is any."""
        return _Room(max(1, self.records // count), self.raw_bytes // count)

    def within(self, room: _Room) -> _Room:
        return _Room(min(self.records, room.records), min(self.raw_bytes, room.raw_bytes))

    def fitting(self, run: Run) -> Run | None:
        """As much of ``run`` as there is room for."""
        if run.count <= self.records and run.raw_bytes <= self.raw_bytes:
            return run
        by_bytes = run.count * self.raw_bytes // max(1, run.raw_bytes)
        count = min(run.count, self.records, by_bytes)
        return run.between(run.first, run.first + count - 1) if count else None

    def use(self, run: Run) -> None:
        self.records -= run.count
        self.raw_bytes -= run.raw_bytes


@dataclass(slots=True)
class _Lane:
    """One log at one trigger; ``end`` is how far it has got."""

    end: int
    backlog: Backlog
    runs: Iterator[Run]
    done: bool = False
    _next: Run | None = None

    def take(self, share: _Room, room: _Room) -> bool:
        """As much as fits into ``share``, out of ``room``; whether that was anything."""
        taken = False
        while share.records and (run := self._peek()) and (part := share.fitting(run)):
            self._next = run.between(part.last + 1, run.last) if part.count < run.count else None
            if part.count:
                self.end = part.last
            share.use(part)
            room.use(part)
            taken = True
        return taken

    def take_one(self) -> None:
        """One record, however long."""
        while (run := self._peek()) and not run.count:
            self._next = None
        if run:
            self.end = run.first

    def _peek(self) -> Run | None:
        """The next run; if there is none, the end is reached."""
        if self._next is None:
            self._next = next(self.runs, None)
        if self._next is None:
            self.done, self.end = True, self.backlog.end
        return self._next


def _share_out(in_turn: Sequence[_Lane], room: _Room) -> None:
    """Rounds of equal shares; where a share is too small for any log, the last in turn waits for another trigger."""
    waiting = list(in_turn)
    while waiting and room.records:
        share = room.share(len(waiting))
        taken = [lane.take(share.within(room), room) for lane in waiting]
        waiting = [lane for lane in waiting if not lane.done]
        if not any(taken) and waiting:
            waiting.pop()
