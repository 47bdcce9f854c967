"""Pieces of a log or an archive hold every record once, and executors run them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from archives import archive, bags
from damage import flip_bit
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import SECOND_NS, START_NS, Built
from running import eventually
from shrinking import shrink
from some_logs import STEPS, Step, build

from wald.errors import Damaged, NotFound, Unavailable
from wald.format.names import Kind
from wald.format.records import Record
from wald.reading.arrow import record_batches, schema
from wald.segments.sealed_file import FRAME_BYTES
from wald_archive.bundle import Records
from wald_archive.codecs import Codec
from wald_spark import progress
from wald_spark.locations import ArchiveLocation, LogLocation, Shipped
from wald_spark.options import STRICT, Options, Tolerance, parse_options
from wald_spark.plan import LogPiece, Range, pieces_of
from wald_spark.query import BundlePiece, bundle_pieces, plan_query
from wald_spark.stream import Extents

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


EVERYTHING = Range(None, 1, 10**9)
FORGIVING = Tolerance(damage=True, loss=True)


def place_of(built: Built) -> LogLocation:
    return LogLocation(built.root, built.log_id)


def planned(
    place: LogLocation,
    wanted: Range = EVERYTHING,
    *,
    limit: int = 1 << 20,
    tolerance: Tolerance = STRICT,
    active: bool = True,
    gaps: bool = False,
) -> list[LogPiece]:
    return pieces_of(place.view(), wanted, limit_bytes=limit, tolerance=tolerance, active=active, gaps=gaps)


def read(pieces: list[LogPiece]) -> list[Record]:
    """Return the records of pieces that were pickled, as for an executor."""
    there: list[LogPiece] = pickle.loads(pickle.dumps(pieces))
    return [record for piece in there for batch in piece.batches() for record in batch.records()]


def in_order(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.sequence)


@settings(max_examples=60, deadline=None)
@given(
    STEPS, st.integers(1, 40), st.integers(0, 40), st.sampled_from([None, "a", "b"]), st.sampled_from([1, 200, 9999])
)
def test_pieces_together_are_what_a_reader_reads(
    steps: list[Step], first: int, length: int, route: str | None, limit: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        built = build(Path(directory) / "root", steps)
        first = min(first, built.last)
        wanted = Range(frozenset([route]) if route else None, first, first + length)
        pieces = planned(place_of(built), wanted, limit=limit)
        expected = list(built.log.records(route, start=first, stop=first + length))
        assert in_order(read(pieces)) == in_order(expected)


@settings(max_examples=30, deadline=None)
@given(STEPS, st.sampled_from([1, 200, 9999]))
def test_a_piece_read_later_gives_the_same(steps: list[Step], limit: int) -> None:
    """Appends, cuts and seals after planning do not change a piece."""
    with tempfile.TemporaryDirectory() as directory:
        built = build(Path(directory) / "root", steps)
        pieces = planned(place_of(built), limit=limit)
        before = read(pieces)
        built.lines("a", [b"later"])
        built.cut()
        built.lines("b", [b"later still"])
        built.seal()
        assert read(pieces) == before


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Three sealed segments of two records each, and two records in the active one."""
    built = Built(tmp_path / "root")
    for number in range(4):
        built.lines("a", [b"%d" % (2 * number), b"%d" % (2 * number + 1)])
        if number < 3:
            built.cut()
    built.seal()
    return built


