"""Triggers read each record once, whatever happens between them, and admission keeps the limits."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Built
from some_logs import STEPS, Step, build

from wald.errors import Damaged, InvalidInput, NotFound, Refused
from wald.format.names import Kind
from wald.log import Log
from wald.reading.assembler import Batch
from wald_archive.bundle import Bytes, Records, Size, bundle_batches
from wald_spark.checkpoint import Offsets, Position, decode_offsets, encode_offsets
from wald_spark.engine import Share, Stretch, shares, stretches
from wald_spark.options import STREAM_OPTIONS, Limits, parse_options, parse_stream_options
from wald_spark.plan import Block, LogPiece, fair_share, joined_blocks, packed
from wald_spark.stream import Backlog, Extent, Triggers, admit

NO_LIMITS = Limits()


def triggers(*paths: Path | str, **given: str) -> Triggers:
    options = parse_options({"paths": json.dumps(list(map(str, paths)))} | given, also=STREAM_OPTIONS)
    return Triggers(options, parse_stream_options(options.given))


def records(pieces: list[LogPiece]) -> list[tuple[str, int, bytes]]:
    found = [(piece.log, batch) for piece in pieces for batch in piece.batches()]
    return [(log, record.sequence, record.value) for log, batch in found for record in batch.records()]


class Stream:
    """A stream as Spark runs it: offsets are stored as text, and the records read are in the sink."""

    def __init__(self, *paths: Path | str, **given: str) -> None:
        self._source = paths, given
        self.sink: list[tuple[str, int, bytes]] = []
        self.restart()
        self.at = self.triggers.start()

    def restart(self) -> None:
        paths, given = self._source
        self.triggers = triggers(*paths, **given)

    def trigger(self, limits: Limits = NO_LIMITS, *, crash: bool = False) -> bool:
        """Run one trigger; return True if it advanced. With ``crash``, plan it, restart and plan it again."""
        end = kept(self.triggers.end(self.at, limits))
        if end == self.at:
            return False
        if crash:
            self.triggers.pieces(self.at, end)
            self.restart()
        self.sink += records(self.triggers.pieces(self.at, end))
        self.at = end
        return True

    @property
    def sequences(self) -> list[int]:
        return [sequence for _, sequence, _ in self.sink]


def kept(offsets: Offsets) -> Offsets:
    return decode_offsets(json.loads(json.dumps(encode_offsets(offsets))))


@settings(max_examples=40, deadline=None)
@given(
    chunks=st.lists(STEPS, min_size=1, max_size=4),
    routes=st.sampled_from(["", "a", "b", "a,between"]),
    data=st.data(),
)
def test_no_record_is_skipped_or_doubled(chunks: list[list[Step]], routes: str, data: Any) -> None:
    """Two logs, with a crash or a limit at any trigger; finally the stream has read every complete record."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [build(Path(folder, name), []) for name in ("one", "two")]
        (logs[0].root.routes / "between").mkdir()
        stream = Stream(f"{folder}/*", **({"routes": routes} if routes else {}))
        for chunk in chunks:
            for step in chunk:
                step.append(logs[data.draw(st.integers(0, 1))])
            for _ in range(data.draw(st.integers(0, 3))):
                limits = data.draw(st.builds(Limits, st.none() | st.integers(1, 5), st.none() | st.integers(1, 500)))
                before = len(stream.sink)
                stream.trigger(limits, crash=data.draw(st.booleans()))
                assert limits.records is None or len(stream.sink) - before <= limits.records
        while stream.trigger():
            pass
        for log in logs:
            wanted = [
                (log.log_id.hex(), record.sequence, record.value)
                for record in log.log.records()
                if not routes or record.route in routes.split(",")
            ]
            # A long record arrives once it is complete, which may be after later records: compare sorted.
            assert sorted(found for found in stream.sink if found[0] == log.log_id.hex()) == sorted(wanted)
            log.crash()


def test_latest_is_where_the_log_ended_when_the_stream_met_it(thirty: Built) -> None:
    """The position survives a crash of Spark during the first batch."""
    stream = Stream(thirty.root.path, startingoffsets="latest")
    assert stream.trigger(crash=True)
    assert stream.sink == []
    thirty.lines("a", [b"31"])
    assert stream.trigger(crash=True)
    assert stream.sequences == [31]


