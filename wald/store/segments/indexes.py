"""Sparse indexes of raw segments: written beside the segment and read as a hint.

An index saves a reader from scanning a raw segment from its start. It is not synced and may be missing, short, stale or
damaged: a reader checks the batch it lands on, may meet entries behind the durable end of the log, and scans the
segment where it does not help.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol

import zstandard

from wald.errors import Damaged
from wald.format.batch import HEADER, checksum_body, decode_header, seed
from wald.format.index import INTERVAL_BYTES, SparseIndex, decode_index, encode_entry, encode_index_header
from wald.format.names import Kind, parse_segment_name, segment_name
from wald.format.segment import HEADER as SEGMENT_HEADER
from wald.format.segment import SEGMENT_MAGIC, BadHeader, SegmentHeader
from wald.format.segment import decode_header as decode_segment_header
from wald.format.state import decode_previous
from wald.store.files.disk import FILE_MODE, Disk
from wald.store.files.making import open_or_make_file
from wald.store.files.regular import open_file, read_regular, read_start
from wald.store.segments.raw import FIRST_BATCH

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
        self._write(encode_index_header(header))

    def add(self, sequence: int, position: int, append_time_ns: int) -> None:
        """Note the next batch; never raises OSError."""
        if position - self._indexed >= INTERVAL_BYTES:
            self._indexed = position
            self._write(encode_entry(sequence, position, append_time_ns))

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
    return decode_index(data, log_id=log_id, base_sequence=base_sequence)
