"""Reading gives each durable record once and in order, whatever form its segment has and whatever happens meanwhile."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import SECOND_NS, START_NS, Built

import wald
from wald.errors import Damaged, InvalidInput, NotFound
from wald.format.head import decode_head
from wald.format.names import Kind
from wald.format.record import Record
from wald.store.batches import Batch
from wald.store.compression import FRAME_BYTES, SealedFile


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return Built(tmp_path / "root")


def seen(records: object) -> list[tuple[int, str, bytes]]:
    """What tells records apart."""
    assert not isinstance(records, list)
    return [(record.sequence, record.route, record.value) for record in records]  # type: ignore[attr-defined]


def values(built: Built, *args: object, **options: object) -> list[bytes]:
    """The values of what a read gives."""
    return [record.value for record in built.log.read(*args, **options)]  # type: ignore[arg-type]


def three_forms(built: Built) -> None:
    """Records 1 to 6 in a sealed, a cut and the active segment, two in each, on routes a and b."""
    for base in (1, 3, 5):
        built.lines("a", [b"a%d" % base])
        built.lines("b", [b"b%d" % (base + 1)])
        if base < 5:
            built.cut()
        if base == 1:
            built.seal()


def moment(seconds: float) -> datetime:
    """The time ``seconds`` after the log began; commits happen at 1, 2, 3, …"""
    return datetime.fromtimestamp(START_NS / SECOND_NS, UTC) + timedelta(seconds=seconds)


class TestPlaces:
    """Where a read begins and ends."""

    def test_all_forms_are_read_through(self, built: Built) -> None:
        three_forms(built)
        assert values(built) == [b"a1", b"b2", b"a3", b"b4", b"a5", b"b6"]

    def test_one_route(self, built: Built) -> None:
        three_forms(built)
        assert seen(built.log.read("b")) == [(2, "b", b"b2"), (4, "b", b"b4"), (6, "b", b"b6")]

    @pytest.mark.parametrize("start", range(1, 8))
    def test_from_each_sequence(self, built: Built, start: int) -> None:
        three_forms(built)
        assert [record.sequence for record in built.log.read(start=start)] == list(range(start, 7))

    @pytest.mark.parametrize(("start", "stop"), [(1, 1), (2, 5), (4, 4), (5, 99), (3, 2)])
    def test_stop_is_the_last_one_wanted(self, built: Built, start: int, stop: int) -> None:
        three_forms(built)
        found = [record.sequence for record in built.log.read(start=start, stop=stop)]
        assert found == list(range(start, min(stop, 6) + 1))

    def test_the_middle_of_a_batch(self, built: Built) -> None:
        built.lines("a", [b"1", b"", b"3", b"4"])
        assert values(built, start=2, stop=3) == [b"", b"3"]
        assert b"".join(batch.raw() for batch in built.log.batches(start=2, stop=3)) == b"\n3\n"

    @pytest.mark.parametrize("limit", range(8))
    def test_limit_counts_records(self, built: Built, limit: int) -> None:
        three_forms(built)
        assert len(values(built, limit=limit)) == min(limit, 6)

    @pytest.mark.parametrize("form", ["active", "cut", "sealed"])
    def test_a_time_is_the_first_record_appended_then_or_later(self, built: Built, form: str) -> None:
        for second in range(1, 6):
            built.lines("a", [b"%d" % second] * 2)
        if form != "active":
            built.cut()
        if form == "sealed":
            built.seal()
        assert values(built, start=moment(0))[:1] == [b"1"]
        assert values(built, start=moment(3)) == [b"3", b"3", b"4", b"4", b"5", b"5"]
        assert values(built, start=moment(3.5)) == [b"4", b"4", b"5", b"5"]
        assert values(built, start=moment(2), stop=moment(4)) == [b"2", b"2", b"3", b"3"]

    def test_a_time_after_the_last_record_means_none_yet(self, built: Built) -> None:
        three_forms(built)
        assert values(built, start=moment(6.5)) == []

    def test_times_are_found_across_segments(self, built: Built) -> None:
        three_forms(built)
        for second in range(1, 7):
            assert next(built.log.read(start=moment(second))).sequence == second

    def test_a_record_before_the_time_that_is_followed_from_is_not_given(self, built: Built) -> None:
        """The time lies ahead, so what comes until then is not wanted."""
        built.lines("a", [b"1"])
        following = built.log.read(start=moment(2.5), follow=True)
        built.lines("a", [b"2"])
        built.lines("a", [b"3"])
        assert next(following).value == b"3"

    @pytest.mark.parametrize(
        ("start", "error"), [(8, NotFound), (10**30, NotFound), (0, InvalidInput), (-1, InvalidInput)]
    )
    def test_a_sequence_never_issued_is_an_error(self, built: Built, start: int, error: type[Exception]) -> None:
        three_forms(built)
        with pytest.raises(error):
            built.log.read(start=start)

    def test_the_sequence_after_the_last_is_the_end(self, built: Built) -> None:
        three_forms(built)
        assert values(built, start=7) == values(built, start="end") == []

    def test_an_unknown_start_route_or_root_is_an_error(self, built: Built, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput):
            built.log.read(start="yesterday")
        with pytest.raises(NotFound):
            built.log.read("nothing")
        with pytest.raises(InvalidInput):
            built.log.read("../x")
        with pytest.raises(NotFound):
            wald.open(tmp_path / "nowhere")

    def test_an_empty_log_has_nothing(self, built: Built) -> None:
        assert values(built) == values(built, start=1) == values(built, start="end") == []


class TestContent:
    """What was written comes back exactly."""

    @pytest.mark.parametrize("sealed", [False, True])
    def test_awkward_bytes(self, built: Built, sealed: bool) -> None:
        lines = [b"crlf\r", b"\r", b"", b"\0\0", b"\xff\xfe", b"W" * 3_000_000, b"WBAT", b"last"]
        built.lines("a", lines)
        built.cut()
        if sealed:
            built.seal()
        assert values(built) == lines
        assert b"".join(batch.raw() for batch in built.log.batches()) == b"".join(line + b"\n" for line in lines)

    def test_columns_come_back_with_keys_times_and_headers(self, built: Built) -> None:
        built.columns("a", [b"x\ny", b""], keys=[b"k", None], times_ns=[5, 6], headers=[None, b'{"h":"1"}'])
        first, second = built.log.read()
        assert (first.value, first.key, first.event_time_ns, first.headers) == (b"x\ny", b"k", 5, None)
        assert (second.value, second.key, second.event_time_ns, second.headers) == (b"", None, 6, b'{"h":"1"}')
        assert next(built.log.batches()).raw() == b"x\ny\n\n"

    def test_the_middle_of_columns(self, built: Built) -> None:
        built.columns("a", [b"1", b"2", b"3"], keys=[b"a", None, b"c"])
        assert [(r.sequence, r.value, r.key) for r in built.log.read(start=2)] == [(2, b"2", None), (3, b"3", b"c")]
        assert next(built.log.batches(start=2, stop=2)).raw() == b"2\n"

    def test_a_line_without_an_end_is_a_record(self, built: Built) -> None:
        built.append("a", b"whole\nrest", 2, flags=4)
        assert [(r.value, r.terminated) for r in built.log.read()] == [(b"whole", True), (b"rest", False)]
        assert next(built.log.batches()).raw() == b"whole\nrest\n"

    def test_the_first_thing_in_a_fresh_segment_is_no_record(self, built: Built) -> None:
        """The KMQ bug: the batch that opens a segment was taken for record 0."""
        assert values(built) == []
        for value in (b"1", b"2"):
            built.lines("a", [value])
            built.cut()
            assert [r.sequence for r in built.log.read()] == list(range(1, built.last + 1))
        built.seal()
        assert [r.sequence for r in built.log.read()] == [1, 2]

    def test_the_payload_of_lines_is_not_copied(self, built: Built) -> None:
        built.lines("a", [b"x"] * 1000)
        batch = next(built.log.batches())
        assert batch.raw() is batch.payload
        assert batch.payload.obj is not None


class TestPieces:
    """A record that came in several pieces."""

    def pieces(self, built: Built) -> None:
        """Record 2 in three pieces over three segments, with route b in between; then 5 and 6 on route a."""
        built.lines("a", [b"one"])
        built.piece("a", b"lo", begins=True, ends=False)
        built.lines("b", [b"x"])
        built.cut()
        built.piece("a", b"ng", begins=False, ends=False)
        built.lines("b", [b"y"])
        built.cut()
        built.piece("a", b"er\nfive\nsix", begins=False, ends=True)

    @pytest.mark.parametrize("sealed", [False, True])
    def test_they_are_joined_and_come_when_they_are_complete(self, built: Built, sealed: bool) -> None:
        self.pieces(built)
        if sealed:
            built.cut()
            built.seal()
        expected = [
            (1, "a", b"one"),
            (3, "b", b"x"),
            (4, "b", b"y"),
            (2, "a", b"longer"),
            (5, "a", b"five"),
            (6, "a", b"six"),
        ]
        assert seen(built.log.read()) == expected
        assert [r.value for r in built.log.read("a")] == [b"one", b"longer", b"five", b"six"]

    def test_a_reader_that_starts_behind_the_beginning_passes_over_them(self, built: Built) -> None:
        self.pieces(built)
        assert [r.sequence for r in built.log.read("a", start=3)] == [5, 6]

    def test_a_stop_waits_for_the_end_of_the_last_record(self, built: Built) -> None:
        self.pieces(built)
        assert seen(built.log.read("a", start=2, stop=2)) == [(2, "a", b"longer")]
        assert [r.sequence for r in built.log.read(stop=3)] == [1, 3, 2]

    def test_the_joined_record_is_a_batch_of_its_own(self, built: Built) -> None:
        self.pieces(built)
        batch = next(batch for batch in built.log.batches() if batch.first_sequence == 2)
        assert (batch.count, bytes(batch.raw()), batch.segment) == (1, b"longer\n", 1)

    def test_one_that_has_not_ended_is_not_given(self, built: Built) -> None:
        built.piece("a", b"begun", begins=True, ends=False)
        assert values(built) == []

    def test_one_that_ends_with_the_input_has_no_newline(self, built: Built) -> None:
        built.piece("a", b"be", begins=True, ends=False)
        built.piece("a", b"", begins=False, ends=True)
        assert [(r.sequence, r.value, r.terminated) for r in built.log.read()] == [(1, b"be", False)]

    def test_a_follower_gets_it_when_the_last_piece_is_durable(self, built: Built) -> None:
        following = built.log.read(follow=True)
        built.piece("a", b"be", begins=True, ends=False)
        built.lines("b", [b"x"])
        assert next(following).value == b"x"
        built.piece("a", b"gun\n", begins=False, ends=True)
        assert next(following).value == b"begun"


class TestDurability:
    """What is not durable does not exist."""

    def test_nothing_behind_the_head_is_read(self, built: Built) -> None:
        built.lines("a", [b"durable"])
        built.lines("a", [b"written"], publish=False)
        assert values(built) == [b"durable"]
        with pytest.raises(NotFound):
            built.log.read(start=3)
        built.publish()
        assert values(built) == [b"durable", b"written"]

    def test_a_segment_behind_the_head_does_not_exist(self, built: Built) -> None:
        built.lines("a", [b"1"])
        built.lines("a", [b"2"], publish=False)
        built.writer.cut(now_ns=built.now_ns)
        built.lines("a", [b"3"], publish=False)
        assert values(built) == [b"1"]

    def test_the_head_holds_in_a_segment_that_was_sealed_meanwhile(self, built: Built) -> None:
        """The position in the head is one in the raw bytes, and so one in the sealed segment."""
        built.lines("a", [b"1"])
        head = built.root.head.read_bytes()
        built.lines("a", [b"2"])
        built.cut()
        built.seal()
        built.root.head.write_bytes(head)
        assert values(built) == [b"1"]

    @pytest.mark.parametrize("head", [None, bytes(160), b"rubbish" * 30])
    def test_without_a_head_everything_but_the_newest_raw_segment_is_read_and_that_is_told(
        self, built: Built, head: bytes | None
    ) -> None:
        three_forms(built)
        built.root.head.unlink()
        if head is not None:
            built.root.head.write_bytes(head)
        told: list[Damaged] = []
        assert [r.value for r in built.log.read(on_damage=told.append)] == [b"a1", b"b2", b"a3", b"b4"]
        assert "no readable head" in told[0].message
        with pytest.raises(Damaged, match="no readable head"):
            values(built)
        with pytest.raises(Damaged, match="no readable head"):
            values(built, start=6)
        assert values(built, stop=4) == [b"a1", b"b2", b"a3", b"b4"]

    def test_sealed_segments_alone_are_a_log(self, built: Built) -> None:
        """As they are when they were copied elsewhere."""
        three_forms(built)
        built.cut()
        built.seal()
        built.writer.close()
        built.root.head.unlink()
        built.path(7, Kind.RAW).unlink()
        assert [r.sequence for r in built.log.read()] == [1, 2, 3, 4, 5, 6]
        assert values(built, start=7) == []


class TestUnderItsFeet:
    """Segments change their form while they are read."""

    def test_cut_and_sealed_between_two_records(self, built: Built) -> None:
        built.lines("a", [b"1", b"2"])
        following = built.log.read(follow=True)
        assert next(following).value == b"1"
        built.cut()
        built.lines("a", [b"3"])
        built.cut()
        built.seal()
        built.lines("a", [b"4"])
        assert [next(following).value for _ in range(3)] == [b"2", b"3", b"4"]

    def test_a_segment_sealed_before_it_was_reached(self, built: Built) -> None:
        for value in (b"1", b"2", b"3"):
            built.lines("a", [value])
            built.cut()
        reading = built.log.read()
        assert next(reading).value == b"1"
        built.seal()
        assert [r.value for r in reading] == [b"2", b"3"]

    def test_a_segment_reclaimed_before_it_was_reached(self, built: Built) -> None:
        for value in (b"1", b"2", b"3"):
            built.lines("a", [value])
            built.cut()
        built.seal()
        reading = built.log.read()
        assert next(reading).value == b"1"
        built.reclaim(2)
        assert [r.value for r in reading] == [b"3"]

    def test_a_file_that_replaced_the_active_one_is_gone_on_with(self, built: Built) -> None:
        """After a failed write the writer goes on in a new file of the same name if the segment has no sequence yet."""
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
        wait_for(lambda: len(got) == 2)
        cancel.set()
        thread.join()
        assert [bytes(batch.raw()) for batch in got] == [b"begun\n", b"next\n"]

    def test_a_follower_sees_each_record_once_across_many_cuts(self, built: Built) -> None:
        cancel = threading.Event()
        got: list[Record] = []
        reading = built.log.read(follow=True, cancel=cancel)
        thread = threading.Thread(target=lambda: got.extend(reading))
        thread.start()
        for number in range(100):
            built.lines("ab"[number % 2], [b"%d" % number] * 3)
            built.cut()
            if number % 7 == 0:
                built.seal(keep=number % 3)
        wait_for(lambda: len(got) == 300)
        cancel.set()
        thread.join()
        assert [record.sequence for record in got] == list(range(1, 301))

    def test_following_can_be_cancelled_while_it_waits(self, built: Built) -> None:
        cancel = threading.Event()
        reading = built.log.read(start="end", follow=True, cancel=cancel)
        thread = threading.Thread(target=lambda: list(reading))
        thread.start()
        cancel.set()
        thread.join(10)
        assert not thread.is_alive()

    def test_following_ends_at_the_stop(self, built: Built) -> None:
        built.lines("a", [b"1", b"2", b"3"])
        assert values(built, stop=2, follow=True) == [b"1", b"2"]

    def test_an_abandoned_read_leaves_no_file_open(self, built: Built) -> None:
        three_forms(built)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            reading = built.log.batches(start=1)
            next(reading)
            reading.close()  # type: ignore[attr-defined]
        assert len(os.listdir("/proc/self/fd")) == before


class TestReclaimed:
    """What is not there any more."""

    def reclaimed(self, built: Built) -> None:
        """Records 1 and 2 of 6 are reclaimed."""
        three_forms(built)
        built.reclaim(1)

    def test_earliest_begins_with_what_there_is(self, built: Built) -> None:
        self.reclaimed(built)
        assert [r.sequence for r in built.log.read()] == [3, 4, 5, 6]

    def test_asking_for_it_is_an_error_that_names_it(self, built: Built) -> None:
        self.reclaimed(built)
        with pytest.raises(NotFound, match="has removed record 2"):
            values(built, start=2)

    def test_what_a_group_has_processed_is_no_less_missing_where_it_is_asked_for(self, built: Built) -> None:
        self.reclaimed(built)
        built.log.set_cursor("a", 1)
        with pytest.raises(NotFound, match="1 record of route a"):
            values(built, "a", start=1)

    def test_what_the_group_has_processed_meanwhile_is_passed_over(self, built: Built) -> None:
        three_forms(built)
        built.log.set_cursor("a", 0)
        reading = built.log.read("a", "cursor")
        built.log.set_cursor("a", 3)
        built.reclaim(1)
        assert [r.sequence for r in reading] == [3, 5]

    def test_a_cursor_behind_the_gap_reads_on(self, built: Built) -> None:
        self.reclaimed(built)
        built.log.set_cursor("a", 3)
        assert [r.sequence for r in built.log.read("a", start="cursor")] == [5]

    def test_a_cursor_in_front_of_the_gap_reads_on_if_its_route_lost_nothing(self, built: Built) -> None:
        """The ledger tells which routes a segment held, so an idle route's cursor need not move."""
        built.lines("idle", [b"1"])
        built.cut()
        built.lines("busy", [b"2"])
        built.cut()
        built.lines("idle", [b"3"])
        built.cut()
        built.seal()
        built.log.set_cursor("idle", 1)
        built.reclaim(1)
        built.reclaim(2)
        assert values(built, "idle", "cursor") == [b"3"]

    def test_a_cursor_in_front_of_records_that_are_gone_is_an_error(self, built: Built) -> None:
        built.lines("a", [b"1"])
        built.log.set_cursor("a", 0)
        built.cut()
        built.lines("a", [b"2"])
        built.cut()
        built.seal()
        built.reclaim(1)
        with pytest.raises(NotFound):
            values(built, "a", "cursor")

    def test_a_group_without_a_cursor_begins_with_what_there_is(self, built: Built) -> None:
        self.reclaimed(built)
        assert [r.sequence for r in built.log.read("b", "cursor", group="new")] == [4, 6]

    def test_a_segment_that_vanished_from_the_middle_is_damage(self, built: Built) -> None:
        three_forms(built)
        built.cut()
        built.seal()
        built.path(3, Kind.SEALED).unlink()
        with pytest.raises(Damaged, match="records 3 to 4"):
            values(built)
        damage: list[Damaged] = []
        assert values(built, on_damage=damage.append) == [b"a1", b"b2", b"a5", b"b6"]
        assert len(damage) == 1


