"""A consumer delivers each record at least once and commits in groups, never past an unprocessed record."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from damage import flip_bit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs import Built
from reclaiming import pinned_hole
from running import eventually

import wald
from wald import aio
from wald.errors import Damaged, InvalidInput, NotFound, Refused
from wald.format.names import Kind
from wald.retention.cursors import CursorState

NEVER = 1 << 40


def consumer(built: Built, **options: object) -> wald.Consumer:
    """A consumer that commits only at the end, unless ``options`` override that."""
    limits = {"commit_records": NEVER, "commit_bytes": NEVER, "commit_seconds": float(NEVER)}
    return wald.Consumer(built.root.path, "a", "g", **(limits | options))  # type: ignore[arg-type]


def committed(built: Built) -> int:
    return built.log.cursor("a", "g").sequence


def values(records: Iterator[wald.Record]) -> list[bytes]:
    return [record.value for record in records]


async def all_values(records: aio.Consumer) -> list[bytes]:
    async with records:
        return [record.value async for record in records]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ({"commit_records": 1}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"commit_records": 3}, [0, 0, 0, 3, 3, 3, 6, 6]),
        ({"commit_bytes": 25}, [0, 0, 0, 3, 3, 3, 6, 6]),
        ({"commit_seconds": 0.0}, [0, 0, 2, 2, 4, 4, 6, 6]),
        ({}, [0] * 8),
    ],
)
def test_the_cursor_is_moved_in_groups(built: Built, limit: dict[str, object], expected: list[int]) -> None:
    """Records, bytes or seconds trigger a commit; if no time passes, the first record of a group does not."""
    built.lines("a", [b"ten bytes."] * 8)
    with consumer(built, **limit) as records:
        assert [committed(built) for _ in records] == expected
    assert committed(built) == 8


def test_leaving_a_loop_leaves_its_record_unprocessed(built: Built) -> None:
    built.lines("a", [b"1", b"2", b"3"])
    with consumer(built) as records:
        for record in records:
            if record.value == b"2":
                break
        assert values(iter(records)) == [b"2", b"3"]
    built.lines("a", [b"4", b"x"])
    with pytest.raises(ValueError, match="x"), consumer(built) as records:
        [int(record.value) for record in records]
    assert committed(built) == 4


def test_batches_are_processed_whole(built: Built) -> None:
    for values_ in ([b"1", b"2"], [b"3"]):
        built.lines("a", values_)
    with consumer(built, commit_records=1) as records:
        seen = [(batch.last_sequence, committed(built)) for batch in records.batches()]

    assert seen == [(2, 0), (3, 2)]


def test_what_waits_is_committed_when_its_time_has_come(built: Built) -> None:
    """No further record arrives, and the commit of the last one is not late."""
    built.lines("a", [b"1", b"2"])
    stop = threading.Event()
    with consumer(built, follow=True, cancel=stop, commit_seconds=0.05) as records:
        thread = threading.Thread(target=lambda: list(records))
        thread.start()
        eventually(lambda: committed(built) == 2)
        built.lines("a", [b"3"])
        eventually(lambda: committed(built) == 3)
        stop.set()
        thread.join()


def test_a_cancelled_iteration_ends_behind_the_record_in_hand(built: Built) -> None:
    for values_ in ([b"1", b"2"], [b"3"], [b"4"]):
        built.lines("a", values_)
    stop = threading.Event()
    records = consumer(built, cancel=stop)
    for record in records:
        stop.set()
        assert record.value == b"1"
    assert committed(built) == 1
    stop.clear()
    for batch in records.batches():
        stop.set()
        assert batch.last_sequence == 2
    assert committed(built) == 2


def test_a_new_group_keeps_what_is_there_from_the_start(built: Built) -> None:
    """Its cursor starts after the reclaimed records; no later record may be reclaimed unread."""
    built.lines("a", [b"1"])
    built.cut()
    built.lines("a", [b"2"])
    built.cut()
    built.seal()
    built.reclaim(1)
    assert built.log.cursor("a", "g").state is CursorState.ABSENT
    with consumer(built) as records:
        assert next(iter(records)).value == b"2"
        cursor = built.log.cursor("a", "g")
        assert (cursor.state, cursor.sequence) == (CursorState.VALID, 1)


def test_damage_stops_it_and_the_cursor_stays_in_front(built: Built) -> None:
    built.lines("a", [b"1"])
    built.lines("a", [b"2"])
    flip_bit(built.path(1, Kind.RAW), b"2\n")
    with pytest.raises(Damaged), consumer(built) as records:
        list(records)
    assert committed(built) == 1


def test_what_was_reclaimed_unread_is_an_error(built: Built) -> None:
    built.lines("a", [b"1"])
    built.cut()
    built.seal()
    built.log.set_cursor("a", 0, "g")
    built.reclaim(1)
    built.lines("a", [b"2"])
    with pytest.raises(NotFound, match="RECLAIM"):
        list(consumer(built))
    assert values(iter(consumer(built, on_missing="skip"))) == [b"2"]


def test_a_new_group_passes_over_what_was_reclaimed_behind_a_pinned_segment(
    built: Built, caplog: pytest.LogCaptureFixture
) -> None:
    pinned_hole(built)
    with consumer(built) as first:
        for record in first:
            assert record.value == b"2"
            first.commit()
            break
    assert (committed(built), caplog.messages) == (2, [])
    with consumer(built, on_missing="error") as second:
        assert values(iter(second)) == [b"3", b"7", b"8", b"9"]
    (said,) = caplog.messages
    assert asyncio.run(all_values(aio.Consumer(built.root.path, "a", "other"))) == [b"2", b"3", b"7", b"8", b"9"]
    assert "RECLAIM has removed records 4 to 6: 3 records of route a are missing" in said
    assert committed(built) == 9


def test_reclaimed_records_of_a_group_that_existed_and_lost_segments_are_errors(built: Built) -> None:
    pinned_hole(built)
    with wald.Consumer(built.root.path, "a", "old") as old:
        assert values(iter(old)) == [b"7", b"8", b"9"]
    built.log.set_cursor("a", 2, "old", rewind=True)
    with pytest.raises(NotFound, match="RECLAIM has removed records 4 to 6"):
        list(wald.Consumer(built.root.path, "a", "old"))
    built.path(7, Kind.SEALED).unlink()
    with pytest.raises(Damaged, match="records 7 to 8 are missing, and no ledger explains why"):
        list(consumer(built))


def test_a_slower_consumer_of_the_same_group_does_not_move_the_cursor_back(built: Built) -> None:
    built.lines("a", [b"1", b"2", b"3"])
    slow = consumer(built, commit_records=2)
    records = iter(slow)
    next(records)
    with consumer(built) as fast:
        list(fast)
    with pytest.raises(Refused, match="backwards"):
        list(records)
    assert committed(built) == 3


def test_a_name_that_cannot_be_is_refused_at_once(built: Built) -> None:
    built.lines("a", [b"1"])
    for route, group, error in (("nothing", "g", NotFound), ("a", "../g", InvalidInput)):
        with pytest.raises(error):
            wald.Consumer(built.root.path, route, group)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    leaves=st.lists(st.integers(0, 12), max_size=4),
    records_limit=st.integers(1, 5),
)
def test_whatever_ends_it_nothing_is_left_out(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], leaves: list[int], records_limit: int
) -> None:
    """After a kill at any point (no final commit), the next consumer skips no unprocessed record."""
    built = Built(tmp_path_factory.mktemp("log") / "root")
    number = 0
    for size in sizes:
        built.lines("a", [b"%d" % (number + i) for i in range(size)])
        number += size
    handed: list[bytes] = []
    for leave in leaves:
        killed = consumer(built, commit_records=records_limit)
        for count, record in enumerate(killed):
            if count == leave:
                break
            handed.append(record.value)
    with consumer(built) as last:
        handed += values(iter(last))

    assert set(handed) == {b"%d" % i for i in range(number)}
    built.crash()