def sequences(pieces: list[LogPiece]) -> list[int]:
    return [record.sequence for record in read(pieces)]


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("routes", [None, frozenset("a")])
def test_a_long_record_counts_with_all_its_pieces(tmp_path: Path, routes: frozenset[str] | None, sealed: bool) -> None:
    """Segments and frames that hold nothing else count towards tasks and trigger limits."""
    built = Built(tmp_path / "root", segment_max_bytes=1 << 24)
    built.lines("a", [b"1"])
    built.piece("a", bytes(FRAME_BYTES), begins=True, ends=False)
    for number in range(6):
        built.piece("a", bytes(FRAME_BYTES), begins=False, ends=False)
        if number == 2:
            built.lines("b", [b"3"])
            built.cut()
    built.piece("a", b"z\n", begins=False, ends=True)
    built.lines("b", [b"4"])
    built.cut()
    if sealed:
        built.seal()
    place = place_of(built)
    pieces = planned(place, replace(EVERYTHING, routes=routes))
    assert [record.sequence for record in in_order(read(pieces))] == ([1, 2] if routes else [1, 2, 3, 4])
    others = sum(piece.raw_bytes for piece in planned(place, replace(EVERYTHING, routes=frozenset("b"))))
    assert sum(piece.raw_bytes for piece in pieces) > 7 * FRAME_BYTES
    assert others < (3 * FRAME_BYTES if sealed else 1000)
    extents = list(Extents(routes).between(place.view(), 0, 4))
    assert [extent.first for extent in extents] == ([1, 2] if routes else [1, 2, 3, 4])
    assert sum(extent.raw_bytes for extent in extents) > 7 * FRAME_BYTES
    assert sum(extent.raw_bytes for extent in Extents(routes).between(place.view(), 0, 2)) > 4 * FRAME_BYTES
    assert [extent.first for extent in Extents(routes).between(place.view(), 2, 4)] == ([] if routes else [3, 4])


def test_segments_outside_the_range_are_not_opened(built: Built) -> None:
    for base in (1, 5):
        built.path(base, Kind.SEALED).write_bytes(b"no segment at all")
    assert sequences(planned(place_of(built), Range(None, 3, 4))) == [3, 4]


def test_the_active_segment_can_be_left_out_and_what_is_not_durable_is_not_read(built: Built) -> None:
    built.lines("a", [b"not yet"], publish=False)
    assert sequences(planned(place_of(built))) == list(range(1, 9))
    assert sequences(planned(place_of(built), active=False)) == list(range(1, 7))
    with pytest.raises(Damaged, match="belongs to log"):
        planned(LogLocation(built.root, bytes(16)))


def test_shipped_segments_are_read_to_their_end(built: Built, tmp_path: Path) -> None:
    directory = tmp_path / "shipped"
    shutil.copytree(built.root.segments, directory)
    assert sequences(planned(LogLocation(Shipped(directory), built.log_id))) == list(range(1, 9))


def test_a_hole_among_shipped_segments_is_damage(built: Built, tmp_path: Path) -> None:
    directory = tmp_path / "shipped"
    directory.mkdir()
    for base in (1, 5):
        shutil.copy(built.path(base, Kind.SEALED), directory)
    place = LogLocation(Shipped(directory), built.log_id)
    with pytest.raises(Damaged, match="records 3 to 4 are missing"):
        planned(place)
    assert sequences(planned(place, tolerance=FORGIVING)) == [1, 2, 5, 6]


def test_what_was_reclaimed_is_passed_over_unless_it_was_asked_for(built: Built) -> None:
    built.reclaim(1)
    built.reclaim(5)
    assert sequences(planned(place_of(built), Range(None, 3, 99), gaps=True)) == [3, 4, 7, 8]
    with pytest.raises(NotFound, match="RECLAIM has removed records 1 to 2") as missing:
        planned(place_of(built))
    assert "failOnDataLoss" in missing.value.hint
    assert sequences(planned(place_of(built), tolerance=FORGIVING)) == [3, 4, 7, 8]


def test_what_is_reclaimed_between_planning_and_reading_is_missed_unless_loss_is_tolerated(built: Built) -> None:
    pieces, tolerant = (planned(place_of(built), limit=1, tolerance=each) for each in (STRICT, FORGIVING))
    built.reclaim(3)
    with pytest.raises(NotFound, match="RECLAIM has removed"):
        read(pieces)
    assert sequences(tolerant) == [1, 2, 5, 6, 7, 8]


