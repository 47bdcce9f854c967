"""Index of a sealed segment: batch table, routes, and what was dropped.

The tables of a sealed segment's index, as columns: a row is made only where one is asked for.

A segment may have a thousand routes, and a backlog ten thousand segments. What looks at all of them does so column by
column, without a step of Python for each row.

What relief has dropped from a sealed segment, as the section ``relieved`` of its index says it.

{"sha256": …, "bytes": …,            of the raw segment, and of the file, as they were sealed
 "dropped": [[first, last], …],      each run of dropped records
 "routes": […]}                      of the dropped records: [route, count, first, last, payload bytes]

The index of a sealed segment.

A ``.wal.zst`` is a run of independent zstd frames (RFC 8878), each with about 1 MiB of whole batches; the first begins
with the segment header. A skippable frame with the index follows, and then the seek table
(at the end of this module).

    index frame   u32 0x184D2A57, u32 content length, content
    content       header, directory, sections
    header        72 bytes: magic WALDSIX1 (8), crc32c of the rest of the header and of the directory (4), version u16,
                  number of sections u16, log id (16), base sequence u64, next sequence u64, raw bytes u64, epoch u64,
                  salt u32, writer u32 (as in the segment header)
    directory     32 bytes a section: name (16, zeros behind it), offset in the content u32, stored bytes u32,
                  raw bytes u32, crc32c of the raw bytes u32
    sections      one zstd frame each

    frames        u32 n, then columns: offset u64[n], compressed u32[n], raw u32[n], first u64[n], next u64[n],
                  earliest i64[n], latest i64[n], ends of the route ids of each frame u32[n], route ids u32[]
    batches       columns: position u64[n], base u64[n], count u32[n], route id u32[n], append time i64[n]
    route names   JSON list, in the order of the ids
    route columns count u64[n], first u64[n], last u64[n], payload bytes u64[n]
    sha256        of the raw segment, 32 bytes
    damage        JSON list of [position, length] of bytes that are no batch; absent if there are none
    relieved      JSON object; absent if relief has dropped nothing
    peers         JSON list of [number, user, pid, process], see :mod:`wald.format.log_state`; absent if there are none

A reader ignores sections that it does not know, so sections can be added without a new version.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple, Self, overload

import zstandard

from wald.format.checksum import crc32c
from wald.format.log_state import Peer


class RouteEntry(NamedTuple):
    """The records of one route in a segment, or in a part of it.

    Attributes:
        count: records that begin there; 0 if only pieces do, or if the number is unknown.
        last: of the records of which it holds any piece.
        payload_bytes: 0 if unknown.
    """

    route: str
    count: int  # type: ignore[assignment]  # tuples have a method of that name
    first: int
    last: int
    payload_bytes: int = 0

    def plus(self, other: RouteEntry) -> RouteEntry:
        """Return the entry for the records of both parts, which have none in common."""
        return RouteEntry(
            self.route,
            self.count + other.count,
            min(self.first, other.first),
            max(self.last, other.last),
            self.payload_bytes + other.payload_bytes,
        )


@dataclass(frozen=True, slots=True, eq=False)
class RouteTable(Sequence[RouteEntry]):
    """The routes of a segment, by number; equal to any sequence of the same entries.

    Attributes:
        names, counts, firsts, lasts, payload_bytes: of equal length. Consecutive segments with the same routes have the
            same ``names``, so what was made of them can be used again.
    """

    names: tuple[str, ...]
    counts: Sequence[int]
    firsts: Sequence[int]
    lasts: Sequence[int]
    payload_bytes: Sequence[int]

    @classmethod
    def of(cls, entries: Sequence[RouteEntry]) -> Self:
        """The table of ``entries``, which may be one already."""
        if isinstance(entries, cls):
            return entries
        return cls(*zip(*entries, strict=True)) if entries else cls((), (), (), (), ())

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[RouteEntry]:
        return map(RouteEntry, self.names, self.counts, self.firsts, self.lasts, self.payload_bytes)

    @overload
    def __getitem__(self, number: int) -> RouteEntry: ...
    @overload
    def __getitem__(self, number: slice) -> list[RouteEntry]: ...
    def __getitem__(self, number: int | slice) -> RouteEntry | list[RouteEntry]:
        if isinstance(number, slice):
            return list(self)[number]
        columns = (self.names, self.counts, self.firsts, self.lasts, self.payload_bytes)
        return RouteEntry._make(column[number] for column in columns)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def reaching(self, last: int) -> Self:
        """The same, with each route's last record no earlier than ``last``."""
        lasts = tuple(map(max, self.lasts, repeat(last)))
        return type(self)(self.names, self.counts, self.firsts, lasts, self.payload_bytes)


