"""Samples of ``wald top``, which disturb nothing, and the statements that follow from two of them."""

import fcntl
import itertools
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from damage import flipped
from hypothesis import given
from hypothesis import strategies as st
from logs import Built

from wald.errors import Damaged
from wald.files.listing import Segment
from wald.format.names import Kind
from wald.format.sealed_index import RouteEntry, RouteTable
from wald.log import Log
from wald.retention.backlog import Condition, GroupBacklog, Growth, SegmentStatus, condition_of
from wald.retention.blockers import NO_BLOCKERS, CursorSnapshot
from wald.retention.cursors import Cursor, CursorState
from wald.retention.progress import Lag
from wald.segments.view import State
from wald.status.rates import (
    Amount,
    HeadSample,
    HeadSource,
    LogSample,
    LogSource,
    Sampler,
    activity,
    inventory,
    rest_seconds,
)
from wald.writing.daemon_lock import Lock


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return Built(tmp_path / "log")


def counts(log_sample: LogSample) -> dict[Condition, int]:
    return {state: amount.segments for state, amount in log_sample.states.items()}


def lags(log_sample: LogSample) -> dict[str, int]:
    return {group.cursor.route: group.lag.records for group in log_sample.groups}


@given(took=st.floats(0, 1e6), interval=st.floats(0.1, 1e5))
def test_a_look_takes_a_tenth_of_a_core_at_most_and_comes_no_sooner_than_asked(took: float, interval: float) -> None:
    period = took + rest_seconds(took, interval)

    assert took <= period / 10 * 1.000001
    assert period >= interval * 0.999999


def test_what_each_route_received_is_counted_to_the_record(built: Built) -> None:
    """Sequences of routes interleave; cuts and seals between two samples do not matter."""
    log_samples = LogSource(built.log)
    built.lines("a", [b"x"] * 10)
    first = log_samples.sample(1.0)
    built.lines("a", [b"x"] * 3)
    built.lines("b", [b"x"] * 500)
    built.cut()
    built.lines("a", [b"x"] * 4)
    built.cut()
    built.seal(keep=1)
    built.lines("b", [b"x"])
    second, third = log_samples.sample(2.0), log_samples.sample(3.0)

    assert first.received is None
    assert second.received == {"a": 7, "b": 501}
    assert not any((third.received or {}).values())
    assert second.last_sequences == {"a": 517, "b": 518}


def test_what_a_group_processed_is_counted_to_the_record(built: Built) -> None:
    """Records of other routes that a cursor passes do not count as processed."""
    built.lines("a", [b"x"] * 10)
    built.lines("b", [b"x"] * 500)
    built.lines("a", [b"x"] * 10)
    log_samples = LogSource(built.log)
    first = log_samples.sample(1.0)
    built.log.set_cursor("a", 515)
    built.lines("a", [b"x"] * 2)
    second = log_samples.sample(2.0)
    found = inventory((first, second), now=2.0, now_ns=built.now_ns)

    assert (lags(first)["a"], lags(second)["a"]) == (20, 7)
    assert found is not None
    rates = {row.route: (row.received_per_second, row.processed_per_second) for row in found.rows}
    assert rates == {"a": (2.0, 15.0), "b": (0.0, 0.0)}


def test_segments_are_counted_by_state(built: Built) -> None:
    for route in ("old", "read", "pinned", "waits"):
        built.lines(route, [b"x"])
        built.cut()
    built.seal(keep=1)
    for sequence, route in enumerate(("old", "read", "pinned", "waits"), start=1):
        if route != "pinned":
            built.log.set_cursor(route, sequence)
    built.reclaim(1, keep=True)
    built.lines("pinned", [b"x"])
    log_sample = LogSource(built.log).sample(1.0)

    assert counts(log_sample) == {state: 1 for state in Condition if state is not Condition.UNREADABLE}
    assert log_sample.states[Condition.FREE].stored_bytes == built.path(2, Kind.SEALED).stat().st_size
    assert 0 < log_sample.free_bytes <= log_sample.total_bytes


def test_a_sealed_segment_with_a_damaged_index_is_unreadable(built: Built) -> None:
    """A flipped bit anywhere in the file does not prevent an answer."""
    built.lines("a", [b"x"] * 20)
    built.lines("a", [b"y"] * 20)
    built.cut()
    built.seal()
    built.lines("a", [b"z"])
    path = built.path(1, Kind.SEALED)
    data = path.read_bytes()
    seen = set()
    for bit in range(0, 8 * len(data), 29):
        path.write_bytes(flipped(data, bit))
        log_sample = LogSource(built.log).sample(1.0)
        state = next(state for state in log_sample.states if state is not Condition.ACTIVE)
        assert log_sample.states[state] == Amount(1, len(data))
        seen.add(state)

    assert seen == {Condition.PINNED, Condition.UNREADABLE}


