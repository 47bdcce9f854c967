"""The window of a work group: what has become of each record between the ack floor and the newest one taken in.

Two bytes a sequence, in pages; a page of which everything is done is not kept. So the memory follows the pages with a
hole, and never the number of records that were acknowledged. Sequences of other routes, which lie between those of
this one, are done from the start. No method takes a Python step for each record where a run of them will do.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from heapq import heappop, heappush
from itertools import groupby
from typing import NamedTuple

from wald.format.work import PAGE_RECORDS, TRIES_MAX

_DONE_TRIES = 255  # so that the tries of a page say what is done


class State(IntEnum):
    """What a record in the window is."""

    DONE = 0
    """Acknowledged, or not of this route."""
    FREE = 1
    """To be delivered, in the order of sequences."""
    OUT = 2
    """Leased."""
    WAITING = 3
    """Not due yet."""
    BEHIND = 4
    """To be delivered after an earlier one of its key."""


class Run(NamedTuple):
    """Consecutive sequences, both ends included."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    def among(self, known: Collection[int]) -> list[int]:
        """Those of its sequences that are in ``known``, in order."""
        if self.size <= len(known):
            return [sequence for sequence in range(self.first, self.last + 1) if sequence in known]
        return sorted(sequence for sequence in known if self.first <= sequence <= self.last)


_NOTHING = bytes(PAGE_RECORDS)
_ALL_OUT = bytes([State.OUT]) * PAGE_RECORDS
_ALL_DONE = bytes([_DONE_TRIES]) * PAGE_RECORDS
_STATES_OF = bytes(State.DONE if tries == _DONE_TRIES else State.FREE for tries in range(256))
_RUNS = {state: re.compile(b"\\x%02x+" % state) for state in State}
_HELD = bytes(State.DONE if state == State.DONE else State.OUT for state in range(256))
_OPEN = re.compile(rb"[^\x00]")
_OPEN_RUN = re.compile(rb"[^\x00]+")
_ONCE_MORE = bytes([*(min(tries + 1, TRIES_MAX) for tries in range(_DONE_TRIES)), _DONE_TRIES])


class _Page:
    """Attributes:
    leases: the number of the lease of what is out: one for all, or one each.
    """

    __slots__ = ("leases", "open", "queued", "states", "tries")

    def __init__(self) -> None:
        self.states = bytearray(_NOTHING)
        self.tries = bytearray(_ALL_DONE)
        self.leases: int | array[int] = 0
        self.open = 0  # how many are not done
        self.queued = False  # among the pages that may have something free

    def lease(self, low: int, numbers: array[int]) -> None:
        """Take in by which leases records are out, from ``low`` on."""
        high = low + len(numbers)
        others = self.states.count(State.OUT) - self.states.count(State.OUT, low, high)
        if not others and numbers.count(numbers[0]) == len(numbers):
            self.leases = numbers[0]
            return
        if isinstance(self.leases, int):
            self.leases = array("I", [self.leases]) * PAGE_RECORDS
        self.leases[low:high] = numbers

    def held(self, first: int) -> Iterator[tuple[int, Run]]:
        """The leases by which all that is open is out, in runs over what is done; ``first``: of its sequences."""
        assert not isinstance(self.leases, int)
        low = 0
        for lease, same in groupby(self.leases):
            high = low + sum(1 for _ in same)
            if (begin := self.states.find(State.OUT, low, high)) >= 0:
                yield lease, Run(first + begin, first + self.states.rfind(State.OUT, low, high))
            low = high


