"""Reading gives each durable record once and in order, whatever happens to its segments, and reports bad bytes."""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from damage import flip_bit
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import START_NS, Built
from reading import moment, seen, three_forms, until_it_waits, values
from repairing import repair
from running import eventually
from some_logs import FIRST as FIRST_VALUE
from some_logs import STEPS, Expected, Step, build

import wald
from wald.errors import Damaged, InvalidInput, NotFound
from wald.format.batch import BatchHeader, Encoding, Flag
from wald.format.names import Kind
from wald.format.records import Record
from wald.reading.arrow import record_batch, schema
from wald.reading.assembler import Batch
from wald.reading.reader import read_without_waiting
from wald.retention.missing import Missing
from wald.segments.sealed_file import FRAME_BYTES, SealedFile


class TestPlaces:
    """Start and end of a read."""

    def test_routes_starts_stops_and_limits_select_records(self, built: Built) -> None:
        three_forms(built)
        assert values(built) == [b"a1", b"b2", b"a3", b"b4", b"a5", b"b6"]
        assert seen(built.log.records("b")) == [(2, "b", b"b2"), (4, "b", b"b4"), (6, "b", b"b6")]
        for start in range(1, 8):
            assert [record.sequence for record in built.log.records(start=start)] == list(range(start, 7))
        for start, stop in ((1, 1), (2, 5), (4, 4), (5, 99), (3, 2)):
            found = [record.sequence for record in built.log.records(start=start, stop=stop)]
            assert found == list(range(start, min(stop, 6) + 1))
        for limit in range(8):
            assert len(values(built, limit=limit)) == min(limit, 6)
        for second in range(1, 7):
            assert next(built.log.records(start=moment(second))).sequence == second
        for start, error in ((8, NotFound), (10**30, NotFound), (0, InvalidInput), (-1, InvalidInput)):
            with pytest.raises(error):
                built.log.records(start=start)

    def test_a_time_is_the_first_record_appended_then_or_later(self, built: Built) -> None:
        for second in range(1, 6):
            built.lines("a", [b"%d" % second] * 2)
        for change in (None, built.cut, built.seal):
            if change is not None:
                change()
            assert values(built, start=moment(0))[:1] == [b"1"]
            assert values(built, start=moment(3)) == [b"3", b"3", b"4", b"4", b"5", b"5"]
            assert values(built, start=moment(3.5)) == [b"4", b"4", b"5", b"5"]
            assert values(built, start=moment(2), stop=moment(4)) == [b"2", b"2", b"3", b"3"]

    def test_a_follower_between_times_gets_what_is_between_and_does_not_wait_for_what_is_long_ago(
        self, built: Built
    ) -> None:
        """Records before the future start time are not wanted."""
        built.lines("a", [b"1"])
        following = built.log.records(start=moment(2.5), follow=True)
        built.lines("a", [b"2"])
        built.lines("a", [b"3"])
        assert next(following).value == b"3"

        waits: list[None] = []
        past = built.log.records(stop=moment(100), follow=True, on_wait=lambda: waits.append(None))
        assert [record.value for record in past] == [b"1", b"2", b"3"]
        assert waits == []

    def test_a_follower_ends_when_the_time_has_passed_and_what_was_before_is_durable(self, built: Built) -> None:
        """One record becomes durable after the end, with an earlier append time; none of the route comes later."""
        built.lines("a", [b"1"])
        waits: list[None] = []

        def wait() -> None:
            waits.append(None)
            built.lines("a" if len(waits) == 2 else "b", [b"2"])

        stop = datetime.now(UTC) - timedelta(seconds=1)
        following = built.log.records("a", stop=stop, follow=True, on_wait=wait)
        assert [record.value for record in following] == [b"1", b"2"]

    def test_an_unknown_start_route_or_root_is_an_error(self, built: Built, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput):
            built.log.records(start="yesterday")  # type: ignore[arg-type]
        with pytest.raises(NotFound):
            built.log.records("nothing")
        with pytest.raises(InvalidInput):
            built.log.records("../x")
        with pytest.raises(NotFound):
            wald.open(tmp_path / "nowhere")


class TestContent:
    """Records are returned unchanged."""

    def test_columns_come_back_with_keys_times_and_headers(self, built: Built) -> None:
        built.columns("a", [b"x\ny", b""], keys=[b"k", None], times_ns=[5, 6], headers=[None, b'{"h":"1"}'])
        first, second = built.log.records()
        assert (first.value, first.key, first.event_time_ns, first.headers) == (b"x\ny", b"k", 5, None)
        assert (second.value, second.key, second.event_time_ns, second.headers) == (b"", None, 6, b'{"h":"1"}')
        assert next(built.log.batches()).raw() == b"x\ny\n\n"
        assert next(built.log.batches(start=2, stop=2)).raw() == b"\n"

    def test_a_line_without_an_end_is_a_record(self, built: Built) -> None:
        built.append("a", b"whole\nrest", 2, flags=4)
        assert [(r.value, r.terminated) for r in built.log.records()] == [(b"whole", True), (b"rest", False)]
        assert next(built.log.batches()).raw() == b"whole\nrest\n"


