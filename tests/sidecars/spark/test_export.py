"""wald-export: each record once, partitioned, readable by Spark and pyarrow, after a crash at any step."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from damage import flipped
from faults import Died, after_each_death
from json_page import require_documented
from logs import Built, Unsynced
from pyarrow import parquet
from running import refused, run, sidecar
from spark_jobs import run_job

from wald.errors import Damaged, InvalidInput, Locked, Refused
from wald.files.disk import Disk
from wald.format.names import Kind
from wald_spark.export import job
from wald_spark.export.job import (
    ExportedFile,
    ExportedLog,
    LogResult,
    Output,
    Shape,
    agreed_shape,
    by_route_and_day,
    chunks_of,
    export_chunk,
    export_new,
    inferred_ddl,
    private,
    staged_name,
)
from wald_spark.options import STRICT, Tolerance
from wald_spark.progress import Progress, Run, find_logs, locked_by, new_records, raw_bytes_of
from wald_spark.rows import Rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


TIME = pa.timestamp("us", "UTC")
ROUTE = pa.dictionary(pa.int32(), pa.string())
COLUMNS = pa.schema(
    [("route", ROUTE), ("seq", pa.int64()), ("timestamp", TIME), ("key", pa.binary()), ("value", pa.binary())]
)
DAY_US = 86_400_000_000
LOG, OTHER = "a" * 32, "b" * 32


def entry(log: str, last: int, shape: Shape | None = None, **more: Any) -> ExportedLog:
    return ExportedLog(log, shape or Shape(), 1, last, **more)


def staged(output: Output, *names: str) -> tuple[Path, list[ExportedFile]]:
    staging = output.stage()
    for name in names:
        (staging / staged_name(name)).write_text(name)
    return staging, [ExportedFile(name, records=1, bytes=len(name)) for name in names]


def names_of(log: str, *firsts: int) -> list[str]:
    return [f"route=a/date=2026-11-{first:02}/{log}-{first:020d}-{first:020d}.parquet" for first in firsts]


def seen(out: Path) -> list[str]:
    """Return the files that a reader finds; assert that each is complete."""
    found = sorted(str(path.relative_to(out)) for path in out.glob("route=*/date=*/*"))
    assert all((out / name).read_text() == name for name in found)
    return found


def two_logs(out: Path, disk: Disk) -> None:
    """Export two files from each of two logs."""
    output = Output(out, disk)
    staging, made = staged(output, *names_of(LOG, 1, 2), *names_of(OTHER, 3, 4))
    entries = [
        entry(log, 0).with_files(
            [file for file in made if log in file.name],
            progress=Progress(last),
            staging=staging.name,
            passed_over=0,
            at="now",
        )
        for log, last in ((LOG, 2), (OTHER, 4))
    ]
    output.commit(entries, staging)


def test_a_crash_at_any_step_leaves_each_log_as_it_was_or_as_it_is_to_be(tmp_path: Path) -> None:
    def die(number: int, disk: Disk) -> None:
        private(tmp_path / f"{number}").mkdir(parents=True)
        two_logs(tmp_path / f"{number}", disk)

    for number in after_each_death(die, least=10):
        out = tmp_path / f"{number}"
        output = Output(out, Unsynced())
        output.recover()

        content = {log: each.last for log, each in output.entries().items()}
        expected = [name for log, last in ((LOG, 2), (OTHER, 4)) if content.get(log) == last for name in both(log)]
        assert seen(out) == sorted(expected)
        assert {each.pending for each in output.entries().values()} <= {()}
        assert [path.name for path in out.glob("_*")] == ["_wald"]
        assert list(private(out).glob("*.tmp")) == []


def both(log: str) -> list[str]:
    return names_of(log, 1, 2) if log == LOG else names_of(log, 3, 4)


def test_a_crash_while_a_run_is_finished_does_no_harm(tmp_path: Path) -> None:
    """Recovery may crash at any step, too."""

    def die(number: int, disk: Disk) -> None:
        out = tmp_path / f"{number}"
        private(out).mkdir(parents=True)
        with pytest.raises(Died):
            two_logs(out, _DyingAtRename())
        Output(out, disk).recover()

    for number in after_each_death(die, least=5):
        Output(tmp_path / f"{number}", Unsynced()).recover()
        assert seen(tmp_path / f"{number}") == sorted(both(LOG) + both(OTHER))


class _DyingAtRename(Unsynced):
    """Disk that dies when the first file is moved, after the catalog was written."""

    def rename(self, source: Path, output: Path) -> None:
        if output.suffix == ".parquet":
            raise Died
        super().rename(source, output)


def test_what_was_exported_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    output = Output(tmp_path, Unsynced())
    private(tmp_path).mkdir()
    shape = Shape(("a", "b"), ("status",), "status INT")
    written = entry(LOG, 7, shape=shape, held_back={"b": 4}, records=3, at="now", pending=("x",))
    output.write(written)

    assert output.entries() == {LOG: written}


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 1}', '{"format": 1, "shape": {}}'])
def test_a_damaged_catalog_entry_is_reported(tmp_path: Path, text: str) -> None:
    private(tmp_path).mkdir()
    (private(tmp_path) / f"{LOG}.json").write_text(text)

    with pytest.raises(Damaged, match=LOG):
        Output(tmp_path, Unsynced()).entries()


def test_a_file_that_is_in_neither_place_is_reported(tmp_path: Path) -> None:
    output = Output(tmp_path, Unsynced())
    private(tmp_path).mkdir()
    output.write(entry(LOG, 1, staging="gone", pending=tuple(names_of(LOG, 1))))

    with pytest.raises(Damaged, match="in neither place"):
        output.recover()


def test_files_of_a_log_that_the_catalog_does_not_list_are_refused(tmp_path: Path) -> None:
    """Otherwise its records would be exported twice."""
    private(tmp_path).mkdir()
    two_logs(tmp_path, Unsynced())
    output = Output(tmp_path, Unsynced())
    (private(tmp_path) / f"{LOG}.json").unlink()

    output.refuse_strays("c" * 32)
    with pytest.raises(Refused, match="does not list"):
        output.refuse_strays(LOG)


def test_one_at_a_time(tmp_path: Path) -> None:
    def alone() -> AbstractContextManager[None]:
        return locked_by("wald-export", tmp_path / "_wald", Disk())

    with alone(), pytest.raises(Locked, match="another wald-export"), alone():
        pass
    with alone():
        pass


@pytest.mark.parametrize("runs", [False, True])
def test_no_other_program_ever(tmp_path: Path, runs: bool) -> None:
    """A directory cannot hold tables of two kinds, so waiting for the other program to finish would not help."""
    with locked_by("wald-export", tmp_path / "_wald", Disk()) if not runs else nullcontext():
        pass
    with (
        locked_by("wald-export", tmp_path / "_wald", Disk()) if runs else nullcontext(),
        pytest.raises(Refused, match="created by wald-export; wald-compact needs a separate directory"),
        locked_by("wald-compact", tmp_path / "_wald", Disk()),
    ):
        pass


@pytest.mark.parametrize(
    ("asked", "before", "ours"),
    [
        (Shape(), Shape(json="a INT"), False),
        (Shape(json="a INT"), Shape(), False),
        (Shape(json="a INT"), Shape(json="a STRING"), False),
        (Shape(names=("a",)), Shape(json="a INT"), False),
        (Shape(json="a INT"), Shape(names=("a",), json="a INT"), False),
        (Shape(names=("a",)), Shape(names=("b",), json="b INT"), False),
        (Shape(), Shape(("a",)), True),
        (Shape(("a",)), Shape(("a", "b")), True),
    ],
)
def test_another_shape_is_refused(tmp_path: Path, asked: Shape, before: Shape, ours: bool) -> None:
    """All logs share the columns; routes may differ per log."""
    place = find_logs([str(Built(tmp_path / "root").root.path)], None)[0]
    log = place.log if ours else OTHER

    with pytest.raises(Refused, match=f"log {log} was exported there with"):
        agreed_shape(asked, {log: entry(log, 1, shape=before)}, [place])


def test_types_that_were_found_out_stay_what_they_are() -> None:
    known = {OTHER: entry(OTHER, 1, shape=Shape(("x",), ("a",), "a INT"))}

    assert agreed_shape(Shape(None, ("a",)), known, []) == Shape(None, ("a",), "a INT")
    assert agreed_shape(Shape(("y",), ("a",)), known, []) == Shape(("y",), ("a",), "a INT")


def test_types_are_found_out_from_records() -> None:
    values = [b'{"i":1,"f":1,"s":"x","b":true,"n":null,"`":1}', b"no json", b'{"f":1.5,"n":2,"x":[]}', b"[]"]

    assert inferred_ddl(["i", "f", "s", "b", "n", "`"], values) == (
        "`i` BIGINT, `f` DOUBLE, `s` STRING, `b` BOOLEAN, `n` BIGINT, ```` BIGINT"
    )


def test_a_type_that_cannot_be_inferred_is_asked_for() -> None:
    """STRING is not a safe default: numbers do not fit it, so most records would be corrupt."""
    for name, words, hint in [
        ("mixed", "is of several types in the first 3 records: BIGINT in 2, STRING in 1", "'mixed BIGINT' keeps"),
        ("nested", "is an object or an array in some of the first 3 records", "'nested STRUCT<…>' or 'nested ARRAY"),
        ("none", "does not occur in the first 3 records", "'none STRING', or BIGINT"),
    ]:
        values = [b'{"mixed":1,"nested":[1]}', b'{"mixed":"1"}', b'{"mixed":2}']
        with pytest.raises(InvalidInput, match=f"field {name} {words}") as refused:
            inferred_ddl([name], values)
        assert hint in refused.value.hint


def batch(rows: list[tuple[str, int, int]]) -> pa.RecordBatch:
    """Return a record batch from rows of route, sequence and day."""
    routes, numbers, days = zip(*rows, strict=True)
    times = pa.array([day * DAY_US + 1 for day in days]).view(TIME)
    values = [b"%d" % number for number in numbers]
    return pa.record_batch([routes, numbers, times, pa.nulls(len(rows), pa.binary()), values], schema=COLUMNS)


def parted(batches: list[pa.RecordBatch]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for route, day, part in by_route_and_day(batches):
        found.setdefault((route, day), []).extend(part.column("seq").to_pylist())
    return found


@pytest.mark.parametrize("small_bytes", [1, 1 << 30])
def test_rows_are_parted_by_route_and_day_in_their_order(monkeypatch: pytest.MonkeyPatch, small_bytes: int) -> None:
    """A record in several pieces comes late, with an earlier time than the records before it."""
    monkeypatch.setattr(job, "_SMALL_BYTES", small_bytes)
    monkeypatch.setattr(job, "_MIXED_BYTES", 100)
    mixed = [("a", 4, 8), ("b", 6, 9), ("a", 5, 9), ("b", 7, 9)]
    late = [("b", 9, 9), ("a", 8, 8)]
    batches = [
        batch([("a", 1, 8), ("a", 2, 8)]),
        batch([("b", 3, 8)]),
        batch(mixed),
        batch(late),
        batch([("a", 10, -1)]),
    ]

    assert parted(batches) == {
        ("a", 8): [1, 2, 4, 8],
        ("b", 8): [3],
        ("a", 9): [5],
        ("b", 9): [6, 7, 9],
        ("a", -1): [10],
    }


def exported(root: Path, staging: Path) -> list[ExportedFile]:
    staging.mkdir()
    place = find_logs([str(root)], None)[0]
    portion = new_records(place, None, None, STRICT)
    result = export_chunk(str(staging), Rows(COLUMNS, None, 1 << 30), tuple(portion.pieces))
    made = [ExportedFile(**file) for file in json.loads(result)]
    assert sorted(path.name for path in staging.iterdir()) == sorted(staged_name(file.name) for file in made)
    return made


def test_open_files_and_what_waits_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more routes than open files allowed, some routes get several files, and no record is in two."""
    monkeypatch.setattr(job, "OPEN_FILES", 3)
    monkeypatch.setattr(job, "BUFFERED_BYTES", 100)
    monkeypatch.setattr(job, "_MIXED_BYTES", 1)
    built = Built(tmp_path / "root")
    for number in range(40):
        built.lines(f"route-{number % 8}", [b"%d" % (number + 1)])
    made = exported(built.root.path, tmp_path / "staging")

    read = [parquet.read_table(tmp_path / "staging" / staged_name(file.name)) for file in made]
    assert sorted(number for table in read for number in table["seq"].to_pylist()) == list(range(1, 41))
    assert sum(file.records for file in made) == 40
    for file, table in zip(made, read, strict=True):
        numbers = table["seq"].to_pylist()
        assert file.name.endswith(f"-{numbers[0]:020d}-{numbers[-1]:020d}.parquet")
        assert numbers == sorted(numbers)


