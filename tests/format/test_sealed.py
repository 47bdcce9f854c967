"""The end of a sealed segment: truncations and lies are BadSealed before they cost memory or give wrong data."""

import resource
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zstandard
from crc32c import crc32c
from damage import every_flip, every_truncation, peak_bytes
from golden.samples import BATCHES, INDEX
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.format.sealed_index import (
    INDEX_FRAME_MAGIC,
    SEEK_FOOTER,
    BadSealed,
    BatchTable,
    Frame,
    FrameTable,
    RouteEntry,
    RouteTable,
    SealedIndex,
    decode_sealed_index,
    decode_seek_table,
    encode_sealed_index,
    encode_seek_table,
    seek_table_bytes,
)

ENCODED = encode_sealed_index(INDEX, BATCHES)
U32, U64, I64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1), st.integers(-(1 << 63), (1 << 63) - 1)
HEADER_BYTES, SECTION_BYTES = 72, 32


def sections_of(frame: bytes) -> dict[str, bytes]:
    """The sections of an encoded index, decompressed."""
    content = frame[8:]
    (count,) = struct.unpack_from("<H", content, 14)
    found = {}
    for number in range(count):
        name, offset, stored, _, _ = struct.unpack_from("<16sIIII", content, HEADER_BYTES + number * SECTION_BYTES)
        raw = zstandard.ZstdDecompressor().decompress(content[offset : offset + stored])
        found[name.rstrip(b"\0").decode()] = raw
    return found


def crafted(sections: dict[str, Any], **header: int) -> bytes:
    """An index frame whose checksums hold, whatever its sections say.

    A section is bytes, or a tuple (stored bytes, claimed raw bytes, checksum).
    """
    offset = HEADER_BYTES + SECTION_BYTES * len(sections)
    directory, bodies = b"", b""
    for name, section in sections.items():
        stored, raw_bytes, checksum = (
            section
            if isinstance(section, tuple)
            else (zstandard.ZstdCompressor().compress(section), len(section), crc32c(section))
        )
        directory += struct.pack("<16sIIII", name.encode(), offset + len(bodies), len(stored), raw_bytes, checksum)
        bodies += stored
    version, count = header.get("version", 1), header.get("count", len(sections))
    fields = struct.pack("<HH16sQQQQII", version, count, bytes(16), 250, 260, header.get("raw_bytes", 1500), 3, 7, 0)
    content = b"WALDSIX1" + struct.pack("<I", crc32c(fields + directory)) + fields + directory + bodies
    return struct.pack("<II", INDEX_FRAME_MAGIC, len(content)) + content


GOOD = sections_of(ENCODED)


@contextmanager
def address_space(more_bytes: int) -> Iterator[None]:
    """Let the process take only ``more_bytes`` more: a lie that asks for more shows as MemoryError."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@st.composite
def indexes(draw: st.DrawFn) -> tuple[SealedIndex, BatchTable]:
    routes = draw(st.lists(st.builds(RouteEntry, st.text(max_size=8), U64, U64, U64, U64), min_size=1, max_size=4))
    ids = st.integers(0, len(routes) - 1)
    rows = draw(st.lists(st.tuples(U64, U32, st.integers(0, 1 << 20), U64, U64, I64, I64, st.lists(ids)), max_size=5))
    frames, raw_offset = [], 0
    for offset, stored, raw, first, following, earliest, latest, in_it in rows:
        frames.append(Frame(offset, stored, raw_offset, raw, first, following, earliest, latest, tuple(in_it)))
        raw_offset += raw
    table = BatchTable()
    for row in draw(st.lists(st.tuples(U64, U64, U32, ids, I64), max_size=10)):
        columns: list[array[int]] = [table.positions, table.bases, table.counts, table.routes, table.times_ns]
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    damage = draw(st.lists(st.tuples(U64, U64), max_size=3))
    log_id, sha256 = draw(st.binary(min_size=16, max_size=16)), draw(st.binary(min_size=32, max_size=32))
    tables = FrameTable.from_frames(frames), RouteTable.from_entries(routes)
    return SealedIndex(log_id, draw(U64), draw(U64), raw_offset, draw(U64), draw(U32), *tables, sha256, damage), table


@settings(max_examples=100, deadline=None)
@given(made=indexes())
def test_an_index_comes_back(made: tuple[SealedIndex, BatchTable]) -> None:
    index, table = made

    decoded = decode_sealed_index(encode_sealed_index(index, table))

    assert decoded == index
    assert decoded.batch_table() == table


def test_every_truncation_of_an_index_is_refused() -> None:
    for data in every_truncation(ENCODED):
        with pytest.raises(BadSealed):
            decode_sealed_index(data)


def test_every_flipped_bit_of_an_index_is_refused_or_changes_nothing() -> None:
    """All that is used lies under a checksum; bits of zstd's own that carry nothing may differ."""
    expected = decode_sealed_index(ENCODED)
    for data in every_flip(ENCODED):
        try:
            decoded = decode_sealed_index(data)
            table = decoded.batch_table()
        except BadSealed:
            continue
        assert (decoded, table) == (expected, BATCHES)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=300), behind=st.integers(0, len(ENCODED)))
