"""Sealed segments: the index, zstd frame boundaries (RFC 8878), and the seek table.

The seek table follows the Zstandard Seekable Format 0.1.0, whose readers require an entry for every frame, even the
index. A segment may have a thousand routes and a backlog ten thousand segments, so tables are stored as columns.
"""

from __future__ import annotations

import json
import struct
import sys
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple, Self, TypeVar, overload

import zstandard

from wald.format.checksum import crc32c
from wald.format.log_state import Peer

_FRAME_HEADER = struct.Struct("<II")
SEEK_FOOTER = struct.Struct("<IBI")
assert SEEK_FOOTER.size == 9
_SEEK_ENTRY = struct.Struct("<II")
_SEEK_TABLE_MAGIC = 0x184D2A5E
_SEEKABLE_MAGIC = 0x8F92EAB1

INDEX_FRAME_MAGIC = 0x184D2A57
_INDEX_MAGIC = b"WALDSIX1"
_VERSION = 1
_HEADER = struct.Struct("<8sIHH16sQQQQII")
assert _HEADER.size == 72
_SECTION = struct.Struct("<16sIIII")
assert _SECTION.size == 32
_CHECKSUM_START = 12
_SECTIONS_MAX = 64
_EXPANSION_MAX = 100  # highest accepted ratio; equal batches reach 30
_EXPANSION_MIN_BYTES = 1 << 16  # smaller claimed sizes are harmless
_DIGEST_BYTES = 32
_BATCH_BYTES = 32  # in the section batches
_FRAME_COLUMNS = "QIIQQqqII"  # column types in the section frames: FrameTable without raw_offsets
assert sys.byteorder == "little"  # arrays use memory order

_ZSTD_MAGIC = (0xFD2FB528).to_bytes(4, "little")
_SKIPPABLE_MAGIC = range(0x184D2A50, 0x184D2A60)
_ZSTD_HEADER_MAX_BYTES = 18
_BLOCK_MAX_BYTES = 128 << 10
_RAW, _RLE, _COMPRESSED = range(3)
_CHECKSUM_BYTES = 4

StoredSection = tuple[bytes | memoryview, int, int]  # zstd frame, raw length, crc32c of the raw bytes
_Row = TypeVar("_Row", bound=tuple[Any, ...])


class BadSealed(ValueError):
    """Not a sealed segment, or its index or seek table is damaged."""


class BadFrame(ValueError):
    """No zstd frame at the offset, or its headers are damaged."""


class RouteEntry(NamedTuple):
    """Records of one route in a segment or part of one."""

    route: str
    count: int  # type: ignore[assignment]  # records that begin in it; 0: only pieces, or unknown
    first: int
    last: int  # last record with a piece in it
    payload_bytes: int = 0  # 0: unknown

    def plus(self, other: RouteEntry) -> RouteEntry:
        """Return the entry for both sets of batches."""
        count, payload_bytes = self.count + other.count, self.payload_bytes + other.payload_bytes
        return RouteEntry(self.route, count, min(self.first, other.first), max(self.last, other.last), payload_bytes)


class _Table(Sequence[_Row]):
    """Rows stored as columns, the fields of a subclass. Equal to any sequence of the same rows."""

    __slots__: tuple[str, ...] = ()
    __hash__ = None  # type: ignore[assignment]

    def columns(self) -> list[Sequence[Any]]:
        return [getattr(self, name) for name in self.__slots__]

    @abstractmethod
    def _row(self, number: int) -> _Row: ...

    def __len__(self) -> int:
        return len(getattr(self, self.__slots__[0]))

    @overload
    def __getitem__(self, number: int) -> _Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[_Row]: ...
    def __getitem__(self, number: int | slice) -> _Row | list[_Row]:
        numbers = range(len(self))[number]
        return self._row(numbers) if isinstance(numbers, int) else list(map(self._row, numbers))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented


@dataclass(frozen=True, slots=True, eq=False)
class RouteTable(_Table[RouteEntry]):
    """The routes of a segment, by route id."""

    names: tuple[str, ...]  # shared by consecutive segments with the same routes, so that callers can compare identity
    counts: Sequence[int]
    firsts: Sequence[int]
    lasts: Sequence[int]
    payload_bytes: Sequence[int]

    @classmethod
    def from_entries(cls, entries: Sequence[RouteEntry]) -> Self:
        return cls(*zip(*entries, strict=True)) if entries else cls((), (), (), (), ())

    def __iter__(self) -> Iterator[RouteEntry]:
        return map(RouteEntry, *self.columns())

    def _row(self, number: int) -> RouteEntry:
        return RouteEntry._make(column[number] for column in self.columns())


