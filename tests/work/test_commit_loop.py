"""Concurrent threads: a round of the commit loop applies all their requests and divides new records among them."""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import pytest
from hypothesis import given
from leasing import group, sequences
from logs import Built
from running import eventually

from wald.reading.assembler import Rows
from wald.work.deliveries import Refusal
from wald.work.group import Order, WorkGroup
from wald.work.owner import Delivery, Leased, LeaseOrder, divide, hand_out
from wald.work.window import Run

WORKERS = 16


def together(count: int, do: Callable[[int], list[Delivery]]) -> list[list[Delivery]]:
    """Return the results of ``count`` threads that start at the same time."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> list[Delivery]:
        barrier.wait()
        return do(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(begin, range(count)))


def lease(work: WorkGroup, number: int, records: int, done: list[int]) -> list[int]:
    """Lease this number of records, in as many calls as needed."""
    got: list[int] = []
    while len(got) < records:
        got += sequences(work.lease(f"w{number}", records - len(got), wait=30, done=done))
    return got


@pytest.mark.parametrize(("order", "records"), [("log", 1), ("key", 3)])
def test_those_who_wait_share_what_comes(built: Built, order: Order, records: int) -> None:
    """This includes several batches, and the next round acknowledges all records of the previous one."""
    rounds = 4
    built.lines("a", [b"first"])
    built.log.set_cursor("a", 1, "g")
    with group(built, order=order) as work, ThreadPoolExecutor(WORKERS) as threads:
        done: list[list[int]] = [[] for _ in range(WORKERS)]
        for first in range(2, 2 + rounds * WORKERS * records, WORKERS * records):
            waiting = [threads.submit(lease, work, number, records, done[number]) for number in range(WORKERS)]
            count = WORKERS * records
            built.columns("a", [b"x"] * (count // 2), keys=[b"k%d" % n for n in range(count // 2)], headers=None)
            built.columns("a", [b"x"] * (count - count // 2), keys=None, headers=None)
            done = [each.result() for each in waiting]
            assert sorted(s for each in done for s in each) == list(range(first, first + count))
        assert work.floor == 1 + (rounds - 1) * WORKERS * records
        assert work.lease("w0", done=done[0]) == []
        assert [pending.worker for pending in work.pending()].count("w0") == 0


def test_records_of_a_key_are_with_one_of_those_who_ask_together(built: Built) -> None:
    keys = [b"%d" % (number % 5) for number in range(4 * WORKERS)]
    built.columns("a", [b"x"] * len(keys), keys=keys, headers=None)
    with group(built, order="key") as work:
        left = len(keys)
        while left:
            got = together(WORKERS, lambda number: work.lease(f"w{number}", 1 + number % 3, wait=0.05))
            holders: dict[bytes, int] = {}
            for number, some in enumerate(got):
                for record, _ in some:
                    assert record.key is not None
                    assert holders.setdefault(record.key, number) == number
                left -= len(some)
                assert work.ack(f"w{number}", sequences(some)) == []


def test_each_that_acknowledges_learns_for_which_of_its_own_it_did_not_count(built: Built) -> None:
    built.lines("a", [b"x"] * 3 * WORKERS)
    with group(built) as work:
        for number in range(WORKERS):
            assert sequences(work.lease(f"w{number}", 2, wait=30)) == [2 * number + 1, 2 * number + 2]
        refused: dict[int, list[Refusal]] = {}
        barrier = threading.Barrier(WORKERS)

        def acknowledge(number: int) -> None:
            """Acknowledge the worker's first record, the next worker's second one, and one that was not delivered."""
            barrier.wait()
            named = [2 * number + 1, 2 * number + 4, 2 * WORKERS + 1 + number]
            refused[number] = work.ack(f"w{number}", named)

        with ThreadPoolExecutor(WORKERS) as threads:
            list(threads.map(acknowledge, range(WORKERS)))
        for number in range(WORKERS):
            next_one = [Refusal(2 * number + 4, f"w{number + 1}")] if number + 1 < WORKERS else []
            not_delivered = [Refusal(s, "") for s in (2 * number + 4, 2 * WORKERS + 1 + number) if s > 2 * WORKERS]
            assert refused[number] == next_one + not_delivered
        assert sorted(s.first for s in work.pending()) == list(range(2, 2 * WORKERS + 1, 2))


def test_a_thread_that_is_alone_waits_until_its_time_is_over_or_records_come(built: Built) -> None:
    """It runs the round itself, and the commit loop has to end its lease."""
    built.lines("a", [b"first"])
    with group(built) as work, ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: sequences(work.lease("x", wait=30))).result() == [1]
        assert thread.submit(lambda: sequences(work.lease("x", wait=0.05, done=[1]))).result() == []
        assert work.floor == 1
        waiting = thread.submit(lambda: sequences(work.lease("x", wait=30)))
        built.lines("a", [b"second"])
        assert waiting.result() == [2]


@pytest.mark.parametrize("moment", ["tick", "next_change_ns"])
def test_the_garbage_collector_may_end_a_loop_over_jobs_during_a_round(
    built: Built, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another lease waits, so that the round ends with a look at when to continue."""
    built.lines("a", [b"x"] * 3)
    with group(built) as work, ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as other:

        def abandon() -> None:
            jobs = iter(work.worker("x", max_records=3, wait=30))
            assert next(jobs).sequence == 1
            cycle: list[object] = [jobs]
            cycle.append(cycle)

        gc.disable()
        try:
            thread.submit(abandon).result(30)
            waiting = other.submit(lambda: sequences(work.lease("y", 3, wait=30)))
            eventually(lambda: len(work._loop._waiting) == 1)
            called = getattr(work._owner, moment)
            monkeypatch.setattr(work._owner, moment, lambda: (gc.collect(), called())[1])
            assert thread.submit(work.ack, "x", [1]).result(30) == []
        finally:
            gc.enable()
        assert waiting.result(30) == [2, 3]


