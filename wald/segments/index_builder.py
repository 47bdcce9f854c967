"""Index of a segment, built from its batches, and sparse index files.

A sparse index saves scanning a raw segment from the start. The file is only a hint, and never synced, so it may be
missing, short, stale, damaged, or ahead of the durable end.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zstandard

from wald.errors import Damaged
from wald.files.disk import FILE_MODE, Disk
from wald.files.modes import open_or_make_file
from wald.files.safe_open import open_file, read_regular, read_start
from wald.format.batch import HEADER, BatchHeader, Flag, checksum_body, decode_header, seed, whole_batches
from wald.format.log_state import BadControl, Peer, decode_peer, decode_previous
from wald.format.names import Kind, parse_segment_name, segment_name
from wald.format.sealed_index import (
    BatchTable,
    DroppedRecords,
    Frame,
    FrameTable,
    RouteTable,
    SealedIndex,
    compress_section,
)
from wald.format.segment import (
    SEGMENT_HEADER,
    SEGMENT_MAGIC,
    SPARSE_INTERVAL_BYTES,
    SPARSE_MAGIC,
    BadHeader,
    SegmentHeader,
    SparseIndex,
    decode_segment_header,
    decode_sparse_index,
    encode_segment_header,
    encode_sparse_entry,
)
from wald.format.spans import Spans
from wald.segments.raw_scan import FIRST_BATCH

_NO_EARLIEST, _NO_LATEST = (1 << 63) - 1, -(1 << 63)  # neutral under min and max
_CONTINUES, _DROPPED = int(Flag.CONTINUES), int(Flag.DROPPED)  # enums are slow


@dataclass(slots=True)
class _RouteTally:
    id: int
    first: int
    last: int
    count: int = 0
    payload_bytes: int = 0


class SegmentIndexBuilder:
    """Builder of a segment's index from its batches."""

    def __init__(self, base_sequence: int) -> None:
        self.next_sequence = base_sequence
        self.last_position = 0
        self.table = BatchTable()
        self.dropped = Spans()
        self.peers: dict[int, Peer] = {}
        self.frames: list[Frame] = []
        self._frame_start = 0  # first row of the frame
        self._first_dropped = base_sequence
        self._dropped_ns = array("q")
        self._tallies: dict[bytes, _RouteTally] = {}

    def add_window(self, window: bytes, origin: int, salt: int) -> int:
        """Add the whole batches at the start of ``window``, faster than a scan; return where they end."""
        begin = end = 0 if origin else FIRST_BATCH
        for at, next_at, fields in whole_batches(window, begin, position=origin, salt=salt):
            _, _, _, payload_bytes, base, time_ns, _, number, count, _, encoding, flags, route_bytes, peer = fields
            if base < self.next_sequence:
                break
            self.last_position, end = origin + at, next_at
            if encoding:
                route_begin = at + HEADER.size
                route = window[route_begin : route_begin + route_bytes]
                self._add_batch(origin + at, route, base, count, time_ns, flags, number, payload_bytes)
            elif flags & _DROPPED:
                self._add_dropped(base, count, time_ns)
            elif peer:
                self._add_peer(peer, window[at + HEADER.size : at + HEADER.size + payload_bytes])
        return end

    def add(self, position: int, header: BatchHeader, route: str, payload: bytes | memoryview = b"") -> None:
        """Add a whole batch. Only control batches need ``payload``."""
        self.last_position = position
        base, count, time_ns = header.base_sequence, header.count, header.append_time_ns
        if header.is_dropped:
            self._add_dropped(base, count, time_ns)
        elif header.is_control:
            self._add_peer(header.peer, payload)
        else:
            number, size = header.producer_sequence, header.payload_bytes
            self._add_batch(position, route.encode(), base, count, time_ns, header.flags, number, size)

    def end_frame(self, offset: int = 0, compressed_bytes: int = 0, raw_offset: int = 0, raw_bytes: int = 0) -> Frame:
        """Append a frame that covers the batches added since the previous frame, and return it."""
        table, start, dropped_ns = self.table, self._frame_start, self._dropped_ns
        self._frame_start, self._dropped_ns = len(table), array("q")
        starting_bases = (base for base, count in zip(table.bases[start:], table.counts[start:], strict=True) if count)
        first = next(starting_bases, self.next_sequence)
        if dropped_ns:
            first = min(first, self._first_dropped)
        times = table.times_ns[start:] + dropped_ns
        ranges = first, self.next_sequence, min(times, default=_NO_EARLIEST), max(times, default=_NO_LATEST)
        routes = tuple(sorted(set(table.routes[start:])))
        self.frames.append(Frame(offset, compressed_bytes, raw_offset, raw_bytes, *ranges, routes))
        return self.frames[-1]

    def sort_routes(self) -> None:
        """Number the routes alphabetically, so that segments with equal routes can share a table."""
        ordered = dict(sorted(self._tallies.items()))
        if list(ordered) == list(self._tallies):
            return
        new_ids = [0] * len(ordered)
        for number, tally in enumerate(ordered.values()):
            new_ids[tally.id], tally.id = number, number
        self._tallies = ordered
        renumber = new_ids.__getitem__
        self.table.routes = array("I", map(renumber, self.table.routes))
        self.frames = [frame._replace(routes=tuple(sorted(map(renumber, frame.routes)))) for frame in self.frames]

    def routes(self) -> RouteTable:
        names = tuple(name.decode("ascii", "replace") for name in self._tallies)
        rows = [(tally.count, tally.first, tally.last, tally.payload_bytes) for tally in self._tallies.values()]
        return RouteTable(names, *zip(*rows, strict=True)) if rows else RouteTable.from_entries([])

    def index(
        self, header: SegmentHeader, raw_bytes: int, damage: list[tuple[int, int]], *, sha256: bytes = b""
    ) -> SealedIndex:
        """Return the index. If :meth:`end_frame` was never called, one frame contains all batches."""
        sections = {} if self.frames else {"batches": compress_section(self.table.columns())}
        frames = FrameTable.from_frames(self.frames or [self.end_frame(raw_bytes=raw_bytes)])
        dropped = list(self.dropped)
        shrunk = DroppedRecords(b"", 0, dropped, []) if dropped else None  # only the ledger lists the dropped routes
        identity = header.log_id, header.base_sequence, self.next_sequence, raw_bytes, header.epoch, header.salt
        return SealedIndex(*identity, frames, self.routes(), sha256, damage, shrunk, header.writer, sections)

    def _add_dropped(self, base: int, count: int, time_ns: int) -> None:
        if not self._dropped_ns:
            self._first_dropped = base
        self._dropped_ns.append(time_ns)
        self.next_sequence = max(self.next_sequence, base + count)
        self.dropped.add(base, base + count - 1)

    def _add_peer(self, number: int, payload: bytes | memoryview) -> None:
        with suppress(BadControl):
            if number:  # 0 is the state of the log
                self.peers[number] = decode_peer(payload)

    def _add_batch(
        self, position: int, route: bytes, base: int, count: int, time_ns: int, flags: int, continued: int, size: int
    ) -> None:
        tally = self._tallies.get(route)
        if tally is None:
            tally = self._tallies[route] = _RouteTally(len(self._tallies), base, base - 1)
        table = self.table
        table.positions.append(position)
        table.bases.append(base)
        table.counts.append(count)
        table.routes.append(tally.id)
        table.times_ns.append(time_ns)
        tally.payload_bytes += size
        if count:
            if not tally.count:
                tally.first = base
            tally.count += count
            end = base + count
            tally.last = end - 1
            if end > self.next_sequence:
                self.next_sequence = end
        elif flags & _CONTINUES:
            tally.last = continued
            if not tally.count:
                tally.first = continued