@dataclass(frozen=True, slots=True)
class Frame:
    """One zstd frame of whole batches.

    Attributes:
        offset: in the compressed file; ``raw_offset``: in the raw segment.
        first_sequence, next_sequence: records that begin in it are first ≤ s < next.
        earliest_ns, latest_ns: append times; earliest > latest if it holds no batch.
        routes: ids, as indexes into the table of routes.
    """

    offset: int
    compressed_bytes: int
    raw_offset: int
    raw_bytes: int
    first_sequence: int
    next_sequence: int
    earliest_ns: int
    latest_ns: int
    routes: tuple[int, ...]


@dataclass(slots=True)
class BatchTable:
    """Every batch of a segment as columns; control batches are not listed."""

    positions: array[int] = field(default_factory=lambda: array("Q"))
    bases: array[int] = field(default_factory=lambda: array("Q"))
    counts: array[int] = field(default_factory=lambda: array("I"))
    routes: array[int] = field(default_factory=lambda: array("I"))
    times_ns: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True, eq=False)
class FrameTable(Sequence[Frame]):
    """The frames of a segment, in order, with the fields of :class:`Frame` as columns; equal to any sequence of them.

    Attributes:
        ends: where the routes of each frame end in ``routes``.
    """

    offsets: Sequence[int]
    compressed_bytes: Sequence[int]
    raw_offsets: Sequence[int]
    raw_bytes: Sequence[int]
    first_sequences: Sequence[int]
    next_sequences: Sequence[int]
    earliest_ns: Sequence[int]
    latest_ns: Sequence[int]
    ends: Sequence[int]
    routes: Sequence[int]

    @classmethod
    def of(cls, frames: Sequence[Frame]) -> Self:
        """The table of ``frames``, which may be one already."""
        if isinstance(frames, cls):
            return frames
        routes = [frame.routes for frame in frames]
        return cls(
            [frame.offset for frame in frames],
            [frame.compressed_bytes for frame in frames],
            [frame.raw_offset for frame in frames],
            [frame.raw_bytes for frame in frames],
            [frame.first_sequence for frame in frames],
            [frame.next_sequence for frame in frames],
            [frame.earliest_ns for frame in frames],
            [frame.latest_ns for frame in frames],
            list(accumulate(map(len, routes))),
            list(chain.from_iterable(routes)),
        )

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, number: int) -> Frame: ...
    @overload
    def __getitem__(self, number: slice) -> list[Frame]: ...
    def __getitem__(self, number: int | slice) -> Frame | list[Frame]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        begin = self.ends[number - 1] if number else 0
        return Frame(
            self.offsets[number],
            self.compressed_bytes[number],
            self.raw_offsets[number],
            self.raw_bytes[number],
            self.first_sequences[number],
            self.next_sequences[number],
            self.earliest_ns[number],
            self.latest_ns[number],
            tuple(self.routes[begin : self.ends[number]]),
        )

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Shrunk:
    """
    Attributes:
        sha256: of the raw bytes as they were sealed; empty if not known.
        stored_bytes: the length of the file as it was sealed; 0 if not known.
        ranges: the dropped records as (first, last), in order, as long as possible.
        routes: what was dropped of each route: always the first batches that the segment held of it; less
            than that, if the index was made anew in between, from frames that do not show the routes.
    """

    sha256: bytes
    stored_bytes: int
    ranges: list[tuple[int, int]]
    routes: list[RouteEntry]

    @property
    def records(self) -> int:
        """How many records were dropped."""
        return sum(last - first + 1 for first, last in self.ranges)

    @property
    def is_complete(self) -> bool:
        """Whether ``routes`` has all that was dropped: not if the index was made anew, also before another relief."""
        return sum(entry.count for entry in self.routes) == self.records

    @property
    def lasts(self) -> dict[str, int] | None:
        """The last sequence that was dropped of each route; None if ``routes`` has not all that was dropped."""
        return {entry.route: entry.last for entry in self.routes} if self.is_complete else None

    def encode(self) -> bytes:
        """The content of the section."""
        sealed = {"sha256": self.sha256.hex(), "bytes": self.stored_bytes}
        return json.dumps(sealed | {"dropped": self.ranges, "routes": self.routes}, separators=(",", ":")).encode()

    def dropped_between(self, first: int, following: int) -> bool:
        """Whether any record first ≤ s < following was dropped."""
        return any(begin < following and first <= last for begin, last in self.ranges)