def test_without_a_head_what_is_behind_the_last_complete_segment_is_reported(built: Built) -> None:
    built.root.head.unlink()
    with pytest.raises(Damaged, match="no readable head"):
        planned(place_of(built))
    assert sequences(planned(place_of(built), Range(None, 1, 6))) == [1, 2, 3, 4, 5, 6]
    assert sequences(planned(place_of(built), tolerance=FORGIVING)) == [1, 2, 3, 4, 5, 6]


def test_of_what_is_gone_only_what_no_ledger_explains_is_called_lost(built: Built) -> None:
    built.reclaim(1)
    built.path(3, Kind.SEALED).unlink()
    with pytest.raises(Damaged, match="records 3 to 4 are missing"):
        planned(place_of(built), gaps=True)


def test_a_gap_ends_where_the_next_segment_begins_also_behind_the_range(built: Built) -> None:
    built.reclaim(3)
    assert sequences(planned(place_of(built), Range(None, 1, 4), gaps=True)) == [1, 2]


def test_a_damaged_frame_is_named_or_passed_over_and_reported(built: Built, tmp_path: Path) -> None:
    path = built.path(3, Kind.SEALED)
    flip_bit(path, 40)  # in the first frame
    with pytest.raises(Damaged, match=rf"{path}: offset 0: frame 0") as damaged:
        read(planned(place_of(built), limit=1))
    assert "PERMISSIVE" in damaged.value.hint

    pieces = planned(place_of(built), limit=1, tolerance=Tolerance(damage=True, report=str(tmp_path / "report")))
    for _ in range(2):  # a retried task does not repeat its report
        assert sequences(pieces) == [1, 2, 5, 6, 7, 8]
        (report,) = os.listdir(tmp_path / "report")
        assert (tmp_path / "report" / report).read_text().count("records 3 to 4 cannot be read") == 1


def test_a_segment_whose_index_is_damaged_is_read_frame_by_frame_and_one_without_anything_whole_is_named(
    built: Built,
) -> None:
    path = built.path(3, Kind.SEALED)
    path.write_bytes(path.read_bytes()[:-5])
    assert sequences(planned(place_of(built))) == [1, 2, 3, 4, 5, 6, 7, 8]

    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(Damaged, match=str(path)):
        planned(place_of(built))
    assert sequences(planned(place_of(built), tolerance=FORGIVING)) == [1, 2, 5, 6, 7, 8]


@pytest.mark.parametrize("route", [None, "a", "b"])
@pytest.mark.parametrize("sealed", [False, True])
def test_damage_of_a_raw_segment_is_met_once_whatever_the_route(
    tmp_path: Path, route: str | None, sealed: bool
) -> None:
    """The damaged records could belong to any route, so readers of every route report them."""
    built = Built(tmp_path / "root")
    for number in range(9):
        built.lines("ab"[number % 2], [b"x" * 100])
    built.lines("a", [b"to be damaged " * 10])
    for number in range(9):
        built.lines("ab"[number % 2], [b"y" * 100])
    flip_bit(built.path(1, Kind.RAW), b"to be damaged")
    built.cut()
    if sealed:
        built.seal()
    wanted = Range(frozenset([route]) if route else None, 1, 99)
    with pytest.raises(Damaged):
        read(planned(place_of(built), wanted, limit=200))
    content = tmp_path / "report"
    pieces = planned(place_of(built), wanted, limit=200, tolerance=Tolerance(damage=True, report=str(content)))
    found = [record.sequence for record in read(pieces)]
    assert found == [n for n in range(1, 20) if n != 10 and route in (None, "ab"[(n - 1) % 2 if n < 10 else n % 2 ^ 1])]
    assert sum(path.read_text().count("\n") for path in content.iterdir()) == 1


def with_shrinking(path: Path) -> Built:
    """Log of which shrinking has kept only 3, 6 and 9 of records 1 to 10; record 11 is in the next segment."""
    built = Built(path / "log")
    for number in range(1, 10):
        built.lines("stuck" if number % 3 == 0 else "web", [b"%d" % number + bytes(700)])
    built.lines("web", [b"10"])
    built.cut()
    built.lines("web", [b"11"])
    built.seal()
    shrink(built, 1, web=10)
    return built


