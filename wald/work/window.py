"""Window of a work group: state and tries of each record between the ack floor and the newest record read.

Each sequence takes two bytes, in pages; a page is dropped once all of its records are done. Memory depends on the
number of pages with gaps, not on the number of acknowledged records. Sequences of other routes count as done. Methods
work on runs rather than single records, because Python code per record would be too slow.
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

_DONE_TRIES = 255  # marks done records in the tries of a page


class State(IntEnum):
    """State of a record in the window."""

    DONE = 0
    """Acknowledged, or of another route."""
    FREE = 1
    """Ready for delivery, in the order of sequences."""
    OUT = 2
    """Leased."""
    WAITING = 3
    """Not due yet."""
    BEHIND = 4
    """Blocked by an earlier record of its key."""


class Run(NamedTuple):
    """Consecutive sequences, both ends included."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    def among(self, known: Collection[int]) -> list[int]:
        """Return the sequences of the run that are in ``known``, in order."""
        if self.size <= len(known):
            return [sequence for sequence in range(self.first, self.last + 1) if sequence in known]
        return sorted(sequence for sequence in known if self.first <= sequence <= self.last)


_NOTHING = bytes(PAGE_RECORDS)
_ALL_OUT = bytes([State.OUT]) * PAGE_RECORDS
_ALL_DONE = bytes([_DONE_TRIES]) * PAGE_RECORDS
_STATES_OF = bytes(State.DONE if tries == _DONE_TRIES else State.FREE for tries in range(256))
_RUNS = {state: re.compile(b"\\x%02x+" % state) for state in State}
_HELD = bytes(State.DONE if state == State.DONE else State.OUT for state in range(256))
_OPEN_RUN = re.compile(rb"[^\x00]+")
_ONCE_MORE = bytes([*(min(tries + 1, TRIES_MAX) for tries in range(_DONE_TRIES)), _DONE_TRIES])


class _Page:
    """``PAGE_RECORDS`` consecutive sequences. ``leases`` is one number for all leased records, or one each."""

    __slots__ = ("leases", "open", "queued", "states", "tries")

    def __init__(self) -> None:
        self.states = bytearray(_NOTHING)
        self.tries = bytearray(_ALL_DONE)
        self.leases: int | array[int] = 0
        self.open = 0  # records that are not done
        self.queued = False  # in the heap of pages that may have free records

    def set_leases(self, low: int, numbers: array[int]) -> None:
        high = low + len(numbers)
        others = self.states.count(State.OUT) - self.states.count(State.OUT, low, high)
        if not others and numbers.count(numbers[0]) == len(numbers):
            self.leases = numbers[0]
            return
        if isinstance(self.leases, int):
            self.leases = array("I", [self.leases]) * PAGE_RECORDS
        self.leases[low:high] = numbers

    def held(self, first: int) -> Iterator[tuple[int, Run]]:
        """Return runs with equal leases if all open records are out; a run may span done records."""
        assert not isinstance(self.leases, int)
        low = 0
        for lease, same in groupby(self.leases):
            high = low + sum(1 for _ in same)
            if (begin := self.states.find(State.OUT, low, high)) >= 0:
                yield lease, Run(first + begin, first + self.states.rfind(State.OUT, low, high))
            low = high


