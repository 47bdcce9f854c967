"""Delivery state of a work group: leases, tries, due times and the order of each key. Uses no files and no clock.

    appended ─▶ free ─▶ out ─▶ done
                 ▲       │
                 └───────┴─ the lease ended, or the record was returned or released; a delay, if any, comes first

With an order by key, a record after an open one of its key is *behind* that one. All leased records of a key belong to
one worker: later ones may be part of the same lease, and return when an earlier one returns.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from wald.work.window import Run, State, Window, runs_of

_COMPACTED_FROM = 64
_TICK_NS = 100_000_000  # leases of one worker with the same start and end ticks share a number
_NUMBERS = (1 << 32) - 1
_KEPT = 1000  # leases without records, before they are dropped early

Named = tuple[str, Sequence[int]]
"""A worker and the sequences in its request, in order."""


class Refusal(NamedTuple):
    """A record that a worker cannot settle.

    Attributes:
        holder: the worker that has it, or "".
    """

    sequence: int
    holder: str


@dataclass(slots=True)
class Settled:
    """Settled runs and, for each worker in the call, its refused records."""

    runs: list[Run]
    refused: list[list[Refusal]]


class Part(NamedTuple):
    """One worker's part of a delivered run; the lease ends at ``until_ns`` of the monotonic clock."""

    worker: str
    until_ns: int
    size: int


@dataclass(slots=True)
class Lease:
    """A worker's lease, by the monotonic clock. Times are rounded up to ticks; ``left`` records are still out."""

    worker: str
    since_ns: int
    until_ns: int
    left: int = 0


class Claim(NamedTuple):
    """A run of records in the request of the worker with index ``who``."""

    run: Run
    who: int


