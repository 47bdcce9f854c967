"""A sealed segment with a damaged index or seek table, or cut short, gives every batch that is whole."""

import random
from pathlib import Path

import pytest
import zstandard
from damage import flipped, peak_bytes
from logs import Built

from wald.checking.checker import Level
from wald.checking.verifier import verify
from wald.errors import Damaged
from wald.files.listing import Segment
from wald.format.names import Kind
from wald.retention.blockers import sealed_index
from wald.segments.salvage import SalvagedSegment
from wald.segments.sealed_file import FRAME_BYTES, SealedFile
from wald.segments.view import open_segment

RECORDS = 12


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Twelve records of a third of a frame in a sealed segment, three in a frame, and one in the active segment."""
    chance = random.Random(1)
    built = Built(tmp_path / "root", segment_max_bytes=64 << 20)
    for number in range(RECORDS):
        built.lines("ab"[number % 2], [chance.randbytes(FRAME_BYTES // 7).hex().encode()])
    built.cut(seal=True)
    built.lines("a", [b"last"])
    return built


def sealed(built: Built) -> Path:
    return built.path(1, Kind.SEALED)


def read(built: Built) -> tuple[list[int], list[str]]:
    """Return the sequences read, after a check of their contents, and the reports."""
    reported: list[str] = []
    records = list(built.log.records(on_damage=lambda error: reported.append(error.message)))
    return [record.sequence for record in records], reported


def parts(path: Path) -> tuple[list[tuple[int, int]], int]:
    """Return each frame's start and end, and the start of the index."""
    with SealedFile(path) as file:
        spans = [(frame.offset, frame.offset + frame.compressed_bytes) for frame in file.index.frames]
    return spans, spans[-1][1]


def errors(built: Built) -> list[str]:
    return [f"{f.path.name} {f.message}" for f in verify(built.root) if f.level is Level.ERROR]


def test_a_flipped_bit_in_index_or_seek_table_loses_nothing(built: Built) -> None:
    path = sealed(built)
    whole, (_, index) = path.read_bytes(), parts(path)
    places = random.Random(2).sample(range(8 * index, 8 * len(whole)), 30)
    places += [8 * index + 1, 8 * (len(whole) - 1), 8 * (len(whole) - 9), 8 * (index + 8)]
    reported = 0
    for bit in places:
        path.write_bytes(flipped(whole, bit))
        assert read(built) == ([*range(1, RECORDS + 2)], [])
        reported += isinstance(open_segment(Segment(1, Kind.SEALED, path), built.log_id), SalvagedSegment)
        assert [record.sequence for record in built.log.records("b", 4)] == [*range(4, RECORDS + 1, 2)]
        assert next(built.log.records(start=RECORDS)).sequence == RECORDS
        assert built.log.where(5).segment == path.name
    assert reported > 10, "many bits of an index matter"


def test_cut_short_anywhere_it_gives_what_is_in_front(built: Built) -> None:
    """Every batch of which all bytes are there but for the last block, and never one too many."""
    path = sealed(built)
    whole, (spans, index) = path.read_bytes(), parts(path)
    cuts = [0, 1, 17, index - 1, index, index + 1, index + 100, len(whole) - 1]
    cuts += [place for begin, end in spans for place in (begin + 5, (begin + end) // 2, end - 1, end)]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        found, reported = read(built)
        frames = sum(end <= cut for _, end in spans)
        inside = [*range(1, min(RECORDS, 3 * frames) + 1)]
        assert found[-1] == RECORDS + 1
        assert found[: len(inside)] == inside
        assert found == [*range(1, len(found)), RECORDS + 1]
        if len(found) <= RECORDS:
            assert len(reported) == 1
            assert path.name in reported[0]
            first = len(found)
            span = f"record {first}" if first == RECORDS else f"records {first} to {RECORDS}"
            assert f"{span} cannot be read" in reported[0]
        else:
            assert reported == []
        assert any(path.name in error for error in errors(built))


def test_a_damaged_frame_and_a_damaged_index_lose_that_frame_at_most(built: Built) -> None:
    """If a frame's header is hit, the seek table gives the start of the next frame."""
    path = sealed(built)
    whole, (spans, index) = bytearray(path.read_bytes()), parts(path)
    whole[index + 80] ^= 1
    path.write_bytes(whole)
    assert [error.split()[0] for error in errors(built)] == [path.name]
    with pytest.raises(Damaged):  # so RECLAIM cannot know what it holds
        sealed_index(Segment(1, Kind.SEALED, path), built.log_id)
    for frame, place in [(0, 0), (0, 9), (1, 4), (1, 300_000), (2, 5), (2, 11), (3, 0), (3, 300_000)]:
        data = bytearray(whole)
        data[spans[frame][0] + place] ^= 0x81
        path.write_bytes(data)
        found, reported = read(built)
        lost = set(range(1, RECORDS + 2)) - set(found)
        assert lost <= set(range(3 * frame + 1, 3 * frame + 4))
        assert bool(lost) == bool(reported)
        assert found == sorted(found)
    whole[spans[0][0] : spans[0][0] + 64] = bytes(64)  # with the segment header
    path.write_bytes(whole)
    assert read(built)[0] == [*range(4, RECORDS + 2)]


def test_memory_is_that_of_a_frame_even_if_one_claims_to_be_huge(built: Built) -> None:
    path = sealed(built)
    whole, (_, index) = path.read_bytes(), parts(path)
    path.write_bytes(flipped(whole, 8 * (index + 80)))
    assert peak_bytes(lambda: sum(1 for _ in built.log.batches())) < 8 * FRAME_BYTES
    bomb = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(bytes(64 << 20))
    path.write_bytes(bomb + whole[:-1])
    assert peak_bytes(lambda: read(built)) < 16 * FRAME_BYTES
    assert read(built)[0][-1] == RECORDS + 1