def test_written_bytes_are_counted_through_cuts_and_seals(built: Built) -> None:
    head_samples = HeadSource(built.log)
    assert head_samples.sample(0.0).written_bytes == built.writer.position
    raw_bytes = 0
    for _ in range(3):
        built.lines("a", [b"x" * 1000] * 5)
        raw_bytes += built.writer.position
        built.cut()
    before = head_samples.sample(1.0)
    built.seal()
    after = head_samples.sample(2.0)

    assert before.written_bytes == after.written_bytes == raw_bytes + built.writer.position
    assert (before.sequence, before.durable_ns) == (15, built.now_ns)


def test_sealing_counts_from_the_first_look_on(built: Built) -> None:
    """This includes a segment that is cut, sealed and reclaimed between samples, and one that was already waiting."""
    for _ in range(3):
        built.lines("a", [b"x" * 100])
        built.cut()
    built.seal(keep=2)
    lengths = [built.path(base, Kind.RAW).stat().st_size for base in (2, 3)]
    head_samples = HeadSource(built.log)
    first = head_samples.sample(0.0)
    built.seal(keep=1)
    second = head_samples.sample(1.0)
    built.seal()
    built.reclaim(2)
    third = head_samples.sample(2.0)

    assert [(p.waiting_segments, p.sealed_segments, p.sealed_bytes) for p in (first, second, third)] == [
        (2, 0, 0),
        (1, 1, lengths[0]),
        (0, 2, sum(lengths)),
    ]


def test_a_fresh_root_has_nothing_to_tell(built: Built) -> None:
    built.root.head.unlink()
    head_sample, log_sample = HeadSource(built.log).sample(1.0), LogSource(built.log).sample(1.0)

    assert (head_sample.sequence, head_sample.durable_ns, head_sample.waiting_segments, head_sample.daemon) == (
        0,
        0,
        0,
        "",
    )
    assert (log_sample.groups, counts(log_sample)) == ((), {Condition.ACTIVE: 1})