class Deliveries:
    """Delivery state of the records of one route above the ack floor."""

    def __init__(self, floor: int, *, by_key: bool = False) -> None:
        self.window = Window(floor)
        self._keys = _KeyOrder(self.window) if by_key else None
        self._offered: list[int] = []  # free for the worker of the current lease only
        self._followers: list[Run] = []
        self._leases = _LeaseTable()
        self._due: list[tuple[int, int]] = []  # a heap of due times and sequences
        self._due_of: dict[int, int] = {}

    def append(self, run: Run, keys: Iterable[bytes | None] | None = None, due: Iterable[tuple[int, int]] = ()) -> None:
        """Append records after all others.

        Args:
            keys: the key of each record if the order is by key; None if a later call of :meth:`sort` passes them.
            due: pairs of a delayed sequence and its due time in ns since 1970.
        """
        self.window.append(run)
        if keys is not None:
            self.sort(run, keys)
        for sequence, due_ns in due:
            self.delay(sequence, due_ns)

    def sort(self, run: Run, keys: Iterable[bytes | None]) -> None:
        """Add the keys of records appended without keys, in log order."""
        if self._keys is None:
            return
        add = self._keys.add
        records = zip(range(run.first, run.last + 1), keys, self.window.states_of(run), strict=True)
        behind = [at for at, key, state in records if key is not None and state != State.DONE and not add(at, key)]
        for part in runs_of(behind):
            self.window.set(part, State.BEHIND)

    def delay(self, sequence: int, due_ns: int) -> None:
        self._due_of[sequence] = due_ns
        heappush(self._due, (due_ns, sequence))
        if self.window.state(sequence) is State.FREE:
            self._set(sequence, State.WAITING)

    def deliver(self, run: Run, parts: Sequence[Part], *, now_ns: int) -> bytes:
        """Lease free records, part by part; return the tries of each, including this delivery.

        Records behind those of the last part, by key, become free for its worker only, until :meth:`end_offer`.
        """
        numbers: array[int] = array("I")
        for worker, until_ns, size in parts:
            number = self._leases.number(worker, now_ns, until_ns)
            self._leases[number].left += size
            numbers += array("I", [number]) * size
        tries = self.window.deliver(run, numbers)
        if self._keys is not None:
            for sequence in self._keys.of(Run(run.last - parts[-1].size + 1, run.last)):
                following = next(self._keys.behind(sequence), None)
                if following and self.window.state(following) is State.BEHIND and following not in self._due_of:
                    self._set(following, State.FREE)
                    self._offered.append(following)
        return tries

    @property
    def is_offering(self) -> bool:
        """True if some records are free for one worker only."""
        return bool(self._offered)

    def end_offer(self) -> None:
        for sequence in self._offered:
            if self.window.state(sequence) is State.FREE:
                self._set(sequence, State.BEHIND)
        self._offered.clear()

    def finish(self, named: Sequence[Named]) -> Settled:
        """Mark processed records done.

        A delivered record that no worker has now is marked done too, because redelivering it would be useless. A
        record that another worker has, or that was never delivered, is refused.
        """
        return self._settle(named, self._finish, late=True)

    def finish_all(self, run: Run) -> None:
        """Mark records done even if a worker has them."""
        first, last = max(run.first, self.window.floor + 1), min(run.last, self.window.end - 1)
        if first <= last:
            run = Run(first, last)
            self._uncount(run)
            self._finish(run)

    def hold(self, run: Run, worker: str, *, until_ns: int) -> None:
        """Lease the open records of a run to ``worker`` even if others have them, without counting a try."""
        number = self._leases.number(worker, until_ns, until_ns)
        self._uncount(run)
        self._leases[number].left += self.window.hold(run, number)

    def take_back(self, run: Run) -> None:
        """Give back the leased records of a run, regardless of their worker."""
        for _, part in list(self.window.leases_in(run)):
            self._uncount(part)
            self._give_back(part)

    def pop_followers(self) -> list[Run]:
        """Return, and forget, the records that came back only because an earlier one of their key did."""
        followers, self._followers = self._followers, []
        return followers

    def give_back(self, named: Named, *, due_ns: int | None = None) -> Settled:
        """Give back a worker's unprocessed records for redelivery, at ``due_ns`` if given."""
        return self._settle([named], lambda run: self._give_back(run, due_ns), last_first=True)

    def extend(self, named: Named, *, now_ns: int, until_ns: int) -> Settled:
        def extend(run: Run) -> None:
            number = self._leases.number(named[0], now_ns, until_ns)
            self._leases[number].left += self.window.hold(run, number)

        return self._settle([named], extend)

    def release(self, worker: str) -> list[Run]:
        """Give back all records of ``worker``."""
        return self._end_leases({number for number, lease in self._leases if lease.worker == worker})

    def claim(self, since_ns: int) -> list[Run]:
        """Give back all records leased at ``since_ns`` or earlier."""
        return self._end_leases({number for number, each in self._leases if each.since_ns <= since_ns and each.worker})

    def expire(self, now_ns: int) -> None:
        """Give back the records of expired leases."""
        over = self._leases.pop_over(now_ns)
        self._end_leases(over)
        for number in over:
            self._leases.drop(number)

    def wake(self, now_ns: int) -> None:
        """Free delayed records that are due."""
        while self._due and self._due[0][0] <= now_ns:
            due_ns, sequence = heappop(self._due)
            if self._due_of.get(sequence) == due_ns:
                del self._due_of[sequence]
                if self.window.state(sequence) is State.WAITING:
                    self._set(sequence, State.FREE)

    @property
    def by_key(self) -> bool:
        return self._keys is not None

    @property
    def next_end_ns(self) -> int | None:
        """Time at which the next lease ends."""
        return self._leases.next_end_ns

    @property
    def next_due_ns(self) -> int | None:
        """Earliest time at which a delayed record may be due."""
        return self._due[0][0] if self._due else None

    def due_times(self) -> dict[int, int]:
        """Return the due time of each open record that has one."""
        return {sequence: due_ns for sequence, due_ns in self._due_of.items() if self.window.is_open(sequence)}

    def out(self) -> Iterator[tuple[Run, Lease]]:
        """Return the leased records with their leases, in order."""
        for run in self.window.runs(State.OUT):
            for number, part in self.window.leases_in(run):
                yield part, self._leases[number]

    def holdings(self) -> Iterator[tuple[Run, Lease]]:
        """Like :meth:`out`, but in fewer runs, which may span done records."""
        for number, run in self.window.holdings():
            yield run, self._leases[number]

    def _settle(
        self, named: Sequence[Named], settle: Callable[[Run], None], *, late: bool = False, last_first: bool = False
    ) -> Settled:
        """Call ``settle`` with runs of records that their workers have.

        Args:
            late: also settle records that no worker has now.
            last_first: begin with the last record, because records behind another return with it.
        """
        settled = Settled([], [[] for _ in named])
        found = list(stretches(named))
        for stretch in reversed(found) if last_first else found:
            run = Run(stretch[0].run.first, stretch[-1].run.last)
            if self._uncount_held(run, stretch, named):
                settle(run)
                settled.runs.append(run)
                continue
            each = [(sequence, who) for (first, last), who in stretch for sequence in range(first, last + 1)]
            for sequence, who in reversed(each) if last_first else each:
                if self._may_settle(named[who][0], sequence, settled.refused[who], late=late):
                    part = Run(sequence, sequence)
                    self._uncount(part)
                    settle(part)
                    settled.runs.append(part)
        return settled

    def _uncount_held(self, run: Run, claims: Sequence[Claim], named: Sequence[Named]) -> bool:
        """Remove a run from the leases of the workers that name it; return False unless they hold all of it."""
        held = self.window.leases_of(run) if self._keys is None else []
        claimed = ((named[who][0], part.size) for part, who in claims)
        if _joined((self._leases[number].worker, size) for number, size in held) != _joined(claimed):
            return False
        for number, size in held:
            self._leases[number].left -= size
        return True

    def _may_settle(self, worker: str, sequence: int, refused: list[Refusal], *, late: bool) -> bool:
        """Return True if ``worker`` may settle a record; otherwise refuse the record unless it is done."""
        state = self.window.state(sequence)
        if state is State.DONE:
            return False
        holder = self._leases[self.window.lease_of(sequence)].worker if state is State.OUT else ""
        had = late and state not in (None, State.OUT) and self.window.tries(sequence) > 0
        if had or holder == worker:
            return True
        refused.append(Refusal(sequence, holder))
        return False

    def _finish(self, run: Run) -> None:
        self.window.finish((run,))
        if self._due_of:
            for sequence in run.among(self._due_of):
                del self._due_of[sequence]
        if self._keys is not None:
            for sequence in self._keys.of(run):
                first = self._keys.remove(sequence)
                if first is not None and self.window.state(first) is State.BEHIND:
                    self._free(first)

    def _give_back(self, run: Run, due_ns: int | None = None) -> None:
        if self._keys is None:
            self.window.set(run, State.FREE)
        else:
            for sequence in range(run.first, run.last + 1):
                self._give_back_in_order(sequence, self._keys)
        if due_ns is not None:
            for sequence in range(run.first, run.last + 1):
                self.delay(sequence, due_ns)

    def _give_back_in_order(self, sequence: int, keys: _KeyOrder) -> None:
        """Give back a record that no lease counts, and all leased records behind it."""
        self._set(sequence, State.BEHIND)
        for behind in keys.behind(sequence):
            if self.window.state(behind) is State.OUT:
                self._uncount(Run(behind, behind))
                self._set(behind, State.BEHIND)
                self._followers.append(Run(behind, behind))
        if keys.is_first(sequence):
            self._free(sequence)

    def _end_leases(self, numbers: Collection[int]) -> list[Run]:
        numbers = {number for number in numbers if self._leases[number].left}
        if not numbers:
            return []
        runs = [
            part
            for run in self.window.runs(State.OUT)
            for number, part in self.window.leases_in(run)
            if number in numbers
        ]
        for run in runs:
            parts = [run] if self._keys is None else (Run(at, at) for at in range(run.first, run.last + 1))
            for part in parts:  # some were given back together with an earlier one of their key
                if self.window.state(part.first) is State.OUT:
                    self._uncount(part)
                    self._give_back(part)
        return runs

    def _uncount(self, run: Run) -> None:
        for number, part in self.window.leases_in(run):
            self._leases[number].left -= part.size

    def _free(self, sequence: int) -> None:
        self._set(sequence, State.WAITING if sequence in self._due_of else State.FREE)

    def _set(self, sequence: int, state: State) -> None:
        self.window.set(Run(sequence, sequence), state)