def test_any_bytes_are_an_index_or_bad_sealed(data: bytes, behind: int) -> None:
    for candidate in (data, ENCODED[:behind] + data):
        try:
            decoded = decode_sealed_index(candidate)
            table = decoded.batch_table()
        except BadSealed:
            continue
        assert (decoded, table) == (decode_sealed_index(ENCODED), BATCHES)


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(sorted(GOOD)), section=st.binary(max_size=120) | st.text(max_size=40).map(str.encode))
def test_any_section_under_a_good_checksum_decodes_or_is_bad_sealed(name: str, section: bytes) -> None:
    try:
        decode_sealed_index(crafted(GOOD | {name: section})).batch_table()
    except BadSealed:
        return


def test_sections_that_are_not_known_are_passed_over() -> None:
    """A later writer may add some without a new version."""
    assert decode_sealed_index(crafted(GOOD | {"keys": b"whatever"})) == decode_sealed_index(crafted(GOOD))


ZEROS = zstandard.ZstdCompressor().compress(bytes(1 << 28))
LYING_SIZE = bytearray(zstandard.ZstdCompressor().compress(b"a" * 300_000))
LYING_SIZE[5:9] = struct.pack("<I", 0xFFFFFFF0)  # the frame's own content size, right behind magic and descriptor


def frames_section(ends: list[int], ids: list[int]) -> bytes:
    n = len(ends)
    zeros = bytes(n * (8 + 4 + 4 + 8 * 4))
    return struct.pack("<I", n) + zeros + struct.pack(f"<{n}I", *ends) + struct.pack(f"<{len(ids)}I", *ids)


def test_a_section_that_lies_is_refused_without_taking_memory() -> None:
    """All checksums hold; 64 MiB would be plenty for an index of this size."""
    for section, content in [
        ("frames", b""),
        ("frames", b"\xff\xff\xff\xff"),
        ("frames", struct.pack("<I", 0xFFFFFFFF) + bytes(600)),
        ("frames", frames_section([0xFFFFFFFF], [0])),
        ("frames", frames_section([2, 1, 2], [0, 0])),
        ("frames", frames_section([1, 1], [0, 0])),
        ("frames", frames_section([1], [2])),
        ("sha256", b"short"),
        *(("route names", names) for names in (b"[", b"[" * 100_000, b"[1]", b"null", b'["web"]', b"\xff")),
        ("route names", b'["web","db","no"]'),
        ("route columns", bytes(63)),
        ("damage", b"[1]"),
        ("damage", b"{}x"),
        ("batches", (ZEROS, 1 << 28, crc32c(bytes(1 << 28)))),
        ("batches", (bytes(LYING_SIZE), 300_000, 0)),
        ("batches", (bytes(LYING_SIZE), 0xFFFFFFF0, 0)),
        ("batches", (b"", 0, 0)),
        ("batches", (b"", 1 << 31, 0)),
        ("batches", (b"not zstd", 32, 0)),
        ("batches", bytes(31)),
        ("batches", struct.pack("<QQIIq", 64, 1, 1, 2, 0)),  # a route that is not in the table of routes
    ]:
        frame = crafted(GOOD | {section: content})
        with address_space(64 << 20), pytest.raises(BadSealed):
            decode_sealed_index(frame).batch_table()