def test_a_first_batch_with_records_is_planned_again_from_where_it_began(thirty: Built) -> None:
    """Between the crash and the restart, records are appended and the oldest ones are reclaimed."""
    thirty.lines("a", [b"31"])
    stream = Stream(thirty.root.path, startingoffsets=f'{{"{thirty.log_id.hex()}": 29}}')
    end = kept(stream.triggers.end(stream.at, NO_LIMITS))
    thirty.lines("a", [b"32"])
    thirty.reclaim(1)
    stream.restart()
    assert [sequence for _, sequence, _ in records(stream.triggers.pieces(stream.at, end))] == [29, 30, 31]


def test_earliest_is_the_oldest_record_there_is(thirty: Built) -> None:
    thirty.reclaim(1)
    stream = Stream(thirty.root.path)
    stream.trigger()
    assert stream.sequences == list(range(11, 31))


def test_places_to_start_that_do_not_exist_are_refused(thirty: Built) -> None:
    log = thirty.log_id.hex()
    with pytest.raises(NotFound, match="record 32, which startingOffsets names, was never issued"):
        Stream(thirty.root.path, startingoffsets=f'{{"{log}": 32}}').trigger()
    with pytest.raises(InvalidInput, match="which is missing") as caught:
        Stream(thirty.root.path, startingoffsets=f'{{"{"00" * 16}": 1}}').trigger()
    assert log in caught.value.hint
    stream = Stream(thirty.root.path, startingoffsets=f'{{"{log}": 31}}')
    stream.trigger()
    thirty.lines("a", [b"31"])
    stream.trigger()
    assert stream.sequences == [31]


def test_a_log_that_appears_later_is_read_from_its_beginning(thirty: Built) -> None:
    """This also holds for a stream that started at the end of the existing logs."""
    pattern = f"{thirty.root.path.parent}/*"
    stream = Stream(pattern, startingoffsets="latest")
    stream.trigger()
    later = Built(thirty.root.path.parent / "later")
    later.lines("a", [b"new"])
    stream.restart()
    stream.trigger()
    assert stream.sink == [(later.log_id.hex(), 1, b"new")]


def test_what_comes_after_the_stream_was_closed_is_not_part_of_it(thirty: Built) -> None:
    stream = Stream(f"{thirty.root.path.parent}/*")
    stream.triggers.close()
    thirty.lines("a", [b"31"])
    Built(thirty.root.path.parent / "later").lines("a", [b"new"])
    while stream.trigger(Limits(records=4)):
        pass
    assert stream.sequences == list(range(1, 31))


def test_a_reclaimed_range_is_loud_unless_loss_is_tolerated(thirty: Built) -> None:
    strict, tolerant = Stream(thirty.root.path), Stream(thirty.root.path, failondataloss="false")
    for stream in (strict, tolerant):
        stream.trigger(Limits(records=5))
    planned = strict.triggers.pieces(strict.at, strict.triggers.end(strict.at, NO_LIMITS))
    thirty.reclaim(1)
    with pytest.raises(NotFound, match="RECLAIM has removed records 6 to 10"):
        records(planned)
    with pytest.raises(NotFound, match="RECLAIM has removed records 6 to 10") as caught:
        strict.trigger()
    assert "failOnDataLoss" in caught.value.hint
    tolerant.trigger()
    assert tolerant.sequences == [*range(1, 6), *range(11, 31)]


def test_a_log_that_vanishes_is_loud_unless_loss_is_tolerated(thirty: Built) -> None:
    other = Built(thirty.root.path.parent / "other")
    other.lines("a", [b"x"])
    strict, tolerant = (Stream(f"{thirty.root.path.parent}/*", failondataloss=word) for word in ("true", "false"))
    for stream in (strict, tolerant):
        stream.trigger()
    shutil.rmtree(other.root.path)
    with pytest.raises(NotFound, match="other"):
        strict.trigger()
    strict.restart()
    with pytest.raises(NotFound, match=f"log {other.log_id.hex()}, read up to record 1, is missing"):
        strict.trigger()
    thirty.lines("a", [b"31"])
    assert tolerant.trigger(crash=True)
    assert tolerant.sink[-1][1] == 31
    assert tolerant.at.logs[other.log_id.hex()].last == 1