class _LeaseTable:
    """Leases by number."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._shared: dict[tuple[str, int, int], int] = {}  # the lease of a worker, by its ticks
        self._ends: list[tuple[int, int]] = []  # a heap of ends and numbers
        self._max = _KEPT
        self._number = 0

    def __getitem__(self, number: int) -> Lease:
        return self._leases[number]

    def __iter__(self) -> Iterator[tuple[int, Lease]]:
        return iter(self._leases.items())

    @property
    def next_end_ns(self) -> int | None:
        return self._ends[0][0] if self._ends else None

    def number(self, worker: str, now_ns: int, until_ns: int) -> int:
        """Return the number of a lease of ``worker`` that ends in the tick of ``until_ns``."""
        since, until = -(-now_ns // _TICK_NS) * _TICK_NS, -(-until_ns // _TICK_NS) * _TICK_NS
        number = self._shared.get((worker, since, until))
        if number is None:
            if len(self._leases) >= self._max:
                self._drop_empty()
            self._number = number = self._number % _NUMBERS + 1
            self._shared[worker, since, until] = number
            self._leases[number] = Lease(worker, since, until)
            heappush(self._ends, (until, number))
        return number

    def pop_over(self, now_ns: int) -> list[int]:
        """Return the numbers of expired leases; the caller drops them."""
        over = []
        while self._ends and self._ends[0][0] <= now_ns:
            over.append(heappop(self._ends)[1])
        return over

    def drop(self, number: int) -> None:
        lease = self._leases.pop(number)
        del self._shared[lease.worker, lease.since_ns, lease.until_ns]

    def _drop_empty(self) -> None:
        """Drop leases without records, which might end much later."""
        self._leases = {number: lease for number, lease in self._leases.items() if lease.left}
        self._shared = {(each.worker, each.since_ns, each.until_ns): n for n, each in self._leases.items()}
        self._ends = sorted((lease.until_ns, number) for number, lease in self._leases.items())
        self._max = _KEPT + 2 * len(self._leases)


@dataclass(slots=True)
class _KeyQueue:
    """Records of one key, in order; done records may remain after the first one."""

    key: bytes
    sequences: array[int] = field(default_factory=partial(array, "Q"))
    start: int = 0


class _KeyOrder:
    """Open records of a window that have a key.

    A done record stays in its queue until it is at the front, so nothing moves in the middle of a long queue.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._queue_of: dict[int, _KeyQueue] = {}
        self._queues: dict[bytes, _KeyQueue] = {}

    def add(self, sequence: int, key: bytes) -> bool:
        """Add a record after all others of its key; return True if it is the first one."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _KeyQueue(key)
        self._queue_of[sequence] = queue
        queue.sequences.append(sequence)
        return len(queue.sequences) - queue.start == 1

    def remove(self, sequence: int) -> int | None:
        """Remove a done record; return the first one of its key that remains, if any."""
        queue = self._queue_of.pop(sequence, None)
        if queue is None:
            return None
        while queue.start < len(queue.sequences) and self._is_done(queue.sequences[queue.start]):
            queue.start += 1
        if queue.start == len(queue.sequences):
            del self._queues[queue.key]
            return None
        if queue.start > max(_COMPACTED_FROM, len(queue.sequences) // 2):
            del queue.sequences[: queue.start]
            queue.start = 0
        return queue.sequences[queue.start]

    def is_first(self, sequence: int) -> bool:
        """True if no earlier record of the same key is open."""
        queue = self._queue_of.get(sequence)
        if queue is None:
            return True
        place = bisect_left(queue.sequences, sequence, queue.start)
        return all(self._is_done(before) for before in queue.sequences[queue.start : place])

    def behind(self, sequence: int) -> Iterator[int]:
        """Return the later open records of the same key, in order."""
        queue = self._queue_of.get(sequence)
        if queue is None:
            return
        for place in range(bisect_right(queue.sequences, sequence, queue.start), len(queue.sequences)):
            if not self._is_done(queue.sequences[place]):
                yield queue.sequences[place]

    def of(self, run: Run) -> list[int]:
        """Return the records of a run that have a key, in order."""
        return run.among(self._queue_of)

    def _is_done(self, sequence: int) -> bool:
        return self._window.state(sequence) is State.DONE


def stretches(named: Sequence[Named]) -> Iterator[list[Claim]]:
    """Return all claims in order, as lists of adjacent ones. A record named by two workers is in two lists."""
    claims = [Claim(run, who) for who, (_, sequences) in enumerate(named) for run in runs_of(sequences)]
    stretch: list[Claim] = []
    for claim in sorted(claims):
        if stretch and claim.run.first != stretch[-1].run.last + 1:
            yield stretch
            stretch = []
        stretch.append(claim)
    if stretch:
        yield stretch


def _joined(parts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Join adjacent parts of the same worker."""
    return [(worker, sum(size for _, size in same)) for worker, same in groupby(parts, itemgetter(0))]
