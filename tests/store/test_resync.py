"""Resynchronisation after damage: only positions in the sparse index, the head and the end of the data are trusted."""

from __future__ import annotations

from pathlib import Path

import pytest
from logs import Built

from wald.errors import Damaged
from wald.format.names import Kind
from wald.format.segment import SEGMENT_HEADER, SPARSE_INTERVAL_BYTES, encode_sparse_entry
from wald.segments.index_builder import find_index
from wald.segments.raw_scan import RawFile, ScannedBatch

SECTOR = 512
LINE = b"x" * 80
COUNT = 2000


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Batches of one record of about 170 bytes each: a sector holds three, and the sparse index has five entries."""
    built = Built(tmp_path, segment_max_bytes=1 << 20)
    for number in range(COUNT):
        built.lines("a", [b"%d " % number + LINE])
    return built


def batches(built: Built) -> list[ScannedBatch]:
    with built.path(1, Kind.RAW).open("rb") as file:
        return [found for found in RawFile(file.fileno()).scan() if isinstance(found, ScannedBatch)][1:]


def lose(built: Built, *offsets: int) -> set[int]:
    """Zero the sectors that hold these offsets; returns the records that are hit."""
    met = batches(built)
    path = built.path(1, Kind.RAW)
    data = bytearray(path.read_bytes())
    hit = set()
    for offset in offsets:
        begin = offset // SECTOR * SECTOR
        data[begin : begin + SECTOR] = bytes(SECTOR)
        hit |= {each.header.base_sequence for each in met if each.offset < begin + SECTOR and begin < each.end}
    path.write_bytes(data)
    return hit


def missing(built: Built) -> set[int]:
    reported: list[Damaged] = []
    found = {record.sequence for record in built.log.records("a", on_damage=reported.append)}
    assert reported
    return set(range(1, COUNT + 1)) - found


@pytest.mark.parametrize("places", [(200,), (10, 1990), (3, 500, 1000, 1500, 1990)])
def test_lost_sectors_cost_the_records_they_hit(built: Built, places: tuple[int, ...]) -> None:
    met = batches(built)
    hit = lose(built, *(met[place - 1].offset for place in places))
    assert missing(built) == hit
    built.cut()
    built.seal()
    assert missing(built) == hit


def test_without_a_sparse_index_only_what_is_between_two_lost_sectors_is_not_believed(built: Built) -> None:
    """Bytes between two lost sectors may be a payload that looks like batches; the index entries bound the loss."""
    index = built.path(1, Kind.INDEX)
    kept, reported = index.read_bytes(), find_index(index.parent, built.log_id, 1)
    assert len(reported.entries) == built.writer.position // SPARSE_INTERVAL_BYTES
    index.unlink()
    met = batches(built)
    hit = lose(built, met[499].offset)
    assert missing(built) == hit
    hit |= lose(built, met[1499].offset)
    between = set(range(500, 1500))
    assert missing(built) == hit | between
    for wrong in ((1, 0, 0), (0, 8, 0), (0, 0, 1)):  # an entry counts only if such a batch is there
        lies = (
            encode_sparse_entry(sequence + wrong[0], position + wrong[1], time_ns + wrong[2])
            for sequence, position, time_ns in reported.entries
        )
        index.write_bytes(kept[: SEGMENT_HEADER.size] + b"".join(lies))
        assert missing(built) == hit | between
    index.write_bytes(kept)
    assert missing(built) == hit
