"""Deliveries of a work group compared with the model of ``tests/support/workgroup_model.py``, one by one."""

from itertools import cycle

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from workgroup_model import Group, Item

from wald.format.work import PAGE_RECORDS
from wald.work.deliveries import Deliveries, Part
from wald.work.window import Run, State

SECOND = 1_000_000_000
CONSUMERS = ("a", "b", "c")
consumers = st.sampled_from(CONSUMERS)
FLOOR = PAGE_RECORDS - 3


class Machine(RuleBasedStateMachine):
    by_key = False

    def __init__(self) -> None:
        super().__init__()
        self.deliveries = Deliveries(FLOOR, by_key=self.by_key)
        self.model = Group(self.by_key, window=1 << 40, max_tries=None)
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
            self.model.items[sequence] = Item(sequence, sequence, key, due.get(sequence, 0), self.wall)

    @rule(consumer=consumers, limit=st.integers(1, 40), seconds=st.integers(1, 30))
    def lease(self, consumer: str, limit: int, seconds: int) -> None:
        got: list[int] = []
        until = self.now + seconds * SECOND
        while len(got) < limit and (run := self.deliveries.window.first_free()):
            part = Run(run.first, min(run.last, run.first + limit - len(got) - 1))
            self.deliveries.deliver(part, [Part(consumer, until, part.size)], now_ns=self.now)
            got += range(part.first, part.last + 1)
        self.deliveries.end_offer()
        wanted: list[int] = []
        while len(wanted) < limit and (record := self.next_beside(wanted)):
            record.holder, record.since_ns, record.until_ns = consumer, self.now, until
            record.tries += 1
            wanted.append(record.sequence)
        assert got == wanted

    def next_beside(self, leased: list[int]) -> Item | None:
        """Return the record that a worker gets next within one lease."""
        floor = self.model.floor
        return next((item for item in self.model.open() if self.model.may_come(item, leased, floor)), None)

    def some(self, data: st.DataObject, consumer: str) -> list[int]:
        """Draw mostly records of a worker, in any order, and some others."""
        mine = [item.sequence for item in self.model.held(consumer)]
        chosen = data.draw(st.lists(st.sampled_from(mine), unique=True, max_size=60)) if mine else []
        known = list(self.model.items)
        others = data.draw(st.lists(st.sampled_from(known), unique=True, max_size=5)) if known else []
        return [*chosen, *(each for each in others if each not in chosen)]

    @rule(consumer=consumers, data=st.data())
    def finish(self, consumer: str, data: st.DataObject) -> None:
        sequences = self.some(data, consumer)
        refused = []
        for sequence in sorted(sequences):
            record = self.model.items[sequence]
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
        before = {sequence: record.holder for sequence, record in self.model.items.items()}
        was_done = {sequence for sequence, record in self.model.items.items() if record.done}
        for consumer, sequences in named:
            for sequence in set(sequences) - was_done:
                record = self.model.items[sequence]
                if consumer == before[sequence] or (record.tries and not before[sequence]):
                    record.done, record.holder = True, ""
        for (consumer, sequences), refused in zip(named, settled.refused, strict=True):
            wrong = [s for s in sequences if s not in was_done and before[s] != consumer]
            late = {s for s in wrong if self.model.items[s].done}
            assert {each.sequence for each in refused} - late == set(wrong) - late
            assert all(holder == before[s] for s, holder in refused)
            assert [each.sequence for each in refused] == sorted({each.sequence for each in refused})

    @rule(consumer=consumers, delay=st.none() | st.integers(0, 20), data=st.data())
    def give_back(self, consumer: str, delay: int | None, data: st.DataObject) -> None:
        sequences = self.some(data, consumer)
        due = None if delay is None else self.wall + delay * SECOND
        for sequence in sorted(sequences, reverse=True):  # records after it by key return with it
            record = self.model.items[sequence]
            if not record.done and record.holder == consumer:
                self.model.come_back(record)
                if due is not None:
                    record.due_ns, record.peak_ns = due, self.wall
        self.deliveries.give_back((consumer, sorted(sequences)), due_ns=due)
        self.deliveries.wake(self.wall)

    @rule(consumer=consumers, seconds=st.integers(1, 60), data=st.data())
    def extend(self, consumer: str, seconds: int, data: st.DataObject) -> None:
        until = self.now + seconds * SECOND
        sequences = self.some(data, consumer)
        for sequence in sequences:
            record = self.model.items[sequence]
            if not record.done and record.holder == consumer:
                record.until_ns, record.since_ns = until, self.now
        self.deliveries.extend((consumer, sorted(sequences)), now_ns=self.now, until_ns=until)

    @rule(consumer=consumers)
    def release(self, consumer: str) -> None:
        mine = self.model.held(consumer)
        for item in mine:
            self.model.come_back(item)
        released = {
            sequence for run in self.deliveries.release(consumer) for sequence in range(run.first, run.last + 1)
        }
        assert released == {item.sequence for item in mine}

    @rule(seconds=st.integers(0, 30))
    def claim(self, seconds: int) -> None:
        since = self.now - seconds * SECOND
        for item in [each for each in self.model.open() if each.holder and each.since_ns <= since]:
            self.model.come_back(item)
        self.deliveries.claim(since)

    @rule(seconds=st.integers(1, 20))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds * SECOND
        self.wall += seconds * SECOND
        self.model.lapse(self.now)
        self.model.notice()
        self.model.show(self.wall)
        self.deliveries.expire(self.now)
        self.deliveries.wake(self.wall)

    @rule(seconds=st.integers(-50, 50))
    def the_clock_is_set(self, seconds: int) -> None:
        self.wall += seconds * SECOND
        self.model.show(self.wall)  # due records stay due
        self.deliveries.wake(self.wall)

    @invariant()
    def what_is_out_is_with_whom_it_was_leased_to(self) -> None:
        out = {s: lease.worker for run, lease in self.deliveries.out() for s in range(run.first, run.last + 1)}
        assert out == {each.sequence: each.holder for each in self.model.open() if each.holder}

    @invariant()
    def what_is_done_is_done(self) -> None:
        window = self.deliveries.window
        for sequence, record in self.model.items.items():
            assert (window.state(sequence) is State.DONE) == record.done
            assert record.done or window.tries(sequence) == record.tries
        assert window.open == len(self.model.open())

    @invariant()
    def the_floor_is_before_the_first_open_record(self) -> None:
        first = min((each.sequence for each in self.model.open()), default=self.deliveries.window.end)
        assert self.deliveries.window.floor == first - 1

    def teardown(self) -> None:
        """Check that every unacknowledged record is still delivered."""
        self.now += 1000 * SECOND
        self.deliveries.expire(self.now)
        self.deliveries.wake(self.wall + 10**6 * SECOND)
        left = {each.sequence for each in self.model.open()}
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
