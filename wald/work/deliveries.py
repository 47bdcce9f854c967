"""Who has which record of a work group, how often each was delivered, and which comes next; no file, and no clock.

    taken in ─▶ free ─▶ out ─▶ done
                 ▲       │
                 └───────┴─ its lease is over, it was given back, its consumer is gone; with a delay, first waiting

With an order by key, a record that follows an open one of its key is *behind* it. One consumer at a time has records of
a key: those that follow the first one may go out in the same lease, and when an earlier one comes back, they come back
too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from wald.work.claims import Claim, Named, joined, stretches
from wald.work.keys import KeyOrder
from wald.work.leases import Lease, Leases
from wald.work.window import Run, State, Window, runs_of


class Refusal(NamedTuple):
    """A record that a consumer cannot settle.

    Attributes:
        holder: the consumer that has it; "" if none has.
    """

    sequence: int
    holder: str


@dataclass(slots=True)
class Settled:
    """What became of the records that consumers named.

    Attributes:
        runs: for which it was carried out.
        refused: for which it was not, of each who named some.
    """

    runs: list[Run]
    refused: list[list[Refusal]]


class Part(NamedTuple):
    """What one consumer gets of a run.

    Attributes:
        until_ns: when its lease ends, by the clock that is never set.
        size: how many records.
    """

    consumer: str
    until_ns: int
    size: int


class Deliveries:
    """The records of one route above the ack floor.

    Attributes:
        window: what each of them is.
    """

    def __init__(self, floor: int, *, by_key: bool = False) -> None:
        self.window = Window(floor)
        self._keys = KeyOrder(self.window) if by_key else None
        self._offered: list[int] = []  # what goes out with a lease, but not alone
        self._followers: list[Run] = []
        self._leases = Leases()
        self._due: list[tuple[int, int]] = []  # a heap: when each waiting record is due
        self._due_of: dict[int, int] = {}

    def take_in(
        self, run: Run, keys: Iterable[bytes | None] | None = None, due: Iterable[tuple[int, int]] = ()
    ) -> None:
        """Take in records that follow all others.

        Args:
            keys: of each record, if the order is by key; None: :meth:`sort` gets them later.
            due: sequence and time of each that is not to be delivered before, in ns since 1970.
        """
        self.window.take_in(run)
        if keys is not None:
            self.sort(run, keys)
        for sequence, due_ns in due:
            self.delay(sequence, due_ns)

    def sort(self, run: Run, keys: Iterable[bytes | None]) -> None:
        """Take in the keys of records that were taken in without, in the order of the log."""
        if self._keys is None:
            return
        add = self._keys.add
        behind = [
            sequence
            for sequence, key, state in zip(
                range(run.first, run.last + 1), keys, self.window.states_of(run), strict=True
            )
            if key is not None and state != State.DONE and not add(sequence, key)
        ]
        for part in runs_of(behind):
            self.window.set(part, State.BEHIND)

    def delay(self, sequence: int, due_ns: int) -> None:
        """Take in that a record is not to be delivered before ``due_ns``."""
        self._due_of[sequence] = due_ns
        heappush(self._due, (due_ns, sequence))
        if self.window.state(sequence) is State.FREE:
            self._set(sequence, State.WAITING)

    def first_free(self) -> Run | None:
        """Records that come next; a run may be delivered from its beginning on. None if there are none."""
        return self.window.first_free()

    def deliver(self, run: Run, parts: Sequence[Part], *, now_ns: int) -> bytes:
        """Take in that free records are leased, part after part.

        What follows those of the last part by key is free until :meth:`close`, and only for its consumer.

        Returns:
            for each how often it was delivered, this time included.
        """
        numbers: array[int] = array("I")
        for consumer, until_ns, size in parts:
            number = self._leases.number(consumer, now_ns, until_ns)
            self._leases[number].left += size
            numbers += array("I", [number]) * size
        tries = self.window.deliver(run, numbers)
        if self._keys is not None:
            self._offer(Run(run.last - parts[-1].size + 1, run.last), self._keys)
        return tries

    @property
    def is_offering(self) -> bool:
        """Whether something is free for one consumer only."""
        return bool(self._offered)

    def close(self) -> None:
        """Take in that a consumer gets no more for now."""
        for sequence in self._offered:
            if self.window.state(sequence) is State.FREE:
                self._set(sequence, State.BEHIND)
        self._offered.clear()

    def finish(self, named: Sequence[Named]) -> Settled:
        """Take in what consumers have processed.

        What is done stays done. What was delivered and is with no consumer by now is done, too, as to deliver it again
        would be of no use. What another consumer has, or what was never delivered, is refused.
        """
        return self._settled(named, self._finish, late=True)

    def finish_all(self, run: Run) -> None:
        """Take in that these records are done, also those that a consumer has."""
        first, last = max(run.first, self.window.floor + 1), min(run.last, self.window.end - 1)
        if first <= last:
            run = Run(first, last)
            self._uncount(run)
            self._finish(run)

    def hold(self, run: Run, consumer: str, *, until_ns: int) -> None:
        """Take in that ``consumer`` has what is open of a run, which was counted before, whichever had it."""
        number = self._leases.number(consumer, until_ns, until_ns)
        self._uncount(run)
        self._leases[number].left += self.window.hold(run, number)

    def take_back(self, run: Run) -> None:
        """Take in that what is out of a run came back, whichever consumer has it."""
        for _, part in list(self.window.leases_in(run)):
            self._uncount(part)
            self._give_back(part)

    def followers(self) -> list[Run]:
        """What came back since this was asked only because an earlier record of its key did."""
        followers, self._followers = self._followers, []
        return followers

    def give_back(self, named: Named, *, due_ns: int | None = None) -> Settled:
        """Take in what a consumer has not processed: it is delivered again, at ``due_ns`` if that is given."""
        return self._settled([named], lambda run: self._give_back(run, due_ns), last_first=True)

    def extend(self, named: Named, *, now_ns: int, until_ns: int) -> Settled:
        """Take in that a consumer needs longer."""

        def extend(run: Run) -> None:
            number = self._leases.number(named[0], now_ns, until_ns)
            self.window.transfer(run, number)
            self._leases[number].left += run.size

        return self._settled([named], extend)

    def release(self, consumer: str) -> list[Run]:
        """Take back all that ``consumer`` has; returns what that was."""
        return self._take_back({number for number, lease in self._leases if lease.consumer == consumer})

    def claim(self, since_ns: int) -> list[Run]:
        """Take back all that consumers have had since ``since_ns`` or longer; returns what that was."""
        over = {number for number, lease in self._leases if lease.since_ns <= since_ns}
        return self._take_back({number for number in over if self._leases[number].consumer})

    def expire(self, now_ns: int) -> list[Run]:
        """Take back what was leased until now; returns what that was."""
        over = self._leases.over(now_ns)
        runs = self._take_back(over)
        for number in over:
            self._leases.drop(number)
        return runs

    def wake(self, now_ns: int) -> None:
        """Make free what is due now."""
        while self._due and self._due[0][0] <= now_ns:
            due_ns, sequence = heappop(self._due)
            if self._due_of.get(sequence) == due_ns:
                del self._due_of[sequence]
                if self.window.state(sequence) is State.WAITING:
                    self._set(sequence, State.FREE)

    @property
    def by_key(self) -> bool:
        """Whether records of one key come in order."""
        return self._keys is not None

    @property
    def next_end_ns(self) -> int | None:
        """When the next lease ends."""
        return self._leases.next_end_ns

    @property
    def next_due_ns(self) -> int | None:
        """When the next waiting record may be due."""
        return self._due[0][0] if self._due else None

    def due_times(self) -> dict[int, int]:
        """When each open record that has a time is due."""
        return {sequence: due_ns for sequence, due_ns in self._due_of.items() if self.window.is_open(sequence)}

    def out(self) -> Iterator[tuple[Run, Lease]]:
        """The records that are out, in order, and their leases."""
        for run in self.window.runs(State.OUT):
            for number, part in self.window.leases_in(run):
                yield part, self._leases[number]

    def holdings(self) -> Iterator[tuple[Run, Lease]]:
        """As :meth:`out`, in fewer runs, which may have records in them that are done."""
        for number, run in self.window.holdings():
            yield run, self._leases[number]

    def _offer(self, run: Run, keys: KeyOrder) -> None:
        """Make what follows by key free, for the same consumer."""
        for sequence in keys.of(run):
            following = next(keys.behind(sequence), None)
            if following and self.window.state(following) is State.BEHIND and following not in self._due_of:
                self._set(following, State.FREE)
                self._offered.append(following)

    def _settled(
        self, named: Sequence[Named], carry_out: Callable[[Run], None], *, late: bool = False, last_first: bool = False
    ) -> Settled:
        """Carry something out for the records that consumers have.

        Args:
            late: also for those that they had.
            last_first: from the last one on, as those behind a record come back with it.
        """
        settled = Settled([], [[] for _ in named])
        found = list(stretches(named))
        for stretch in reversed(found) if last_first else found:
            run = Run(stretch[0].run.first, stretch[-1].run.last)
            if self._count_off(run, stretch, named):
                carry_out(run)
                settled.runs.append(run)
                continue
            each = [(sequence, who) for (first, last), who in stretch for sequence in range(first, last + 1)]
            for sequence, who in reversed(each) if last_first else each:
                if self._may_settle(named[who][0], sequence, settled.refused[who], late=late):
                    part = Run(sequence, sequence)
                    self._uncount(part)
                    carry_out(part)
                    settled.runs.append(part)
        return settled

    def _count_off(self, run: Run, claims: Sequence[Claim], named: Sequence[Named]) -> bool:
        """Take a run off the leases of those who claim it; False if they do not have all of it."""
        held = self.window.leases_of(run) if self._keys is None else []
        claimed = ((named[who][0], part.size) for part, who in claims)
        if joined((self._leases[number].consumer, size) for number, size in held) != joined(claimed):
            return False
        for number, size in held:
            self._leases[number].left -= size
        return True

    def _may_settle(self, consumer: str, sequence: int, refused: list[Refusal], *, late: bool) -> bool:
        """Whether ``consumer`` may settle a record; if it may not and that matters, it is refused."""
        state = self.window.state(sequence)
        if state is State.DONE:
            return False
        holder = self._leases[self.window.lease_of(sequence)].consumer if state is State.OUT else ""
        had = late and state not in (None, State.OUT) and self.window.tries(sequence) > 0
        if had or holder == consumer:
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

    def _give_back_in_order(self, sequence: int, keys: KeyOrder) -> None:
        """Give a record back that is counted off its lease, and with it those behind it that are out."""
        self._set(sequence, State.BEHIND)
        for behind in keys.behind(sequence):
            if self.window.state(behind) is State.OUT:
                self._uncount(Run(behind, behind))
                self._set(behind, State.BEHIND)
                self._followers.append(Run(behind, behind))
        if keys.is_first(sequence):
            self._free(sequence)

    def _take_back(self, numbers: Collection[int]) -> list[Run]:
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
            for part in self._still_out(run):
                self._uncount(part)
                self._give_back(part)
        return runs

    def _still_out(self, run: Run) -> Iterator[Run]:
        """What of a run is out when its turn comes: what is behind a record comes back with it."""
        if self._keys is None:
            yield run
            return
        for sequence in range(run.first, run.last + 1):
            if self.window.state(sequence) is State.OUT:
                yield Run(sequence, sequence)

    def _uncount(self, run: Run) -> None:
        """Take records off the leases by which they are out."""
        for number, part in self.window.leases_in(run):
            self._leases[number].left -= part.size

    def _free(self, sequence: int) -> None:
        """Make a record free, or let it wait if it is not due."""
        self._set(sequence, State.WAITING if sequence in self._due_of else State.FREE)

    def _set(self, sequence: int, state: State) -> None:
        self.window.set(Run(sequence, sequence), state)
