"""Record of bytes in transfer from a pipe to the log.

The transfers file as the daemon uses it: a slot for each pipe, whose mark the kernel sets when the bytes leave it.

``readv(2)`` puts the first byte of a transfer into the mark, which is a mapped page of the file. Python code neither
reads nor writes that page: if the file was shortened, the system call fails with EFAULT and the bytes are still in
their pipe, where an access from Python would be a SIGBUS.

A transfer that the last life of the daemon recorded and did not carry out is both in its pipe and in the log. Such
transfers are read before this life writes anything, while the log still has at a recorded place what was recorded.
The segment may be sealed by then, because a FIFO may be unreadable for more than one life.
"""

from __future__ import annotations

import mmap
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.safe_open import InPlaceFile
from wald.format.batch import StoredBatch
from wald.format.transfers import MARK_OFFSET, SLOT_BYTES, Transfer, decode_transfer, encode_transfer
from wald.segments.view import View, read_view


class Transfers:
    """``count`` slots in the file at ``path``, which is created if missing.

    Raises:
        OSError: it cannot be made, or there is no room for it.
    """

    def __init__(self, path: Path, count: int, disk: Disk) -> None:
        self.count = count
        self._file = InPlaceFile(path, count * SLOT_BYTES, disk)
        self._map = self._mapped()

    def pending(self, slot: int) -> Transfer | None:
        """The transfer that a slot records, if its bytes have not left their pipe."""
        recorded = decode_transfer(os.pread(self._file.descriptor, SLOT_BYTES, slot * SLOT_BYTES))
        return None if recorded is None or recorded[1] else recorded[0]

    def restore(self) -> None:
        """Make the file anew if it was removed or replaced.

        Raises:
            OSError: as for the class.
        """
        if self._file.restore():
            self._map.close()
            self._map = self._mapped()

    def write(self, slot: int, transfer: Transfer) -> None:
        """Record a transfer, as one whose bytes are still in their pipe.

        Raises:
            OSError: the file was shortened, and there is no room to make it longer again.
        """
        self._file.write(encode_transfer(transfer), slot * SLOT_BYTES)

    def mark(self, slot: int) -> memoryview:
        """The byte to hand to the kernel; to be released before :meth:`restore`."""
        at = slot * SLOT_BYTES + MARK_OFFSET
        return memoryview(self._map)[at : at + 1]

    def clear(self, slot: int) -> None:
        """Empty a slot; errors as of :meth:`write`."""
        self._file.write(bytes(SLOT_BYTES), slot * SLOT_BYTES)

    def close(self) -> None:
        self._map.close()
        self._file.close()

    def _mapped(self) -> mmap.mmap:
        return mmap.mmap(self._file.descriptor, self.count * SLOT_BYTES)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A transfer to be finished when its pipe is opened: the slot that records it, and what the log holds of it."""

    slot: int
    payload: bytes


def unfinished_transfers(root: Root, transfers: Transfers, *, log_id: bytes) -> dict[int, Unfinished]:
    """The transfers that the slots record and whose batches were written, by the inode of their pipe."""
    found = {}
    for slot in range(transfers.count):
        transfer = transfers.pending(slot)
        payload = None if transfer is None else _written(root, transfer, log_id)
        if transfer is not None and payload is not None:
            found[transfer.inode] = Unfinished(slot, payload)
    return found


def _written(root: Root, transfer: Transfer, log_id: bytes) -> bytes | None:
    """The payload at the place that was recorded; None if no such batch was written, or it is gone."""
    try:
        return _payload(read_view(root, log_id).including_released(), transfer)
    except Damaged:
        return None


def _payload(view: View, transfer: Transfer) -> bytes | None:
    for segment in view.segments:
        if segment.base_sequence == transfer.segment:
            with closing(view.open(segment)) as opened:
                met = next(opened.batches(transfer.position, None), None)
                if isinstance(met, StoredBatch) and (met.position, met.route) == (transfer.position, transfer.route):
                    return bytes(met.payload)
    return None
