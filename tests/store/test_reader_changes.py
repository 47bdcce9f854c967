"""Readers continue while segments are cut, sealed, reclaimed and replaced."""

import os
import threading

import pytest
from damage import flip_bit
from logs import Built
from reading import three_forms, until_it_waits, values
from repairing import repair
from running import eventually

from wald.errors import Damaged, NotFound
from wald.format.names import Kind
from wald.format.records import Record
from wald.reading.assembler import Batch
from wald.reading.reader import read_without_waiting
from wald.retention.missing import Missing


class TestUnderItsFeet:
    """Segments change their form while they are read."""

    def test_cut_and_sealed_between_two_records(self, built: Built) -> None:
        built.lines("a", [b"1", b"2"])
        following = built.log.records(follow=True)
        assert next(following).value == b"1"
        built.cut()
        built.lines("a", [b"3"])
        built.cut(seal=True)
        built.lines("a", [b"4"])
        assert [next(following).value for _ in range(3)] == [b"2", b"3", b"4"]

    def test_a_file_that_replaced_the_active_one_is_gone_on_with(self, built: Built) -> None:
        """After a failed write the writer continues in a new file of the same name if no sequence was used."""
        built.piece("a", b"be", begins=True, ends=False)
        built.cut()
        following = built.log.batches(follow=True, cancel=(cancel := threading.Event()))
        got: list[Batch] = []
        thread = threading.Thread(target=lambda: got.extend(following))
        thread.start()
        built.piece("a", b"gun", begins=False, ends=False)
        built.writer.replace(now_ns=built.now_ns)
        built.piece("a", b"\n", begins=False, ends=True)
        built.lines("a", [b"next"])
        eventually(lambda: len(got) == 2)
        cancel.set()
        thread.join()
        assert [bytes(batch.raw()) for batch in got] == [b"begun\n", b"next\n"]

    def test_a_follower_sees_each_record_once_across_many_cuts(self, built: Built) -> None:
        cancel = threading.Event()
        got: list[Record] = []
        reading = built.log.records(follow=True, cancel=cancel)
        thread = threading.Thread(target=lambda: got.extend(reading))
        thread.start()
        for number in range(60):
            built.lines("ab"[number % 2], [b"%d" % number] * 3, cut=True)
            if number % 7 == 0:
                built.seal(keep=number % 3)
        eventually(lambda: len(got) == 180)
        cancel.set()
        thread.join()
        assert [record.sequence for record in got] == list(range(1, 181))

    def test_following_can_be_cancelled_while_it_waits(self, built: Built) -> None:
        cancel = threading.Event()
        reading = built.log.records(start="end", follow=True, cancel=cancel)
        thread = threading.Thread(target=lambda: list(reading))
        thread.start()
        cancel.set()
        thread.join(10)
        assert not thread.is_alive()

    def test_an_abandoned_read_leaves_no_file_open(self, built: Built) -> None:
        three_forms(built)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            reading = built.log.batches(start=1)
            next(reading)
            reading.close()  # type: ignore[attr-defined]
        assert len(os.listdir("/proc/self/fd")) == before


class TestReclaimed:
    """Records that RECLAIM has deleted."""

    def test_asking_for_it_is_an_error_that_names_it_and_others_begin_with_what_there_is(self, built: Built) -> None:
        three_forms(built)
        built.reclaim(1)
        assert [r.sequence for r in built.log.records()] == [3, 4, 5, 6]
        assert [r.sequence for r in built.log.records("b", "cursor", group="new")] == [4, 6]
        with pytest.raises(NotFound, match="has removed record 2"):
            values(built, start=2)
        built.log.set_cursor("a", 1)
        with pytest.raises(NotFound, match="1 record of route a"):
            values(built, "a", start=1)

    def test_what_the_group_has_processed_meanwhile_is_passed_over(self, built: Built) -> None:
        three_forms(built)
        built.log.set_cursor("a", 0)
        reading = built.log.records("a", "cursor")
        built.log.set_cursor("a", 3)
        built.reclaim(1)
        assert [r.sequence for r in reading] == [3, 5]

    def test_a_cursor_in_front_of_the_gap_reads_on_if_its_route_lost_nothing(self, built: Built) -> None:
        """The ledger tells which routes a segment held, so an idle route's cursor need not move."""
        built.lines("idle", [b"1"], cut=True)
        built.lines("busy", [b"2"], cut=True)
        built.lines("idle", [b"3"])
        built.cut(seal=True)
        built.log.set_cursor("idle", 1)
        built.reclaim(1)
        built.reclaim(2)
        assert values(built, "idle", "cursor") == [b"3"]


def test_reading_from_cursors_begins_behind_each(built: Built) -> None:
    three_forms(built)
    built.log.set_cursor("a", 3)
    built.log.set_cursor("b", 2)
    assert values(built, "a", "cursor") == [b"a5"]
    assert [r.sequence for r in built.log.records(start="cursor")] == [4, 5, 6]
    built.root.cursor("a", "processed").write_bytes(b"7\n")
    with pytest.raises(Damaged, match="beyond the last durable record"):
        built.log.records("a", "cursor")