@pytest.mark.parametrize("index", ["whole", "damaged"])
def test_what_shrinking_has_dropped_is_missing_like_what_was_reclaimed(tmp_path: Path, index: str) -> None:
    place = place_of(built := with_shrinking(tmp_path))
    if index == "damaged":
        path = built.path(1, Kind.SEALED)
        path.write_bytes(path.read_bytes()[:-5])

    def found(*routes: str, first: int = 1, **options: Any) -> list[int]:
        return sequences(planned(place, Range(frozenset(routes) or None, first, 10**9), **options))

    assert found("stuck", gaps=index == "damaged") == [3, 6, 9]
    for routes in ((), ("web",)):
        with pytest.raises(NotFound, match="RECLAIM has removed records"):
            found(*routes)
    assert found(gaps=True) == found(tolerance=FORGIVING) == [3, 6, 9, 11]
    assert found(first=11) == [11]
    built.crash()


NAMES = [name for name in schema.names if name != "headers"]  # a bundle stores headers as JSON, formatted differently


def pieces(
    dest: Path,
    first: int = 1,
    last: int = 10**9,
    *,
    from_ns: int | None = None,
    until_ns: int | None = None,
    routes: frozenset[str] | None = None,
    tolerance: Tolerance = STRICT,
) -> list[BundlePiece]:
    options = Options((), routes, first, last, from_ns, until_ns, tolerance=tolerance)
    return bundle_pieces(ArchiveLocation(str(dest)), options)


def rows(found: list[BundlePiece], names: list[str] = NAMES) -> list[dict[str, object]]:
    there: list[BundlePiece] = pickle.loads(pickle.dumps(found))
    return plain(pa.Table.from_batches([batch for piece in there for batch in piece.arrow(names)] or [empty(names)]))


def empty(names: list[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], pa.schema([schema.field(name) for name in names]))


def plain(table: pa.Table) -> list[dict[str, object]]:
    """Return rows ordered by sequence, with times as integers to keep nanoseconds."""
    times = [
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        for column in (table[name] for name in table.column_names)
    ]
    found: list[dict[str, object]] = pa.table(times, names=table.column_names).to_pylist()
    return sorted(found, key=lambda row: str(row["sequence"]).zfill(9))


@settings(max_examples=40, deadline=None)
@given(
    steps=STEPS,
    records=st.integers(1, 8),
    codec=st.sampled_from(Codec),
    bounds=st.tuples(st.integers(1, 30), st.integers(1, 30)),
)
def test_pieces_of_an_archive_are_the_records_of_the_log(
    steps: list[Step], records: int, codec: Codec, bounds: tuple[int, int]
) -> None:
    """Any log and any range of it."""
    with tempfile.TemporaryDirectory() as folder:
        built = build(Path(folder) / "root", steps)
        for route in "ab":
            archive(built, Path(folder) / "dest", route, size=Records(records), codec=codec)
        log = [
            batch for route in "ab" for batch in built.log.batches(route, bounds[0] if bounds[0] <= built.last else 1)
        ]
        wanted = [cut for batch in log if (cut := batch.between(bounds[0], bounds[1]))]
        expected = plain(pa.Table.from_batches([*record_batches(wanted, NAMES)] or [empty(NAMES)]))
        assert rows(pieces(Path(folder) / "dest", *bounds)) == expected


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    """Archive of nine records, one second apart, three per bundle."""
    built = Built(tmp_path / "root")
    for number in range(9):
        built.lines("a", [b"%d" % number])
    built.columns("b", [b"\xff"], keys=[b"k"], headers=[b'{"h":"1"}'])
    for route in "ab":
        archive(built, tmp_path / "dest", route, size=Records(3))
    return tmp_path / "dest"


