"""Sparse indexes: a hint that is right when it is there, and missing rather than wrong when anything goes wrong."""

from __future__ import annotations

import itertools
import os
import resource
from contextlib import closing
from pathlib import Path

import pytest
from damage import every_truncation
from sample_segments import LOG_ID, TIME_NS, segment

from wald.files.listing import Segment
from wald.format.names import Kind, segment_name
from wald.format.segment import SPARSE_INTERVAL_BYTES, SegmentHeader, SparseIndex
from wald.segments.index_builder import SparseIndexWriter, find_index
from wald.segments.raw_scan import RawFile, ScannedBatch
from wald.segments.reader import RawSegment

HEADER = SegmentHeader(LOG_ID, 7, 3, TIME_NS, 7)


def scanned(raw: Path) -> list[ScannedBatch]:
    """The batches of records in a raw segment."""
    with raw.open("rb") as file:
        found = RawFile(file.fileno()).scan()
        return [batch for batch in found if isinstance(batch, ScannedBatch) and not batch.header.is_control]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A raw segment of some 600 KB in batches of 1 to 40 KB."""
    payloads = [b"a line of some bytes\n" * (50 + 1900 * (number % 7 == 0)) for number in range(100)]
    path = tmp_path / segment_name(7, Kind.RAW)
    path.write_bytes(segment(payloads, base=7)[0])
    return path


@pytest.fixture
def index(raw: Path) -> Path:
    """The index a writer makes of it."""
    path = raw.with_name(segment_name(7, Kind.INDEX))
    writer = SparseIndexWriter(path, HEADER)
    for batch in scanned(raw):
        writer.add(batch.header.base_sequence, batch.offset, batch.header.append_time_ns)
    writer.close()
    return path


def test_every_record_is_found_at_or_behind_the_place_the_index_names(raw: Path, index: Path) -> None:
    """Entries are at least an interval apart: the index of any segment stays small, and a seek scans little."""
    positions = [position for _, position, _ in find_index(index.parent, LOG_ID, 7).entries]
    assert len(positions) > 5
    largest = max(batch.header.total_bytes for batch in scanned(raw))
    distances = [after - before for before, after in itertools.pairwise(positions)]
    assert all(SPARSE_INTERVAL_BYTES <= distance < SPARSE_INTERVAL_BYTES + largest for distance in distances)
    with closing(RawSegment(Segment(7, Kind.RAW, raw), LOG_ID)) as opened:
        for batch in scanned(raw):
            header = batch.header
            for find, wanted in (
                (opened.position_of_sequence, header.base_sequence),
                (opened.position_of_sequence, header.end_sequence - 1),
                (opened.position_of_time, header.append_time_ns),
            ):
                place = find(wanted, None)
                assert place in {64, *positions}
                assert place <= batch.offset < place + 3 * SPARSE_INTERVAL_BYTES
                assert place == 64 or find(wanted, place) < place
    index.unlink()
    with closing(RawSegment(Segment(7, Kind.RAW, raw), LOG_ID)) as opened:
        assert (opened.position_of_sequence(999, None), opened.position_of_time(TIME_NS + 999, None)) == (64, 64)


def test_an_index_that_cannot_be_written_stops_nobody() -> None:
    """A full disk fails the append itself, where it matters."""
    before = len(os.listdir("/proc/self/fd"))
    for path in ("/dev/full", "/nowhere/at/all.idx"):
        writer = SparseIndexWriter(Path(path), HEADER)
        writer.add(8, 1 << 20, TIME_NS)
        writer.add(9, 2 << 20, TIME_NS)
        writer.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_is_written_behind_half_an_entry(tmp_path: Path) -> None:
    """A file size limit makes the kernel write a part, as a full disk does; then there is room again."""
    path = tmp_path / segment_name(7, Kind.INDEX)
    writer = SparseIndexWriter(path, HEADER)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 + 32 + 10, hard))
    try:
        writer.add(8, 1 << 20, TIME_NS)
        writer.add(9, 2 << 20, TIME_NS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.add(10, 3 << 20, TIME_NS)
    writer.close()
    assert path.stat().st_size == 64 + 32 + 10
    assert find_index(path.parent, LOG_ID, 7) == SparseIndex([(8, 1 << 20, TIME_NS)], HEADER.salt)


def test_a_truncated_index_is_a_shorter_one(index: Path) -> None:
    """It is not synced: after a power cut any part of it may be missing."""
    whole = find_index(index.parent, LOG_ID, 7)
    for cut in every_truncation(index.read_bytes()):
        index.write_bytes(cut)
        read = find_index(index.parent, LOG_ID, 7)
        assert read.salt == (None if len(cut) < 64 else HEADER.salt)
        entries = max(0, len(cut) - 64) // 32
        assert read.entries == whole.entries[:entries]


def test_no_index_and_that_of_another_segment_are_none(index: Path) -> None:
    assert find_index(index.parent, LOG_ID, 8) == SparseIndex()
    assert find_index(index.parent, bytes(16), 7) == SparseIndex()
    index.rename(index.with_name(segment_name(8, Kind.INDEX)))
    assert find_index(index.parent, LOG_ID, 8) == SparseIndex()
    index.write_bytes(b"\0" * 4096)
    assert find_index(index.parent, LOG_ID, 7) == SparseIndex()
    index.unlink()
    index.mkdir()
    assert find_index(index.parent, LOG_ID, 7) == SparseIndex()
