"""Sparse indexes of raw segments: written beside the segment and read as a hint.

An index saves a reader from scanning a raw segment from its start. It is not synced and may be missing, short, stale or
damaged: a reader checks the batch it lands on, may meet entries behind the durable end of the log, and scans the
segment where it does not help.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import zstandard

from wald.errors import Damaged
from wald.format.index import INTERVAL_BYTES, SparseIndex, decode_index, encode_entry, encode_index_header
from wald.format.segment import SEGMENT_MAGIC, SegmentHeader
from wald.store.files.disk import FILE_MODE, Disk
from wald.store.files.making import open_or_make_file
from wald.store.files.regular import read_regular, read_start
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


def read_index(path: Path, log_id: bytes, base_sequence: int) -> SparseIndex | None:
    """The index at ``path``; None if there is none, or it is not that of the segment."""
    try:
        data = read_regular(path)
    except (OSError, Damaged):
        return None
    return decode_index(data, log_id=log_id, base_sequence=base_sequence)