def merge_routes(routes: Iterable[RouteEntry], others: Iterable[RouteEntry]) -> list[RouteEntry]:
    """What is held of each route, where ``routes`` are a part of it and ``others`` the rest."""
    found = {entry.route: entry for entry in routes}
    for entry in others:
        old = found.get(entry.route)
        found[entry.route] = entry if old is None else old.plus(entry)
    return list(found.values())


SKIPPABLE = struct.Struct("<II")
INDEX_FRAME_MAGIC = 0x184D2A57

INDEX_MAGIC = b"WALDSIX1"
VERSION = 1
_HEADER = struct.Struct("<8sIHH16sQQQQII")
assert _HEADER.size == 72
_SECTION = struct.Struct("<16sIIII")
assert _SECTION.size == 32
_CHECKED_FROM = 12
_SECTIONS_MAX = 64
_EXPANSION_MAX = 100  # equal batches reach 30 to 1, so a larger claim is damage
_EXPANSION_FROM_BYTES = 1 << 16  # below it any claim is harmless
_DIGEST_BYTES = 32
assert sys.byteorder == "little"  # array columns are written as they are in memory


class BadSealed(ValueError):
    """The index or the seek table is damaged, or the file is not a sealed segment."""


StoredSection = tuple[bytes | memoryview, int, int]
"""A section as it is stored: its zstd frame, its raw length, the crc32c of its raw bytes."""

_BATCH_BYTES = 32  # position, base, count, route and time of one batch


@dataclass(frozen=True, slots=True)
class SealedIndex:
    """The decoded index; the batch table is decoded when it is asked for."""

    log_id: bytes
    base_sequence: int
    next_sequence: int
    raw_bytes: int
    epoch: int
    salt: int
    frames: Sequence[Frame]
    routes: Sequence[RouteEntry]
    sha256: bytes
    damage: list[tuple[int, int]]
    stored_batches: StoredSection = field(repr=False, compare=False, default=(b"", 0, 0))
    shrunk: Shrunk | None = None
    writer: int = 0
    stored_peers: StoredSection | None = field(repr=False, compare=False, default=None)

    def is_damage(self, frame: Frame) -> bool:
        """Whether the frame holds bytes that were no batch when they were sealed, even if they look like batches."""
        return any(offset <= frame.raw_offset < offset + length for offset, length in self.damage)

    def batch_table(self) -> BatchTable:
        """Every batch; decompressed at each call, as few readers need it.

        Raises:
            BadSealed: the section does not decode.
        """
        table = BatchTable()
        data = _decompress(self.stored_batches, "batches")
        count, rest = divmod(len(data), _BATCH_BYTES)
        if rest:
            raise BadSealed("the batches section has a broken length")
        columns = _Columns(data)
        for column in (table.positions, table.bases, table.counts, table.routes, table.times_ns):
            columns.take(column, count)
        if max(table.routes, default=-1) >= len(self.routes):
            raise BadSealed("the batches section names a route that is not in the table")
        return table

    def peers(self) -> dict[int, Peer]:
        """The peers of the batches, by their numbers; decompressed at each call, as few readers need them.

        Raises:
            BadSealed: the section does not decode.
        """
        if self.stored_peers is None:
            return {}
        try:
            rows = json.loads(_decompress(self.stored_peers, "peers"))
            return {int(number): Peer(int(user), int(pid), str(process)) for number, user, pid, process in rows}
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise BadSealed(f"the peers section does not decode: {error}") from error


