"""The data source with a real Spark: each record once, no needless reads, and errors with a hint."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from archives import archive
from damage import flip_bit
from logs import Built
from pyspark.errors import PySparkException
from pyspark.sql.functions import length
from running import Daemon, eventually, output_of, sidecar

from wald.format.names import Kind
from wald_spark.source import WaldDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