class Frame(NamedTuple):
    """A zstd frame of complete batches."""

    offset: int  # in the compressed file
    compressed_bytes: int
    raw_offset: int  # in the raw segment
    raw_bytes: int
    first_sequence: int  # of the records that begin in it
    next_sequence: int  # exclusive end
    earliest_ns: int  # append time; later than latest_ns if there is no batch
    latest_ns: int
    routes: tuple[int, ...]  # route ids


@dataclass(slots=True)
class BatchTable:
    """The batches of a segment, except control batches, as columns."""

    positions: array[int] = field(default_factory=lambda: array("Q"))
    bases: array[int] = field(default_factory=lambda: array("Q"))
    counts: array[int] = field(default_factory=lambda: array("I"))
    routes: array[int] = field(default_factory=lambda: array("I"))
    times_ns: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.positions)

    def columns(self) -> list[array[int]]:
        return [self.positions, self.bases, self.counts, self.routes, self.times_ns]


@dataclass(frozen=True, slots=True, eq=False)
class FrameTable(_Table[Frame]):
    """Frames of a segment."""

    offsets: Sequence[int]
    compressed_bytes: Sequence[int]
    raw_offsets: Sequence[int]
    raw_bytes: Sequence[int]
    first_sequences: Sequence[int]
    next_sequences: Sequence[int]
    earliest_ns: Sequence[int]
    latest_ns: Sequence[int]
    ends: Sequence[int]  # end of each frame's route ids in ``routes``
    routes: Sequence[int]

    @classmethod
    def from_frames(cls, frames: Sequence[Frame]) -> Self:
        columns: list[Any] = list(zip(*frames, strict=True)) or 9 * [()]
        routes = columns.pop()
        columns += [list(accumulate(map(len, routes))), list(chain.from_iterable(routes))]
        return cls(*columns)

    def _row(self, number: int) -> Frame:
        *columns, ends, routes = self.columns()
        start = ends[number - 1] if number else 0
        return Frame._make([*(column[number] for column in columns), tuple(routes[start : ends[number]])])


@dataclass(frozen=True, slots=True)
class DroppedRecords:
    """Records that shrinking dropped from a segment."""

    sha256: bytes  # before shrinking; empty if unknown
    stored_bytes: int  # before shrinking; 0 if unknown
    ranges: list[tuple[int, int]]  # sorted, maximal (first, last)
    routes: list[RouteEntry]  # incomplete if the index was rebuilt from frames, which do not show dropped routes

    @property
    def records(self) -> int:
        return sum(last - first + 1 for first, last in self.ranges)

    @property
    def is_complete(self) -> bool:
        return sum(entry.count for entry in self.routes) == self.records

    @property
    def last_by_route(self) -> dict[str, int] | None:
        """Each route's last dropped sequence; None if the routes are incomplete."""
        return {entry.route: entry.last for entry in self.routes} if self.is_complete else None


def merge_routes(routes: Iterable[RouteEntry], others: Iterable[RouteEntry]) -> list[RouteEntry]:
    """Merge two lists for different batches by route."""
    totals = {entry.route: entry for entry in routes}
    for entry in others:
        total = totals.get(entry.route)
        totals[entry.route] = entry if total is None else total.plus(entry)
    return list(totals.values())


@dataclass(frozen=True, slots=True)
class SealedIndex:
    """Decoded index. Few readers need the sections in ``stored``, so each call decompresses them."""

    log_id: bytes
    base_sequence: int
    next_sequence: int
    raw_bytes: int
    epoch: int
    salt: int
    frames: FrameTable
    routes: RouteTable
    sha256: bytes
    damage: list[tuple[int, int]]
    shrunk: DroppedRecords | None = None
    writer: int = 0
    stored: Mapping[str, StoredSection] = field(repr=False, compare=False, default_factory=dict)  # batches, peers

    def was_damaged(self, frame: Frame) -> bool:
        """Return True if the frame was damaged when sealed, even if it looks intact now."""
        return any(offset <= frame.raw_offset < offset + length for offset, length in self.damage)

    def batch_table(self) -> BatchTable:
        data = _section(self.stored, "batches")
        count, rest = divmod(len(data), _BATCH_BYTES)
        if rest:
            raise BadSealed("the length of the batches section is wrong")
        columns, _ = _read_columns(data, 0, "QQIIq", count)
        table = BatchTable(*columns)
        if max(table.routes, default=-1) >= len(self.routes):
            raise BadSealed("the batches section names a route that is not in the table")
        return table

    def peers(self) -> dict[int, Peer]:
        try:
            rows = json.loads(_section(self.stored, "peers", b"[]"))
            return {int(number): Peer(int(user), int(pid), str(process)) for number, user, pid, process in rows}
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise BadSealed(f"the peers section cannot be decoded: {error}") from error


