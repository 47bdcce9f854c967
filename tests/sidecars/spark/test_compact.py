"""wald-compact keeps the latest value of each key from run to run, like a dictionary."""

from __future__ import annotations

import json
import os
import random
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from damage import flip_bit
from faults import after_each_death
from hypothesis import given
from hypothesis import strategies as st
from json_page import require_documented
from logs import Built, Unsynced
from pyarrow import parquet
from running import sidecar
from spark_jobs import run_job

from wald.errors import Damaged, Refused
from wald.files.disk import Disk
from wald.format.names import Kind
from wald_spark.compact import job
from wald_spark.compact.job import (
    SCHEMA,
    Compacted,
    Generation,
    Generations,
    last_of,
    next_generation,
    reduce_chunk,
)
from wald_spark.options import STRICT, Tolerance
from wald_spark.progress import Progress, Run, find_logs, new_records

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Key = tuple[str, bytes]


def compact(
    spark: SparkSession, out: Path, *logs: Built, routes: tuple[str, ...] | None = None, permissive: bool = False
) -> Compacted:
    """Run the compaction as the command does."""
    out.mkdir(exist_ok=True)
    tolerance = Tolerance(permissive, permissive, str(out / "notes"))
    run, locations = (
        Run(tolerance, "now", lambda: nullcontext(spark)),
        find_logs([str(log.root.path) for log in logs], routes),
    )
    return next_generation(Generations(out, Unsynced()), routes, run, locations)


def table_of(directory: Path) -> dict[Key, tuple[bytes | None, str, int]]:
    """Return value, log and sequence by route and key; assert that no key occurs twice."""
    paths = [path for path in directory.iterdir() if path.suffix == ".parquet"]
    rows = [row for path in paths for row in parquet.read_table(path).to_pylist()]
    found = {(row["route"], row["key"]): (row["value"], row["log"], row["seq"]) for row in rows}
    assert len(found) == len(rows)
    return found


def oracle(*logs: Built) -> dict[Key, tuple[bytes | None, str, int]]:
    """Return the expected table, from a loop over all records."""
    records = [
        (r.append_time_ns // 1000, each.log_id.hex(), r.sequence, r) for each in logs for r in each.log.records()
    ]
    return {
        (r.route, r.key): (r.value or None, log, number)
        for _, log, number, r in sorted(records, key=lambda each: each[:3])
        if r.key is not None
    }


def test_the_latest_of_each_key_from_run_to_run(spark: SparkSession, tmp_path: Path) -> None:
    """Two logs with interleaved timestamps, deletions, records without a key, and a run without new records."""
    chance, out = random.Random(4), tmp_path / "out"
    logs = [Built(tmp_path / name) for name in ("one", "two")]

    def append() -> None:
        for _ in range(6):
            count = chance.randrange(1, 8)
            keys = [chance.choice([None, *(b"k%d" % number for number in range(9))]) for _ in range(count)]
            values = [chance.choice([b"", b"v%d" % chance.randrange(1000)]) for _ in range(count)]
            chance.choice(logs).columns(chance.choice("ab"), values, keys=keys)

    for number in range(1, 4):
        append()
        logs[0].cut()
        logs[0].seal()
        done = compact(spark, out, *logs)
        expected = oracle(*logs)
        assert table_of(out / "latest") == expected
        assert done.generation is not None
        assert (done.generation.keys, done.generation.deleted) == (
            len(expected),
            sum(value is None for value, _, _ in expected.values()),
        )
        everything = [record for each in logs for record in each.log.records()]
        assert done.generation.records == len(everything)
        assert done.generation.unkeyed == sum(record.key is None for record in everything)
        assert os.readlink(out / "latest") == f"gen-{number:06d}"

    again = compact(spark, out, *logs)
    assert (again.parts, again.directory, again.generation) == ([], out / "gen-000003", done.generation)
    assert sorted(path.name for path in out.glob("gen-*")) == ["gen-000002", "gen-000003"]
    frame = spark.read.parquet(str(out / "latest"))
    assert {name for name, kind in frame.dtypes if kind == "timestamp"} == {"timestamp", "event_time"}
    assert frame.where("value IS NOT NULL").count() == sum(value is not None for value, _, _ in oracle(*logs).values())


def test_a_log_that_comes_late_brings_back_no_deleted_key(spark: SparkSession, tmp_path: Path) -> None:
    early, late, out = Built(tmp_path / "early"), Built(tmp_path / "late"), tmp_path / "out"
    early.columns("a", [b"old", b"older"], keys=[b"x", b"y"])
    for _ in range(3):
        late.columns("a", [b"new"], keys=[b"x"])
    late.columns("a", [b""], keys=[b"x"])
    compact(spark, out, late)
    compact(spark, out, early, late)

    assert table_of(out / "latest") == oracle(early, late)
    assert table_of(out / "latest")["a", b"x"] == (None, late.log_id.hex(), 4)


def test_routes_of_before_hold_and_damage_changes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    built, out = Built(tmp_path / "root"), tmp_path / "out"
    for number in range(3):
        built.columns("a", [b"%d" % number], keys=[b"k%d" % number])
        built.cut()
    compact(spark, out, built, routes=("a",))
    with pytest.raises(Refused, match="made of route a, not of all routes"):
        compact(spark, out, built)

    for number in range(2):
        built.columns("a", [b"later %d" % number], keys=[b"k0"])
        built.cut()
    segment = built.path(4, Kind.RAW)
    flip_bit(segment, b"later")
    with pytest.raises(Damaged, match=str(segment)):
        compact(spark, out, built, routes=("a",))
    assert os.readlink(out / "latest") == "gen-000001"

    done = compact(spark, out, built, routes=("a",), permissive=True)
    assert len(done.passed_over) == 1
    assert table_of(out / "latest")["a", b"k0"][0] == b"later 1"


def test_a_crash_at_any_step_leaves_one_generation_or_the_next(tmp_path: Path) -> None:
    """The next run removes the leftovers of the crashed one."""

    def run(out: Path, disk: Disk, number: int) -> None:
        generations = Generations(out, disk)
        generations.read()
        directory = generations.begin()
        directory.mkdir()
        (directory / "part.parquet").write_text(str(number))
        generations.commit(directory, Generation(None, {"log": Progress(number)}))

    def die(number: int, disk: Disk) -> None:
        out = tmp_path / f"{number}"
        out.mkdir()
        run(out, Unsynced(), 1)
        run(out, Unsynced(), 2)
        run(out, disk, 3)

    for number in after_each_death(die, least=5):
        out = tmp_path / f"{number}"
        holding = Generations(out, Unsynced())
        content, latest = holding.read(), holding.latest()
        assert content is not None
        assert latest is not None
        assert content.logs == {"log": Progress(int((latest / "part.parquet").read_text()))}
        before = int(latest.name[-6:]) - 1
        run(out, Unsynced(), 4)
        assert sorted(path.name for path in out.glob("gen-*")) == [f"gen-{before + 1:06d}", f"gen-{before + 2:06d}"]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}'])