def encode_sealed_index(index: SealedIndex, batches: BatchTable, peers: Mapping[int, Peer] | None = None) -> bytes:
    """The skippable frame of ``index``. Instead of its stored sections, ``batches`` and ``peers`` are stored."""
    sections = _sections(index, batches, peers or {})
    offset = _HEADER.size + _SECTION.size * len(sections)
    directory, bodies = b"", b""
    for name, parts in sections.items():
        stored, raw_bytes, checksum = _compress_section(parts)
        directory += _SECTION.pack(name.encode(), offset + len(bodies), len(stored), raw_bytes, checksum)
        bodies += stored
    span = (index.base_sequence, index.next_sequence, index.raw_bytes, index.epoch, index.salt)
    header = _HEADER.pack(INDEX_MAGIC, 0, VERSION, len(sections), index.log_id, *span, index.writer)
    checksum = crc32c(header[_CHECKED_FROM:] + directory)
    content = header[:8] + struct.pack("<I", checksum) + header[_CHECKED_FROM:] + directory + bodies
    return SKIPPABLE.pack(INDEX_FRAME_MAGIC, len(content)) + content


def _sections(
    index: SealedIndex, batches: BatchTable, peers: Mapping[int, Peer]
) -> dict[str, Sequence[bytes | array[int]]]:
    sections: dict[str, Sequence[bytes | array[int]]] = {
        "frames": _frame_columns(FrameTable.of(index.frames)),
        "batches": _columns_of(batches),
        **_route_sections(RouteTable.of(index.routes)),
        "sha256": [index.sha256],
    }
    if index.damage:
        sections["damage"] = [json.dumps(index.damage).encode()]
    if index.shrunk is not None:
        sections["relieved"] = [index.shrunk.encode()]
    if peers:
        sections["peers"] = [_peers_section(peers)]
    return sections


def _peers_section(peers: Mapping[int, Peer]) -> bytes:
    rows = [[number, peer.user, peer.pid, peer.process] for number, peer in peers.items()]
    return json.dumps(rows, separators=(",", ":")).encode()


def _route_sections(routes: RouteTable) -> dict[str, Sequence[bytes | array[int]]]:
    columns = (routes.counts, routes.firsts, routes.lasts, routes.payload_bytes)
    return {
        "route names": [json.dumps(routes.names, separators=(",", ":")).encode()],
        "route columns": [array("Q", column) for column in columns],
    }


def _frame_columns(frames: FrameTable) -> list[bytes | array[int]]:
    return [
        struct.pack("<I", len(frames)),
        array("Q", frames.offsets),
        array("I", frames.compressed_bytes),
        array("I", frames.raw_bytes),
        array("Q", frames.first_sequences),
        array("Q", frames.next_sequences),
        array("q", frames.earliest_ns),
        array("q", frames.latest_ns),
        array("I", frames.ends),
        array("I", frames.routes),
    ]


def store_batches(batches: BatchTable) -> StoredSection:
    """The section of them, for an index that is not written."""
    return _compress_section(_columns_of(batches))