class TestPieces:
    """A record that came in several pieces."""

    def pieces(self, built: Built) -> None:
        """Record 2 in three pieces over three segments, with route b in between; then 5 and 6 on route a."""
        built.lines("a", [b"one"])
        built.piece("a", b"lo", begins=True, ends=False)
        built.lines("b", [b"x"], cut=True)
        built.piece("a", b"ng", begins=False, ends=False)
        built.lines("b", [b"y"], cut=True)
        built.piece("a", b"er\nfive\nsix", begins=False, ends=True)

    def test_one_that_ends_with_the_input_has_no_newline(self, built: Built) -> None:
        built.piece("a", b"be", begins=True, ends=False)
        built.piece("a", b"", begins=False, ends=True)
        assert [(r.sequence, r.value, r.terminated) for r in built.log.records()] == [(1, b"be", False)]

    def test_a_follower_gets_it_when_the_last_piece_is_durable(self, built: Built) -> None:
        following = built.log.records(follow=True)
        built.piece("a", b"be", begins=True, ends=False)
        built.lines("b", [b"x"])
        assert next(following).value == b"x"
        built.piece("a", b"gun\n", begins=False, ends=True)
        assert next(following).value == b"begun"


class TestDurability:
    """Records that are not durable are invisible."""

    def test_nothing_behind_the_head_is_read(self, built: Built) -> None:
        built.lines("a", [b"durable"])
        built.lines("a", [b"written"], publish=False)
        with pytest.raises(NotFound):
            built.log.records(start=3)
        built.writer.cut(now_ns=built.now_ns)
        built.lines("a", [b"3"], publish=False)
        assert values(built) == [b"durable"]
        built.publish()
        assert values(built) == [b"durable", b"written", b"3"]

    @pytest.mark.parametrize("head", [None, b"rubbish" * 30])
    def test_without_a_head_everything_but_the_newest_raw_segment_is_read_and_that_is_reported(
        self, built: Built, head: bytes | None
    ) -> None:
        three_forms(built)
        built.root.head.unlink()
        if head is not None:
            built.root.head.write_bytes(head)
        reported: list[Damaged] = []
        assert [r.value for r in built.log.records(on_damage=reported.append)] == [b"a1", b"b2", b"a3", b"b4"]
        assert "no readable head" in reported[0].message
        with pytest.raises(Damaged, match="no readable head"):
            values(built)
        with pytest.raises(Damaged, match="no readable head"):
            values(built, start=6)
        assert values(built, stop=4) == [b"a1", b"b2", b"a3", b"b4"]

    def test_sealed_segments_alone_are_a_log(self, built: Built) -> None:
        three_forms(built)
        built.cut(seal=True)
        built.writer.close()
        built.root.head.unlink()
        built.path(7, Kind.RAW).unlink()
        assert [r.sequence for r in built.log.records()] == [1, 2, 3, 4, 5, 6]
        assert values(built, start=7) == []


@settings(max_examples=40, deadline=None)
@given(STEPS, st.data())
def test_a_log_reads_as_a_list_would(steps: list[Step], data: st.DataObject) -> None:
    """Any route from any sequence reads like a list, whatever was written, cut and sealed in any order."""
    with tempfile.TemporaryDirectory() as folder:
        built = build(Path(folder) / "root", steps)
        model: list[Expected] = [(1, "b", FIRST_VALUE)]
        for step in steps:
            model += step.records(len(model) + 1)
        start = data.draw(st.integers(1, built.last + 1))
        stop = data.draw(st.integers(start, built.last + 2))
        chosen = data.draw(st.sampled_from([None, *built.root.route_names()]))
        assert seen(built.log.records()) == model
        assert seen(built.log.records(chosen, start, stop)) == [
            each for each in model if start <= each[0] <= stop and chosen in (None, each[1])
        ]
        built.writer.close()


def rows(table: pa.Table | pa.RecordBatch) -> list[tuple[object, ...]]:
    """Every row, times as integers (a datetime does not hold nanoseconds)."""
    table = pa.Table.from_batches([table]) if isinstance(table, pa.RecordBatch) else table
    columns = []
    for name in schema.names:
        column = table.column(name)
        columns.append(column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column)
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def expected(built: Built, **options: int) -> list[tuple[object, ...]]:
    return [
        (r.sequence, r.route, r.append_time_ns, r.event_time_ns, r.key, r.value, r.headers)
        for r in built.log.records(**options)  # type: ignore[arg-type]
    ]


def test_a_table_holds_what_the_records_hold(built: Built) -> None:
    """An empty log is an empty table, and a joined record is a row."""
    table = built.log.to_arrow_reader().read_all()
    assert (table.num_rows, table.schema) == (0, schema)
    built.piece("a", b"be", begins=True, ends=False)
    built.piece("a", b"gun\nnext\n", begins=False, ends=True)
    assert built.log.to_arrow_reader().read_all()["value"].to_pylist() == [b"begun", b"next"]

    built.lines("a", [b"one", b"", b"\xff\r", b"four"])
    built.columns(
        "b", [b"x\n", b"", b"z"], keys=[b"k", None, b""], times_ns=[-1, 0, START_NS + 1], headers=[None, b"{}", None]
    )
    built.columns("b", [b"plain"])
    built.lines("c", [b"five"])
    built.append("a", b"six\nseven", 2, flags=Flag.UNTERMINATED)
    built.cut(seal=True)
    table = built.log.to_arrow_reader().read_all()
    table.validate(full=True)
    assert table.schema == schema
    assert rows(table) == expected(built)


