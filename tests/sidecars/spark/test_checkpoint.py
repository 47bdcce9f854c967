"""A stream's checkpoint moves a cursor to the last committed record and no further."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from logs import Built
from running import output_of, refusal_of, wald

from wald.errors import Damaged, InvalidInput, NotFound, Refused, UnsupportedFormat, WaldError
from wald_spark.checkpoint import Offsets, Position, encode_offsets, processed_by_stream

COMMIT = 'v1\n{"nextBatchWatermarkMs":0}'
METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1795278068015,"conf":{}}'
OTHER = "00" * 16


class Checkpoint:
    """A checkpoint in Spark's layout, for streams of one log."""

    def __init__(self, path: Path, log: str) -> None:
        self.path = path
        self._log = log

    def source(self, last: int, *, began: int = 0, routes: str = "", log: str = "") -> str:
        """Return the offsets that the source stores in the checkpoint."""
        position = {log or self._log: Position(began, last), OTHER: Position(0, 900)}
        return json.dumps(encode_offsets(Offsets(position, frozenset(routes) if routes else None)))

    def batch(self, number: int, *sources: str, committed: bool = True, version: str = "v1") -> None:
        self.write("offsets", number, "\n".join([version, METADATA, *sources]))
        if committed:
            self.write("commits", number, COMMIT)

    def write(self, folder: str, number: int, text: str) -> None:
        (self.path / folder).mkdir(parents=True, exist_ok=True)
        (self.path / folder / str(number)).write_text(text)


@pytest.fixture
def checkpoint(thirty: Built, tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "checkpoint", thirty.log_id.hex())


def processed(checkpoint: Checkpoint, thirty: Built) -> int:
    return processed_by_stream(checkpoint.path, thirty.root, thirty.log.cursor("a"), log_id=thirty.log_id)


def refusal(checkpoint: Checkpoint, thirty: Built, kind: type[WaldError]) -> str:
    with pytest.raises(kind) as refused:
        processed(checkpoint, thirty)
    assert refused.value.hint
    return refused.value.message


def test_the_last_batch_that_is_committed_counts(checkpoint: Checkpoint, thirty: Built) -> None:
    """Batches are ordered by number, not as text: 10 follows 9. A batch that was only started does not count."""
    checkpoint.batch(9, checkpoint.source(9))
    checkpoint.batch(10, checkpoint.source(12))
    checkpoint.batch(11, checkpoint.source(25), committed=False)
    assert processed(checkpoint, thirty) == 12


def test_what_spark_leaves_beside_the_batches_does_not_count(checkpoint: Checkpoint, thirty: Built) -> None:
    """Neither do offsets that were cut short or are gone."""
    checkpoint.batch(0, checkpoint.source(7))
    for name in (".1.4f9c.tmp", ".0.crc", "1.compact"):
        (checkpoint.path / "commits" / name).write_text(COMMIT)
    assert processed(checkpoint, thirty) == 7
    checkpoint.batch(1, checkpoint.source(9)[:-5])
    assert processed(checkpoint, thirty) == 7
    (checkpoint.path / "offsets/1").unlink()
    assert processed(checkpoint, thirty) == 7


@pytest.mark.parametrize("harm", ["", "v1", "v1\n", COMMIT[:-3], "\0" * 30])
@pytest.mark.parametrize("folder", ["commits", "offsets"])
def test_a_batch_that_was_cut_short_does_not_count(
    checkpoint: Checkpoint, thirty: Built, folder: str, harm: str
) -> None:
    """A power loss can truncate a batch; the previous batch counts instead."""
    checkpoint.batch(0, checkpoint.source(7))
    checkpoint.batch(1, checkpoint.source(9))
    checkpoint.write(folder, 1, harm)
    assert processed(checkpoint, thirty) == 7


def test_of_several_sources_the_one_that_is_behind_decides(checkpoint: Checkpoint, thirty: Built) -> None:
    """Foreign sources, and those of other logs or routes, are ignored."""
    checkpoint.batch(
        0,
        "-",
        '{"logOffset":3}',
        "17",
        '{"topic":{"0":4}}',
        checkpoint.source(9),
        checkpoint.source(8, routes="ab"),
        checkpoint.source(2, routes="b"),
        checkpoint.source(1, log="11" * 16),
    )
    assert processed(checkpoint, thirty) == 8


def test_sources_with_names_are_understood(checkpoint: Checkpoint, thirty: Built) -> None:
    """Version 2 of Spark's format, which a Spark setting enables."""
    checkpoint.batch(0, f"0:{checkpoint.source(9)}", '1:{"logOffset":3}', "2:-", version="v2")
    assert processed(checkpoint, thirty) == 9