def test_another_log_in_its_place_is_loud_unless_loss_is_tolerated(thirty: Built) -> None:
    """The other log has more records than the stream has read."""
    strict, tolerant = (Stream(thirty.root.path, failondataloss=word) for word in ("true", "false"))
    for stream in (strict, tolerant):
        stream.trigger()
    shutil.rmtree(thirty.root.path)
    other = Built(thirty.root.path)
    other.lines("a", [b"other"] * 40)
    with pytest.raises(NotFound, match=f"log {thirty.log_id.hex()} is no longer there"):
        strict.trigger()
    tolerant.trigger()
    tolerant.trigger()
    assert tolerant.sink[30:] == [(other.log_id.hex(), sequence, b"other") for sequence in range(1, 41)]


def test_without_a_head_a_stream_waits_and_a_batch_that_needs_it_fails(thirty: Built) -> None:
    stream = Stream(thirty.root.path)
    end = stream.triggers.end(stream.at, NO_LIMITS)
    head = thirty.root.head.read_bytes()
    thirty.root.head.unlink()
    with pytest.raises(Damaged, match="no readable head"):
        stream.triggers.pieces(stream.at, end)
    assert stream.triggers.end(end, NO_LIMITS) == end
    thirty.root.head.write_bytes(head)
    assert len(records(stream.triggers.pieces(stream.at, end))) == 30


def test_a_stream_of_other_routes_does_not_go_on(thirty: Built) -> None:
    stream = Stream(thirty.root.path, route="a")
    stream.trigger()
    with pytest.raises(Refused, match="a stream of routes a, but this stream reads all routes"):
        triggers(thirty.root.path).end(stream.at, NO_LIMITS)


def test_shipped_segments_are_streamed_as_they_arrive(thirty: Built, tmp_path: Path) -> None:
    """Files are renamed into place; their headers identify the log."""
    place = tmp_path / "shipped"
    place.mkdir()

    def ship(base: int) -> None:
        path = thirty.path(base, Kind.SEALED)
        shutil.copy(path, place / f"{path.name}.tmp")
        (place / f"{path.name}.tmp").rename(place / path.name)

    ship(1)
    stream = Stream(place)
    assert stream.trigger(Limits(records=8))
    assert stream.trigger()
    assert not stream.trigger()
    ship(11)
    assert stream.trigger(crash=True)
    assert stream.sequences == list(range(1, 21))


def test_what_cannot_be_streamed_is_refused(thirty: Built, tmp_path: Path) -> None:
    """What is not a log is passed over by a pattern only."""
    with pytest.raises(InvalidInput, match="an archive cannot be streamed"):
        Stream("s3://bucket/archive").trigger()

    with pytest.raises(NotFound, match="the data has no route 'nope'"):
        Stream(thirty.root.path, route="nope").trigger()

    (tmp_path / "half-made" / "segments").mkdir(parents=True)
    stream = Stream(f"{tmp_path}/*")
    stream.trigger()
    assert len(stream.sink) == 30
    with pytest.raises(NotFound, match="neither a log"):
        Stream(tmp_path / "half-made").trigger()
    with pytest.raises(NotFound, match="no log there"):
        Stream(f"{tmp_path}/half*").trigger()

    shutil.copytree(thirty.root.path, tmp_path / "copy")
    with pytest.raises(InvalidInput, match="the same log"):
        Stream(f"{tmp_path}/*").trigger()


def test_an_idle_log_costs_one_read_of_its_head(thirty: Built) -> None:
    other = Built(thirty.root.path.parent / "other")
    other.lines("a", [b"x"])
    stream = Stream(thirty.root.path, other.root.path)
    stream.trigger()
    with opened() as paths:
        for _ in range(5):
            assert not stream.trigger()
    assert paths == [str(log.root.head) for log in (thirty, other)] * 5


