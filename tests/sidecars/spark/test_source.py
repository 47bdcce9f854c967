"""The data source and streams with a real Spark: each record once, in spite of kills and reclaim."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from archives import archive
from damage import flip_bit
from logs import Built
from pyspark.errors import PySparkException
from pyspark.sql.functions import length
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows
from running import Daemon, eventually, output_of, sidecar

from wald.errors import Damaged
from wald.files.ledger_read import read_ledger
from wald.format.names import Kind
from wald_spark.options import STREAM_OPTIONS, parse_options
from wald_spark.rows import Rows
from wald_spark.source import StreamReader, WaldDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


Load = Callable[..., "DataFrame"]


@pytest.fixture(scope="session")
def load(spark: SparkSession) -> Load:
    """Return a function that queries logs: ``load(root, route="a")``."""
    spark.dataSource.register(WaldDataSource)

    def loaded(*paths: Path | str, schema: str = "", **options: object) -> DataFrame:
        reader = spark.read.format("wald").options(**{name: str(value) for name, value in options.items()})
        named = [str(path) for path in paths]
        return (reader.schema(schema) if schema else reader).load(named if len(named) > 1 else named[0])

    return loaded


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Two sealed segments of ten records each, and five records in the active one."""
    built = Built(tmp_path / "root")
    for number in range(25):
        built.lines("ab"[number % 2], [b"record %d" % (number + 1)])
        if number in (9, 19):
            built.cut()
    built.seal()
    return built


def sequences(frame: DataFrame) -> list[int]:
    return sorted(row.seq for row in frame.select("seq").collect())


def refusal(frame: Callable[[], DataFrame]) -> str:
    with pytest.raises(PySparkException) as refused:
        frame().collect()
    return str(refused.value)


def test_what_cannot_be_right_is_reported_with_a_hint(load: Load, built: Built, tmp_path: Path) -> None:
    cases: list[tuple[Path, dict[str, object], str]] = [
        (built.root.path, {"startingSequnce": 1}, "did you mean startingSequence?"),
        (built.root.path, {"route": "nope"}, "the data has no route 'nope'"),
        (built.root.path, {"schema": "seq INT"}, "seq must be BIGINT"),
        (tmp_path, {}, "neither a log, nor segments"),
    ]
    for path, options, words in cases:
        assert words in refusal(partial(load, path, **options))
    assert load(Built(tmp_path / "empty").root.path).count() == 0


def test_every_record_comes_once_and_whole(load: Load, built: Built) -> None:
    rows = load(built.root.path).orderBy("seq").collect()
    assert [(row.seq, row.route, bytes(row.value)) for row in rows] == [
        (record.sequence, record.route, record.value) for record in built.log.records()
    ]
    assert {row.log for row in rows} == {built.log_id.hex()}
    assert [row.segment for row in rows] == [1] * 10 + [11] * 10 + [21] * 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingSequence": 9, "endingSequence": 12}, [9, 10, 11, 12]),
        ({"startingSequence": 9, "endingSequence": 12, "route": "a"}, [9, 11]),
        ({"routes": "a,b", "startingSequence": 24}, [24, 25]),
        ({"startingTimestamp": "2023-11-14T22:13:40Z", "endingTimestamp": "2023-11-14T22:13:42Z"}, [20, 21]),
        ({"includeActive": "false", "startingSequence": 19}, [19, 20]),
    ],
)
def test_ranges_and_routes_are_exact(load: Load, built: Built, options: dict[str, object], expected: list[int]) -> None:
    assert sequences(load(built.root.path, **options)) == expected


def test_what_the_index_excludes_is_not_even_opened(load: Load, built: Built) -> None:
    built.path(1, Kind.SEALED).write_bytes(b"no segment at all")
    assert sequences(load(built.root.path, startingSequence=11, endingSequence=13)) == [11, 12, 13]
    assert str(built.path(1, Kind.SEALED)) in refusal(partial(load, built.root.path))


