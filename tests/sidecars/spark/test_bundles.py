"""Pieces of an archive hold the same records as the log."""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from archives import archive, bags
from damage import flip_bit
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import SECOND_NS, START_NS, Built
from some_logs import STEPS, Step, build

from wald.errors import Damaged
from wald.reading.arrow import record_batches, schema
from wald_archive.bundle import Records
from wald_archive.codecs import Codec
from wald_spark.locations import ArchiveLocation
from wald_spark.options import STRICT, Options, Tolerance, parse_options
from wald_spark.query import BundlePiece, bundle_pieces, plan_query

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