_OPENED: list[list[str]] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _OPENED and event in ("open", "os.listdir", "os.scandir", "glob.glob"):
        _OPENED[-1].append(str(arguments[0]))


sys.addaudithook(_note)


@contextmanager
def opened() -> Iterator[list[str]]:
    """Yield the list of files and directories that this process opens inside the block."""
    _OPENED.append([])
    yield _OPENED[-1]
    _OPENED.pop()


def test_what_others_wrote_may_be_reclaimed_from_under_a_stream_of_one_route(thirty: Built) -> None:
    """RECLAIM checks only the cursors of routes with records in the segment."""
    stream = Stream(thirty.root.path, route="b")
    thirty.lines("b", [b"31"])
    thirty.reclaim(1)
    stream.at = Offsets({thirty.log_id.hex(): Position(0, 5)}, frozenset("b"))
    stream.trigger()
    assert stream.sequences == [31]


RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 50)), max_size=6)
LIMITS = st.builds(Limits, st.none() | st.integers(1, 12), st.none() | st.integers(1, 120))


def runs_of(shape: list[tuple[int, int, int]]) -> list[Extent]:
    """Return one extent for each (gap, records, bytes); a gap skips records of other routes."""
    begins = accumulate((gap + count for gap, count, _ in shape), initial=1)
    return [Extent(begin + gap, count, size) for begin, (gap, count, size) in zip(begins, shape, strict=False)]


def backlog(extents: list[Extent], start: int, end: int) -> Backlog:
    wanted = (extent for extent in extents if start < extent.last and extent.first <= end)
    return Backlog(start, end, (extent.between(start + 1, end) if extent.count else extent for extent in wanted))


def even(count: int, size: int = 1, *, start: int = 0) -> Backlog:
    """Return a backlog of equal-sized records, each in its own batch."""
    return Backlog(start, start + count, [Extent(start + 1 + number, 1, size) for number in range(count)])


@settings(max_examples=300, deadline=None)
@given(shapes=st.lists(RUNS, min_size=1, max_size=3), limits=LIMITS)
def test_triggers_cover_everything_once_and_keep_the_limits(
    shapes: list[list[tuple[int, int, int]]], limits: Limits
) -> None:
    """Any layout of records, including records above the limit."""
    logs = [runs_of(shape) for shape in shapes]
    ends = [max([extent.last for extent in extents], default=0) for extents in logs]
    at = [0] * len(logs)
    for turn in range(200):
        waiting = [number for number, end in enumerate(ends) if at[number] < end]
        if not waiting:
            break
        before = dict(enumerate(at))
        admitted = admit([backlog(logs[n], at[n], ends[n]) for n in waiting], limits, turn=turn)
        for number, end in zip(waiting, admitted, strict=True):
            assert at[number] <= end <= ends[number]
            at[number] = end
        taken = [
            extent.between(before[n] + 1, at[n])
            for n in waiting
            for extent in logs[n]
            if extent.count and before[n] < extent.last and extent.first <= at[n]
        ]
        records = sum(extent.count for extent in taken)
        assert at != list(before.values())
        assert limits.records is None or records <= limits.records
        if (
            limits.raw_bytes is not None and records > 1
        ):  # records count as the average of their batch, rounded to bytes
            assert sum(extent.raw_bytes for extent in taken) <= limits.raw_bytes + records
    assert at == ends


def test_without_limits_nothing_is_counted() -> None:
    counted = iter([Extent(4, 1, 1)])
    assert admit([Backlog(3, 9, counted), Backlog(0, 5, [])], Limits(), turn=0) == [9, 5]
    assert next(counted) == Extent(4, 1, 1)


def test_only_as_much_is_read_as_is_needed() -> None:
    """A limit of ten records does not read a whole segment."""
    read: list[int] = []

    def extents() -> Iterator[Extent]:
        for first in range(1, 1000, 5):
            read.append(first)
            yield Extent(first, 5, 100)

    assert admit([Backlog(0, 1000, extents())], Limits(records=10), turn=0) == [10]
    assert read == [1, 6]