def test_keys_headers_and_bytes_come_back(dest: Path) -> None:
    (row,) = rows(pieces(dest, routes=frozenset("b")), ["sequence", "key", "value", "headers"])
    assert row == {"sequence": 10, "key": b"k", "value": b"\xff", "headers": b'{"h":"1"}'}


def test_bundles_outside_the_range_are_no_pieces(dest: Path) -> None:
    assert [(piece.first, piece.last) for piece in pieces(dest, 5, 5)] == [(5, 5)]
    times = pieces(dest, from_ns=START_NS + 4 * SECOND_NS, until_ns=START_NS + 6 * SECOND_NS)
    assert len(times) == 1
    assert [row["sequence"] for row in rows(times)] == [4, 5]
    assert pieces(dest, routes=frozenset(["none"])) == []


def test_a_damaged_bundle_is_named_and_may_be_passed_over(dest: Path, tmp_path: Path) -> None:
    bundle = sorted((bags(dest)[0] / "data").glob("*.tar"))[1]
    flip_bit(bundle, 700)
    with pytest.raises(Damaged, match=bundle.name):
        rows(pieces(dest))
    forgiving = Tolerance(damage=True, report=str(tmp_path / "report"))
    assert [row["sequence"] for row in rows(pieces(dest, tolerance=forgiving))] == [1, 2, 3, 7, 8, 9, 10]
    (report,) = (tmp_path / "report").iterdir()
    assert bundle.name in report.read_text()


def test_what_two_groups_have_archived_comes_once(tmp_path: Path) -> None:
    built, dest = Built(tmp_path / "root"), tmp_path / "dest"
    for number in range(5):
        built.lines("a", [b"%d" % number])
        if number in (2, 4):
            archive(built, dest, size=Records(number), group=f"g{number}")
    assert [row["value"] for row in rows(pieces(dest))] == [b"0", b"1", b"2", b"3", b"4"]


def test_records_missing_between_two_bundles_are_reported(tmp_path: Path) -> None:
    built, dest = Built(tmp_path / "root"), tmp_path / "dest"
    for number in range(3):
        built.lines("a", [b"%d" % number])
        archive(built, dest)
    shutil.rmtree(bags(dest)[1])
    with pytest.raises(Damaged, match="no bundle has the records after record 1"):
        pieces(dest)
    assert [row["value"] for row in rows(pieces(dest, tolerance=Tolerance(damage=True)))] == [b"0", b"2"]
    assert len(pieces(dest, 3, 3)) == 1


def test_a_missing_first_bag_is_damage_unless_the_copy_is_partial(tmp_path: Path) -> None:
    built, dest, elsewhere = Built(tmp_path / "root"), tmp_path / "dest", tmp_path / "elsewhere"
    for number in range(3):
        built.lines("a", [b"%d" % number])
        archive(built, dest)
    (elsewhere / "a").mkdir(parents=True)
    bags(dest)[0].rename(elsewhere / "a" / bags(dest)[0].name)
    with pytest.raises(Damaged, match=r"begins after record 1, and the bundle before it, .*, is missing") as damaged:
        pieces(dest)
    assert damaged.value.hint.startswith("put the bags back; if this is a copy without them, ")
    assert [row["value"] for row in rows(pieces(dest, tolerance=Tolerance(partial=True)))] == [b"1", b"2"]
    report = tmp_path / "report"
    assert len(pieces(dest, tolerance=Tolerance(damage=True, report=str(report)))) == 2
    assert "begins after record 1" in next(report.iterdir()).read_text()
    assert len(pieces(dest, 2)) == 2
    both = plan_query(parse_options({"paths": json.dumps([str(dest), str(elsewhere)])}))
    assert sorted((piece.first, piece.last) for piece in both) == [(1, 1), (2, 2), (3, 3)]


