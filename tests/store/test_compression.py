"""Sealed files give back the raw segment, byte for byte, or say that they cannot, and then every whole batch."""

import hashlib
import itertools
import os
import random
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import pyzstd
import zstandard
from bombs import GIB, MEMORY_MAX_BYTES, MIB, ZEROS, run
from damage import every_flip, every_truncation, flipped, peak_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Built
from sample_segments import SALT, TIME_NS, batch, control_batch, joined, moved, segment, segment_header

from wald.checking.checker import Level
from wald.checking.verifier import verify
from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.listing import Segment
from wald.format import records
from wald.format.batch import Encoding, Flag, ParseOutcome, parse_batch, seed
from wald.format.log_state import LogState
from wald.format.names import Kind
from wald.format.sealed_index import BadSealed, Frame, FrameTable, SealedIndex, encode_sealed_index, encode_seek_table
from wald.retention.blockers import sealed_index
from wald.segments.raw_scan import FIRST_BATCH, DamagedBytes, RawFile, ScannedBatch
from wald.segments.salvage import SalvagedSegment
from wald.segments.sealed_file import FRAME_BYTES, CompressedSegment, SealedFile, compress_segment
from wald.segments.view import open_segment

LINE = b"2024-05-01T12:00:00Z web-3 GET /index.html 200\r\n"


def compress(folder: Path, raw: bytes, *, frame_bytes: int = FRAME_BYTES) -> tuple[Path, CompressedSegment]:
    """The sealed file of a raw segment with this content."""
    (folder / "raw").write_bytes(raw)
    return _compress_file(folder / "raw", frame_bytes=frame_bytes)


def _compress_file(raw: Path, *, frame_bytes: int = FRAME_BYTES) -> tuple[Path, CompressedSegment]:
    sealed = raw.with_name("sealed.zst")
    sealed.unlink(missing_ok=True)
    disk = Disk()
    target = disk.create(sealed)
    try:
        with raw.open("rb") as source:
            return sealed, compress_segment(source.fileno(), target, disk, frame_bytes=frame_bytes)
    finally:
        disk.close(target)


def raw_segment(*batches: bytes, base: int = 1) -> bytes:
    """A raw segment of these batches behind its control batch."""
    return segment_header(base) + joined([control_batch(LogState(base)), *batches])


def decompressed(path: Path) -> bytes:
    """Decompress a file with the zstd program."""
    return subprocess.run(["zstd", "-dcq", path], check=True, capture_output=True).stdout


def everything(path: Path) -> tuple[SealedIndex, bytes]:
    """The index and the raw bytes, as our own reader gives them; the batch table has been looked at too."""
    with SealedFile(path) as sealed:
        try:
            sealed.index.batch_table()
        except BadSealed as error:
            raise Damaged(f"{path}: offset 0: {error}") from error
        return sealed.index, b"".join(sealed.frame(number) for number in range(len(sealed.index.frames)))


def many_batches() -> bytes:
    """Small and large batches, lines and columns, three routes: several frames."""
    batches, base = [], 1
    for number, lines in enumerate([1, 3, 20_000, 1, 1, 40_000, 12_000, 12_000, 2]):
        batches.append(batch(LINE * lines, base=base, route=[b"web", b"db", b"a" * 127][number % 3]))
        base += lines
    payload = records.encode_columns([b"\0\xff", b"", b"\n"], keys=[b"k", None, b""], times_ns=[1, 2, 3])
    batches.append(batch(payload, base=base, count=3, encoding=Encoding.COLUMNS))
    return raw_segment(*batches)


def test_zstd_and_pyzstd_give_back_the_raw_segment_without_preallocated_zeros(tmp_path: Path) -> None:
    """They know nothing of us; another implementation of the seekable format accepts our seek table."""
    raw = many_batches()
    path, compressed = compress(tmp_path, raw + bytes(3 << 20))
    assert len(compressed.index.frames) > 3
    assert (decompressed(path), compressed.gaps) == (raw, [])
    index, data = everything(path)
    assert data == raw
    assert index.sha256 == hashlib.sha256(raw).digest()
    assert index.raw_bytes == len(raw)
    assert compressed.stored_bytes == path.stat().st_size
    with pyzstd.SeekableZstdFile(path) as file:
        assert file.seek(0, os.SEEK_END) == len(raw)
        for frame in reversed(compressed.index.frames):
            position = frame.raw_offset + frame.raw_bytes // 2
            file.seek(position)
            assert file.read(100) == raw[position : position + 100]
    assert_whole_batches(path)


