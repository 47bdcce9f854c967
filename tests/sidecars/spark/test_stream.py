"""Streams with a real Spark write each record to a Parquet sink once, in spite of kills and reclaim."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from logs import Built
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows
from running import Daemon, eventually, output_of, sidecar

from wald.errors import Damaged
from wald.files.ledger_read import read_ledger
from wald_spark.options import STREAM_OPTIONS, parse_options
from wald_spark.rows import Rows
from wald_spark.source import StreamReader, WaldDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

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