def test_asking_for_the_daemon_does_not_get_in_its_way(built: Built) -> None:
    """Without a daemon, the lock is not tested again before its file changes, since testing briefly holds it."""
    Lock(built.root, built.disk, now="before").release()
    head_samples = HeadSource(built.log)

    assert head_samples.sample(0.0).daemon == ""
    descriptor = os.open(built.root.lock, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # held, and the file is unchanged
    assert head_samples.sample(1.0).daemon == ""
    os.close(descriptor)
    lock = Lock(built.root, built.disk, now="again")
    assert head_samples.sample(2.0).daemon.startswith(f"pid {os.getpid()} ")
    lock.release()
    assert head_samples.sample(3.0).daemon == ""


def test_a_failed_sample_is_reported_until_one_succeeds(built: Built) -> None:
    """Earlier values are not shown as current."""
    built.lines("a", [b"x"])
    reported = built.root.head.read_bytes()
    watch = Sampler(HeadSource(built.log).sample)
    watch.update()
    watch.update()
    assert (len(watch.samples), watch.problem) == (2, "")

    built.root.head.write_bytes(b"nonsense" * 20)
    watch.update()
    assert (watch.samples, watch.problem) == ((), f"{built.root.head}: offset 0: not a valid head")

    built.root.head.write_bytes(reported)
    watch.update()
    assert ([head_sample.sequence for head_sample in watch.samples], watch.problem) == ([1], "")


def test_a_survey_works_without_a_head(built: Built) -> None:
    built.lines("a", [b"x"])
    built.cut()
    built.seal()
    built.root.head.write_bytes(b"nonsense" * 20)

    assert counts(LogSource(built.log).sample(1.0))[Condition.PINNED] == 1


def test_a_root_that_vanishes_is_reported(built: Built) -> None:
    built.lines("a", [b"x"])
    log = Log(built.root.path)
    watches = (Sampler(HeadSource(log).sample), Sampler(LogSource(log).sample))
    shutil.rmtree(built.root.path)
    for watch in watches:
        watch.update()
        assert watch.problem.startswith(f"{log.root.path}: the log is gone: ")


def test_an_error_of_the_operating_system_is_reported() -> None:
    def sample(_now: float) -> object:
        raise PermissionError(13, "Permission denied", "the/head")

    watch = Sampler(sample)
    watch.update()
    assert watch.problem == "the/head: Permission denied"


def test_rates_start_again_after_a_failed_sample(built: Built) -> None:
    built.lines("a", [b"x"])
    log_samples = LogSource(built.log)
    log_samples.sample(1.0)
    hidden = built.root.segments.rename(built.root.path / "hidden")
    with pytest.raises(Damaged):
        log_samples.sample(2.0)
    hidden.rename(built.root.segments)

    assert log_samples.sample(3.0).received is None
    assert log_samples.sample(4.0).received == {"a": 0}


NOW_NS = 1_700_000_000_000_000_000
PULSE = HeadSample(
    taken=10.0,
    sequence=100,
    durable_ns=NOW_NS - 500_000_000,
    written_bytes=5000,
    waiting_segments=2,
    sealed_segments=1,
    sealed_bytes=4000,
    daemon="pid 1",
)


def group(route: str, group: str = "g", *, lag: int = 0, held: int = 0, oldest_ns: int | None = None) -> GroupBacklog:
    cursor = Cursor(route, group, Path(route), CursorState.VALID, 7)
    return GroupBacklog(cursor, Lag(cursor.effective, lag, oldest_ns), retired=False, pinned_bytes=held)


def log_sample(taken: float, *groups: GroupBacklog, received: dict[str, int] | None = None) -> LogSample:
    return LogSample(taken, {}, groups, {"a": 9}, received, Growth(10.0, {}), free_bytes=1000, total_bytes=4000)


def test_rates_are_differences_by_the_time_between_the_looks() -> None:
    later = replace(PULSE, taken=14.0, sequence=300, written_bytes=5400, sealed_segments=3, sealed_bytes=12000)
    found = activity((PULSE, later), now_ns=NOW_NS)

    assert found is not None
    assert (found.records_per_second, found.bytes_per_second, found.sealed_bytes_per_second) == (50.0, 100.0, 2000.0)
    assert (found.sequence, found.sealed_segments, found.durable_seconds) == (300, 3, 0.5)


def test_without_two_looks_in_order_there_are_no_rates() -> None:
    assert activity((), now_ns=NOW_NS) is None
    assert inventory((), now=1.0, now_ns=NOW_NS) is None
    replaced = replace(PULSE, taken=11.0, sequence=5, written_bytes=64)  # another log since the first look
    for pulses in ((PULSE,), (PULSE, replaced)):
        alone = activity(pulses, now_ns=NOW_NS)
        assert alone is not None
        assert (alone.records_per_second, alone.bytes_per_second) == (None, None)
    total = inventory((log_sample(1.0, group("a", lag=3)),), now=1.0, now_ns=NOW_NS)
    assert total is not None
    assert (total.rows[0].received_per_second, total.rows[0].processed_per_second) == (None, None)


def test_a_commit_has_an_age_and_none_in_the_future() -> None:
    ages = [activity((replace(PULSE, durable_ns=at),), now_ns=NOW_NS) for at in (0, NOW_NS + 1)]

    assert [found and found.durable_seconds for found in ages] == [None, 0.0]


@pytest.mark.parametrize(
    ("lag_before", "received", "lag", "processed"),
    [(10, 0, 4, 3.0), (10, 6, 10, 3.0), (0, 8, 8, 0.0), (4, 0, 10, 0.0)],
    ids=["catches up", "keeps up", "stands still", "moved back"],
)
def test_what_a_group_processed_is_what_it_had_and_got_less_what_is_left(
    lag_before: int, received: int, lag: int, processed: float
) -> None:
    before, after = (
        log_sample(1.0, group("a", lag=lag_before)),
        log_sample(3.0, group("a", lag=lag), received={"a": received}),
    )
    found = inventory((before, after), now=3.0, now_ns=NOW_NS)

    assert found is not None
    assert (found.rows[0].processed_per_second, found.rows[0].received_per_second) == (processed, received / 2)


def test_a_group_that_was_not_there_before_has_no_rate_of_its_own() -> None:
    found = inventory((log_sample(1.0), log_sample(2.0, group("a", lag=1), received={"a": 5})), now=2.0, now_ns=NOW_NS)

    assert found is not None
    assert (found.rows[0].processed_per_second, found.rows[0].received_per_second) == (None, 5.0)


def test_rows_are_sorted_by_pinned_bytes_then_lag_then_name() -> None:
    groups = [group("c"), group("b"), group("late", lag=5), group("pins", held=1), group("pins most", held=9)]
    found = inventory((log_sample(1.0, *groups),), now=1.0, now_ns=NOW_NS)

    assert found is not None
    assert [row.route for row in found.rows] == ["pins most", "pins", "late", "b", "c"]


def test_a_row_has_the_age_of_the_oldest_record_and_the_last_sequence() -> None:
    waiting = group("a", lag=1, oldest_ns=NOW_NS - 2_000_000_000)
    found = inventory((log_sample(1.0, waiting, group("b")),), now=4.0, now_ns=NOW_NS)

    assert found is not None
    assert [(row.oldest_seconds, row.last_sequence) for row in found.rows] == [(2.0, 9), (None, None)]
    assert (found.age_seconds, found.growth_bytes_per_second, found.seconds_until_full) == (3.0, 10.0, 100.0)


@pytest.mark.parametrize("state", [State.ACTIVE, State.CUT, State.SEALED, State.RELEASED])
@pytest.mark.parametrize(("pinned", "readable"), list(itertools.product([False, True], [False, True])))
def test_every_segment_is_in_one_condition(state: State, pinned: bool, readable: bool) -> None:
    """The groups that pin an unreadable segment are unknown."""
    segment = Segment(1, Kind.RAW, Path("1"))
    routes = RouteTable.from_entries([RouteEntry("a", 1, 1, 1, 10)])
    pins = CursorSnapshot().blockers(routes) if pinned else NO_BLOCKERS
    expected = {
        State.ACTIVE: Condition.ACTIVE,
        State.CUT: Condition.WAITING,
        State.SEALED: Condition.FREE,
        State.RELEASED: Condition.RELEASED,
    }

    found = condition_of(SegmentStatus(segment, state, 1, 10, pins, readable=readable))

    assert found is (Condition.UNREADABLE if not readable else Condition.PINNED if pinned else expected[state])