def test_a_chunk_that_cannot_be_read_leaves_no_file(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    for _ in range(2):
        built.lines("a", [b"x" * 100] * 10)
        built.cut()
    portion = new_records(find_logs([str(built.root.path)], None)[0], None, None, STRICT)
    segment = built.path(11, Kind.RAW)
    segment.write_bytes(flipped(segment.read_bytes(), 8 * (segment.stat().st_size - 50)))
    (tmp_path / "staging").mkdir()

    with pytest.raises(Damaged):
        export_chunk(str(tmp_path / "staging"), Rows(COLUMNS, None, 1 << 30), tuple(portion.pieces))
    assert list((tmp_path / "staging").iterdir()) == []


def test_chunks_grow_with_the_routes_and_keep_all_cores_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wald_spark.progress.PIECE_BYTES", 1 << 20)
    built = Built(tmp_path / "root", segment_max_bytes=64 << 20)
    for number in range(32):
        built.lines(f"r{number % 4}", [b"x" * (1 << 19)])
    built.cut()
    built.seal()
    place = find_logs([str(built.root.path)], None)[0]

    new = new_records(place, None, None, STRICT)

    def largest(shape: Shape, cores: int) -> float:
        found = chunks_of(new, shape, file_bytes=(1 << 20) + 4096, cores=cores)
        return max(map(raw_bytes_of, found)) / (1 << 20)

    assert 3 < largest(Shape(), 1) < 4.1
    assert 1 < largest(Shape(("r0", "r1")), 1) < 2.1
    assert largest(Shape(), 8) < 1.1


NIGHT_NS = 1_795_305_595_000_000_000  # five seconds to midnight, on 2026-11-21


def export(
    spark: SparkSession,
    out: Path,
    *logs: Built,
    routes: tuple[str, ...] | None = None,
    names: tuple[str, ...] = (),
    json_ddl: str = "",
    permissive: bool = False,
) -> list[LogResult]:
    """Run the export as the command does."""
    private(out).mkdir(parents=True, exist_ok=True)
    output = Output(out, Unsynced())
    output.recover()
    tolerance = Tolerance(permissive, permissive, str(private(out) / "passed-over"))
    run = Run(tolerance, "now", lambda: nullcontext(spark))
    locations = find_logs([str(log.root.path) for log in logs], routes)
    return export_new(output, Shape(routes, names, json_ddl), 1 << 20, run, print, locations)


def read_back(out: Path) -> pa.Table:
    """Read the directory with pyarrow."""
    from pyarrow import dataset  # imports pandas

    partitions = dataset.partitioning(pa.schema([("route", pa.string()), ("date", pa.string())]), flavor="hive")
    table: pa.Table = dataset.dataset(out, format="parquet", partitioning=partitions).to_table()
    return table.sort_by([("log", "ascending"), ("seq", "ascending")])


def rows(out: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in read_back(out).to_pylist()]


def truth(*logs: Built) -> list[tuple[Any, ...]]:
    """Return log, sequence, route, key, value and headers of every record."""
    return sorted(
        (each.log.identity.log_id.hex(), r.sequence, r.route, r.key, r.value, r.headers and r.headers.decode())
        for each in logs
        for r in each.log.records()
    )


@pytest.fixture
def night(tmp_path: Path) -> Built:
    """Lines, keyed records, a long record and an open one, across midnight, in sealed and raw segments."""
    built = Built(tmp_path / "night", now_ns=NIGHT_NS)
    built.lines("a", [b"1", b"2"])
    built.columns(
        "keyed", [b"3", b""], keys=[b"k", None], times_ns=[NIGHT_NS, NIGHT_NS + 1], headers=[b'{"h":"1"}', None]
    )
    built.piece("b", b"5 is ", begins=True, ends=False)
    built.cut()
    built.lines("a", [b"6"])
    built.piece("b", b"long\n", begins=False, ends=True)
    built.cut()
    built.seal()
    built.lines("a", [b"7", b"8"])
    built.piece("b", b"9 is open", begins=True, ends=False)
    built.lines("a", [b"10"])
    return built


def test_every_complete_record_is_exported_once(spark: SparkSession, night: Built, tmp_path: Path) -> None:
    """Two logs with several routes cross midnight; the next run exports only the records appended since."""
    out, day = tmp_path / "out", Built(tmp_path / "day")
    day.lines("a", [b"another log"])
    done = export(spark, out, night, day)

    assert [(each.entry.first, each.entry.last, each.entry.records) for each in done] == [(1, 10, 9), (1, 1, 1)]
    assert [each.entry.held_back for each in done] == [{"b": 8}, {}]
    columns = ("log", "seq", "route", "key", "value", "headers")
    assert rows(out, *columns) == truth(night, day)
    early = [(route, "2026-11-21", number) for number, route in enumerate(["a", "a", "keyed", "keyed", "b", "a"], 1)]
    late = [("a", "2026-11-22", number) for number in (7, 8, 10)]
    assert [row[1:] for row in rows(out, "log", "route", "date", "seq") if row[0] == done[0].entry.log] == early + late
    assert export(spark, out, night, day) == []

    night.piece("b", b" no more\n", begins=False, ends=True)
    day.lines("new", [b"2"])
    done = export(spark, out, night, day)
    assert [(each.entry.last, each.entry.records) for each in done] == [(10, 10), (2, 2)]
    assert rows(out, *columns) == truth(night, day)

    frame = spark.read.parquet(str(out))
    assert dict(frame.dtypes) == {
        "log": "string",
        "route": "string",
        "seq": "bigint",
        "timestamp": "timestamp",
        "event_time": "timestamp",
        "key": "binary",
        "value": "binary",
        "headers": "string",
        "segment": "bigint",
        "date": "date",
    }
    assert frame.count() == 12
    assert frame.where("to_date(timestamp) != date").count() == 0
    assert frame.where("event_time = timestamp'2026-11-21 23:59:55'").count() == 2


def test_json_becomes_columns_and_what_is_none_is_kept(spark: SparkSession, tmp_path: Path) -> None:
    """Types are first given, then inferred."""
    built = Built(tmp_path / "root")
    built.lines("a", [b'{"status":200,"host":"x"}', b"no json", b'{"status":"?"}', b'{"host":"y","more":[]}'])
    done = export(spark, tmp_path / "said", built, json_ddl="status INT, host STRING")

    expected = [
        ({"status": 200, "host": "x"}, None),
        (None, b"no json"),
        (None, b'{"status":"?"}'),
        ({"status": None, "host": "y"}, None),
    ]
    assert rows(tmp_path / "said", "json", "_corrupt_record") == expected
    assert "value" not in read_back(tmp_path / "said").schema.names
    assert done[0].entry.corrupt == 2
    frame = spark.read.parquet(str(tmp_path / "said"))
    assert [row.seq for row in frame.where("json.status = 200").collect()] == [1]

    with pytest.raises(InvalidInput, match="field status is of several types"):
        export(spark, tmp_path / "found", built, names=("status", "host"))
    export(spark, tmp_path / "found", built, names=("host",))
    built.lines("a", [b'{"host":1}', b'{"host":"z"}'])
    export(spark, tmp_path / "found", built, names=("host",))
    found = rows(tmp_path / "found", "json", "_corrupt_record")
    assert found[3:] == [({"host": "y"}, None), (None, b'{"host":1}'), ({"host": "z"}, None)]


def test_damage_ends_the_run_or_is_passed_over_and_reported(spark: SparkSession, tmp_path: Path) -> None:
    """A failed run exports nothing, not even from intact logs."""
    good, bad, out = Built(tmp_path / "good"), Built(tmp_path / "bad"), tmp_path / "out"
    for built in (good, bad):
        for _ in range(3):
            built.lines("a", [b"x" * 50] * 10)
            built.cut()
    segment = bad.path(11, Kind.RAW)
    segment.write_bytes(flipped(segment.read_bytes(), 8 * (segment.stat().st_size - 50)))

    with pytest.raises(Damaged, match=str(segment)):
        export(spark, out, good, bad)
    assert list(out.glob("route=*")) == list(private(out).glob("*.json")) == []

    done = export(spark, out, good, bad, permissive=True)
    assert [(each.entry.last, each.entry.records, each.entry.passed_over) for each in done] == [
        (30, 30, 0),
        (30, 20, 1),
    ]
    assert str(segment) in done[1].passed_over[0]
    assert len(rows(out, "seq")) == 50


KILLED = """
import os, signal, sys
from wald.files.disk import Disk

def replace(self, path, data, *, exclusive=False):
    os.kill(os.getpid(), signal.SIGKILL)

Disk.replace = replace
from wald_spark.export.command import command
from wald.cli.command import run
sys.exit(run(command, "wald-export", sys.argv[1:]))
"""


@pytest.mark.spark
def test_the_command_killed_before_it_commits_leaves_nothing_to_readers(
    spark: SparkSession, night: Built, tmp_path: Path
) -> None:
    """SIGKILL hits after all files are staged; the next run exports each record once."""
    out = tmp_path / "out"
    words = ["--root", night.root.path, "--out", out, "--master", "local[1]", "--json"]
    killed = run_job([sys.executable, "-c", KILLED, *words], tmp_path)

    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert [path.name for path in sorted(out.iterdir())] == ["_staging", "_wald"]
    assert len(list(out.glob("_staging/*/*.staged"))) == 4
    assert spark_finds_nothing(spark, out)

    export(spark, out, night)
    assert [row[2] for row in rows(out, "log", "route", "seq")] == [*range(1, 9), 10]
    assert not (out / "_staging").exists()


def spark_finds_nothing(spark: SparkSession, out: Path) -> bool:
    return spark.read.schema("seq BIGINT").parquet(str(out)).count() == 0


def test_the_command_reports_what_it_has_done(cluster: str, night: Built, tmp_path: Path) -> None:
    """The command runs as a process on a cluster, from options to JSON."""
    out = tmp_path / "out"
    words = ["--root", night.root.path, "--out", out, "--route", "a", "--master", cluster, "--json"]
    done = run_job(sidecar("spark.export", *words), tmp_path)

    assert (done.returncode, done.stderr) == (0, b"")
    printed = json.loads(done.stdout)
    require_documented("wald-export", printed)
    content = printed["logs"][0]
    assert (content["first"], content["last"], content["records"], content["corrupt"]) == (1, 10, 6, 0)
    assert sorted(content["files"]) == sorted(str(path.relative_to(out)) for path in out.glob("route=*/*/*"))


def test_the_command_says_what_is_wrong_before_spark_starts(night: Built, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--root", night.root.path, "--out", out]
    done = run(sidecar("spark.export", *words, "--columns", "x", "--route", "a"))
    assert done.returncode == 2
    assert refused(done)[1].startswith("field x does not occur in the first 0 records")

    done = run(sidecar("spark.export", *words, "--route", "none"))
    assert done.returncode == 3
    assert refused(done)[1:] == ("no log has route 'none'", "routes: a, b, keyed")