def decode_sealed_index(frame: bytes) -> SealedIndex:
    """The index in a skippable frame as :func:`encode_index` makes it.

    Raises:
        BadSealed: anything that does not fit; sizes are checked before memory is asked for.
    """
    content = memoryview(frame)[SKIPPABLE.size :]
    end, log_id, base, following, raw_bytes, epoch, salt, writer = _decode_header(frame)
    sections: dict[str, StoredSection] = {}
    for name, offset, stored, raw, crc in _SECTION.iter_unpack(content[_HEADER.size : end]):
        sections[name.rstrip(b"\0").decode("ascii", "replace")] = (content[offset : offset + stored], raw, crc)
    routes = _decode_routes(sections)
    damage, relieved = _decode_losses(sections)
    frames = _decode_frames(_section(sections, "frames"), len(routes))
    sha256 = _section(sections, "sha256")
    batches, batches_bytes, batches_crc = _stored(sections, "batches")
    if len(sha256) != _DIGEST_BYTES:
        raise BadSealed(f"a digest of {len(sha256)} bytes")
    stored_batches = (bytes(batches), batches_bytes, batches_crc)
    span = (log_id, base, following, raw_bytes, epoch, salt)
    peers = sections.get("peers")
    stored_peers = None if peers is None else (bytes(peers[0]), *peers[1:])
    return SealedIndex(*span, frames, routes, sha256, damage, stored_batches, relieved, writer, stored_peers)


def decode_salt(frame: bytes) -> int | None:
    """Return the salt in an index of which at least header and directory are whole; None if they are not."""
    try:
        return int(_decode_header(frame)[-2])
    except BadSealed:
        return None


def _decode_header(frame: bytes) -> tuple[Any, ...]:
    """Return the end of the directory in the content, and the fields from the log id on."""
    content = memoryview(frame)[SKIPPABLE.size :]
    if len(content) < _HEADER.size or SKIPPABLE.unpack_from(frame) != (INDEX_FRAME_MAGIC, len(content)):
        raise BadSealed("no index frame")
    magic, checksum, version, count, *fields = _HEADER.unpack_from(content)
    end = _HEADER.size + _SECTION.size * count
    if magic != INDEX_MAGIC or count > _SECTIONS_MAX or end > len(content):
        raise BadSealed("no index header")
    if crc32c(content[_CHECKED_FROM:end]) != checksum:
        raise BadSealed("the index header's checksum is wrong")
    if version > VERSION:
        raise BadSealed(f"index version {version} is newer than the {VERSION} this program reads")
    return end, *fields


def _decode_routes(sections: dict[str, StoredSection]) -> RouteTable:
    data = _section(sections, "route columns")
    try:
        names = _decode_names(_section(sections, "route names"))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadSealed(f"the names of the routes do not decode: {error}") from error
    columns, taken = _Columns(data), [array("Q") for _ in range(4)]
    for column in taken:
        columns.take(column, len(names))
    if columns.position != len(data):
        raise BadSealed("the route columns have a broken length")
    return RouteTable(names, *taken)


@lru_cache(maxsize=1)
def _decode_names(data: bytes) -> tuple[str, ...]:
    """The same object as for the segment before, if that had the same routes."""
    names = json.loads(data)
    if not isinstance(names, list) or set(map(type, names)) - {str}:
        raise TypeError("not what a sealer writes")
    return tuple(names)


def _routes(table: list[list[Any]]) -> RouteTable:
    names, *numbers = list(zip(*table, strict=True)) or 5 * [()]
    if set(map(type, names)) - {str} or any(set(map(type, column)) - {int} for column in numbers):
        raise TypeError("not what a sealer writes")
    return RouteTable(names, *numbers)


def _decode_losses(sections: dict[str, StoredSection]) -> tuple[list[tuple[int, int]], Shrunk | None]:
    """The sections that few segments have: damage and relieved."""
    damage_table = _section(sections, "damage") if "damage" in sections else b"[]"
    relief = _section(sections, "relieved") if "relieved" in sections else b"null"
    try:
        return _spans(json.loads(damage_table)), _relieved(json.loads(relief))
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadSealed(f"the table of damage or of relief does not decode: {error}") from error


def _relieved(found: Any) -> Shrunk | None:  # JSON
    if found is None:
        return None
    dropped = _spans(found["dropped"])
    return Shrunk(bytes.fromhex(found["sha256"]), int(found["bytes"]), dropped, list(_routes(found["routes"])))


