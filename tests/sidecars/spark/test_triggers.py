"""Triggers read each record once over any sequence of appends, cuts, crashes and restarts; loss raises an error."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Built
from some_logs import STEPS, Step, build

from wald.errors import Damaged, InvalidInput, NotFound, Refused
from wald.format.names import Kind
from wald_spark.checkpoint import Offsets, Position, decode_offsets, encode_offsets
from wald_spark.options import STREAM_OPTIONS, Limits, parse_options, parse_stream_options
from wald_spark.plan import LogPiece
from wald_spark.stream import Triggers

NO_LIMITS = Limits()


def triggers(*paths: Path | str, **given: str) -> Triggers:
    options = parse_options({"paths": json.dumps(list(map(str, paths)))} | given, also=STREAM_OPTIONS)
    return Triggers(options, parse_stream_options(options.given))


def records(pieces: list[LogPiece]) -> list[tuple[str, int, bytes]]:
    found = [(piece.log, batch) for piece in pieces for batch in piece.batches()]
    return [(log, record.sequence, record.value) for log, batch in found for record in batch.records()]


class Stream:
    """A stream as Spark runs it: offsets are stored as text, and the records read are in the sink."""

    def __init__(self, *paths: Path | str, **given: str) -> None:
        self._source = paths, given
        self.sink: list[tuple[str, int, bytes]] = []
        self.restart()
        self.at = self.triggers.start()

    def restart(self) -> None:
        paths, given = self._source
        self.triggers = triggers(*paths, **given)

    def trigger(self, limits: Limits = NO_LIMITS, *, crash: bool = False) -> bool:
        """Run one trigger; return True if it advanced. With ``crash``, plan it, restart and plan it again."""
        end = kept(self.triggers.end(self.at, limits))
        if end == self.at:
            return False
        if crash:
            self.triggers.pieces(self.at, end)
            self.restart()
        self.sink += records(self.triggers.pieces(self.at, end))
        self.at = end
        return True

    @property
    def sequences(self) -> list[int]:
        return [sequence for _, sequence, _ in self.sink]


def kept(offsets: Offsets) -> Offsets:
    return decode_offsets(json.loads(json.dumps(encode_offsets(offsets))))


@settings(max_examples=40, deadline=None)
@given(
    chunks=st.lists(STEPS, min_size=1, max_size=4),
    routes=st.sampled_from(["", "a", "b", "a,between"]),
    data=st.data(),
)
def test_no_record_is_skipped_or_doubled(chunks: list[list[Step]], routes: str, data: Any) -> None:
    """Two logs, with a crash or a limit at any trigger; finally the stream has read every complete record."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [build(Path(folder, name), []) for name in ("one", "two")]
        (logs[0].root.routes / "between").mkdir()
        stream = Stream(f"{folder}/*", **({"routes": routes} if routes else {}))
        for chunk in chunks:
            for step in chunk:
                step.append(logs[data.draw(st.integers(0, 1))])
            for _ in range(data.draw(st.integers(0, 3))):
                limits = data.draw(st.builds(Limits, st.none() | st.integers(1, 5), st.none() | st.integers(1, 500)))
                before = len(stream.sink)
                stream.trigger(limits, crash=data.draw(st.booleans()))
                assert limits.records is None or len(stream.sink) - before <= limits.records
        while stream.trigger():
            pass
        for log in logs:
            wanted = [
                (log.log_id.hex(), record.sequence, record.value)
                for record in log.log.records()
                if not routes or record.route in routes.split(",")
            ]
            # A long record arrives once it is complete, which may be after later records: compare sorted.
            assert sorted(found for found in stream.sink if found[0] == log.log_id.hex()) == sorted(wanted)
            log.crash()


def test_latest_is_where_the_log_ended_when_the_stream_met_it(thirty: Built) -> None:
    """The position survives a crash of Spark during the first batch."""
    stream = Stream(thirty.root.path, startingoffsets="latest")
    assert stream.trigger(crash=True)
    assert stream.sink == []
    thirty.lines("a", [b"31"])
    assert stream.trigger(crash=True)
    assert stream.sequences == [31]