def test_logs_share_equally_what_the_others_leave() -> None:
    for limits, counts, ends in [
        (Limits(records=30), [100, 100, 100], [10, 10, 10]),
        (Limits(records=30), [100, 4, 100], [13, 4, 13]),
        (Limits(records=30), [100, 0, 2], [28, 2]),
        (Limits(records=2), [100, 100, 100], [1, 1, 0]),
        (Limits(raw_bytes=300), [100, 100, 100], [10, 10, 10]),
        (Limits(raw_bytes=300), [100, 4, 100], [13, 4, 13]),
        (Limits(records=12, raw_bytes=300), [100, 100, 100], [4, 4, 4]),
        (Limits(records=300, raw_bytes=60), [100, 100, 100], [2, 2, 2]),
    ]:
        assert admit([even(count, 10) for count in counts if count], limits, turn=0) == ends


def test_a_batch_is_cut_where_the_limit_is_and_a_longer_record_goes_alone() -> None:
    """Its bytes count even if they are in other batches; logs take turns if there is not enough for all."""
    assert admit([Backlog(0, 1000, [Extent(1, 1000, 5000)])], Limits(records=7), turn=0) == [7]
    assert admit([Backlog(0, 1000, [Extent(1, 1000, 5000)])], Limits(raw_bytes=50), turn=0) == [10]
    long = [Backlog(0, 2, [Extent(1, 1, 900), Extent(2, 1, 900)]), Backlog(0, 1, [Extent(1, 1, 900)])]
    assert [admit(long, Limits(raw_bytes=10), turn=turn) for turn in (0, 1)] == [[1, 0], [0, 1]]
    # Each record has ten bytes in its first batch and ninety in the next.
    extents = [Extent(1 + number // 2, 1 - number % 2, 90 if number % 2 else 10) for number in range(20)]
    assert admit([Backlog(0, 10, extents)], Limits(raw_bytes=300), turn=0) == [3]
    assert admit([Backlog(5, 900, []), Backlog(0, 900, [Extent(3, 1, 10)])], Limits(records=1), turn=0) == [900, 3]
    at = [0, 0, 0]
    for turn in range(9):
        at = admit([even(50, start=start) for start in at], Limits(records=1), turn=turn)
    assert at == [3, 3, 3]


def shares_of(log: Log, size: Size, *, pieces: list[int], stretch_bytes: int) -> list[Share]:
    """Measure pieces that begin at the given records, even in the middle of a batch."""
    last = max((record.sequence for record in log.records()), default=0)
    starts = sorted({1, *(start for start in pieces if start <= last), last + 1})
    measured: list[Stretch] = []
    for start, following in pairwise(starts):
        found = stretches(log.batches("a", start, following - 1), size, limit_bytes=stretch_bytes)
        measured += found

    def read(stretch: Stretch) -> Iterator[Batch]:
        return log.batches("a", stretch.first, stretch.last)

    return list(shares(measured, size, after=0, read=read))


def expected(log: Log, size: Size) -> list[Share]:
    found, after = [], 0
    for portion in bundle_batches(log.batches("a"), size):
        sequences = [record.sequence for batch in portion for record in batch.records()]
        found.append(Share(after, sequences[0], sequences[-1]))
        after = sequences[-1]
    return found


@settings(max_examples=80, deadline=None)
@given(
    steps=STEPS,
    size=st.builds(Bytes, st.integers(1, 60)) | st.builds(Records, st.integers(1, 9)),
    pieces=st.lists(st.integers(1, 40), max_size=4),
    stretch_bytes=st.sampled_from([1, 20, 1000]),
)
def test_shares_are_portions(steps: list[Step], size: Size, pieces: list[int], stretch_bytes: int) -> None:
    """The batches of a share equal those of the portion: the same bytes of the same stored batches."""
    with tempfile.TemporaryDirectory() as folder:
        log = build(Path(folder) / "root", steps).log
        found = shares_of(log, size, pieces=pieces, stretch_bytes=stretch_bytes)
        assert found == expected(log, size)
        for share, portion in zip(found, bundle_batches(log.batches("a"), size), strict=True):
            assert list(log.batches("a", share.first, share.last)) == list(portion)


@pytest.mark.parametrize("size", [Records(100), Bytes(10_000)])
def test_only_stretches_in_which_a_bundle_ends_are_read(built: Built, size: Size) -> None:
    for _ in range(10):
        built.lines("a", [b"x" * 99] * 10)
    measured = list(stretches(built.log.batches("a"), size, limit_bytes=1))
    assert len(measured) == 10

    def never(stretch: Stretch) -> list[Batch]:
        raise AssertionError(stretch)

    assert list(shares(measured, size, after=0, read=never)) == [Share(0, 1, 100)]


def test_small_batches_are_measured_together(built: Built) -> None:
    for _ in range(10):
        built.lines("a", [b"x" * 99])
    assert list(stretches(built.log.batches("a"), Records(1), limit_bytes=300)) == [
        Stretch(1, 3, 3),
        Stretch(4, 6, 3),
        Stretch(7, 9, 3),
        Stretch(10, 10, 1),
    ]


SIZES = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 100), st.integers(0, 3)), max_size=30)