class TestCursorStart:
    """Reading on where a group has got to."""

    def test_it_begins_behind_the_cursor(self, built: Built) -> None:
        three_forms(built)
        built.log.set_cursor("a", 3)
        assert values(built, "a", "cursor") == [b"a5"]

    def test_every_route_has_its_own(self, built: Built) -> None:
        three_forms(built)
        built.log.set_cursor("a", 3)
        built.log.set_cursor("b", 2)
        assert [r.sequence for r in built.log.read(start="cursor")] == [4, 5, 6]

    def test_one_that_cannot_be_trusted_is_an_error(self, built: Built) -> None:
        three_forms(built)
        built.root.cursor("a", "processed").write_bytes(b"7\n")
        with pytest.raises(Damaged, match="beyond the head"):
            built.log.read("a", "cursor")


def spoil(path: Path, offset: int, length: int = 1) -> None:
    """Change bytes of a file."""
    data = bytearray(path.read_bytes())
    for i in range(offset, offset + length):
        data[i] ^= 0x55
    path.write_bytes(data)


class TestDamage:
    """Bad bytes are told of, and what follows them is read."""

    def place(self, built: Built, sequence: int) -> int:
        position = built.log.where(sequence).position
        assert position is not None
        return position

    @pytest.mark.parametrize("cut", [False, True])
    def test_a_raw_batch(self, built: Built, cut: bool) -> None:
        for value in (b"1", b"2", b"3"):
            built.lines("a", [value])
        if cut:
            built.cut()
        place = self.place(built, 2)
        spoil(built.path(1, Kind.RAW), place + 70)
        with pytest.raises(Damaged, match=rf"{place}.*record 2 "):
            values(built)
        damage: list[Damaged] = []
        assert values(built, on_damage=damage.append) == [b"1", b"3"]
        assert len(damage) == 1
        assert values(built, start=3) == [b"3"]

    @pytest.mark.parametrize("base", [1, 3])
    def test_a_file_that_is_listed_and_not_there(self, built: Built, base: int) -> None:
        """As after half a restore: looking again does not help, so nobody looks for ever."""
        three_forms(built)
        path = built.path(base, Kind.SEALED if base == 1 else Kind.RAW)
        path.unlink()
        path.symlink_to("/nowhere")
        damage: list[Damaged] = []
        assert len(values(built, on_damage=damage.append)) == 4
        assert [str(path) in error.message for error in damage] == [True]
        with pytest.raises(Damaged, match=path.name):
            values(built, start=moment(base + 0.5))

    def test_the_directory_of_the_segments(self, built: Built) -> None:
        three_forms(built)
        shutil.rmtree(built.root.segments)
        for start in ("earliest", "end", 1, moment(1)):
            with pytest.raises(Damaged, match="is gone"):
                values(built, start=start)

    @pytest.mark.parametrize("cut", [False, True])
    def test_the_last_raw_batch(self, built: Built, cut: bool) -> None:
        """Nothing good follows in the file; the head or the next segment shows that something is missing."""
        built.lines("a", [b"1"])
        built.lines("a", [b"2"])
        place = self.place(built, 2)
        if cut:
            built.cut()
            built.lines("a", [b"3"])
        spoil(built.path(1, Kind.RAW), place + 70)
        damage: list[Damaged] = []
        assert values(built, on_damage=damage.append) == ([b"1", b"3"] if cut else [b"1"])
        assert len(damage) == 1
        assert "record 2 " in damage[0].message

    def test_a_follower_goes_on_behind_it(self, built: Built) -> None:
        built.lines("a", [b"1"])
        built.lines("a", [b"2"])
        spoil(built.path(1, Kind.RAW), self.place(built, 2) + 70)
        damage: list[Damaged] = []
        following = built.log.read(follow=True, on_damage=damage.append)
        assert next(following).value == b"1"
        built.lines("a", [b"3"])
        assert next(following).value == b"3"
        assert len(damage) == 1

    def frames(self, built: Built) -> None:
        """Three records, each in a sealed frame of its own."""
        for number in range(3):
            built.lines("ab"[number % 2], [b"%d" % number + os.urandom(FRAME_BYTES // 2).hex().encode()])
        built.cut()
        built.seal()

    def spoil_frame(self, built: Built, sequence: int) -> None:
        path = built.path(1, Kind.SEALED)
        with SealedFile(path) as sealed:
            frame = next(frame for frame in sealed.index.frames if frame.next_sequence > sequence)
        spoil(path, frame.offset + 100, 8)

    def test_a_sealed_frame(self, built: Built) -> None:
        self.frames(built)
        self.spoil_frame(built, 2)
        with pytest.raises(Damaged, match="record 2 "):
            values(built)
        damage: list[Damaged] = []
        assert [r.sequence for r in built.log.read(on_damage=damage.append)] == [1, 3]
        assert len(damage) == 1

    def test_a_frame_of_other_routes_does_no_harm(self, built: Built) -> None:
        self.frames(built)
        self.spoil_frame(built, 2)
        assert [r.sequence for r in built.log.read("a")] == [1, 3]

    def test_a_sealed_segment_cut_short_anywhere(self, built: Built) -> None:
        """What is in front of the cut is read, and only what is not there is missing."""
        three_forms(built)
        built.cut()
        built.seal()
        path = built.path(3, Kind.SEALED)
        whole = path.read_bytes()
        for length in range(0, len(whole), 7):
            path.write_bytes(whole[:length])
            damage: list[Damaged] = []
            found = values(built, on_damage=damage.append)
            kept = len(found) - 4
            assert found == [b"a1", b"b2", *[b"a3", b"b4"][:kept], b"a5", b"b6"]
            missing = [["records 3 to 4"], ["record 4 "], []][kept]
            assert [words for error, words in zip(damage, missing, strict=True) if words not in error.message] == []

    def test_damage_from_before_sealing(self, built: Built) -> None:
        for value in (b"1", b"2", b"3"):
            built.lines("a", [value])
        spoil(built.path(1, Kind.RAW), self.place(built, 2) + 70)
        built.cut()
        built.seal()
        damage: list[Damaged] = []
        assert values(built, on_damage=damage.append) == [b"1", b"3"]
        assert "record 2 " in damage[0].message

    def test_damage_behind_the_stop_does_no_harm(self, built: Built) -> None:
        for value in (b"1", b"2", b"3"):
            built.lines("a", [value])
        spoil(built.path(1, Kind.RAW), self.place(built, 3) + 70)
        assert values(built, stop=2) == [b"1", b"2"]

    def test_a_record_that_lost_a_piece_is_not_given_with_a_hole_in_it(self, built: Built) -> None:
        built.lines("b", [b"1"])
        built.piece("a", b"be", begins=True, ends=False)
        place = built.writer.position
        built.piece("a", b"g", begins=False, ends=False)
        built.piece("a", b"un\n", begins=False, ends=True)
        built.lines("b", [b"3"])
        spoil(built.path(1, Kind.RAW), place + 70)
        damage: list[Damaged] = []
        assert values(built, on_damage=damage.append) == [b"1", b"3"]
        assert "record 2 " in damage[0].message

    def test_a_segment_of_another_log(self, built: Built, tmp_path: Path) -> None:
        other = Built(tmp_path / "other")
        for log in (built, other):
            log.lines("a", [b"1"])
            log.cut()
            log.lines("a", [b"2"])
        built.path(1, Kind.RAW).write_bytes(other.path(1, Kind.RAW).read_bytes())
        damage: list[Damaged] = []
        assert values(built, on_damage=damage.append) == [b"2"]
        assert "another log" in damage[0].message or "belongs to log" in damage[0].message

    def test_a_lying_sparse_index_does_no_harm(self, built: Built) -> None:
        for number in range(40):
            built.lines("a", [b"%d" % number * 10_000])
        path = built.path(1, Kind.INDEX)
        assert path.stat().st_size > 64
        for shift in (8, 24, 1 << 20):
            data = bytearray(path.read_bytes())
            for entry in range(64, len(data), 24):
                data[entry + 8 : entry + 16] = (
                    int.from_bytes(data[entry + 8 : entry + 16], "little") + shift
                ).to_bytes(8, "little")
            path.write_bytes(data)
            assert [r.sequence for r in built.log.read(start=30)] == list(range(30, 41))
            assert next(built.log.read(start=moment(30))).sequence == 30


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Return when ``condition`` holds; a condition nobody can be woken by, looked at again and again."""
    never = threading.Event()
    for _ in range(int(seconds * 1000)):
        if condition():
            return
        never.wait(0.001)
    raise AssertionError("it did not come to that")


ROUTES = ("a", "b", "c")
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("lines"),
            st.sampled_from(ROUTES),
            st.lists(st.binary(max_size=9).filter(lambda b: b"\n" not in b), min_size=1, max_size=4),
        ),
        st.tuples(
            st.just("columns"),
            st.sampled_from(ROUTES),
            st.lists(st.binary(min_size=0, max_size=9), min_size=1, max_size=4),
        ),
        st.tuples(
            st.just("pieces"),
            st.sampled_from(ROUTES),
            st.lists(st.binary(min_size=1, max_size=5).filter(lambda b: b"\n" not in b), min_size=2, max_size=4),
        ),
        st.tuples(st.sampled_from(["cut", "seal", "piece"]), st.just(""), st.just([])),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps, st.data())
def test_a_log_reads_as_a_list_would(script: list[tuple[str, str, list[bytes]]], data: st.DataObject) -> None:
    """Whatever was written, cut and sealed in whatever order: any route from any sequence gives what a list gives."""
    with tempfile.TemporaryDirectory() as folder:
        built = Built(Path(folder) / "root", segment_max_bytes=4096)
        model: list[tuple[int, str, bytes]] = []
        begun: dict[str, tuple[int, bytes, list[bytes]]] = {}

        def go_on(route: str) -> None:
            sequence, value, (piece, *rest) = begun.pop(route)
            built.piece(route, piece + (b"" if rest else b"\n"), begins=False, ends=not rest)
            if rest:
                begun[route] = (sequence, value + piece, rest)
            else:
                model.append((sequence, route, value + piece))

        for what, route, content in script:
            if what == "cut" and built.writer.advanced:
                built.cut()
            elif what == "seal":
                built.seal()
            elif what == "piece":
                for name in list(begun):
                    go_on(name)
            elif route:
                while route in begun:
                    go_on(route)
                if what == "pieces":
                    first = built.piece(route, content[0], begins=True, ends=False)
                    begun[route] = (first, content[0], content[1:])
                else:
                    first = built.lines(route, content) if what == "lines" else built.columns(route, content)
                    model += [(first + i, route, value) for i, value in enumerate(content)]
        start = data.draw(st.integers(1, built.last + 1))
        stop = data.draw(st.integers(start, built.last + 2))
        chosen = data.draw(st.sampled_from([None, *built.root.route_names()]))
        wanted = [r for r in model if start <= r[0] <= stop and chosen in (None, r[1])]
        assert seen(built.log.read()) == model
        assert seen(built.log.read(chosen, start, stop)) == wanted
        built.writer.close()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 12))
def test_damage_never_makes_wrong_records(seed: int, changes: int) -> None:
    """Whatever bytes are changed: what is still read was written, in its order, and the rest is told."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        built = Built(Path(folder) / "root", segment_max_bytes=8192)
        for number in range(3):
            built.lines("a", [b"%d" % number, b"", b"x" * number])
            built.columns("b", [b"c%d" % number, b"y"], keys=[b"k", None])
            built.piece("a", b"lo%d" % number, begins=True, ends=False)
            built.lines("b", [b"between"])
            if number < 2:
                built.cut()
            built.piece("a", b"ng", begins=False, ends=False)
            built.piece("a", b"\nrest", begins=False, ends=True)
            if number == 0:
                built.seal()
        model = seen(built.log.read())
        files = sorted([*built.root.segments.iterdir(), built.root.head])
        for _ in range(changes):
            path = chance.choice(files)
            data = bytearray(path.read_bytes()[:3000])
            at = chance.randrange(len(data) + 1)
            if chance.randrange(4):
                data[at : at + 8] = chance.randbytes(len(data[at : at + 8]))
            else:
                data[at : at + 8] = chance.randbytes(chance.randrange(16))
            path.write_bytes(data)
        damage: list[Damaged] = []
        found = seen(built.log.read(on_damage=damage.append))
        left = iter(model)
        assert all(record in left for record in found), "in order, and nothing else"
        head_is_lost = decode_head(built.root.head.read_bytes()) is None  # then nobody knows how far to read
        assert found == model or damage or head_is_lost
        built.writer.close()