def test_an_exception_from_outside_in_a_round_fails_the_group_for_all_its_callers(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries that limit the time of a thread raise one, perhaps when a line of the journal is half written."""

    class TimeLimit(BaseException):
        pass

    def interrupt() -> None:
        if threading.current_thread() is not work._loop._thread:
            raise TimeLimit
        tick()

    def acknowledge() -> None:
        while True:  # until this thread runs the round itself
            work.ack("x", [1])

    built.lines("a", [b"x"] * 2)
    work = group(built)
    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as other:
        assert sequences(work.lease("x", 2, wait=30)) == [1, 2]
        waiting = other.submit(work.lease, "y", wait=30)
        eventually(lambda: len(work._loop._waiting) == 1)
        tick = work._owner.tick
        monkeypatch.setattr(work._owner, "tick", interrupt)
        with pytest.raises(TimeLimit):
            thread.submit(acknowledge).result(30)
        with pytest.raises(RuntimeError, match="TimeLimit"):
            waiting.result(30)
        with pytest.raises(RuntimeError, match="TimeLimit"):
            thread.submit(work.ack, "x", [2]).result(30)
    assert work.has_failed
    work.close()


def test_closing_the_group_ends_threads_that_call_alone(built: Built) -> None:
    built.columns("a", [b"x"] * 2000, keys=None, headers=None)

    def call(work: WorkGroup, began: threading.Event, acknowledged: list[int]) -> None:
        done: list[int] = []
        while True:
            got = sequences(work.lease("x", 1, wait=30, done=done))
            acknowledged.extend(done)
            began.set()
            done = got

    for _ in range(20):
        work, began, acknowledged = group(built), threading.Event(), [0]
        with ThreadPoolExecutor(1) as thread:
            calling = thread.submit(call, work, began, acknowledged)
            assert began.wait(30)
            work.close()
            with pytest.raises(ValueError, match="the work group is closed"):
                calling.result(30)
        with group(built) as again:
            assert again.floor >= acknowledged[-1]


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=12)
LIMITS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20)), min_size=1, max_size=6)


def rows(sizes: list[int]) -> Rows:
    return Rows("a", 1, len(sizes), 0, [bytes(size) for size in sizes])


def handed_out(sizes: list[int], tries: bytes, wanted: list[LeaseOrder]) -> None:
    some = rows(sizes)
    if shares := list(divide(some.values, wanted)):
        run = Run(1, sum(count for _, count in shares))
        hand_out(some, run, tries[: run.size], shares)


def alone(sizes: list[int], records_max: int, bytes_max: int) -> int:
    """Return how many of the first records a worker without records gets."""
    count = 0
    while count < min(len(sizes), records_max) and (count == 0 or sum(sizes[: count + 1]) <= bytes_max):
        count += 1
    return count


@given(SIZES, LIMITS)
def test_each_gets_what_it_would_get_alone_of_what_is_left(sizes: list[int], limits: list[tuple[int, int]]) -> None:
    wanted = [LeaseOrder(f"worker-{place}", *limit, 1) for place, limit in enumerate(limits)]
    handed_out(sizes, bytes(range(1, len(sizes) + 1)), wanted)
    at = 0
    for each, limit in zip(wanted, limits, strict=True):
        count = alone(sizes[at:], *limit)
        expected = [(sequence, sequence) for sequence in range(at + 1, at + count + 1)]
        assert [(delivery.record.sequence, delivery.tries) for delivery in Leased(each.shares, ())] == expected
        assert each.runs == ([(at + 1, at + count)] if count else [])
        at += count


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(1, 20), st.integers(1, 30))
def test_what_comes_in_parts_counts_together(parts: list[list[int]], records_max: int, bytes_max: int) -> None:
    wanted = LeaseOrder("worker", records_max, bytes_max, 1)
    first = 0
    for sizes in parts:
        if not wanted.is_full:
            handed_out(sizes, bytes(len(sizes)), [wanted])
        first += len(sizes)
    sizes = [size for part in parts for size in part]
    values = [len(delivery.record.value) for delivery in Leased(wanted.shares, ())]
    assert len(values) <= records_max
    assert values == sizes[: len(values)]
    assert sum(values) <= bytes_max or len(values) == 1
    if len(values) < len(sizes):
        assert wanted.is_full
        assert len(values) == records_max or sum(values) + sizes[len(values)] > bytes_max or sum(values) == bytes_max