class SparseIndexWriter:
    """Best-effort writer of a growing segment's sparse index. The first error stops it."""

    def __init__(self, path: Path, header: SegmentHeader) -> None:
        self._descriptor = -1
        self._indexed_position = FIRST_BATCH
        with suppress(OSError):
            if not _is_other_kind(path):
                flags = os.O_WRONLY | os.O_APPEND | os.O_TRUNC | os.O_NOFOLLOW
                self._descriptor = open_or_make_file(path, flags, FILE_MODE)
        self._write(encode_segment_header(header, SPARSE_MAGIC))

    def add(self, sequence: int, position: int, append_time_ns: int) -> None:
        """Write an entry for the next batch if one is due; never raise OSError."""
        if position - self._indexed_position >= SPARSE_INTERVAL_BYTES:
            self._indexed_position = position
            self._write(encode_sparse_entry(sequence, position, append_time_ns))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes) -> None:
        if self._descriptor < 0:
            return
        written = 0
        with suppress(OSError):
            written = os.write(self._descriptor, data)
        if written != len(data):  # readers cannot find the entries after half an entry
            self.close()


def remove_index(path: Path, disk: Disk) -> None:
    with suppress(FileNotFoundError):
        if not _is_other_kind(path):
            disk.unlink(path)


def _is_other_kind(path: Path) -> bool:
    """Return True if the file is recognizably not an index, and must be kept."""
    try:
        start = read_start(path, 8)
    except FileNotFoundError:
        return False
    except Damaged:  # not a regular file
        return True
    return start.startswith((SEGMENT_MAGIC, zstandard.FRAME_HEADER, b"{"))


def find_index(directory: Path, log_id: bytes | None, base_sequence: int) -> SparseIndex:
    """Return the sparse index, or only the salt if the file is unusable. ``log_id`` None accepts any log."""
    with suppress(OSError, Damaged):
        data = read_regular(directory / segment_name(base_sequence, Kind.INDEX))
        index = decode_sparse_index(data, log_id=log_id, base_sequence=base_sequence)
        if index is not None:
            return index
    return SparseIndex(salt=salt_recorded_after(directory, base_sequence))


def next_base(directory: Path, base_sequence: int) -> int | None:
    """Return the base of the segment after ``base_sequence``, or None."""
    after = f"{base_sequence + 1:020d}"
    for text in sorted(text for text in os.listdir(directory) if text >= after):
        name = parse_segment_name(text)
        if name is not None and name.kind in (Kind.RAW, Kind.SEALED):
            return name.base_sequence
    return None


def salt_recorded_after(directory: Path, base_sequence: int) -> int | None:
    """Return the salt of a segment without a header, from the copy in the next segment."""
    next_segment = None
    with suppress(OSError):
        next_segment = next_base(directory, base_sequence)
    if next_segment is None:
        return None
    for kind in (Kind.RAW, Kind.SEALED):
        path = directory / segment_name(next_segment, kind)
        with suppress(Damaged, OSError, BadHeader, zstandard.ZstdError), open_file(path) as file:
            stream = file if kind is Kind.RAW else zstandard.ZstdDecompressor().stream_reader(file)
            salt = _read_previous_salt(stream.read)
            if salt is not None:
                return salt
    return None


def _read_previous_salt(read: Callable[[int], bytes]) -> int | None:
    checksum_seed = seed(decode_segment_header(read(SEGMENT_HEADER.size)).salt, FIRST_BATCH)
    header = decode_header(read(HEADER.size), 0, checksum_seed)
    if header is None or not header.is_state:
        return None
    payload = read(header.payload_bytes)
    if checksum_body(b"", [payload], len(payload)) != header.body_checksum:
        return None
    previous = decode_previous(payload)
    return None if previous is None else previous.salt