def encode_sealed_index(index: SealedIndex, batches: BatchTable, peers: Mapping[int, Peer] | None = None) -> bytes:
    """Encode the index frame. ``batches`` and ``peers`` replace the sections in ``index.stored``."""
    frames, routes = index.frames.columns(), index.routes.columns()
    del frames[2]  # raw_offsets, the sums of raw_bytes
    sections: dict[str, Sequence[bytes | array[int]]] = {
        "frames": [
            struct.pack("<I", len(index.frames)),
            *(array(code, column) for code, column in zip(_FRAME_COLUMNS, frames, strict=True)),
        ],
        "batches": batches.columns(),
        "route names": [_to_json(routes[0])],
        "route columns": [array("Q", column) for column in routes[1:]],
        "sha256": [index.sha256],
    }
    if index.damage:
        sections["damage"] = [json.dumps(index.damage).encode()]
    if (shrunk := index.shrunk) is not None:
        original = {"sha256": shrunk.sha256.hex(), "bytes": shrunk.stored_bytes}
        sections["shrunk"] = [_to_json(original | {"dropped": shrunk.ranges, "routes": shrunk.routes})]
    if peers:
        sections["peers"] = [_to_json([(number, *peer) for number, peer in peers.items()])]
    offset = _HEADER.size + _SECTION.size * len(sections)
    directory, bodies = b"", b""
    for name, parts in sections.items():
        stored, raw_bytes, checksum = compress_section(parts)
        directory += _SECTION.pack(name.encode(), offset + len(bodies), len(stored), raw_bytes, checksum)
        bodies += stored
    fields = (index.base_sequence, index.next_sequence, index.raw_bytes, index.epoch, index.salt)
    header = _HEADER.pack(_INDEX_MAGIC, 0, _VERSION, len(sections), index.log_id, *fields, index.writer)
    checksum = crc32c(header[_CHECKSUM_START:] + directory)
    content = header[:8] + struct.pack("<I", checksum) + header[_CHECKSUM_START:] + directory + bodies
    return _FRAME_HEADER.pack(INDEX_FRAME_MAGIC, len(content)) + content