def _spans(table: list[list[int]]) -> list[tuple[int, int]]:
    return [(int(first), int(second)) for first, second in table]


class _Columns:
    """Takes one array after the other off a section."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def take(self, column: array[int], count: int) -> None:
        end = self.position + count * column.itemsize
        if end > len(self.data):
            raise BadSealed("a column runs past its section")
        column.frombytes(self.data[self.position : end])
        self.position = end


def _decode_frames(data: bytes, routes: int) -> FrameTable:
    if len(data) < 4:
        raise BadSealed("the frames section is too short")
    (count,) = struct.unpack_from("<I", data)
    columns = _Columns(data[4:])
    taken = [array(code) for code in "QIIQQqqI"]
    for column in taken:
        columns.take(column, count)
    offsets, compressed, raw, first, following, earliest, latest, ends = taken
    ids = array("I")
    columns.take(ids, ends[-1] if ends else 0)
    if sorted(ends) != list(ends) or columns.position != len(columns.data) or max(ids, default=-1) >= routes:
        raise BadSealed("the frames section's routes do not fit")
    raw_offsets = list(accumulate(raw[:-1], initial=0))
    return FrameTable(offsets, compressed, raw_offsets, raw, first, following, earliest, latest, ends, ids)


def _columns_of(batches: BatchTable) -> list[array[int]]:
    return [batches.positions, batches.bases, batches.counts, batches.routes, batches.times_ns]


def _compress_section(parts: Sequence[bytes | array[int]]) -> tuple[bytes, int, int]:
    """The zstd frame of a section, its raw length and its checksum; the parts, which may be large, are not joined."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    raw_bytes = sum(map(len, views))
    compressor = zstandard.ZstdCompressor(level=3).compressobj(size=raw_bytes)
    checksum = 0
    for view in views:
        checksum = crc32c(view, checksum)
    return b"".join([*map(compressor.compress, views), compressor.flush()]), raw_bytes, checksum


def _section(sections: dict[str, StoredSection], name: str) -> bytes:
    return _decompress(_stored(sections, name), name)


def _stored(sections: dict[str, StoredSection], name: str) -> StoredSection:
    if name not in sections:
        raise BadSealed(f"the index has no section {name!r}")
    return sections[name]


def _decompress(section: StoredSection, name: str) -> bytes:
    stored, raw_bytes, crc = section
    if raw_bytes > max(len(stored) * _EXPANSION_MAX, _EXPANSION_FROM_BYTES):
        raise BadSealed(f"section {name!r} claims {raw_bytes} bytes in {len(stored)}")
    try:
        # The frame's own header decides how much memory is taken, so it is the one to ask.
        if zstandard.frame_content_size(stored) != raw_bytes:
            raise BadSealed(f"section {name!r} is not of the size that the directory says")
        raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes)
    except zstandard.ZstdError as error:
        raise BadSealed(f"section {name!r} does not decompress: {error}") from error
    if len(raw) != raw_bytes or crc32c(raw) != crc:
        raise BadSealed(f"section {name!r} has a wrong checksum")
    return raw


_ZSTD_MAGIC = (0xFD2FB528).to_bytes(4, "little")
_SKIPPABLE_MAGIC = range(0x184D2A50, 0x184D2A60)
_ZSTD_HEADER_MAX_BYTES = 18
_BLOCK_MAX_BYTES = 128 << 10
_RAW, _RLE, _COMPRESSED = range(3)
_CHECKSUM_BYTES = 4


class BadFrame(ValueError):
    """There is no frame here, or its headers are damaged."""


@dataclass(frozen=True, slots=True)
class FrameLengths:
    """The lengths of a frame, by its headers.

    Attributes:
        stored_bytes: of the frame in the file; more than there are if the file was cut short.
        raw_bytes: of its content; 0: a skippable frame.
    """

    stored_bytes: int
    raw_bytes: int

    @property
    def skippable(self) -> bool:
        return not self.raw_bytes


