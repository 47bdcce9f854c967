"""The index of a sealed segment.

A ``.wal.zst`` is a run of independent zstd frames (RFC 8878), each with about 1 MiB of whole batches; the first begins
with the segment header. A skippable frame with the index follows, and then the seek table
(:mod:`wald.format.seek_table`).

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
    relieved      JSON object, see :mod:`wald.format.relieved`; absent if relief has dropped nothing
    peers         JSON list of [number, user, pid, process], see :mod:`wald.format.peers`; absent if there are none

A reader ignores sections that it does not know, so sections can be added without a new version.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

import zstandard

from wald.format.checksum import crc32c
from wald.format.peers import Peer
from wald.format.relieved import Relieved
from wald.format.tables import BatchTable, Frame, FrameTable, RouteEntry, RouteTable

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
    relieved: Relieved | None = None
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


def encode_index(index: SealedIndex, batches: BatchTable, peers: Mapping[int, Peer] | None = None) -> bytes:
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
    if index.relieved is not None:
        sections["relieved"] = [index.relieved.encoded()]
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


def decode_index(frame: bytes) -> SealedIndex:
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


def _decode_losses(sections: dict[str, StoredSection]) -> tuple[list[tuple[int, int]], Relieved | None]:
    """The sections that few segments have: damage and relieved."""
    damage_table = _section(sections, "damage") if "damage" in sections else b"[]"
    relief = _section(sections, "relieved") if "relieved" in sections else b"null"
    try:
        return _spans(json.loads(damage_table)), _relieved(json.loads(relief))
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadSealed(f"the table of damage or of relief does not decode: {error}") from error


def _relieved(found: Any) -> Relieved | None:  # JSON
    if found is None:
        return None
    dropped = _spans(found["dropped"])
    return Relieved(bytes.fromhex(found["sha256"]), int(found["bytes"]), dropped, list(_routes(found["routes"])))


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