def test_an_archive_that_was_begun_late_has_no_missing_bag(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    built.lines("a", [b"1", b"2", b"3"])
    built.log.set_cursor("a", 2)
    archive(built, tmp_path / "dest")
    assert [row["sequence"] for row in rows(pieces(tmp_path / "dest"))] == [3]


# Executors cannot import test modules, so the functions that they call are defined inside the tests.


def ignore(_: int) -> None:
    pass


@pytest.mark.parametrize("count", [0, 4, 10])
def test_every_piece_gives_its_result_once(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """More pieces than tasks are shared out."""
    monkeypatch.setattr(progress, "_TASKS_PER_CORE", 2)
    done: list[int] = []
    results = dict(progress.run_tasks(spark, range(count), lambda piece: str(piece).encode(), on_done=done.append))
    assert results == {number: str(number).encode() for number in range(count)}
    assert sorted(done) == list(range(count))


def test_a_result_arrives_while_others_are_being_made(spark: SparkSession, tmp_path: Path) -> None:
    """The second result arrives while the first piece is still running; otherwise the test would hang."""

    def work(piece: Path) -> bytes:
        while not piece.exists():
            pass
        return piece.name.encode()

    first, second = tmp_path / "first", tmp_path / "second"
    second.touch()
    running = progress.run_tasks(spark, [first, second], work, on_done=ignore)
    assert next(running) == (1, b"second")
    first.touch()
    assert list(running) == [(0, b"first")]


def test_an_error_arrives_as_what_it_was(spark: SparkSession) -> None:
    def damaged(piece: str) -> bytes:
        raise Damaged(f"{piece}: offset 7: no batch", hint=f"wald inspect --content {piece}")

    def missing(piece: str) -> bytes:
        return Path(piece).read_bytes()

    with pytest.raises(Damaged, match=r"a\.wal: offset 7: no batch") as caught:
        list(progress.run_tasks(spark, ["a.wal"], damaged, on_done=ignore))
    assert caught.value.hint == "wald inspect --content a.wal"
    with pytest.raises(FileNotFoundError) as gone:
        list(progress.run_tasks(spark, ["/nowhere/at/all"], missing, on_done=ignore))
    assert gone.value.filename == "/nowhere/at/all"


def test_a_piece_that_fails_at_every_attempt_ends_the_job(spark: SparkSession) -> None:
    def broken(piece: int) -> bytes:
        raise ValueError(f"no {piece}")

    with pytest.raises(Unavailable, match="given up: ValueError: no 5"):
        list(progress.run_tasks(spark, [5], broken, on_done=ignore))


def test_a_piece_whose_worker_dies_is_tried_again(spark: SparkSession, tmp_path: Path) -> None:
    """Its result arrives once."""

    def work(piece: Path) -> bytes:
        if not piece.exists():
            piece.touch()
            os._exit(1)
        return piece.name.encode()

    found = dict(progress.run_tasks(spark, [tmp_path / name for name in "ab"], work, on_done=ignore))
    assert found == {0: b"a", 1: b"b"}


def test_closing_the_results_ends_the_job(spark: SparkSession, tmp_path: Path) -> None:
    """The worker process that was still busy ends."""
    pid = tmp_path / "pid"

    def work(piece: Path) -> bytes:
        piece.write_text(str(os.getpid()))
        while piece.name == "pid":
            pass
        return b""

    running = progress.run_tasks(spark, [tmp_path / "quick", pid], work, on_done=ignore)
    assert next(running) == (0, b"")
    eventually(lambda: pid.exists() and pid.read_text())
    running.close()
    eventually(lambda: not Path("/proc", pid.read_text()).exists())


# Like PySpark's daemon: the name is in its command line, and it forks workers.
DAEMON = """
import os, signal
from wald_spark.progress import end_with_parent
if os.fork() == 0:
    end_with_parent()
    print("ready", flush=True)
signal.pause()
"""


def test_a_worker_ends_with_the_process_that_forked_it() -> None:
    """If PySpark's daemon is killed with the driver, orphaned workers must not write alongside the next run."""
    line = [sys.executable, "-c", DAEMON, "pyspark.daemon"]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        assert process.communicate(timeout=60)[0] == b""  # EOF on stdout, which the worker keeps open