def test_a_generation_without_a_description_is_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / "gen-000001").mkdir()
    (tmp_path / "gen-000001" / "_wald.json").write_text(text)
    (tmp_path / "latest").symlink_to("gen-000001")

    with pytest.raises(Damaged, match=r"gen-000001/_wald\.json"):
        Generations(tmp_path, Unsynced()).read()


ROW = st.tuples(st.sampled_from("ab"), st.sampled_from([b"", b"x", b"y", b"z"]))


@given(st.lists(ROW, max_size=30))
def test_the_last_row_of_each_key_stays_in_order(rows: list[tuple[str, bytes]]) -> None:
    columns = {"route": [r for r, _ in rows], "key": [k for _, k in rows], "seq": list(range(len(rows)))}
    table = pa.table(columns, pa.schema([SCHEMA.field(name) for name in columns]))

    assert last_of(table)["seq"].to_pylist() == sorted({row: number for number, row in enumerate(rows)}.values())


def test_a_part_of_a_log_is_reduced_as_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reduction repeats whenever the buffer exceeds its limit."""
    monkeypatch.setattr(job, "REDUCE_BYTES", 100)
    built, place = Built(tmp_path / "root"), tmp_path / "partial"
    for number in range(20):
        built.columns("ab"[number % 2], [b"%d" % number, b""], keys=[b"k%d" % (number % 3), b"deleted"])
        built.lines("a", [b"without a key"])
    portion = new_records(find_logs([str(built.root.path)], None)[0], None, None, STRICT)
    place.mkdir()

    assert portion is not None
    assert json.loads(reduce_chunk(str(place), tuple(portion.pieces))) == {"records": 60, "unkeyed": 20}
    assert table_of(place) == oracle(built)


def test_the_command_reports_what_there_is(cluster: str, tmp_path: Path) -> None:
    """The command runs as a process on a cluster, from options to JSON."""
    built, out = Built(tmp_path / "root"), tmp_path / "out"
    built.columns("a", [b"1", b"2", b""], keys=[b"x", b"x", b"y"])
    built.columns("b", [b"3"], keys=[b"x"])
    words = ["--root", built.root.path, "--out", out, "--route", "a", "--master", cluster, "--json"]
    done = run_job(sidecar("spark.compact", *words), tmp_path)

    assert (done.returncode, done.stderr) == (0, b"")
    content: dict[str, Any] = json.loads(done.stdout)
    require_documented("wald-compact", content)
    assert (content["generation"]["keys"], content["generation"]["deleted"], content["read"]["records"]) == (2, 1, 3)
    assert {key: value for (_, key), (value, _, _) in table_of(out / "latest").items()} == {b"x": b"2", b"y": None}
