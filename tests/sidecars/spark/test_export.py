"""wald-export with a real Spark: each record is exported once, and both Spark and pyarrow can read the files."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from damage import flipped
from json_page import require_documented
from logs import Built, Unsynced
from running import refused, run, sidecar
from spark_jobs import run_job

from wald.errors import Damaged, InvalidInput
from wald.format.names import Kind
from wald_spark.export.job import LogResult, Output, Shape, export_new, private
from wald_spark.options import Tolerance
from wald_spark.progress import Run, find_logs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