def repaired(built: Built, base: int, kind: Kind, value: bytes) -> Built:
    """Damage the record with ``value`` while no daemon runs, let ``wald repair --accept-loss`` run, and start."""
    built.crash()
    path = built.path(base, kind)
    flip_bit(path, value)
    repair(built.root.path)
    return Built(built.root.path, epoch=built.writer.epoch + 8, now_ns=built.now_ns)


class TestASegmentThatARepairHasMadeAgain:
    """The follower has it open, and has been given records that are now in another file or at another position."""

    @pytest.mark.parametrize("cut", [False, True], ids=["active", "cut"])
    def test_no_record_is_delivered_twice(self, built: Built, *, cut: bool) -> None:
        for number in range(1, 9):
            built.lines("a", [b"r%d" % number])
        follower = read_without_waiting(built.view, route="a", start=1, stop=None)
        assert [sequence for sequence, _ in until_it_waits(follower)] == list(range(1, 9))
        built.lines("a", [b"r9"])
        if cut:
            built.cut()
            built.lines("a", [b"next"])
        built = repaired(built, 1, Kind.RAW, b"r3")
        assert list(built.root.segments.glob("*4.wal"))
        built.lines("a", [b"after"])
        assert [value for _, value in until_it_waits(follower)] == [b"r9", *([b"next"] if cut else []), b"after"]
        assert until_it_waits(follower) == []

    def test_a_long_record_and_those_of_other_routes_are_delivered_once(self, built: Built) -> None:
        """It begins before the records that were delivered, and is in the segment that is made again."""
        built.lines("b", [b"r1"])
        built.lines("b", [b"r2"])
        built.piece("a", b"begins ", begins=True, ends=False)
        built.lines("b", [b"r4"])
        built.lines("b", [b"r5"])
        built.piece("a", b"middle ", begins=False, ends=False)
        follower = read_without_waiting(built.view, route=None, start=1, stop=None)
        assert [value for _, value in until_it_waits(follower)] == [b"r1", b"r2", b"r4", b"r5"]
        built.piece("a", b"ends\nnext\n", begins=False, ends=True)
        built = repaired(built, 1, Kind.RAW, b"r2")
        built.lines("b", [b"after"])
        assert [value for _, value in until_it_waits(follower)] == [b"begins middle ends", b"next", b"after"]

    def test_only_a_long_record_that_was_not_delivered_is_lost(self, built: Built) -> None:
        lost: list[Missing] = []
        built.lines("b", [b"r1"])
        built.piece("a", b"begins ", begins=True, ends=False)
        for number in range(3, 6):
            built.lines("b", [b"r%d" % number])
        follower = read_without_waiting(built.view, route=None, start=1, stop=None, on_missing=lost.append)
        assert [value for _, value in until_it_waits(follower)] == [b"r1", b"r3", b"r4", b"r5"]
        built = repaired(built, 1, Kind.RAW, b"r4")
        built.lines("b", [b"after"])
        assert [value for _, value in until_it_waits(follower)] == [b"after"]
        assert [(each.first, each.last) for each in lost] == [(2, 2)]

    def test_two_forms_that_a_killed_repair_has_left_are_read_once(self, built: Built) -> None:
        """The segments were split off; the one that they were in is still there."""
        for number in range(1, 9):
            built.lines("a", [b"r%d" % number])
        built.cut()
        built.lines("a", [b"next"])
        whole = built.path(1, Kind.RAW).read_bytes()
        built = repaired(built, 1, Kind.RAW, b"r3")
        built.path(1, Kind.RAW).write_bytes(whole)
        follower = read_without_waiting(built.view, route="a", start=1, stop=None)
        assert [sequence for sequence, _ in until_it_waits(follower)] == list(range(1, 10))


@pytest.mark.parametrize("of_another", [False, True], ids=["unreadable", "misplaced"])
def test_an_open_segment_whose_sealed_form_cannot_be_read_is_reported_as_damage(
    built: Built, *, of_another: bool
) -> None:
    damage: list[Damaged] = []
    built.lines("a", [b"1"])
    follower = read_without_waiting(built.view, route="a", start=1, stop=None, on_damage=damage.append)
    assert until_it_waits(follower) == [(1, b"1")]
    built.lines("a", [b"2"], cut=True)
    built.lines("a", [b"3"])
    built.cut(seal=True)
    built.lines("a", [b"4"])
    sealed = built.path(1, Kind.SEALED)
    sealed.write_bytes(built.path(3, Kind.SEALED).read_bytes() if of_another else bytes(500))
    assert until_it_waits(follower) == [(3, b"3"), (4, b"4")]
    assert [str(sealed) in each.message and "record 2 cannot" in each.message for each in damage] == [True]
