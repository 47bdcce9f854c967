"""Index of a segment, built from its batches, and sparse index files.

What the batches of a segment hold, added up while they are met: its batch table, its routes, its next sequence.

An index is made of this: of a segment that is sealed, of one that is not, of what is left of one that is damaged, or of
what relief leaves of one.

Sparse indexes of raw segments: written beside the segment and read as a hint.

An index saves a reader from scanning a raw segment from its start. It is not synced and may be missing, short, stale or
damaged: a reader checks the batch it lands on, may meet entries behind the durable end of the log, and scans the
segment where it does not help.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import zstandard

from wald.errors import Damaged
from wald.files.disk import FILE_MODE, Disk
from wald.files.modes import open_or_make_file
from wald.files.safe_open import open_file, read_regular, read_start
from wald.format.batch import HEADER, BatchHeader, Flag, checksum_body, decode_header, seed, whole_batches
from wald.format.log_state import BadPeer, Peer, decode_peer, decode_previous
from wald.format.names import Kind, parse_segment_name, segment_name
from wald.format.sealed_index import BatchTable, Frame, RouteEntry, SealedIndex, Shrunk, store_batches
from wald.format.segment import (
    SEGMENT_HEADER,
    SEGMENT_MAGIC,
    SPARSE_INTERVAL_BYTES,
    BadHeader,
    SegmentHeader,
    SparseIndex,
    decode_segment_header,
    decode_sparse_index,
    encode_sparse_entry,
    encode_sparse_header,
)
from wald.segments.raw_scan import FIRST_BATCH

_NO_TIME = ((1 << 63) - 1, -(1 << 63))  # earliest and latest of no batch: neutral under min and max
_CONTINUES, _DROPPED = int(Flag.CONTINUES), int(Flag.DROPPED)  # enums are slow


@dataclass(frozen=True, slots=True)
class Span:
    """What the batches of one frame hold, as :class:`wald.format.sealed_index.Frame` has it."""

    first_sequence: int
    next_sequence: int
    earliest_ns: int
    latest_ns: int
    routes: tuple[int, ...]


@dataclass(slots=True)
class _Tally:
    """A :class:`wald.format.sealed_index.RouteEntry` being counted."""

    id: int
    first: int
    last: int
    count: int = 0
    payload_bytes: int = 0


class SegmentIndexBuilder:
    """What the batches met so far hold: the batch table, the routes, the next sequence.

    Attributes:
        dropped: the runs of records (first, last) in whose place there are DROPPED batches.
    """

    def __init__(self, base_sequence: int, salt: int) -> None:
        self._base_sequence = self.next_sequence = base_sequence
        self._salt = salt
        self.last_position = 0  # of the last whole batch; 0: none yet
        self.table = BatchTable()
        self.dropped: list[tuple[int, int]] = []
        self.peers: dict[int, Peer] = {}
        self._taken = 0
        self._begun_dropped = self.next_sequence
        self._dropped_ns = array("q")
        self._tallies: dict[bytes, _Tally] = {}

    def walk(self, window: bytes, origin: int) -> int:
        """Add the plain whole batches that ``window`` begins with; returns where they end in it.

        This is :meth:`RawFile.scan` for the case that is nearly every case, several times as fast. Whatever is not a
        whole batch is left to the scan.

        Args:
            origin: where the window begins in the segment; at 0 it begins with the segment header.
        """
        begin = end = 0 if origin else FIRST_BATCH
        for at, behind, fields in whole_batches(window, begin, position=origin, salt=self._salt):
            _, _, _, payload_bytes, base, time_ns, _, number, count, _, encoding, flags, name, peer = fields
            if base < self.next_sequence:
                break
            self.last_position, end = origin + at, behind
            if encoding:
                begin = at + HEADER.size
                route = window[begin : begin + name]
                self._add(origin + at, route, base, count, time_ns, flags, number, payload_bytes)
            elif flags & _DROPPED:
                self._drop(base, count, time_ns)
            elif peer:
                self._introduce(peer, window[at + HEADER.size : at + HEADER.size + payload_bytes])
        return end

    def add(self, position: int, header: BatchHeader, route: str, payload: bytes | memoryview = b"") -> None:
        """Add a batch that was found whole. Only of a control batch the payload is used."""
        self.last_position = position
        if header.is_dropped:
            self._drop(header.base_sequence, header.count, header.append_time_ns)
        elif header.is_control:
            self._introduce(header.peer, payload)
        else:
            self._add(
                position,
                route.encode(),
                header.base_sequence,
                header.count,
                header.append_time_ns,
                header.flags,
                header.producer_sequence,
                header.payload_bytes,
            )

    def take(self) -> Span:
        """The span of the batches added since the last call."""
        start, self._taken = self._taken, len(self.table)
        dropped_ns, self._dropped_ns = self._dropped_ns, array("q")
        table = self.table
        times = table.times_ns[start:] + dropped_ns
        if not times:
            return Span(self.next_sequence, self.next_sequence, *_NO_TIME, ())
        begun = (base for base, count in zip(table.bases[start:], table.counts[start:], strict=True) if count)
        first = next(begun, self.next_sequence)
        routes = tuple(sorted(set(table.routes[start:])))
        if dropped_ns:
            first = min(first, self._begun_dropped)
        return Span(first, self.next_sequence, min(times), max(times), routes)

    def in_order(self, frames: list[Frame]) -> list[Frame]:
        """Number the routes by name, and return ``frames`` with the new numbers.

        So the tables of segments with the same routes name them in the same order.
        """
        ordered = dict(sorted(self._tallies.items()))
        if list(ordered) == list(self._tallies):
            return frames
        numbers = [0] * len(ordered)
        for number, tally in enumerate(ordered.values()):
            numbers[tally.id], tally.id = number, number
        self._tallies = ordered
        new = numbers.__getitem__
        self.table.routes = array("I", map(new, self.table.routes))
        return [replace(frame, routes=tuple(sorted(map(new, frame.routes)))) for frame in frames]

    def routes(self) -> list[RouteEntry]:
        """The table of routes, in the order of their ids."""
        return [
            RouteEntry(name.decode("ascii", "replace"), tally.count, tally.first, tally.last, tally.payload_bytes)
            for name, tally in self._tallies.items()
        ]

    def relieved(self) -> Shrunk | None:
        """What relief has dropped; whose the records were, only the ledger says. None: nothing."""
        return Shrunk(b"", 0, self.dropped, []) if self.dropped else None

    def index(
        self, *, log_id: bytes, epoch: int, raw_bytes: int, damage: list[tuple[int, int]], sha256: bytes
    ) -> SealedIndex:
        """What an index of all that was met would say; one frame stands for all.

        Args:
            sha256: of the raw bytes; empty if not known.
        """
        span = self.take()
        times_ns = (span.earliest_ns, span.latest_ns)
        return SealedIndex(
            log_id=log_id,
            base_sequence=self._base_sequence,
            next_sequence=self.next_sequence,
            raw_bytes=raw_bytes,
            epoch=epoch,
            salt=self._salt,
            frames=[Frame(0, 0, 0, raw_bytes, span.first_sequence, span.next_sequence, *times_ns, span.routes)],
            routes=self.routes(),
            sha256=sha256,
            damage=damage,
            stored_batches=store_batches(self.table),
            shrunk=self.relieved(),
        )

    def _drop(self, base: int, count: int, time_ns: int) -> None:
        if not self._dropped_ns:
            self._begun_dropped = base
        self._dropped_ns.append(time_ns)
        self.next_sequence = max(self.next_sequence, base + count)
        if count and self.dropped and self.dropped[-1][1] + 1 == base:
            self.dropped[-1] = self.dropped[-1][0], base + count - 1
        elif count:
            self.dropped.append((base, base + count - 1))

    def _introduce(self, number: int, payload: bytes | memoryview) -> None:
        with suppress(BadPeer):  # the log's state, which has no number
            if number:
                self.peers[number] = decode_peer(payload)

    def _add(
        self,
        position: int,
        route: bytes,
        base: int,
        count: int,
        time_ns: int,
        flags: int,
        continues: int,
        payload_bytes: int,
    ) -> None:
        tally = self._tallies.get(route)
        if tally is None:
            tally = self._tallies[route] = _Tally(len(self._tallies), base, base - 1)
        table = self.table
        table.positions.append(position)
        table.bases.append(base)
        table.counts.append(count)
        table.routes.append(tally.id)
        table.times_ns.append(time_ns)
        tally.payload_bytes += payload_bytes
        if count:
            if not tally.count:
                tally.first = base
            tally.count += count
            end = base + count
            tally.last = end - 1
            if end > self.next_sequence:
                self.next_sequence = end
        elif flags & _CONTINUES:
            tally.last = continues
            if not tally.count:
                tally.first = continues


_START_BYTES = 8


class SparseIndexWriter:
    """Adds entries while the segment grows; at the first error it stops, and the index stays as short as it is.

    Args:
        path: of the index; an old index there is emptied; any other file is kept, and no index is written.
        header: of the segment.
    """

    def __init__(self, path: Path, header: SegmentHeader) -> None:
        self._descriptor = -1
        self._indexed = FIRST_BATCH
        with contextlib.suppress(OSError):
            if not _is_another_file(path):
                flags = os.O_WRONLY | os.O_APPEND | os.O_TRUNC | os.O_NOFOLLOW
                self._descriptor = open_or_make_file(path, flags, FILE_MODE)
        self._write(encode_sparse_header(header))

    def add(self, sequence: int, position: int, append_time_ns: int) -> None:
        """Note the next batch; never raises OSError."""
        if position - self._indexed >= SPARSE_INTERVAL_BYTES:
            self._indexed = position
            self._write(encode_sparse_entry(sequence, position, append_time_ns))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes) -> None:
        if self._descriptor < 0:
            return
        written = 0
        with contextlib.suppress(OSError):
            written = os.write(self._descriptor, data)
        if written != len(data):  # entries behind half an entry could not be found
            self.close()


def remove_index(path: Path, disk: Disk) -> None:
    """Remove the index at ``path`` if it exists; a segment under that name is kept."""
    with contextlib.suppress(FileNotFoundError):
        if not _is_another_file(path):
            disk.unlink(path)


def _is_another_file(path: Path) -> bool:
    try:
        start = read_start(path, _START_BYTES)
    except FileNotFoundError:
        return False
    except Damaged:  # not a regular file
        return True
    return start.startswith((SEGMENT_MAGIC, zstandard.FRAME_HEADER, b"{"))


def find_index(directory: Path, log_id: bytes | None, base_sequence: int) -> SparseIndex:
    """Return the sparse index of a segment in ``directory``; without one, an empty one that has at least the salt.

    When a segment is cut, its salt is recorded at the start of the next one, whose sectors are others than those of
    the segment's header.

    Args:
        log_id: None accepts the index of any log.
    """
    path = directory / segment_name(base_sequence, Kind.INDEX)
    return read_index(path, log_id, base_sequence) or SparseIndex(salt=salt_recorded_after(directory, base_sequence))


def salt_recorded_after(directory: Path, base_sequence: int) -> int | None:
    """Return the salt that the next segment in ``directory`` records; None if it has none or cannot be read."""
    bases: dict[int, list[Path]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            found = parse_segment_name(name)
            if found is not None and found.base_sequence > base_sequence and found.kind in (Kind.RAW, Kind.SEALED):
                bases.setdefault(found.base_sequence, []).append(directory / name)
    for path in bases[min(bases)] if bases else ():
        with contextlib.suppress(Damaged, OSError, BadHeader, zstandard.ZstdError), open_file(path) as file:
            sealed = path.name != segment_name(min(bases), Kind.RAW)
            salt = _salt_before(zstandard.ZstdDecompressor().stream_reader(file) if sealed else file)
            if salt is not None:
                return salt
    return None


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _salt_before(raw: _Readable) -> int | None:
    """Return the salt of the segment before, by the first batch of the raw bytes of a segment."""
    place = seed(decode_segment_header(raw.read(SEGMENT_HEADER.size)).salt, FIRST_BATCH)
    header = decode_header(raw.read(HEADER.size), 0, place)
    if header is None or not header.is_state:
        return None
    payload = raw.read(header.payload_bytes)
    if checksum_body(b"", [payload], len(payload)) != header.body_checksum:
        return None
    previous = decode_previous(payload)
    return None if previous is None else previous.salt


def read_index(path: Path, log_id: bytes | None, base_sequence: int) -> SparseIndex | None:
    """Return the index at ``path``; None if there is none, or it is not that of the segment."""
    try:
        data = read_regular(path)
    except (OSError, Damaged):
        return None
    return decode_sparse_index(data, log_id=log_id, base_sequence=base_sequence)