def read_frame_lengths(read: Callable[[int, int], bytes], offset: int) -> FrameLengths:
    """The frame that begins at ``offset``.

    Args:
        read: (offset, length) → up to so many bytes.

    Raises:
        BadFrame: there is no frame, or it does not say how long it is.
    """
    opening = read(offset, _ZSTD_HEADER_MAX_BYTES)
    if int.from_bytes(opening[:4], "little") in _SKIPPABLE_MAGIC and len(opening) >= 8:
        return FrameLengths(8 + int.from_bytes(opening[4:8], "little"), 0)
    if not opening.startswith(_ZSTD_MAGIC):
        raise BadFrame("no frame begins here")
    try:
        parameters = zstandard.get_frame_parameters(opening)
        end = offset + zstandard.frame_header_size(opening)
    except zstandard.ZstdError as error:
        raise BadFrame(f"the frame's header is not whole ({error})") from error
    if parameters.content_size in (0, zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
        raise BadFrame("the frame's header does not say how long its content is")
    last = False
    while not last:
        header = read(end, 3)
        if len(header) < 3:
            raise BadFrame("the frame is cut short")
        bits = int.from_bytes(header, "little")
        last, kind, length = bool(bits & 1), bits >> 1 & 3, bits >> 3
        if kind > _COMPRESSED or length > _BLOCK_MAX_BYTES:
            raise BadFrame("a block's header is damaged")
        end += 3 + (1 if kind == _RLE else length)
    return FrameLengths(end + _CHECKSUM_BYTES * parameters.has_checksum - offset, parameters.content_size)


SEEK_TABLE_MAGIC = 0x184D2A5E
SEEKABLE_MAGIC = 0x8F92EAB1
SEEK_ENTRY = struct.Struct("<II")
SEEK_FOOTER = struct.Struct("<IBI")
assert SEEK_FOOTER.size == 9


def encode_seek_table(frames: Sequence[tuple[int, int]]) -> bytes:
    """The seek table of frames given as (compressed, decompressed) bytes, the index frame included."""
    body = b"".join(SEEK_ENTRY.pack(*entry) for entry in frames)
    footer = SEEK_FOOTER.pack(len(frames), 0, SEEKABLE_MAGIC)
    return SKIPPABLE.pack(SEEK_TABLE_MAGIC, len(body) + len(footer)) + body + footer


def seek_table_bytes(footer: bytes) -> int:
    """How long the seek table is that ends in these 9 bytes.

    Raises:
        BadSealed: they are not the end of a seek table of ours.
    """
    if len(footer) != SEEK_FOOTER.size:
        raise BadSealed("the file is too short for a seek table")
    count, descriptor, magic = SEEK_FOOTER.unpack(footer)
    if magic != SEEKABLE_MAGIC or descriptor != 0:
        raise BadSealed("the file does not end in a seek table: it is truncated or not sealed by wald")
    return SKIPPABLE.size + int(count) * SEEK_ENTRY.size + SEEK_FOOTER.size


def decode_seek_table(table: bytes, *, file_bytes: int) -> list[tuple[int, int]]:
    """The (compressed, decompressed) bytes of each frame, the index frame last.

    Raises:
        BadSealed: the frames do not add up to the file.
    """
    if len(table) < SKIPPABLE.size + SEEK_FOOTER.size or len(table) != seek_table_bytes(table[-SEEK_FOOTER.size :]):
        raise BadSealed("the seek table's length is wrong")
    if SKIPPABLE.unpack_from(table) != (SEEK_TABLE_MAGIC, len(table) - SKIPPABLE.size):
        raise BadSealed("the seek table's frame header is wrong")
    frames = list(SEEK_ENTRY.iter_unpack(table[SKIPPABLE.size : -SEEK_FOOTER.size]))
    if not frames or frames[-1][1] != 0 or sum(stored for stored, _ in frames) + len(table) != file_bytes:
        raise BadSealed("the seek table's frames do not add up to the file: bytes are missing")
    return frames