def test_missing_sections_and_more_than_there_are_bytes_are_refused() -> None:
    for name in ("frames", "batches", "route names", "route columns", "sha256"):
        with pytest.raises(BadSealed, match=name):
            decode_sealed_index(crafted({key: section for key, section in GOOD.items() if key != name}))
    for count in (5, 64, 65, 0xFFFF):
        with pytest.raises(BadSealed):
            decode_sealed_index(crafted({}, count=count))
    with pytest.raises(BadSealed, match="version 2"):
        decode_sealed_index(crafted(GOOD, version=2))


def test_sections_that_overlap_are_not_copied_each() -> None:
    """64 entries of the directory may all point at the same megabyte."""
    noise = bytes(i * 7919 % 251 for i in range(1 << 20))
    sections: dict[str, Any] = dict(GOOD)
    frame = crafted(sections | {"noise": (noise, 0, 0)} | {f"n{i}": (b"", 0, 0) for i in range(57)})
    content = bytearray(frame[8:])
    for number in range(6, 64):
        struct.pack_into("<II", content, HEADER_BYTES + number * SECTION_BYTES + 16, 0, len(content))
    checked = bytes(content[12 : HEADER_BYTES + 64 * SECTION_BYTES])
    struct.pack_into("<I", content, 8, crc32c(checked))
    frame = frame[:8] + bytes(content)

    assert decode_sealed_index(frame).routes == INDEX.routes
    assert peak_bytes(lambda: decode_sealed_index(frame)) < 1 << 20


@settings(max_examples=100, deadline=None)
@given(frames=st.lists(st.tuples(U32, U32), max_size=20), index_bytes=U32)
def test_a_seek_table_comes_back(frames: list[tuple[int, int]], index_bytes: int) -> None:
    listed = [*frames, (index_bytes, 0)]
    table = encode_seek_table(listed)
    file_bytes = sum(stored for stored, _ in listed) + len(table)

    assert seek_table_bytes(table[-SEEK_FOOTER.size :]) == len(table)
    assert decode_seek_table(table, file_bytes=file_bytes) == listed
    with pytest.raises(BadSealed):
        decode_seek_table(table, file_bytes=file_bytes - 1)


def test_every_truncation_and_every_flip_of_a_seek_table_is_seen() -> None:
    """If a flip changes the decompressed bytes, the index disagrees: see the tests of sealed files."""
    table = encode_seek_table([(400, 1000), (300, 500), (250, 0)])
    for data in every_truncation(table):
        with pytest.raises(BadSealed):
            decode_seek_table(data, file_bytes=950 + len(table))
    for data in every_flip(table):
        try:
            decoded = decode_seek_table(data, file_bytes=950 + len(table))
        except BadSealed:
            continue
        assert [stored for stored, _ in decoded] == [400, 300, 250]


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=60), file_bytes=U32)
def test_any_bytes_are_a_seek_table_or_bad_sealed(data: bytes, file_bytes: int) -> None:
    with pytest.raises(BadSealed):
        decode_seek_table(data, file_bytes=file_bytes)


def test_a_lying_frame_count_is_only_a_number() -> None:
    """The length is reported, not allocated; the reader compares it with the file first."""
    footer = SEEK_FOOTER.pack(0xFFFFFFFF, 0, 0x8F92EAB1)

    assert seek_table_bytes(footer) == 8 + 0xFFFFFFFF * 8 + 9
    with pytest.raises(BadSealed):
        decode_seek_table(bytes(8) + footer, file_bytes=1 << 40)
