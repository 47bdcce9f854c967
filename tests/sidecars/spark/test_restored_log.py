"""Streams and jobs detect that their log was replaced by an older copy, even if the copy has grown past it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from logs import START_NS, Built, Unsynced
from running import refusal_of, refused, sidecar
from spark_jobs import run_job

from wald.errors import Replaced, RolledBack
from wald_spark.checkpoint import Offsets, decode_offsets, encode_offsets
from wald_spark.compact.job import Generation, Generations
from wald_spark.export.job import ExportedLog, Output, Shape, private
from wald_spark.options import STREAM_OPTIONS, STRICT, Limits, Tolerance, parse_options, parse_stream_options
from wald_spark.plan import LogPiece
from wald_spark.progress import NewRecords, Progress, find_logs, new_records
from wald_spark.query import plan_query
from wald_spark.stream import Triggers

OLDER = "an older copy of the log was restored here"
LATER_NS = START_NS + 3600 * 10**9


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return tmp_path / "copy"


@pytest.fixture
def built(root: Path, copy: Path) -> Built:
    """Log of five records; the copy has the first three."""
    built = Built(root)
    built.lines("a", [b"1", b"2", b"3"])
    shutil.copytree(root, copy)
    built.lines("a", [b"4", b"5"])
    return built


def restart(root: Path, epoch: int, now_ns: int = LATER_NS) -> Built:
    return Built(root, epoch=epoch, now_ns=now_ns + epoch)


def older_copy(root: Path, copy: Path) -> None:
    shutil.rmtree(root)
    shutil.copytree(copy, root)


def longer_copy(root: Path, copy: Path) -> None:
    """Restore the copy and start it again; it now has more records than were read."""
    older_copy(root, copy)
    restart(root, 2).lines("a", [b"other"] * 9)


def several_starts(root: Path, copy: Path) -> None:
    longer_copy(root, copy)
    restart(root, 3).lines("a", [b"other"])
    restart(root, 4)


REPLACEMENTS = pytest.mark.parametrize("restore", [older_copy, longer_copy, several_starts])
Restore = Callable[[Path, Path], None]


def triggers(root: Path) -> Triggers:
    """Return the triggers of a stream that skips all damage and loss."""
    options = parse_options({"path": str(root), "mode": "PERMISSIVE", "failondataloss": "false"}, also=STREAM_OPTIONS)
    return Triggers(options, parse_stream_options(options.given))


def kept(offsets: Offsets) -> Offsets:
    """Encode and decode offsets, as Spark does in a checkpoint."""
    return decode_offsets(json.loads(json.dumps(encode_offsets(offsets))))


def read_all(root: Path) -> Offsets:
    """Return the offsets of a stream that has read everything."""
    stream = triggers(root)
    return kept(stream.end(stream.start(), Limits()))


def values(pieces: list[LogPiece]) -> list[bytes]:
    return [record.value for piece in pieces for batch in piece.batches() for record in batch.records()]


def job(root: Path, before: Progress | None) -> NewRecords:
    """Return the new records after ``before`` for a job that skips all damage and loss."""
    return new_records(find_logs([str(root)], None)[0], before, None, Tolerance(damage=True, loss=True))


@REPLACEMENTS
@pytest.mark.parametrize("started_again", [False, True])
def test_a_stream_ends_with_it_and_one_that_is_started_again_compares_its_checkpoint(
    built: Built, root: Path, copy: Path, restore: Restore, started_again: bool
) -> None:
    """Spark plans a trigger again after a crash."""
    stream = triggers(built.root.path)
    at = kept(stream.end(stream.start(), Limits()))
    restore(root, copy)
    stream = triggers(root) if started_again else stream
    for act in (lambda: stream.end(at, Limits()), lambda: stream.pieces(stream.start(), at)):
        with pytest.raises(RolledBack, match=OLDER) as error:
            act()
        assert (error.value.exit_code, "checkpointLocation" in error.value.hint) == (16, True)


def test_another_start_of_the_same_epoch_is_noticed(built: Built, root: Path, copy: Path) -> None:
    restart(root, 2).lines("a", [b"6"])
    at, done = read_all(root), job(root, None).after
    older_copy(root, copy)
    restart(root, 2, LATER_NS + 77).lines("a", [b"other"] * 9)
    with pytest.raises(RolledBack, match="epoch 2 belongs to another start of the daemon"):
        triggers(root).end(at, Limits())
    with pytest.raises(RolledBack, match="epoch 2 belongs to another start of the daemon"):
        job(root, done)
    assert built.root.path == root


@REPLACEMENTS
def test_what_was_planned_before_is_not_read_from_it(built: Built, root: Path, copy: Path, restore: Restore) -> None:
    pieces = plan_query(parse_options({"path": str(built.root.path), "mode": "PERMISSIVE"}))
    restore(root, copy)
    for piece in pieces:
        with pytest.raises(RolledBack, match=OLDER):
            list(piece.arrow(["value"]))


def test_it_is_noticed_if_it_comes_while_a_piece_is_read(built: Built, root: Path, copy: Path) -> None:
    (piece,) = plan_query(parse_options({"path": str(built.root.path)}))
    assert isinstance(piece, LogPiece)
    reading = piece.batches()
    next(reading)
    longer_copy(root, copy)
    with pytest.raises(Replaced, match=OLDER):
        list(reading)


@REPLACEMENTS
def test_a_job_compares_what_its_last_run_has_kept(
    built: Built, root: Path, copy: Path, tmp_path: Path, restore: Restore
) -> None:
    assert values(job(root, None).pieces) == [b"1", b"2", b"3", b"4", b"5"]
    keep(tmp_path / "out", job(built.root.path, None))
    restore(root, copy)
    (exported,) = Output(tmp_path / "out" / "export", Unsynced()).entries().values()
    compacted = Generations(tmp_path / "out" / "compact", Unsynced()).read()
    assert compacted is not None
    for done in (exported.progress, compacted.logs[exported.log]):
        with pytest.raises(RolledBack, match=OLDER) as error:
            job(root, done)
        assert "another --out" in error.value.hint


def keep(out: Path, new: NewRecords) -> None:
    """Write the files of an export and a compaction after a run."""
    log = new.location.log
    private(out / "export").mkdir(parents=True)
    entry = ExportedLog(log, Shape(), 1, 0)
    Output(out / "export", Unsynced()).write(
        entry.with_files([], progress=new.after, staging="", passed_over=0, at="now")
    )
    (out / "compact").mkdir()
    generations = Generations(out / "compact", Unsynced())
    directory = generations.begin()
    directory.mkdir()
    generations.commit(directory, Generation(None, {log: new.after}))


@pytest.mark.spark
@pytest.mark.parametrize("program", ["export", "compact"])
def test_the_commands_end_with_the_code_of_a_replaced_log(
    built: Built, root: Path, copy: Path, tmp_path: Path, program: str
) -> None:
    """The commands fail before they start Spark, even with ``--permissive``."""
    keep(tmp_path / "out", job(built.root.path, None))
    longer_copy(root, copy)
    out = tmp_path / "out" / program
    code, message, hint = refused(
        run_job(sidecar(f"spark.{program}", "--root", root, "--out", out, "--permissive"), tmp_path)
    )
    assert (code, OLDER in message, "another --out" in hint) == (16, True, True)


def test_a_cursor_does_not_follow_a_stream_of_the_log_before(built: Built, root: Path, copy: Path) -> None:
    """Otherwise unread records of the copy would count as processed."""
    checkpoint = root.with_name("checkpoint")
    for folder, text in (("offsets", json.dumps(encode_offsets(read_all(built.root.path)))), ("commits", "{}")):
        (checkpoint / folder).mkdir(parents=True)
        (checkpoint / folder / "0").write_text(f"v1\n{{}}\n{text}")
    longer_copy(root, copy)
    code, message, hint = refusal_of("cursor", "from-checkpoint", checkpoint, "a", "--root", root)
    assert (code, OLDER in message, "cursor set" in hint) == (16, True, True)
    assert Built(root, epoch=5, now_ns=LATER_NS + 99).log.cursor("a").sequence == 0


def test_restarts_and_copies_that_have_all_that_was_read_are_no_other_past(root: Path, copy: Path) -> None:
    built = Built(root)
    built.lines("a", [b"1", b"2"])
    at, done = read_all(root), job(root, None).after
    for epoch in (2, 3):
        built.lines("a", [b"x"])
        built.cut()
        built.seal()
        built = restart(root, epoch)
    assert triggers(root).end(at, Limits()).logs[built.log_id.hex()].last == 4
    shutil.copytree(root, copy)
    built.lines("a", [b"lost"])
    older_copy(root, copy)
    built = restart(root, 4)
    built.lines("a", [b"5"])
    assert values(triggers(root).pieces(at, read_all(root))) == [b"x", b"x", b"5"]
    assert values(job(root, done).pieces) == [b"x", b"x", b"5"]


def test_a_restart_without_a_new_record_moves_no_stream_and_no_job(built: Built, root: Path) -> None:
    """Otherwise each restart would create an empty batch or run."""
    at, done = read_all(built.root.path), job(root, None).after
    restart(root, 2)
    assert encode_offsets(triggers(root).end(at, Limits())) == encode_offsets(at)
    assert not job(root, done).due


def test_what_an_older_wald_has_kept_goes_on(built: Built, root: Path, copy: Path) -> None:
    """Older versions store no start, so only the end of the log is compared."""
    log = built.log_id.hex()
    at = decode_offsets({"version": 1, "logs": {log: 5}, "began": {log: 0}, "routes": None})
    done = replace(job(root, None).after, epoch=0, life="")
    restart(root, 2).lines("a", [b"6"])
    assert values(triggers(root).pieces(at, read_all(root))) == [b"6"]
    assert values(job(root, done).pieces) == [b"6"]
    older_copy(root, copy)
    with pytest.raises(RolledBack, match="record 5 was read before, and the log ends at record 3"):
        triggers(root).end(at, Limits())
    with pytest.raises(RolledBack, match="record 5 was read before, and the log ends at record 3"):
        new_records(find_logs([str(root)], None)[0], done, None, STRICT)