def test_a_segment_is_read_by_several_tasks(load: Load, tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    for number in range(8):
        built.lines("a", [b"%d" % number * 600_000])
    built.cut()
    built.seal()
    frame = load(built.root.path, maxBytesPerPartition="1MiB")
    assert frame.rdd.getNumPartitions() >= 4
    assert sequences(frame) == list(range(1, 9))


def test_shipped_segments_and_archives_are_read_like_the_log(load: Load, built: Built, tmp_path: Path) -> None:
    """Damage that is passed over is reported by a task; several paths are read together."""
    (tmp_path / "shipped").mkdir()
    for base in (1, 11):
        shutil.copy(built.path(base, Kind.SEALED), tmp_path / "shipped")
    archive(built, tmp_path / "archive", "a")
    assert sequences(load(tmp_path / "shipped")) == list(range(1, 21))
    assert sequences(load(tmp_path / "archive", startingSequence=2)) == list(range(3, 26, 2))
    assert {row.segment for row in load(tmp_path / "archive").collect()} == {None}

    harmed, other = tmp_path / "shipped" / built.path(11, Kind.SEALED).name, Built(tmp_path / "other")
    other.lines("a", [b"x"] * 3)
    flip_bit(harmed, 40)
    words = refusal(partial(load, tmp_path / "shipped", other.root.path))
    assert f"{harmed}: offset 0: frame 0" in words
    assert "hint: " in words
    report = tmp_path / "report"
    assert load(tmp_path / "shipped", other.root.path, mode="PERMISSIVE", damagePath=report).count() == 13
    (content,) = [path.read_text() for path in report.iterdir()]
    assert "records 11 to 20 cannot be read" in content


def test_values_that_are_json_become_columns(load: Load, tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    built.lines("a", [b'{"status":200,"timestamp":"x"}', b"oops", b'{"status":404}'])
    frame = load(built.root.path, jsonSchema="status INT, timestamp STRING")
    assert "value" not in frame.columns
    rows = frame.orderBy("seq").select("json.status", "json.timestamp", "_corrupt_record").collect()
    assert [tuple(row) for row in rows] == [(200, "x", None), (None, None, b"oops"), (404, None, None)]


def test_a_value_of_300_mb_does_not_get_into_the_jvm(load: Load, tmp_path: Path) -> None:
    """The heap is 1 GiB, and such a value would be in it three times."""
    built = Built(tmp_path / "root", segment_max_bytes=1 << 30)
    built.lines("a", [b"x" * 300_000_000])
    built.lines("a", [b"small"])
    rows = load(built.root.path, mode="PERMISSIVE").orderBy("seq").collect()
    assert [row.value for row in rows] == [None, b"small"]


def test_a_query_sees_a_whole_log_while_the_daemon_works(load: Load, tmp_path: Path) -> None:
    """The daemon appends, cuts and seals, and reclaim runs; a query counts the records durable when it was planned."""
    root = tmp_path / "root"
    with Daemon(root, env={"WALD_SEGMENT_MAX_BYTES": "64KiB"}) as daemon:
        output_of("route", "add", "a", "--root", root)
        lines = b"".join(b"line %06d of some length\n" % number for number in range(5_000))
        counts = []
        for _ in range(3):
            output_of("append", "a", "--root", root, stdin=lines)
            counts.append(load(root).groupBy(length("value")).count().first())
        assert counts == [(26, 5_000 * (turn + 1)) for turn in range(3)]
        eventually(lambda: len(list((root / "segments").glob("*.zst"))) > 3)
        output_of("cursor", "set", "a", "10000", "--root", root)
        subprocess.run(sidecar("reclaim", "--root", root, "--grace", "0"), check=True, capture_output=True)
        count, last = load(root).agg({"*": "count", "seq": "max"}).collect()[0]
        assert last == 15_000
        assert 5_000 <= count < 15_000
        assert "RECLAIM has removed" in refusal(partial(load, root, startingSequence=1))
        assert daemon.stop() == 0


def test_the_name_is_enough(spark: SparkSession, tmp_path: Path) -> None:
    """A session without registration reads a log from Python and from SQL."""
    Built(tmp_path / "root").lines("a", [b"one", b"two"])
    fresh = spark.newSession()

    assert fresh.read.format("wald").load(str(tmp_path / "root")).count() == 2
    fresh.sql(f"CREATE TEMPORARY VIEW log USING wald OPTIONS (path '{tmp_path / 'root'}')")
    assert fresh.sql("SELECT max(seq) FROM log").head() == (2,)
    with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
        fresh.sql(f"CREATE TABLE kept USING wald OPTIONS (path '{tmp_path / 'root'}')")


def test_being_found_costs_others_nothing() -> None:
    """Spark imports the package for every unknown format, so it must not load Arrow or the store."""
    script = """
import sys, pyspark.sql.datasource
before = set(sys.modules)
import pyspark_wald
print(*set(sys.modules) - before)
"""
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()

    assert "wald_spark.source" in loaded
    assert [name for name in loaded if name.startswith(("pyarrow", "numpy", "pandas", "wald.store", "zstandard"))] == []


Write = Callable[..., "DataStreamWriter"]

# Program of the killed driver: reads all records in small batches.
DRIVER = """
import sys
from wald_spark.session import session
from wald_spark.source import WaldDataSource
quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
with session("driver", master="local[2]", settings={"spark.driver.extraJavaOptions": quick}) as spark:
    spark.dataSource.register(WaldDataSource)
    stream = spark.readStream.format("wald").option("maxRecordsPerTrigger", 50).load(sys.argv[1])
    sink = stream.writeStream.format("parquet").option("checkpointLocation", sys.argv[3])
    sink.trigger(availableNow=True).start(sys.argv[2]).awaitTermination()
"""


@pytest.fixture
def write(spark: SparkSession, tmp_path: Path) -> Write:
    """Return a function that streams paths into Parquet files; all calls share one checkpoint."""
    spark.dataSource.register(WaldDataSource)

    def writer(*paths: Path | str, **options: object) -> DataStreamWriter:
        stream = spark.readStream.format("wald").options(**{name: str(value) for name, value in options.items()})
        sink = stream.load(*map(str, paths)).writeStream.format("parquet").option("path", str(tmp_path / "sink"))
        return sink.option("checkpointLocation", str(tmp_path / "checkpoint"))

    return writer


def reader(path: Path, **given: str) -> StreamReader:
    """Create a reader as Spark does, for a stream without columns."""
    options = parse_options(
        {"path": str(path)} | {name.lower(): value for name, value in given.items()}, also=STREAM_OPTIONS
    )
    return StreamReader(options, Rows(pa.schema([]), None, options.value_bytes))


def finish(writer: DataStreamWriter) -> list[int]:
    """Process all available records; return the number of records of each batch."""
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


def sink(spark: SparkSession, tmp_path: Path) -> list[tuple[str, int, bytes]]:
    rows = spark.read.parquet(str(tmp_path / "sink")).select("log", "seq", "value").collect()
    return sorted((row.log, row.seq, bytes(row.value)) for row in rows)


def contents(*logs: Built) -> list[tuple[str, int, bytes]]:
    return sorted((log.log_id.hex(), record.sequence, record.value) for log in logs for record in log.log.records())


@pytest.mark.parametrize(
    ("given", "default", "end"),
    [
        ({}, ReadAllAvailable(), 30),
        ({"maxRecordsPerTrigger": "7"}, ReadMaxRows(7), 7),
        ({"maxBytesPerTrigger": "1"}, ReadMaxBytes(1), 1),
        ({"maxRecordsPerTrigger": "7", "maxBytesPerTrigger": "1"}, ReadMaxRows(7), 1),
    ],
)
def test_spark_hands_back_the_limits_or_asks_for_all(
    tmp_path: Path, given: dict[str, str], default: ReadLimit, end: int
) -> None:
    built = Built(tmp_path / "log")
    built.lines("a", [b"x"] * 30)
    stream = reader(built.root.path, **given)
    start = stream.initialOffset()
    assert stream.getDefaultReadLimit() == default
    assert stream.latestOffset(start, default)["logs"] == {built.log_id.hex(): end}
    assert stream.reportLatestOffset() == stream.latestOffset(start, ReadAllAvailable())
    assert stream.latestOffset(start, ReadAllAvailable())["logs"] == {built.log_id.hex(): 30}


def test_the_checkpoint_of_another_source_is_refused_in_words(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    with pytest.raises(Damaged, match="the checkpoint has other offsets") as refused:
        reader(built.root.path).latestOffset({"logOffset": 3}, ReadAllAvailable())
    assert "hint: use a separate checkpointLocation" in refused.value.message


def test_every_record_comes_once_over_restarts(spark: SparkSession, write: Write, tmp_path: Path) -> None:
    """Two logs with sealed and active segments; later a third one, and a record that was open at the first stop."""
    logs = [Built(tmp_path / "logs" / name) for name in ("one", "two")]
    for number in range(12):
        logs[0].lines("a", [b"one %d %d" % (number, n) for n in range(10)])
        logs[1].lines("b", [b"two %d" % number] * (number % 3 + 1))
        if number % 4 == 3:
            logs[0].cut()
    logs[0].seal()
    complete = contents(*logs)
    logs[0].piece("long", b"it be", begins=True, ends=False)
    logs[0].lines("a", [b"behind it"])

    assert finish(write(f"{tmp_path}/logs/*", maxRecordsPerTrigger=60)) == [60, 60, 24]
    assert sink(spark, tmp_path) == complete

    logs[0].piece("long", b"gins and ends\n", begins=False, ends=True)
    logs.append(Built(tmp_path / "logs" / "three"))
    logs[2].columns("c", [b"1", b"2", b"3"])
    assert finish(write(f"{tmp_path}/logs/*", maxBytesPerTrigger="10MiB")) == [5]
    assert sink(spark, tmp_path) == contents(*logs)
    assert finish(write(f"{tmp_path}/logs/*")) == []

    command = ["cursor", "from-checkpoint", tmp_path / "checkpoint", "a", "--root", logs[0].root.path]
    assert output_of(*command) == b"%d\n" % logs[0].last


@pytest.mark.slow
@pytest.mark.spark
def test_a_driver_that_is_killed_loses_and_doubles_nothing(spark: SparkSession, write: Write, tmp_path: Path) -> None:
    """SIGKILL hits between two batches, then during one; the cursor always matches the sink."""
    built = Built(tmp_path / "logs" / "log")
    for number in range(100):
        built.lines("a", [b"%d" % n for n in range(10 * number, 10 * number + 10)])
    checkpoint = tmp_path / "checkpoint"
    for written in ("commits/2", "offsets/6"):
        with started(f"{tmp_path}/logs/*", tmp_path / "sink", checkpoint) as driver:
            eventually((checkpoint / written).exists, timeout=300)
            os.killpg(driver.pid, signal.SIGKILL)
        line = ["cursor", "from-checkpoint", checkpoint, "a", "--root", built.root.path]
        done = int(output_of(*line))
        assert 150 <= done < 1000
        assert [sequence for _, sequence, _ in sink(spark, tmp_path)][:done] == list(range(1, done + 1))
    finish(write(f"{tmp_path}/logs/*"))
    assert sink(spark, tmp_path) == contents(built)


def started(*arguments: Path | str) -> subprocess.Popen[bytes]:
    """Start a driver in its own process group, so that one signal kills its JVM too."""
    return subprocess.Popen([sys.executable, "-c", DRIVER, *map(str, arguments)], start_new_session=True)


@pytest.mark.slow
def test_a_stream_keeps_up_while_the_daemon_works(spark: SparkSession, write: Write, tmp_path: Path) -> None:
    """The daemon appends, cuts and seals; reclaim deletes up to a cursor that follows the checkpoint."""
    root = tmp_path / "log"
    with Daemon(root, env={"WALD_SEGMENT_MAX_BYTES": "64KiB"}) as daemon:
        output_of("route", "add", "a", "--root", root)
        query = write(root, maxRecordsPerTrigger=3_000).trigger(processingTime="100 milliseconds").start()
        for turn in range(4):
            lines = b"".join(b"line %06d of some length\n" % number for number in range(5_000))
            output_of("append", "a", "--root", root, stdin=lines)
            follow(query, tmp_path / "checkpoint", root, beyond=5_000 * turn)
            subprocess.run(sidecar("reclaim", "--root", root, "--grace", "0"), check=True, capture_output=True)
        query.processAllAvailable()
        query.stop()
        assert query.exception() is None
        assert daemon.stop() == 0
    assert [sequence for _, sequence, _ in sink(spark, tmp_path)] == list(range(1, 20_001))
    assert len(read_ledger(root / "ledger/reclaim.jsonl").entries) > 3


def follow(query: StreamingQuery, checkpoint: Path, root: Path, *, beyond: int) -> None:
    """Move the cursor to the stream's committed records, once these are beyond ``beyond``."""

    def moved() -> bool:
        assert query.isActive, query.exception()
        return int(output_of("cursor", "from-checkpoint", checkpoint, "a", "--root", root)) > beyond

    eventually(lambda: any((checkpoint / "commits").glob("[0-9]*")))
    eventually(moved)