def test_a_first_batch_with_records_is_planned_again_from_where_it_began(thirty: Built) -> None:
    """Between the crash and the restart, records are appended and the oldest ones are reclaimed."""
    thirty.lines("a", [b"31"])
    stream = Stream(thirty.root.path, startingoffsets=f'{{"{thirty.log_id.hex()}": 29}}')
    end = kept(stream.triggers.end(stream.at, NO_LIMITS))
    thirty.lines("a", [b"32"])
    thirty.reclaim(1)
    stream.restart()
    assert [sequence for _, sequence, _ in records(stream.triggers.pieces(stream.at, end))] == [29, 30, 31]


def test_earliest_is_the_oldest_record_there_is(thirty: Built) -> None:
    thirty.reclaim(1)
    stream = Stream(thirty.root.path)
    stream.trigger()
    assert stream.sequences == list(range(11, 31))


def test_places_to_start_that_do_not_exist_are_refused(thirty: Built) -> None:
    log = thirty.log_id.hex()
    with pytest.raises(NotFound, match="record 32, which startingOffsets names, was never issued"):
        Stream(thirty.root.path, startingoffsets=f'{{"{log}": 32}}').trigger()
    with pytest.raises(InvalidInput, match="which is missing") as caught:
        Stream(thirty.root.path, startingoffsets=f'{{"{"00" * 16}": 1}}').trigger()
    assert log in caught.value.hint
    stream = Stream(thirty.root.path, startingoffsets=f'{{"{log}": 31}}')
    stream.trigger()
    thirty.lines("a", [b"31"])
    stream.trigger()
    assert stream.sequences == [31]


def test_a_log_that_appears_later_is_read_from_its_beginning(thirty: Built) -> None:
    """This also holds for a stream that started at the end of the existing logs."""
    pattern = f"{thirty.root.path.parent}/*"
    stream = Stream(pattern, startingoffsets="latest")
    stream.trigger()
    later = Built(thirty.root.path.parent / "later")
    later.lines("a", [b"new"])
    stream.restart()
    stream.trigger()
    assert stream.sink == [(later.log_id.hex(), 1, b"new")]


def test_what_comes_after_the_stream_was_closed_is_not_part_of_it(thirty: Built) -> None:
    stream = Stream(f"{thirty.root.path.parent}/*")
    stream.triggers.close()
    thirty.lines("a", [b"31"])
    Built(thirty.root.path.parent / "later").lines("a", [b"new"])
    while stream.trigger(Limits(records=4)):
        pass
    assert stream.sequences == list(range(1, 31))


def test_a_reclaimed_range_is_loud_unless_loss_is_tolerated(thirty: Built) -> None:
    strict, tolerant = Stream(thirty.root.path), Stream(thirty.root.path, failondataloss="false")
    for stream in (strict, tolerant):
        stream.trigger(Limits(records=5))
    planned = strict.triggers.pieces(strict.at, strict.triggers.end(strict.at, NO_LIMITS))
    thirty.reclaim(1)
    with pytest.raises(NotFound, match="RECLAIM has removed records 6 to 10"):
        records(planned)
    with pytest.raises(NotFound, match="RECLAIM has removed records 6 to 10") as caught:
        strict.trigger()
    assert "failOnDataLoss" in caught.value.hint
    tolerant.trigger()
    assert tolerant.sequences == [*range(1, 6), *range(11, 31)]


def test_a_log_that_vanishes_is_loud_unless_loss_is_tolerated(thirty: Built) -> None:
    other = Built(thirty.root.path.parent / "other")
    other.lines("a", [b"x"])
    strict, tolerant = (Stream(f"{thirty.root.path.parent}/*", failondataloss=word) for word in ("true", "false"))
    for stream in (strict, tolerant):
        stream.trigger()
    shutil.rmtree(other.root.path)
    with pytest.raises(NotFound, match="other"):
        strict.trigger()
    strict.restart()
    with pytest.raises(NotFound, match=f"log {other.log_id.hex()}, read up to record 1, is missing"):
        strict.trigger()
    thirty.lines("a", [b"31"])
    assert tolerant.trigger(crash=True)
    assert tolerant.sink[-1][1] == 31
    assert tolerant.at.logs[other.log_id.hex()].last == 1


def test_another_log_in_its_place_is_loud_unless_loss_is_tolerated(thirty: Built) -> None:
    """The other log has more records than the stream has read."""
    strict, tolerant = (Stream(thirty.root.path, failondataloss=word) for word in ("true", "false"))
    for stream in (strict, tolerant):
        stream.trigger()
    shutil.rmtree(thirty.root.path)
    other = Built(thirty.root.path)
    other.lines("a", [b"other"] * 40)
    with pytest.raises(NotFound, match=f"log {thirty.log_id.hex()} is no longer there"):
        strict.trigger()
    tolerant.trigger()
    tolerant.trigger()
    assert tolerant.sink[30:] == [(other.log_id.hex(), sequence, b"other") for sequence in range(1, 41)]