def test_small_batches_are_put_together(built: Built) -> None:
    for number in range(50):
        built.lines("ab"[number % 2], [b"%d" % number])
    reader = built.log.to_arrow_reader()
    batches = list(reader)
    assert len(batches) == 1
    assert rows(batches[0]) == expected(built)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=30), st.booleans())
def test_any_lines_come_out_as_they_went_in(lines: list[bytes], terminated: bool) -> None:
    """The split of Arrow is the split of records."""
    payload = b"\n".join(lines) + (b"\n" if terminated else b"")
    header = BatchHeader(0, len(payload), 7, START_NS, 0, 0, len(lines), 1, Encoding.LINES, 0, 1)
    batch = Batch("a", 7, 6 + len(lines), memoryview(payload), terminated, header, 1, 64)
    table = record_batch([batch, batch])
    table.validate(full=True)
    assert table.column("value").to_pylist() == lines * 2
    assert table.column("sequence").to_pylist() == list(range(7, 7 + len(lines))) * 2


FIRST = 3  # there are others before it


def lines(built: Built) -> None:
    built.append("a", b"1\n\n3\n4", 4, flags=Flag.UNTERMINATED)


def columns(built: Built) -> None:
    headers = [b'{"a": "b"}', None, None, None]
    built.columns("a", [b"1", b"", b"3", b"4"], keys=[None, b"k", None, b"l"], times_ns=[4, 3, 2, 1], headers=headers)


def batch_of(built: Built) -> Batch:
    (batch,) = built.log.batches("a", FIRST)
    return batch


@pytest.mark.parametrize("kind", [lines, columns])
def test_any_run_of_rows_is_made_into_the_same_records(built: Built, kind: Callable[[Built], None]) -> None:
    built.lines("b", [b"x", b"y"])
    kind(built)
    batch = batch_of(built)
    whole = list(batch.records())
    assert [record.sequence for record in whole] == [3, 4, 5, 6]
    assert all(isinstance(record, Record) for record in whole)
    for first in range(8):
        for last in range(8):
            expected = [record for record in whole if first <= record.sequence <= last]
            assert list(batch.rows().records(first, last)) == expected
            if (part := batch.between(first, last)) is not None:
                assert list(part.records()) == expected


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


def spoil(path: Path, offset: int, length: int = 1) -> None:
    """Change bytes of a file."""
    data = bytearray(path.read_bytes())
    for i in range(offset, offset + length):
        data[i] ^= 0x55
    path.write_bytes(data)


class TestDamage:
    """Bad bytes are reported, and what follows them is read."""

    @pytest.mark.parametrize("base", [1, 3])
    def test_a_file_that_is_listed_and_not_there(self, built: Built, base: int) -> None:
        """After half a restore, listing the directory again does not help, so the reader must not retry for ever."""
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

    def frames(self, built: Built) -> None:
        """Write three records, each in a separate sealed frame."""
        for number in range(3):
            built.lines("ab"[number % 2], [b"%d" % number + os.urandom(FRAME_BYTES // 2).hex().encode()])
        built.cut(seal=True)

    def spoil_frame(self, built: Built, sequence: int) -> None:
        path = built.path(1, Kind.SEALED)
        with SealedFile(path) as sealed:
            frame = next(frame for frame in sealed.index.frames if frame.next_sequence > sequence)
        spoil(path, frame.offset + 100, 8)

    def test_a_sealed_frame_is_reported_unless_it_is_of_other_routes(self, built: Built) -> None:
        self.frames(built)
        self.spoil_frame(built, 2)
        damage: list[Damaged] = []
        assert [r.sequence for r in built.log.records(on_damage=damage.append)] == [1, 3]
        assert ["record 2 " in error.message for error in damage] == [True]
        assert [r.sequence for r in built.log.records("a")] == [1, 3]

    def test_a_gap_of_one_sequence(self, built: Built) -> None:
        built.lines("a", [b"1"])
        built.writer.state.next_sequence += 1
        built.lines("a", [b"3"])
        damage: list[Damaged] = []
        assert values(built, on_damage=damage.append) == [b"1", b"3"]
        assert "the sequence has a gap" in damage[0].message

    def test_a_segment_of_another_log(self, built: Built, tmp_path: Path) -> None:
        other = Built(tmp_path / "other")
        for log in (built, other):
            log.lines("a", [b"1"], cut=True)
            log.lines("a", [b"2"])
        built.path(1, Kind.RAW).write_bytes(other.path(1, Kind.RAW).read_bytes())
        damage: list[Damaged] = []
        assert values(built, on_damage=damage.append) == [b"2"]
        assert "another log" in damage[0].message or "belongs to log" in damage[0].message