class Window:
    """Records of one route above ``floor``, the ack floor.

    ``end`` is the first unread sequence; ``open`` is the number of records that are not done.
    """

    def __init__(self, floor: int) -> None:
        self.floor = floor
        self.end = floor + 1
        self.open = 0
        self._pages: OrderedDict[int, _Page] = OrderedDict()  # in ascending order
        self._free: list[int] = []  # a heap of numbers of pages

    def append(self, run: Run) -> None:
        """Append records at the end; skipped sequences belong to other routes."""
        for number, low, high in _parts(run):
            page = self._pages.get(number)
            if page is None:
                page = self._pages[number] = _Page()
            page.states[low:high] = bytes([State.FREE]) * (high - low)
            page.tries[low:high] = bytes(high - low)
            page.open += high - low
            self._queue(number, page, State.FREE)
        self.open += run.size
        self.extend_to(run.last)

    def extend_to(self, last: int) -> None:
        """Extend the window to ``last``; sequences that were not appended belong to other routes."""
        self.end = max(self.end, last + 1)
        self._advance()

    def state(self, sequence: int) -> State | None:
        """Return a record's state, or None if it has not been read."""
        if sequence >= self.end:
            return None
        page = self._pages.get(sequence // PAGE_RECORDS) if sequence > self.floor else None
        return State.DONE if page is None else State(page.states[sequence % PAGE_RECORDS])

    @property
    def next_is_free(self) -> bool:
        """True if the first open record is free and no later one is leased."""
        if self.state(self.floor + 1) is not State.FREE:
            return False
        return all(State.OUT not in page.states for page in self._pages.values())

    def is_open(self, sequence: int) -> bool:
        return self.state(sequence) not in (None, State.DONE)

    def tries(self, sequence: int) -> int:
        """Return the number of deliveries of an open record, at most ``TRIES_MAX``."""
        return self._pages[sequence // PAGE_RECORDS].tries[sequence % PAGE_RECORDS]

    def tries_of(self, run: Run) -> bytes:
        return b"".join(self._pages[number].tries[low:high] for number, low, high in _parts(run))

    def states_of(self, run: Run) -> bytes:
        pages = self._pages
        return b"".join(
            pages[number].states[low:high] if number in pages else _NOTHING[low:high]
            for number, low, high in _parts(run)
        )

    def lease_of(self, sequence: int) -> int:
        page = self._pages[sequence // PAGE_RECORDS]
        return page.leases if isinstance(page.leases, int) else page.leases[sequence % PAGE_RECORDS]

    def leases_of(self, run: Run) -> list[tuple[int, int]]:
        """Return pairs of lease and record count, in order; none unless all records of the run are out."""
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
        """Return the leased parts of a run, with their leases, in order."""
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
        """Return all leased runs, with their leases, in order; a run may span done records."""
        for number, page in self._pages.items():
            out, first = page.states.count(State.OUT), number * PAGE_RECORDS
            if out < page.open:
                yield from self.leases_in(Run(first, first + PAGE_RECORDS - 1))
            elif isinstance(page.leases, int):
                yield page.leases, Run(first + page.states.find(State.OUT), first + page.states.rfind(State.OUT))
            else:  # done records keep the number of their last lease
                yield from page.held(first)

    def deliver(self, run: Run, leases: array[int]) -> bytes:
        """Mark open records as leased under these leases; return their new tries."""
        every = []
        for number, low, high in _parts(run):
            page = self._pages[number]
            at = number * PAGE_RECORDS + low - run.first
            page.set_leases(low, leases[at : at + high - low])
            page.states[low:high] = _ALL_OUT[low:high]
            page.tries[low:high] = tries = page.tries[low:high].translate(_ONCE_MORE)
            every.append(tries)
        return b"".join(every)

    def open_in(self, run: Run) -> Iterator[Run]:
        for number, low, high in _parts(run):
            if (page := self._pages.get(number)) is not None:
                for found in _OPEN_RUN.finditer(page.states, low, high):
                    yield Run(number * PAGE_RECORDS + found.start(), number * PAGE_RECORDS + found.end() - 1)

    def hold(self, run: Run, lease: int) -> int:
        """Mark the open records of a run as leased under ``lease`` without counting a try; return their number."""
        held = 0
        for number, low, high in _parts(run):
            page = self._pages.get(number)
            if page is not None:
                page.set_leases(low, array("I", [lease]) * (high - low))
                page.states[low:high] = page.states[low:high].translate(_HELD)
                held += page.states.count(State.OUT, low, high)
        return held

    def set(self, run: Run, state: State) -> None:
        """Set the state of open records, except to DONE or OUT; tries stay unchanged."""
        for number, low, high in _parts(run):
            page = self._pages[number]
            page.states[low:high] = bytes([state]) * (high - low)
            self._queue(number, page, state)

    def finish(self, runs: Iterable[tuple[int, int]]) -> None:
        """Mark records done. Idempotent."""
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

    def first_free(self, records_max: int = 1) -> Run | None:
        """Return the first run of free records, or None. If below ``records_max``, it may cross into the next page."""
        while self._free:
            number = self._free[0]
            page = self._pages.get(number)
            if page is not None:
                if found := _RUNS[State.FREE].search(page.states):
                    first, behind = number * PAGE_RECORDS + found.start(), number * PAGE_RECORDS + found.end()
                    following = self._pages.get(number + 1) if found.end() == PAGE_RECORDS else None
                    if following is not None and behind - first < records_max:
                        more = _RUNS[State.FREE].match(following.states)
                        behind += more.end() if more else 0
                    return Run(first, behind - 1)
                page.queued = False
            heappop(self._free)
        return None

    def runs(self, state: State) -> Iterator[Run]:
        """Return the runs of records in this state, in order, each within one page."""
        for number, page in list(self._pages.items()):
            base = number * PAGE_RECORDS
            for found in _RUNS[state].finditer(page.states):
                yield Run(base + found.start(), base + found.end() - 1)

    def pages(self) -> Iterator[tuple[int, bytes]]:
        """Return the first sequence and the tries of each page with open records; done records have 255 tries."""
        for number, page in self._pages.items():
            yield number * PAGE_RECORDS, bytes(page.tries)

    def put_page(self, first: int, tries: bytes) -> None:
        """Append a page from :meth:`pages`; its open records become free."""
        page = self._pages[first // PAGE_RECORDS] = _Page()
        page.states[:], page.tries[:] = tries.translate(_STATES_OF), tries
        page.open = PAGE_RECORDS - page.states.count(State.DONE)
        self.open += page.open
        self._queue(first // PAGE_RECORDS, page, State.FREE)

    def count_try(self, run: Run) -> None:
        """Count another delivery of open records that have since come back."""
        for number, low, high in _parts(run):
            if (page := self._pages.get(number)) is not None:
                page.tries[low:high] = page.tries[low:high].translate(_ONCE_MORE)

    def _queue(self, number: int, page: _Page, state: State) -> None:
        if state is State.FREE and not page.queued:
            page.queued = True
            heappush(self._free, number)

    def _advance(self) -> None:
        """Move the floor to just before the first open record."""
        number, page = next(iter(self._pages.items()), (0, None))
        if page is None:
            self.floor = self.end - 1
            return
        if found := _OPEN_RUN.search(page.states):
            self.floor = max(self.floor, number * PAGE_RECORDS + found.start() - 1)


def _parts(run: Run) -> list[tuple[int, int, int]]:
    """Split a run by pages into page number and bounds within the page."""
    first, behind = run.first, run.last + 1
    parts = []
    while first < behind:
        number, low = divmod(first, PAGE_RECORDS)
        high = min(PAGE_RECORDS, low + behind - first)
        parts.append((number, low, high))
        first += high - low
    return parts


def runs_of(sequences: Sequence[int]) -> Iterator[Run]:
    """Join sorted sequences into runs; duplicates count once."""
    first = last = -1
    for sequence in sequences:
        if sequence > last + 1:
            if first >= 0:
                yield Run(first, last)
            first = sequence
        last = sequence
    if first >= 0:
        yield Run(first, last)
