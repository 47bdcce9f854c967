"""Records missing before the oldest segment are damage, unless a ledger explains them or the copy is partial."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import flipped
from logs import SECOND_NS, START_NS, Built
from running import refused, sidecar
from spark_jobs import run_job

from wald.errors import Damaged
from wald.files.ledger_write import Ledger
from wald.format.names import Kind
from wald_spark.options import STREAM_OPTIONS, Limits, Tolerance, parse_options, parse_stream_options
from wald_spark.plan import LogPiece, Range, first_record, pieces_of
from wald_spark.progress import find_logs, new_records, permissive_hint
from wald_spark.query import plan_query
from wald_spark.stream import Triggers

Reader = Callable[..., list[LogPiece]]


def query(path: Path, **given: str) -> list[LogPiece]:
    return [piece for piece in plan_query(parse_options({"path": str(path)} | given)) if isinstance(piece, LogPiece)]


def since_the_first(path: Path, **given: str) -> list[LogPiece]:
    """Query from the timestamp of a missing record."""
    return query(path, startingTimestamp=str((START_NS + SECOND_NS) // 1_000_000), **given)


def stream(path: Path, **given: str) -> list[LogPiece]:
    options = parse_options({"path": str(path)} | given, also=STREAM_OPTIONS)
    triggers = Triggers(options, parse_stream_options(options.given))
    start = triggers.start()
    return triggers.pieces(start, triggers.end(start, Limits()))


def job(path: Path, *, mode: str = "FAILFAST", damagePath: str = "", partial: str = "false") -> list[LogPiece]:  # noqa: N803 - the option
    permissive = mode == "PERMISSIVE"
    tolerance = Tolerance(permissive, permissive, damagePath, partial=partial == "true")
    return new_records(find_logs([str(path)], None)[0], None, None, tolerance).pieces


READERS = pytest.mark.parametrize("read", [query, since_the_first, stream, job])


def sequences(pieces: list[LogPiece]) -> list[int]:
    return sorted(record.sequence for piece in pieces for batch in piece.batches() for record in batch.records())


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Three sealed segments of two records each, and two records in the active one."""
    built = Built(tmp_path / "root")
    for number in range(4):
        built.lines("ab"[number % 2], [b"x", b"y"])
        if number < 3:
            built.cut()
    built.seal()
    return built


@READERS
def test_a_missing_oldest_segment_is_damage_unless_the_copy_is_partial(
    built: Built, read: Reader, tmp_path: Path
) -> None:
    """Damage may be passed over, and is reported then; a partial copy begins with its oldest record."""
    built.path(1, Kind.SEALED).unlink()
    with pytest.raises(Damaged, match="records 1 to 2 are missing, and no ledger explains why") as damaged:
        read(built.root.path)
    assert '.option("partial", "true")' in damaged.value.hint

    report = tmp_path / "report"
    assert sequences(read(built.root.path, mode="PERMISSIVE", damagePath=str(report))) == [3, 4, 5, 6, 7, 8]
    (written,) = (report / name for name in os.listdir(report))
    assert [json.loads(line)["message"] for line in written.read_text().splitlines()] == [
        f"{built.root.segments}: records 1 to 2 are missing, and no ledger explains why"
    ]

    assert sequences(read(built.root.path, partial="true")) == [3, 4, 5, 6, 7, 8]
    built.path(5, Kind.SEALED).unlink()
    with pytest.raises(Damaged, match="records 5 to 6 are missing"):
        read(built.root.path, partial="true")


@READERS
def test_shipped_segments_have_no_ledger_that_explains_a_gap(built: Built, read: Reader, tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    shutil.copytree(built.root.segments, shipped)
    (shipped / built.path(1, Kind.SEALED).name).unlink()
    with pytest.raises(Damaged, match="records 1 to 2 are missing"):
        read(shipped)
    assert sequences(read(shipped, partial="true")) == [3, 4, 5, 6, 7, 8]


@READERS
def test_a_beginning_that_was_reclaimed_is_passed_over(built: Built, read: Reader) -> None:
    built.reclaim(1)
    assert sequences(read(built.root.path)) == [3, 4, 5, 6, 7, 8]
    built.path(3, Kind.SEALED).unlink()
    with pytest.raises(Damaged, match="records 3 to 4 are missing"):
        read(built.root.path)


@READERS
def test_a_damaged_ledger_explains_nothing(built: Built, read: Reader) -> None:
    built.reclaim(1)
    ledger = built.root.ledger / "reclaim.jsonl"
    ledger.write_bytes(flipped(ledger.read_bytes(), 30))
    with pytest.raises(Damaged, match=r"reclaim\.jsonl"):
        read(built.root.path)
    assert sequences(read(built.root.path, mode="PERMISSIVE")) == [3, 4, 5, 6, 7, 8]


def test_a_start_that_is_named_needs_nothing_in_front_of_it(built: Built) -> None:
    built.path(1, Kind.SEALED).unlink()
    assert sequences(query(built.root.path, startingSequence="4")) == [4, 5, 6, 7, 8]
    first = json.dumps({built.log_id.hex(): 4})
    assert sequences(stream(built.root.path, startingOffsets=first)) == [4, 5, 6, 7, 8]
    assert sequences(stream(built.root.path, startingOffsets="latest")) == []


def test_a_stream_that_is_refused_leaves_no_offsets_behind(built: Built) -> None:
    """Spark stores the end offset before it plans the trigger; a stored one would outlive ``partial``."""
    built.path(1, Kind.SEALED).unlink()
    options = parse_options({"path": str(built.root.path)}, also=STREAM_OPTIONS)
    triggers = Triggers(options, parse_stream_options(options.given))
    with pytest.raises(Damaged, match="records 1 to 2"):
        triggers.end(triggers.start(), Limits())


@pytest.mark.parametrize("base", [1, 3, 5])
def test_a_deletion_that_was_taken_back_while_the_query_was_planned_misses_nothing(built: Built, base: int) -> None:
    built.reclaim(base, keep=True)
    view = built.view
    built.path(base, Kind.RELEASED).rename(built.path(base, Kind.SEALED))
    ledger = Ledger(built.root.ledger / "reclaim.jsonl", built.disk)
    ledger.append({"event": "kept", "base": base, "at": built.now_ns})
    ledger.close()
    wanted = Range(None, first_record(view, partial=False), built.last)
    assert sequences(pieces_of(view, wanted, limit_bytes=1)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_commands_name_their_own_options(built: Built) -> None:
    built.path(1, Kind.SEALED).unlink()
    with pytest.raises(Damaged, match="nothing was done") as damaged, permissive_hint("nothing was done"):
        job(built.root.path)
    assert damaged.value.hint == (
        "put the segments back; if this is a copy without them, --partial begins with the oldest record present; "
        "--permissive skips unreadable records"
    )


@pytest.mark.spark
@pytest.mark.parametrize("program", ["spark.export", "spark.compact"])
def test_the_commands_end_with_the_code_of_damage(built: Built, tmp_path: Path, program: str) -> None:
    """The commands fail before they start Spark."""
    built.path(1, Kind.SEALED).unlink()
    line = sidecar(program, "--root", built.root.path, "--out", tmp_path / "out")
    code, message, hint = refused(run_job(line, tmp_path))
    assert (code, "records 1 to 2 are missing" in message, "--partial" in hint) == (4, True, True)