def assert_whole_batches(path: Path) -> None:
    """Check that a frame holds whole batches of about a mebibyte."""
    with SealedFile(path) as sealed:
        for number, frame in enumerate(sealed.index.frames):
            data, at, batches = sealed.frame(number), FIRST_BATCH if number == 0 else 0, 0
            while at < len(data):
                found = parse_batch(data, at, seed(SALT, frame.raw_offset + at))
                assert found.outcome is ParseOutcome.WHOLE
                assert found.header is not None
                at += found.header.total_bytes
                batches += 1
            assert len(data) == frame.raw_bytes
            assert batches == 1 or len(data) <= FRAME_BYTES
        pairs = itertools.pairwise(sealed.index.frames)
        assert all(one.raw_bytes + two.raw_bytes > FRAME_BYTES for one, two in pairs), "frames that would have fitted"


batches_of_routes = st.lists(
    st.tuples(st.sampled_from([b"web", b"db", b"q"]), st.integers(1, 4), st.integers(0, 300)), max_size=40
)


@settings(max_examples=40, deadline=None)
@given(batches_of_routes, st.integers(64, 1500))
def test_the_index_says_what_a_scan_finds(batches: Sequence[tuple[bytes, int, int]], frame_bytes: int) -> None:
    """Frames, routes and the batch table agree with the slow, separate scan of the raw segment."""
    parts, base = [], 7
    for route, count, width in batches:
        parts.append(batch((b"x" * width + b"\n") * count, base=base, route=route, append_time_ns=TIME_NS + base))
        base += count
    with TemporaryDirectory() as folder:
        path, _ = compress(Path(folder), raw_segment(*parts, base=7), frame_bytes=frame_bytes)
        with (Path(folder) / "raw").open("rb") as file:
            scanned = [
                found for found in RawFile(file.fileno()).scan() if isinstance(found, ScannedBatch) and found.route
            ]
        index, _ = everything(path)
    names = [entry.route for entry in index.routes]
    assert index.next_sequence == base
    for frame in index.frames:
        inside = [s for s in scanned if frame.raw_offset <= s.offset < frame.raw_offset + frame.raw_bytes]
        sequences = [n for s in inside for n in range(s.header.base_sequence, s.header.end_sequence)]
        assert list(range(frame.first_sequence, frame.next_sequence)) == sequences
        assert {names[number] for number in frame.routes} == {s.route for s in inside}
        times = [s.header.append_time_ns for s in inside]
        if times:
            assert (frame.earliest_ns, frame.latest_ns) == (times[0], times[-1])
        else:
            assert frame.earliest_ns > frame.latest_ns
    assert sorted(names) == sorted({s.route for s in scanned})
    for entry in index.routes:
        headers = [s.header for s in scanned if s.route == entry.route]
        assert entry.count == sum(header.count for header in headers)
        assert (entry.first, entry.last) == (headers[0].base_sequence, headers[-1].end_sequence - 1)
        assert entry.payload_bytes == sum(header.payload_bytes for header in headers)
    table = index.batch_table()
    assert list(zip(table.positions, table.bases, table.counts, table.times_ns, strict=True)) == [
        (s.offset, s.header.base_sequence, s.header.count, s.header.append_time_ns) for s in scanned
    ]
    assert [names[number] for number in table.routes] == [s.route for s in scanned]


def test_a_held_piece_counts_for_the_last_sequence_of_its_route(tmp_path: Path) -> None:
    """Record 4 began in an older segment and ends here; record 7 begins here and ends in the next segment."""
    pieces = [
        batch(b"x" * 500, base=5, count=0, flags=Flag.CONTINUES | Flag.CONTINUED, producer_sequence=4),
        batch(b"other\n", base=5, route=b"db"),
        batch(b"y\nz\n", base=6, count=1, flags=Flag.CONTINUES, producer_sequence=4),
        batch(b"begin", base=7, count=1, flags=Flag.CONTINUED),
        batch(b"x" * 500, base=8, count=0, flags=Flag.CONTINUES | Flag.CONTINUED, producer_sequence=7),
    ]
    path, _ = compress(tmp_path, raw_segment(*pieces, base=5), frame_bytes=230)
    index, _ = everything(path)
    assert [(r.route, r.count, r.first, r.last) for r in index.routes] == [("db", 1, 5, 5), ("web", 2, 6, 7)]
    assert [(frame.first_sequence, frame.next_sequence, frame.routes) for frame in index.frames][1:] == [
        (5, 5, (1,)),
        (5, 7, (0, 1)),
        (7, 8, (1,)),
        (8, 8, (1,)),
    ]

    only_pieces = raw_segment(pieces[0], pieces[1], base=5)
    index, _ = everything(compress(tmp_path, only_pieces)[0])
    assert [(r.route, r.count, r.first, r.last) for r in index.routes] == [("db", 1, 5, 5), ("web", 0, 4, 4)]


