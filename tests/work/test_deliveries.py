"""Deliveries of a work group compared with a plain list of records and their states, scanned one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from wald.format.work import PAGE_RECORDS
from wald.work.deliveries import Deliveries, Part
from wald.work.window import Run, State

SECOND = 1_000_000_000
CONSUMERS = ("a", "b", "c")
consumers = st.sampled_from(CONSUMERS)
FLOOR = PAGE_RECORDS - 3


@dataclass
class Model:
    """State of one record."""

    sequence: int
    key: bytes | None
    due_ns: int = 0
    tries: int = 0
    done: bool = False
    holder: str = ""
    since_ns: int = 0
    until_ns: int = 0


@dataclass
class Oracle:
    """Model of the records of a route."""

    by_key: bool
    records: dict[int, Model] = field(default_factory=dict)

    def open(self) -> list[Model]:
        return [record for record in self.records.values() if not record.done]

    def of(self, consumer: str) -> list[int]:
        return [record.sequence for record in self.open() if record.holder == consumer]

    def next_for(self, consumer: str, wall_ns: int) -> Model | None:
        """Return the record that ``consumer`` gets next within one lease."""
        blocked: set[bytes] = set()
        for record in self.open():
            if record.key in blocked:
                continue
            if not record.holder and record.due_ns <= wall_ns:
                return record
            if self.by_key and record.key is not None and record.sequence not in self.leased:
                blocked.add(record.key)
        return None

    leased: set[int] = field(default_factory=set)

    def come_back(self, sequences: set[int]) -> None:
        """Return records, and those after them by key."""
        for sequence in sequences:
            record = self.records[sequence]
            record.holder = ""
            for each in self.open():
                if self.by_key and record.key is not None and each.key == record.key and each.sequence > sequence:
                    each.holder = ""


class Machine(RuleBasedStateMachine):
    by_key = False

    def __init__(self) -> None:
        super().__init__()
        self.deliveries = Deliveries(FLOOR, by_key=self.by_key)
        self.oracle = Oracle(self.by_key)
        self.now = self.wall = 1000 * SECOND

    @rule(gap=st.integers(0, 200), count=st.integers(1, 40), data=st.data())
    def more_records(self, gap: int, count: int, data: st.DataObject) -> None:
        first = self.deliveries.window.end + gap
        pattern = data.draw(st.text("-xyz", min_size=1, max_size=6))
        keys = [
            None if letter == "-" else letter.encode() for letter, _ in zip(cycle(pattern), range(count), strict=False)
        ]
        late = data.draw(st.dictionaries(st.integers(first, first + count - 1), st.integers(1, 50), max_size=3))
        due = {sequence: self.wall + seconds * SECOND for sequence, seconds in late.items()}
        self.deliveries.append(Run(first, first + count - 1), keys, due.items())
        for sequence, key in enumerate(keys, first):
            self.oracle.records[sequence] = Model(sequence, key, due.get(sequence, 0))

    @rule(consumer=consumers, limit=st.integers(1, 40), seconds=st.integers(1, 30))
    def lease(self, consumer: str, limit: int, seconds: int) -> None:
        got: list[int] = []
        until = self.now + seconds * SECOND
        while len(got) < limit and (run := self.deliveries.window.first_free()):
            part = Run(run.first, min(run.last, run.first + limit - len(got) - 1))
            self.deliveries.deliver(part, [Part(consumer, until, part.size)], now_ns=self.now)
            got += range(part.first, part.last + 1)
        self.deliveries.end_offer()
        self.oracle.leased.clear()
        wanted: list[int] = []
        while len(wanted) < limit and (record := self.oracle.next_for(consumer, self.wall)):
            record.holder, record.since_ns, record.until_ns = consumer, self.now, until
            record.tries += 1
            self.oracle.leased.add(record.sequence)
            wanted.append(record.sequence)
        assert got == wanted

    def some(self, data: st.DataObject, consumer: str) -> list[int]:
        """Draw mostly records of a worker, in any order, and some others."""
        mine = self.oracle.of(consumer)
        chosen = data.draw(st.lists(st.sampled_from(mine), unique=True, max_size=60)) if mine else []
        known = list(self.oracle.records)
        others = data.draw(st.lists(st.sampled_from(known), unique=True, max_size=5)) if known else []
        return [*chosen, *(each for each in others if each not in chosen)]

    @rule(consumer=consumers, data=st.data())
    def finish(self, consumer: str, data: st.DataObject) -> None:
        sequences = self.some(data, consumer)
        refused = []
        for sequence in sorted(sequences):
            record = self.oracle.records[sequence]
            free = not record.holder and record.tries
            if record.done:
                continue
            if record.holder == consumer or free:
                record.done, record.holder = True, ""
            else:
                refused.append((sequence, record.holder))
        settled = self.deliveries.finish([(consumer, sorted(sequences))])
        assert settled.refused == [refused]

    @rule(data=st.data())
    def finish_together(self, data: st.DataObject) -> None:
        """Several workers name records, including the same ones; any order among them is correct."""
        named = [(consumer, sorted(self.some(data, consumer))) for consumer in CONSUMERS]
        settled = self.deliveries.finish(named)
        before = {sequence: record.holder for sequence, record in self.oracle.records.items()}
        was_done = {sequence for sequence, record in self.oracle.records.items() if record.done}
        for consumer, sequences in named:
            for sequence in set(sequences) - was_done:
                record = self.oracle.records[sequence]
                if consumer == before[sequence] or (record.tries and not before[sequence]):
                    record.done, record.holder = True, ""
        for (consumer, sequences), refused in zip(named, settled.refused, strict=True):
            wrong = [s for s in sequences if s not in was_done and before[s] != consumer]
            late = {s for s in wrong if self.oracle.records[s].done}
            assert {each.sequence for each in refused} - late == set(wrong) - late
            assert all(holder == before[s] for s, holder in refused)
            assert [each.sequence for each in refused] == sorted({each.sequence for each in refused})

    @rule(consumer=consumers, delay=st.none() | st.integers(0, 20), data=st.data())
    def give_back(self, consumer: str, delay: int | None, data: st.DataObject) -> None:
        sequences = self.some(data, consumer)
        due = None if delay is None else self.wall + delay * SECOND
        for sequence in sorted(sequences, reverse=True):  # records after it by key return with it
            record = self.oracle.records[sequence]
            if not record.done and record.holder == consumer:
                self.oracle.come_back({sequence})
                record.due_ns = record.due_ns if due is None else due
        self.deliveries.give_back((consumer, sorted(sequences)), due_ns=due)
        self.deliveries.wake(self.wall)

    @rule(consumer=consumers, seconds=st.integers(1, 60), data=st.data())
    def extend(self, consumer: str, seconds: int, data: st.DataObject) -> None:
        until = self.now + seconds * SECOND
        sequences = self.some(data, consumer)
        for sequence in sequences:
            record = self.oracle.records[sequence]
            if not record.done and record.holder == consumer:
                record.until_ns, record.since_ns = until, self.now
        self.deliveries.extend((consumer, sorted(sequences)), now_ns=self.now, until_ns=until)

    @rule(consumer=consumers)
    def release(self, consumer: str) -> None:
        mine = set(self.oracle.of(consumer))
        self.oracle.come_back(mine)
        released = {
            sequence for run in self.deliveries.release(consumer) for sequence in range(run.first, run.last + 1)
        }
        assert released == mine

    @rule(seconds=st.integers(0, 30))
    def claim(self, seconds: int) -> None:
        idle = {
            each.sequence for each in self.oracle.open() if each.holder and each.since_ns <= self.now - seconds * SECOND
        }
        self.oracle.come_back(idle)
        self.deliveries.claim(self.now - seconds * SECOND)

    @rule(seconds=st.integers(1, 20))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds * SECOND
        self.wall += seconds * SECOND
        over = {each.sequence for each in self.oracle.open() if each.holder and each.until_ns <= self.now}
        self.oracle.come_back(over)
        self.deliveries.expire(self.now)
        self.deliveries.wake(self.wall)

    @rule(seconds=st.integers(-50, 50))
    def the_clock_is_set(self, seconds: int) -> None:
        self.wall += seconds * SECOND
        if seconds < 0:  # due records stay due
            for each in self.oracle.open():
                if each.due_ns <= self.wall - seconds * SECOND:
                    each.due_ns = 0
        self.deliveries.wake(self.wall)

    @invariant()
    def what_is_out_is_with_whom_it_was_leased_to(self) -> None:
        out = {s: lease.worker for run, lease in self.deliveries.out() for s in range(run.first, run.last + 1)}
        assert out == {each.sequence: each.holder for each in self.oracle.open() if each.holder}

    @invariant()
    def what_is_done_is_done(self) -> None:
        window = self.deliveries.window
        for sequence, record in self.oracle.records.items():
            assert (window.state(sequence) is State.DONE) == record.done
            assert record.done or window.tries(sequence) == record.tries
        assert window.open == len(self.oracle.open())

    @invariant()
    def the_floor_is_before_the_first_open_record(self) -> None:
        first = min((each.sequence for each in self.oracle.open()), default=self.deliveries.window.end)
        assert self.deliveries.window.floor == first - 1

    def teardown(self) -> None:
        """Check that every unacknowledged record is still delivered."""
        self.now += 1000 * SECOND
        self.deliveries.expire(self.now)
        self.deliveries.wake(self.wall + 10**6 * SECOND)
        left = {each.sequence for each in self.oracle.open()}
        while run := self.deliveries.window.first_free():
            self.deliveries.deliver(run, [Part("a", self.now + SECOND, run.size)], now_ns=self.now)
            self.deliveries.end_offer()
            self.deliveries.finish([("a", range(run.first, run.last + 1))])
            left -= set(range(run.first, run.last + 1))
            self.deliveries.wake(self.wall + 10**6 * SECOND)
        assert not left
        assert self.deliveries.window.floor == self.deliveries.window.end - 1


class ByKey(Machine):
    by_key = True


_SHORT = settings(max_examples=40, stateful_step_count=25)
TestInTheOrderOfTheLog = Machine.TestCase
TestInTheOrderOfEachKey = ByKey.TestCase
TestInTheOrderOfTheLog.settings = TestInTheOrderOfEachKey.settings = _SHORT


def test_a_record_that_is_given_back_waits_for_the_earlier_one_of_its_key() -> None:
    deliveries = Deliveries(0, by_key=True)
    deliveries.append(Run(1, 2), [b"key", b"key"])
    for sequence in (1, 2):
        deliveries.deliver(Run(sequence, sequence), [Part("a", SECOND, 1)], now_ns=0)
    deliveries.end_offer()
    deliveries.give_back(("a", [2]))
    assert deliveries.window.first_free() is None
    deliveries.finish([("a", [1])])
    assert deliveries.window.first_free() == Run(2, 2)