def _to_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def compress_section(parts: Sequence[bytes | array[int]]) -> StoredSection:
    """Compress a section without joining its parts, which may be large."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    raw_bytes = sum(map(len, views))
    compressor = zstandard.ZstdCompressor(level=3).compressobj(size=raw_bytes)
    checksum = 0
    for view in views:
        checksum = crc32c(view, checksum)
    return b"".join([*map(compressor.compress, views), compressor.flush()]), raw_bytes, checksum


def decode_sealed_index(frame: bytes) -> SealedIndex:
    """Decode the index frame, or raise BadSealed. Check sizes before allocating memory."""
    content = memoryview(frame)[_FRAME_HEADER.size :]
    end, log_id, base, next_sequence, raw_bytes, epoch, salt, writer = _decode_header(frame)
    sections: dict[str, StoredSection] = {}
    for name, offset, stored, raw, crc in _SECTION.iter_unpack(content[_HEADER.size : end]):
        sections[name.rstrip(b"\0").decode("ascii", "replace")] = (content[offset : offset + stored], raw, crc)
    routes = _decode_routes(sections)
    damage, shrunk = _decode_damage(sections)
    frames = _decode_frames(_section(sections, "frames"), len(routes))
    sha256 = _section(sections, "sha256")
    lazy_sections: dict[str, StoredSection] = {
        name: (bytes(sections[name][0]), *sections[name][1:]) for name in ("batches", "peers") if name in sections
    }
    if "batches" not in lazy_sections:
        raise BadSealed("the index has no section 'batches'")
    if len(sha256) != _DIGEST_BYTES:
        raise BadSealed(f"the digest has {len(sha256)} bytes, not {_DIGEST_BYTES}")
    fields = log_id, base, next_sequence, raw_bytes, epoch, salt
    return SealedIndex(*fields, frames, routes, sha256, damage, shrunk, writer, lazy_sections)


def decode_salt(frame: bytes) -> int | None:
    """Return the salt; None if the header of the index is damaged."""
    try:
        return int(_decode_header(frame)[-2])
    except BadSealed:
        return None


@dataclass(frozen=True, slots=True)
class FrameLengths:
    """Lengths of a zstd frame."""

    stored_bytes: int  # according to the headers; the file may be truncated
    raw_bytes: int  # 0 for a skippable frame

    @property
    def skippable(self) -> bool:
        return not self.raw_bytes


def read_frame_lengths(read: Callable[[int, int], bytes], offset: int) -> FrameLengths:
    """Read the lengths of a frame from its headers, without an index. ``read`` may return fewer bytes."""
    frame_header = read(offset, _ZSTD_HEADER_MAX_BYTES)
    if int.from_bytes(frame_header[:4], "little") in _SKIPPABLE_MAGIC and len(frame_header) >= 8:
        return FrameLengths(8 + int.from_bytes(frame_header[4:8], "little"), 0)
    if not frame_header.startswith(_ZSTD_MAGIC):
        raise BadFrame("no frame begins here")
    try:
        parameters = zstandard.get_frame_parameters(frame_header)
        end = offset + zstandard.frame_header_size(frame_header)
    except zstandard.ZstdError as error:
        raise BadFrame(f"the frame's header is incomplete ({error})") from error
    if parameters.content_size in (0, zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
        raise BadFrame("the frame's header has no content size")
    is_last = False
    while not is_last:
        block_header = read(end, 3)
        if len(block_header) < 3:
            raise BadFrame("the frame is truncated")
        bits = int.from_bytes(block_header, "little")
        is_last, kind, length = bool(bits & 1), bits >> 1 & 3, bits >> 3
        if kind > _COMPRESSED or length > _BLOCK_MAX_BYTES:
            raise BadFrame("a block's header is damaged")
        end += 3 + (1 if kind == _RLE else length)
    return FrameLengths(end + _CHECKSUM_BYTES * parameters.has_checksum - offset, parameters.content_size)


def encode_seek_table(frames: Sequence[tuple[int, int]]) -> bytes:
    """Encode each frame's compressed and decompressed bytes, including the index frame's."""
    body = b"".join(_SEEK_ENTRY.pack(*entry) for entry in frames)
    footer = SEEK_FOOTER.pack(len(frames), 0, _SEEKABLE_MAGIC)
    return _FRAME_HEADER.pack(_SEEK_TABLE_MAGIC, len(body) + len(footer)) + body + footer


def seek_table_bytes(footer: bytes) -> int:
    """Return the length of the seek table that ends with ``footer``."""
    if len(footer) != SEEK_FOOTER.size:
        raise BadSealed("the file is too short for a seek table")
    count, descriptor, magic = SEEK_FOOTER.unpack(footer)
    if magic != _SEEKABLE_MAGIC or descriptor != 0:
        raise BadSealed("the file does not end in a seek table: it is truncated, or wald did not seal it")
    return _FRAME_HEADER.size + int(count) * _SEEK_ENTRY.size + SEEK_FOOTER.size


def decode_seek_table(table: bytes, *, file_bytes: int) -> list[tuple[int, int]]:
    """Invert :func:`encode_seek_table`. The last entry is the index frame."""
    if len(table) < _FRAME_HEADER.size + SEEK_FOOTER.size or len(table) != seek_table_bytes(table[-SEEK_FOOTER.size :]):
        raise BadSealed("the length of the seek table is wrong")
    if _FRAME_HEADER.unpack_from(table) != (_SEEK_TABLE_MAGIC, len(table) - _FRAME_HEADER.size):
        raise BadSealed("the frame header of the seek table is invalid")
    frames = list(_SEEK_ENTRY.iter_unpack(table[_FRAME_HEADER.size : -SEEK_FOOTER.size]))
    if not frames or frames[-1][1] != 0 or sum(stored for stored, _ in frames) + len(table) != file_bytes:
        raise BadSealed("the frames in the seek table do not add up to the file: bytes are missing")
    return frames


def _decode_header(frame: bytes) -> tuple[Any, ...]:
    """Return the end of the directory, and the header fields after the number of sections."""
    content = memoryview(frame)[_FRAME_HEADER.size :]
    if len(content) < _HEADER.size or _FRAME_HEADER.unpack_from(frame) != (INDEX_FRAME_MAGIC, len(content)):
        raise BadSealed("the file has no index frame")
    magic, checksum, version, count, *fields = _HEADER.unpack_from(content)
    end = _HEADER.size + _SECTION.size * count
    if magic != _INDEX_MAGIC or count > _SECTIONS_MAX or end > len(content):
        raise BadSealed("the index frame has no valid header")
    if crc32c(content[_CHECKSUM_START:end]) != checksum:
        raise BadSealed("the index header's checksum is wrong")
    if version > _VERSION:
        raise BadSealed(f"index version {version} is newer than the {_VERSION} this program reads")
    return end, *fields


def _decode_routes(sections: dict[str, StoredSection]) -> RouteTable:
    data = _section(sections, "route columns")
    try:
        names = _decode_names(_section(sections, "route names"))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadSealed(f"the names of the routes cannot be decoded: {error}") from error
    columns, end = _read_columns(data, 0, "QQQQ", len(names))
    if end != len(data):
        raise BadSealed("the length of the route columns is wrong")
    return RouteTable(names, *columns)


@lru_cache(maxsize=1)  # see RouteTable
def _decode_names(data: bytes) -> tuple[str, ...]:
    names = json.loads(data)
    if not isinstance(names, list) or set(map(type, names)) - {str}:
        raise TypeError("they are not a list of names")
    return tuple(names)


def _decode_damage(sections: dict[str, StoredSection]) -> tuple[list[tuple[int, int]], DroppedRecords | None]:
    damage, shrunk = _section(sections, "damage", b"[]"), _section(sections, "shrunk", b"null")
    try:
        ranges, fields = _int_pairs(json.loads(damage)), json.loads(shrunk)
        if fields is None:
            return ranges, None
        names, *columns = list(zip(*fields["routes"], strict=True)) or 5 * [()]
        if set(map(type, names)) - {str} or any(set(map(type, column)) - {int} for column in columns):
            raise TypeError("the routes are not a table")
        routes, dropped = list(RouteTable(names, *columns)), _int_pairs(fields["dropped"])
        return ranges, DroppedRecords(bytes.fromhex(fields["sha256"]), int(fields["bytes"]), dropped, routes)
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadSealed(f"the section damage or shrunk cannot be decoded: {error}") from error


def _int_pairs(table: list[list[int]]) -> list[tuple[int, int]]:
    return [(int(first), int(second)) for first, second in table]


def _read_columns(data: bytes, offset: int, codes: str, count: int) -> tuple[list[array[int]], int]:
    """Read a column of ``count`` numbers for each type code; return the columns and the end offset."""
    columns = []
    for code in codes:
        column: array[int] = array(code)
        end = offset + count * column.itemsize
        if end > len(data):
            raise BadSealed("a column runs past the end of its section")
        column.frombytes(data[offset:end])
        columns.append(column)
        offset = end
    return columns, offset


def _decode_frames(data: bytes, route_count: int) -> FrameTable:
    if len(data) < 4:
        raise BadSealed("the frames section is too short")
    (count,) = struct.unpack_from("<I", data)
    columns, end = _read_columns(data, 4, _FRAME_COLUMNS[:-1], count)
    raw_bytes, ends = columns[2], columns[-1]
    (ids,), end = _read_columns(data, end, _FRAME_COLUMNS[-1], ends[-1] if ends else 0)
    if sorted(ends) != list(ends) or end != len(data) or max(ids, default=-1) >= route_count:
        raise BadSealed("the routes of the frames section are invalid")
    raw_offsets = array("Q", accumulate(raw_bytes[:-1], initial=0))
    return FrameTable(*[*columns[:2], raw_offsets, *columns[2:], ids])


def _section(sections: Mapping[str, StoredSection], name: str, default: bytes | None = None) -> bytes:
    """Decompress a section, or raise BadSealed. ``default`` replaces a missing section."""
    if name not in sections:
        if default is None:
            raise BadSealed(f"the index has no section {name!r}")
        return default
    stored, raw_bytes, crc = sections[name]
    if raw_bytes > max(len(stored) * _EXPANSION_MAX, _EXPANSION_MIN_BYTES):
        raise BadSealed(f"section {name!r} cannot expand from {len(stored)} to {raw_bytes} bytes")
    try:
        # The decompressor trusts the frame's own header when it allocates.
        if zstandard.frame_content_size(stored) != raw_bytes:
            raise BadSealed(f"the size of section {name!r} differs from the size in the directory")
        raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes)
    except zstandard.ZstdError as error:
        raise BadSealed(f"section {name!r} cannot be decompressed: {error}") from error
    if len(raw) != raw_bytes or crc32c(raw) != crc:
        raise BadSealed(f"the checksum of section {name!r} is wrong")
    return raw