def test_much_damage_takes_several_frames(tmp_path: Path) -> None:
    """Damaged bytes need no more memory than good ones."""
    garbage = bytes(range(1, 256)) * 10_000
    raw = raw_segment(batch(b"one\n"), garbage + bytes(-len(garbage) % 8), batch(b"two\n", base=2))
    path, compressed = compress(tmp_path, raw)
    index, data = everything(path)
    assert data == raw
    assert max(frame.raw_bytes for frame in index.frames) <= FRAME_BYTES
    assert len(index.frames) == 5
    assert len(compressed.gaps) == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(224, 2000), min_size=1, max_size=4), st.integers(64, 1500))
def test_sealing_believes_what_the_scan_believes(bad_bytes: Sequence[int], frame_bytes: int) -> None:
    """The fast path distinguishes batches and damage as the scan does."""
    raw, offsets = segment([b"x" * (7 * n % 90) + b"\n" for n in range(16)])
    bad = bytearray(raw)
    for position in bad_bytes:
        bad[position % len(bad) if position % len(bad) >= FIRST_BATCH else offsets[-1]] ^= 0x10
    assert_sealed_as_scanned(bytes(bad), frame_bytes=frame_bytes)


def test_sealing_believes_an_odd_batch_if_the_scan_does() -> None:
    """Every checksum holds, but the fields are implausible."""
    for odd in [
        batch(base=2, encoding=3),
        batch(base=2, encoding=Encoding.CONTROL),
        batch(base=2, flags=Flag.CONTROL),
        batch(base=2, count=100),
        batch(base=2, route=b"r" * 128),
        batch(base=1),
        batch(base=1 << 40),
        batch(b"x" * 40 + batch(base=5), base=2, count=0),
        bytes(80) + batch(base=1 << 40),
        b"x" * 80 + batch(base=3, append_time_ns=0),
    ]:
        gaps = assert_sealed_as_scanned(raw_segment(batch(b"one\n"), odd, batch(b"last\n", base=4)), frame_bytes=4096)
        assert len(gaps) <= 1


def assert_sealed_as_scanned(raw: bytes, *, frame_bytes: int) -> list[DamagedBytes]:
    """Nothing is lost, and batches and damage are those of the scan."""
    with TemporaryDirectory() as folder:
        path, compressed = compress(Path(folder), raw, frame_bytes=frame_bytes)
        with (Path(folder) / "raw").open("rb") as file:
            gaps, positions = [], []
            for found in RawFile(file.fileno()).scan():
                if isinstance(found, DamagedBytes):
                    gaps.append(found)
                elif isinstance(found, ScannedBatch):
                    positions += [found.offset] if found.route else []
                elif found.garbage_bytes:
                    gaps.append(DamagedBytes(found.offset, len(raw) - found.offset, found.reason))
        index, data = everything(path)
    assert data == raw
    assert compressed.gaps == gaps
    assert list(index.batch_table().positions) == positions
    return gaps