def blocks(sizes: list[tuple[int, int, int]]) -> list[Block]:
    """Return one block for each (records, bytes, gap); a gap of 3 begins another segment."""
    made: list[Block] = []
    segment = at = 1
    for records, raw_bytes, gap in sizes:
        at += gap
        segment = at if gap == 3 else segment
        made.append(Block(segment, at, at + records, raw_bytes))
        at += records
    return made


@given(SIZES, st.integers(1, 200))
def test_joined_blocks_cover_every_block_once_and_in_order(sizes: list[tuple[int, int, int]], limit: int) -> None:
    """One is larger than the limit only if its block is."""
    made = blocks(sizes)
    found = list(joined_blocks(made, first=1, last=10**9, limit_bytes=limit))
    assert all(one.last < other.first for one, other in pairwise(found))
    for block in made:
        assert sum(joined.first <= block.first and block.next - 1 <= joined.last for joined in found) == 1
    assert sum(joined.raw_bytes for joined in found) == sum(block.raw_bytes for block in made)
    for joined in found:
        inside = [block for block in made if joined.first <= block.first <= joined.last]
        assert joined.raw_bytes <= limit or len([block for block in inside if block.raw_bytes]) == 1


def test_joined_blocks_end_with_a_segment_that_was_passed_over_and_hold_all_of_a_long_record() -> None:
    def joined(*made: Block, first: int = 1, last: int = 99) -> list[Block]:
        return list(joined_blocks(made, first=first, last=last, limit_bytes=100))

    apart = [Block(1, 1, 5, 10), Block(20, 20, 25, 10)]
    assert joined(*apart) == apart
    assert joined(Block(1, 1, 5, 10), Block(1, 20, 25, 10), Block(25, 25, 30, 10)) == [Block(1, 1, 30, 30)]
    rest = [Block(1, 1, 1, 70), Block(1, 1, 5, 10), Block(5, 5, 5, 300), Block(9, 9, 9, 50), Block(9, 9, 12, 10)]
    assert joined(*rest) == [Block(1, 1, 5, 360), Block(9, 9, 12, 10)]
    assert joined(Block(1, 1, 100, 10), first=7, last=9) == [Block(1, 7, 10, 10)]


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 150))
def test_tasks_hold_everything_in_order_and_up_to_the_limit(sizes: list[int], limit: int) -> None:
    pieces = [Block(1, number, number + 1, size) for number, size in enumerate(sizes)]
    tasks = packed(pieces, limit_bytes=limit)
    assert [piece for task in tasks for piece in task] == pieces
    assert all(sum(piece.raw_bytes for piece in task) <= limit or len(task) == 1 for task in tasks)
    for task, following in pairwise(tasks):
        assert sum(piece.raw_bytes for piece in (*task, following[0])) > limit


def test_a_small_log_is_shared_by_several_tasks_too() -> None:
    for total, most, share in [
        (0, 64 << 20, 8 << 20),
        (64 << 20, 64 << 20, 8 << 20),
        (128 << 20, 64 << 20, 16 << 20),
        (1 << 40, 64 << 20, 64 << 20),
        (1 << 40, 1 << 20, 1 << 20),
    ]:
        assert fair_share(total, most) == share