class Window:
    """The records of one route above ``floor``.

    Attributes:
        floor: everything up to it is done.
        end: the first sequence that has not been taken in.
        open: how many records are not done.
    """

    def __init__(self, floor: int) -> None:
        self.floor = floor
        self.end = floor + 1
        self.open = 0
        self._pages: OrderedDict[int, _Page] = OrderedDict()  # in ascending order
        self._free: list[int] = []  # a heap of numbers of pages

    def take_in(self, run: Run, state: State = State.FREE) -> None:
        """Take in records that follow all others; what lies between is not of this route."""
        for number, low, high in _parts(run):
            page = self._pages.get(number)
            if page is None:
                page = self._pages[number] = _Page()
            page.states[low:high] = bytes([state]) * (high - low)
            page.tries[low:high] = bytes(high - low)
            page.open += high - low
            self._queue(number, page, state)
        self.open += run.size
        self.pass_over(run.last)

    def pass_over(self, last: int) -> None:
        """Take in that no record up to ``last`` is of this route but those that were taken in."""
        self.end = max(self.end, last + 1)
        self._advance()

    def state(self, sequence: int) -> State | None:
        """What a record is; None if it was not taken in."""
        if sequence >= self.end:
            return None
        page = self._pages.get(sequence // PAGE_RECORDS) if sequence > self.floor else None
        return State.DONE if page is None else State(page.states[sequence % PAGE_RECORDS])

    def is_open(self, sequence: int) -> bool:
        """Whether a record was taken in and is not done."""
        return self.state(sequence) not in (None, State.DONE)

    def tries(self, sequence: int) -> int:
        """How often an open record was delivered; ``TRIES_MAX`` if that often or more."""
        return self._pages[sequence // PAGE_RECORDS].tries[sequence % PAGE_RECORDS]

    def tries_of(self, run: Run) -> bytes:
        """How often each of these open records was delivered."""
        return b"".join(self._pages[number].tries[low:high] for number, low, high in _parts(run))

    def states_of(self, run: Run) -> bytes:
        """The state of each of these records, which were taken in; those up to the floor are done."""
        pages = self._pages
        return b"".join(
            pages[number].states[low:high] if number in pages else _NOTHING[low:high]
            for number, low, high in _parts(run)
        )

    def lease_of(self, sequence: int) -> int:
        """The number of the lease by which a record is out."""
        page = self._pages[sequence // PAGE_RECORDS]
        return page.leases if isinstance(page.leases, int) else page.leases[sequence % PAGE_RECORDS]

    def leases_of(self, run: Run) -> list[tuple[int, int]]:
        """By which leases a run is out, each with how many records, in order; nothing if any of them is not out."""
        found: list[tuple[int, int]] = []
        if run.first <= self.floor or run.last >= self.end:
            return found
        for number, low, high in _parts(run):
            page = self._pages.get(number)
            if page is None or page.states.count(State.OUT, low, high) != high - low:
                return []
            if isinstance(page.leases, int):
                found.append((page.leases, high - low))
            else:
                found += [(lease, len(list(same))) for lease, same in groupby(page.leases[low:high])]
        return found

    def leases_in(self, run: Run) -> Iterator[tuple[int, Run]]:
        """What of a run is out, and by which leases, in order."""
        for number, low, high in _parts(run):
            page = self._pages.get(number)
            if page is None:
                continue
            for found in _RUNS[State.OUT].finditer(page.states, low, high):
                first = number * PAGE_RECORDS + found.start()
                if isinstance(page.leases, int):
                    yield page.leases, Run(first, first + len(found[0]) - 1)
                    continue
                for lease, same in groupby(page.leases[found.start() : found.end()]):
                    last = first + sum(1 for _ in same) - 1
                    yield lease, Run(first, last)
                    first = last + 1

    def holdings(self) -> Iterator[tuple[int, Run]]:
        """What is out, and by which leases, in order; a run may have records in it that are done."""
        for number, page in self._pages.items():
            out, first = page.states.count(State.OUT), number * PAGE_RECORDS
            if out < page.open:
                yield from self.leases_in(Run(first, first + PAGE_RECORDS - 1))
            elif isinstance(page.leases, int):
                yield page.leases, Run(first + page.states.find(State.OUT), first + page.states.rfind(State.OUT))
            else:  # what is done has the number of the lease that it had
                yield from page.held(first)

    def deliver(self, run: Run, leases: array[int]) -> bytes:
        """Take in that open records are out, once more each, by the leases of these numbers; how often by now."""
        every = []
        for number, low, high in _parts(run):
            page = self._pages[number]
            at = number * PAGE_RECORDS + low - run.first
            page.lease(low, leases[at : at + high - low])
            page.states[low:high] = _ALL_OUT[low:high]
            page.tries[low:high] = tries = page.tries[low:high].translate(_ONCE_MORE)
            every.append(tries)
        return b"".join(every)

    def transfer(self, run: Run, lease: int) -> None:
        """Take in that records are out by another lease."""
        for number, low, high in _parts(run):
            self._pages[number].lease(low, array("I", [lease]) * (high - low))

    def open_in(self, run: Run) -> Iterator[Run]:
        """What is open of a run, in order."""
        for number, low, high in _parts(run):
            if (page := self._pages.get(number)) is not None:
                for found in _OPEN_RUN.finditer(page.states, low, high):
                    yield Run(number * PAGE_RECORDS + found.start(), number * PAGE_RECORDS + found.end() - 1)

    def hold(self, run: Run, lease: int) -> int:
        """Take in that what is open of a run is out by ``lease``, and was counted before; how many records that is."""
        held = 0
        for number, low, high in _parts(run):
            page = self._pages.get(number)
            if page is not None:
                page.lease(low, array("I", [lease]) * (high - low))
                page.states[low:high] = page.states[low:high].translate(_HELD)
                held += page.states.count(State.OUT, low, high)
        return held

    def set(self, run: Run, state: State) -> None:
        """Give open records a state that is neither DONE nor OUT; they keep their tries."""
        for number, low, high in _parts(run):
            page = self._pages[number]
            page.states[low:high] = bytes([state]) * (high - low)
            self._queue(number, page, state)

    def finish(self, runs: Iterable[tuple[int, int]]) -> None:
        """Take in that records are done; those that are already stay so."""
        beginning, end, pages = self.floor + 1, self.end - 1, self._pages
        floor_moves = False
        for first, last in runs:
            floor_moves = floor_moves or first <= beginning <= last
            at, behind = max(first, beginning), min(last, end) + 1
            while at < behind:
                number, low = divmod(at, PAGE_RECORDS)
                high = min(PAGE_RECORDS, low + behind - at)
                at += high - low
                page = pages.get(number)
                if page is None:
                    continue
                finished = high - low - page.states.count(State.DONE, low, high)
                page.states[low:high] = _NOTHING[low:high]
                page.tries[low:high] = _ALL_DONE[low:high]
                page.open -= finished
                self.open -= finished
                if not page.open:
                    del pages[number]
        if floor_moves:
            self._advance()

    def first_free(self) -> Run | None:
        """The first run of free records in one page; None if there is none."""
        while self._free:
            page = self._pages.get(self._free[0])
            if page is not None:
                if found := _RUNS[State.FREE].search(page.states):
                    base = self._free[0] * PAGE_RECORDS
                    return Run(base + found.start(), base + found.end() - 1)
                page.queued = False
            heappop(self._free)
        return None

    def runs(self, *states: State) -> Iterator[Run]:
        """The runs of records in each of these states, in order; each is in one page."""
        pattern = re.compile(b"|".join(_RUNS[state].pattern for state in states))
        for number, page in list(self._pages.items()):
            base = number * PAGE_RECORDS
            for found in pattern.finditer(page.states):
                yield Run(base + found.start(), base + found.end() - 1)

    def pages(self) -> Iterator[tuple[int, bytes]]:
        """The first sequence of each page that has open records, in order, and the tries of each record.

        The tries of a record that is done are 255.
        """
        for number, page in self._pages.items():
            yield number * PAGE_RECORDS, bytes(page.tries)

    def put_page(self, first: int, tries: bytes) -> None:
        """Take in a page as :meth:`pages` gives it, which follows all others; what is open in it is free."""
        page = self._pages[first // PAGE_RECORDS] = _Page()
        page.states[:], page.tries[:] = tries.translate(_STATES_OF), tries
        page.open = PAGE_RECORDS - page.states.count(State.DONE)
        self.open += page.open
        self._queue(first // PAGE_RECORDS, page, State.FREE)

    def count_try(self, run: Run) -> None:
        """Take in that open records were delivered once more, and came back."""
        for number, low, high in _parts(run):
            if (page := self._pages.get(number)) is not None:
                page.tries[low:high] = page.tries[low:high].translate(_ONCE_MORE)

    def _queue(self, number: int, page: _Page, state: State) -> None:
        if state is State.FREE and not page.queued:
            page.queued = True
            heappush(self._free, number)

    def _advance(self) -> None:
        """Move the floor to where the first open record is."""
        number, page = next(iter(self._pages.items()), (0, None))
        if page is None:
            self.floor = self.end - 1
            return
        if found := _OPEN.search(page.states):
            self.floor = max(self.floor, number * PAGE_RECORDS + found.start() - 1)


def _parts(run: Run) -> list[tuple[int, int, int]]:
    """The number of each page that a run is in, and from where to where it is there."""
    first, behind = run.first, run.last + 1
    parts = []
    while first < behind:
        number, low = divmod(first, PAGE_RECORDS)
        high = min(PAGE_RECORDS, low + behind - first)
        parts.append((number, low, high))
        first += high - low
    return parts


def runs_of(sequences: Sequence[int]) -> Iterator[Run]:
    """Sorted sequences as runs; a sequence that comes twice counts once."""
    first = last = -1
    for sequence in sequences:
        if sequence > last + 1:
            if first >= 0:
                yield Run(first, last)
            first = sequence
        last = sequence
    if first >= 0:
        yield Run(first, last)