def test_memory_does_not_grow_with_the_segment(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    payload = (LINE * 20_000)[: 512 * 1024 - 1] + b"\n"
    count = payload.count(b"\n")
    with path.open("wb") as file:
        file.write(raw_segment())
        for number in range(24):
            file.write(moved(batch(payload, base=1 + number * count), file.tell()))
    assert peak_bytes(lambda: _compress_file(path)) < 6 << 20
    with SealedFile(tmp_path / "sealed.zst") as sealed:
        assert (
            peak_bytes(lambda: [sealed.frame(number) and None for number in range(len(sealed.index.frames))]) < 3 << 20
        )


def small_file(folder: Path) -> tuple[bytes, SealedIndex, bytes]:
    """A sealed file of three frames, its index and its raw bytes."""
    raw, _ = segment([b"one\ntwo\n", b"three\n" * 30, b"four\n"])
    path, _ = compress(folder, raw, frame_bytes=320)
    index, data = everything(path)
    assert len(index.frames) == 3
    assert data == raw
    return path.read_bytes(), index, raw


def test_truncation_at_any_byte_is_reported(tmp_path: Path) -> None:
    """The trap of the zstd packages: a truncated file reads short without an error."""
    stored, _, _ = small_file(tmp_path)
    path = tmp_path / "cut.zst"
    for cut in every_truncation(stored):
        path.write_bytes(cut)
        with pytest.raises(Damaged, match=r"cut\.zst: offset \d+: "):
            SealedFile(path)


@pytest.mark.slow
def test_no_bit_flip_gives_wrong_data(tmp_path: Path) -> None:
    """Each is reported, or is in a bit that means nothing and changes nothing."""
    stored, index, raw = small_file(tmp_path)
    path = tmp_path / "flipped.zst"
    harmless, messages = 0, []
    for changed in every_flip(stored):
        path.write_bytes(changed)
        try:
            found, data = everything(path)
        except Damaged as error:
            messages.append(error.message)
        else:
            assert data == raw
            assert found == index
            harmless += 1
    assert all(f"{path}: offset " in message for message in messages)
    assert harmless < len(stored) // 8


def test_a_frame_without_its_checksum_is_reported(tmp_path: Path) -> None:
    """One bit of a frame's header turns the check off; four bytes too many give it away."""
    stored, index, _ = small_file(tmp_path)
    path = tmp_path / "unchecked.zst"
    for number, frame in enumerate(index.frames):
        path.write_bytes(flipped(stored, 8 * (frame.offset + 4) + 2))
        with SealedFile(path) as sealed, pytest.raises(Damaged):
            sealed.frame(number)


def test_an_index_with_other_places_is_reported(tmp_path: Path) -> None:
    """Its checksums hold: it was written wrong."""
    stored, index, _ = small_file(tmp_path)
    end = index.frames[-1].offset + index.frames[-1].compressed_bytes
    wrong = replace(
        index, frames=FrameTable.from_frames([frame._replace(offset=frame.offset + 1) for frame in index.frames])
    )
    index_frame = encode_sealed_index(wrong, index.batch_table())
    sizes = [(frame.compressed_bytes, frame.raw_bytes) for frame in index.frames]
    path = tmp_path / "wrong.zst"
    path.write_bytes(stored[:end] + index_frame + encode_seek_table([*sizes, (len(index_frame), 0)]))
    with pytest.raises(Damaged, match="wrong frame offsets"):
        SealedFile(path)


def test_a_seek_table_of_another_file_is_reported(tmp_path: Path) -> None:
    """Same length, same sum, other frames."""
    stored, index, _ = small_file(tmp_path)
    body = bytearray(stored)
    table = len(stored) - 9 - 8 * (len(index.frames) + 1)
    body[table : table + 16] = body[table + 8 : table + 16] + body[table : table + 8]
    path = tmp_path / "other.zst"
    path.write_bytes(body)
    with pytest.raises(Damaged, match="contradicts the index"):
        SealedFile(path)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda data: data + (b"\x01\0\0\0\0\xb1\xea\x92\x8f")))
def test_any_other_file_is_reported(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "any.zst"
        path.write_bytes(data)
        with pytest.raises(Damaged):
            SealedFile(path)


def test_a_file_that_does_not_open_leaves_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "bad.zst"
    path.write_bytes(b"nothing")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(Damaged):
            SealedFile(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_sealing_a_long_batch_takes_no_memory_for_it(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(raw_segment(batch(LINE * 300_000)))
    assert path.stat().st_size > 10 << 20
    assert peak_bytes(lambda: _compress_file(path)) < 6 << 20
    with SealedFile(tmp_path / "sealed.zst") as sealed:
        assert peak_bytes(sealed.sha256) < 4 << 20


def plant(path: Path, raw_bytes: int) -> None:
    """Give a sealed segment another frame of ``length`` zeros, and an index that lists it."""
    with SealedFile(path) as file:
        index, batches = file.index, file.index.batch_table()
    last = index.frames[-1]
    end = last.offset + last.compressed_bytes
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=raw_bytes)
    pieces = [compressor.compress(ZEROS[: min(MIB, raw_bytes - at)]) for at in range(0, raw_bytes, MIB)]
    frame = b"".join([*pieces, compressor.flush()])
    more = Frame(end, len(frame), index.raw_bytes, raw_bytes, index.next_sequence, 1000, 0, 1 << 62, (0,))
    index = replace(
        index,
        frames=FrameTable.from_frames([*index.frames, more]),
        raw_bytes=index.raw_bytes + raw_bytes,
        next_sequence=1000,
    )
    section = encode_sealed_index(index, batches)
    sizes = [(each.compressed_bytes, each.raw_bytes) for each in index.frames]
    path.write_bytes(path.read_bytes()[:end] + frame + section + encode_seek_table([*sizes, (len(section), 0)]))
    assert path.stat().st_size < 200 << 10


def test_a_frame_of_a_gigabyte_is_not_expanded(tmp_path: Path) -> None:
    """Only a batch may have a frame of more than about 1 MiB, and a batch has a maximum size."""
    root = tmp_path / "log"
    built = Built(root)
    built.lines("a", [b"one", b"two"])
    built.cut(seal=True)
    path = built.path(1, Kind.SEALED)
    plant(path, GIB)

    for arguments in (("inspect", "--content", path), ("verify", "--root", root), ("read", "a", "--root", root)):
        _, reported, memory = run("wald", *arguments)
        assert "Traceback" not in reported
        assert memory < MEMORY_MAX_BYTES, arguments
        assert "claims" in reported or arguments[0] == "read", reported


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