def test_what_is_not_there_is_not_found(checkpoint: Checkpoint, thirty: Built, tmp_path: Path) -> None:
    assert "not the checkpoint of a stream" in refusal(checkpoint, thirty, NotFound)
    checkpoint.batch(0, checkpoint.source(9), committed=False)
    assert "committed nothing yet" in refusal(checkpoint, thirty, NotFound)
    checkpoint.batch(0, checkpoint.source(9, log="11" * 16), "-")
    assert f"does not read log {thirty.log_id.hex()}" in refusal(checkpoint, thirty, NotFound)
    checkpoint.batch(0, checkpoint.source(9, routes="bc"))
    assert "does not read route a of this log" in refusal(checkpoint, thirty, Refused)


def test_what_cannot_be_read_is_damage(checkpoint: Checkpoint, thirty: Built) -> None:
    checkpoint.batch(3, checkpoint.source(9).replace('"routes": null', '"routes": 1'))
    assert "offsets/3: not a list of routes" in refusal(checkpoint, thirty, Damaged)
    checkpoint.batch(3, checkpoint.source(9).replace('"version": 1', '"version": 2'))
    assert "version 2" in refusal(checkpoint, thirty, Damaged)
    checkpoint.write("offsets", 3, "")
    assert "commits/3: neither this batch nor an older one" in refusal(checkpoint, thirty, Damaged)
    checkpoint.batch(3, checkpoint.source(9), version="v9")
    assert "version 'v9' of Spark's format" in refusal(checkpoint, thirty, UnsupportedFormat)


def test_what_the_stream_has_never_met_stays_to_be_read(checkpoint: Checkpoint, thirty: Built) -> None:
    """The stream began after record 15, so the group must have read records 1 to 15, unless they were reclaimed."""
    checkpoint.batch(0, checkpoint.source(25, began=15))
    assert "the stream began after record 15" in refusal(checkpoint, thirty, Refused)
    thirty.log.set_cursor("a", 15)
    assert processed(checkpoint, thirty) == 25
    thirty.log.set_cursor("a", 0, rewind=True)
    thirty.reclaim(1)
    assert "the stream began after record 15" in refusal(checkpoint, thirty, Refused)
    checkpoint.batch(1, checkpoint.source(25, began=10))
    assert processed(checkpoint, thirty) == 25
    checkpoint.batch(2, checkpoint.source(25), checkpoint.source(25, began=15))  # the one that began last decides
    assert "the stream began after record 15" in refusal(checkpoint, thirty, Refused)


def test_a_log_without_segments_has_nothing_to_miss(checkpoint: Checkpoint, thirty: Built) -> None:
    checkpoint.batch(0, checkpoint.source(25, began=15))
    thirty.crash()
    shutil.rmtree(thirty.root.segments)
    thirty.root.segments.mkdir()
    assert processed_by_stream(checkpoint.path, thirty.root, thirty.log.cursor("a"), log_id=thirty.log_id) == 25


def test_a_cursor_follows_a_stream(checkpoint: Checkpoint, thirty: Built) -> None:
    line = ["cursor", "from-checkpoint", checkpoint.path, "a", "--root", thirty.root.path, "--group", "spark"]
    checkpoint.batch(0, checkpoint.source(7))
    first = wald(*line)
    assert (first.returncode, first.stdout) == (0, b"7\n")
    assert b"group spark is new on route a" in first.stderr
    line[2] = f"file://{line[2]}"
    assert output_of(*line) == b"7\n"
    checkpoint.batch(1, checkpoint.source(9))
    assert output_of(*line) == b"9\n"
    assert thirty.log.cursor("a", "spark").effective == 9


def test_it_refuses_what_would_lose_something(checkpoint: Checkpoint, thirty: Built) -> None:
    def refused(place: object = checkpoint.path) -> tuple[int, str, str]:
        return refusal_of("cursor", "from-checkpoint", place, "a", "--root", thirty.root.path)

    checkpoint.batch(0, checkpoint.source(7))
    thirty.log.set_cursor("a", 8)
    assert refused()[0] == Refused.exit_code  # backwards
    checkpoint.batch(1, checkpoint.source(31))
    code, message, _ = refused()
    assert (code, "beyond the last durable record" in message) == (Refused.exit_code, True)
    assert thirty.log.cursor("a").effective == 8
    assert refused(thirty.root.path / "nowhere")[0] == NotFound.exit_code
    code, message, hint = refused("s3://lake/ck")
    assert (code, message) == (InvalidInput.exit_code, "s3://lake/ck: a URL, but a directory is needed")
    assert "copy the checkpoint" in hint