def test_without_a_head_a_stream_waits_and_a_batch_that_needs_it_fails(thirty: Built) -> None:
    stream = Stream(thirty.root.path)
    end = stream.triggers.end(stream.at, NO_LIMITS)
    head = thirty.root.head.read_bytes()
    thirty.root.head.unlink()
    with pytest.raises(Damaged, match="no readable head"):
        stream.triggers.pieces(stream.at, end)
    assert stream.triggers.end(end, NO_LIMITS) == end
    thirty.root.head.write_bytes(head)
    assert len(records(stream.triggers.pieces(stream.at, end))) == 30


def test_a_stream_of_other_routes_does_not_go_on(thirty: Built) -> None:
    stream = Stream(thirty.root.path, route="a")
    stream.trigger()
    with pytest.raises(Refused, match="a stream of routes a, but this stream reads all routes"):
        triggers(thirty.root.path).end(stream.at, NO_LIMITS)


def test_shipped_segments_are_streamed_as_they_arrive(thirty: Built, tmp_path: Path) -> None:
    """Files are renamed into place; their headers identify the log."""
    place = tmp_path / "shipped"
    place.mkdir()

    def ship(base: int) -> None:
        path = thirty.path(base, Kind.SEALED)
        shutil.copy(path, place / f"{path.name}.tmp")
        (place / f"{path.name}.tmp").rename(place / path.name)

    ship(1)
    stream = Stream(place)
    assert stream.trigger(Limits(records=8))
    assert stream.trigger()
    assert not stream.trigger()
    ship(11)
    assert stream.trigger(crash=True)
    assert stream.sequences == list(range(1, 21))


def test_archives_are_not_streamed() -> None:
    with pytest.raises(InvalidInput, match="an archive cannot be streamed"):
        Stream("s3://bucket/archive").trigger()


def test_the_same_log_twice_is_refused(thirty: Built, tmp_path: Path) -> None:
    shutil.copytree(thirty.root.path, tmp_path / "copy")
    with pytest.raises(InvalidInput, match="the same log"):
        Stream(f"{tmp_path}/*").trigger()


def test_what_is_no_log_is_passed_over_by_a_pattern_only(thirty: Built, tmp_path: Path) -> None:
    (tmp_path / "half-made" / "segments").mkdir(parents=True)
    stream = Stream(f"{tmp_path}/*")
    stream.trigger()
    assert len(stream.sink) == 30
    with pytest.raises(NotFound, match="neither a log"):
        Stream(tmp_path / "half-made").trigger()
    with pytest.raises(NotFound, match="no log there"):
        Stream(f"{tmp_path}/half*").trigger()


def test_an_idle_log_costs_one_read_of_its_head(thirty: Built) -> None:
    other = Built(thirty.root.path.parent / "other")
    other.lines("a", [b"x"])
    stream = Stream(thirty.root.path, other.root.path)
    stream.trigger()
    with opened() as paths:
        for _ in range(5):
            assert not stream.trigger()
    assert paths == [str(log.root.head) for log in (thirty, other)] * 5


_OPENED: list[list[str]] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _OPENED and event in ("open", "os.listdir", "os.scandir", "glob.glob"):
        _OPENED[-1].append(str(arguments[0]))


sys.addaudithook(_note)


@contextmanager
def opened() -> Iterator[list[str]]:
    """Yield the list of files and directories that this process opens inside the block."""
    _OPENED.append([])
    yield _OPENED[-1]
    _OPENED.pop()


def test_what_others_wrote_may_be_reclaimed_from_under_a_stream_of_one_route(thirty: Built) -> None:
    """RECLAIM checks only the cursors of routes with records in the segment."""
    stream = Stream(thirty.root.path, route="b")
    thirty.lines("b", [b"31"])
    thirty.reclaim(1)
    stream.at = Offsets({thirty.log_id.hex(): Position(0, 5)}, frozenset("b"))
    stream.trigger()
    assert stream.sequences == [31]


def test_a_route_that_no_log_has_is_reported_at_once(thirty: Built) -> None:
    with pytest.raises(NotFound, match="the data has no route 'nope'"):
        Stream(thirty.root.path, route="nope").trigger()
