"""The transfers file as the daemon writes it: a slot for each pipe, whose mark the kernel sets when the bytes leave it.

``readv(2)`` puts the first byte of a transfer into the mark, which is a mapped page of the file. Nobody here reads or
writes that page: if somebody has shortened the file, the call fails with EFAULT and the bytes are still in their pipe,
where a touch of ours would be a SIGBUS.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from wald.format.transfers import MARK_OFFSET, SLOT_BYTES, Transfer, decode_transfer, encode_transfer
from wald.store.files.disk import Disk
from wald.store.files.inplace import InPlaceFile


class Transfers:
    """``count`` slots in the file at ``path``, which is created if missing.

    Raises:
        OSError: it cannot be made, or there is no room for it.
    """

    def __init__(self, path: Path, count: int, disk: Disk) -> None:
        self._count = count
        self._file = InPlaceFile(path, count * SLOT_BYTES, disk)
        self._map = self._mapped()

    def told(self, number: int) -> tuple[Transfer, bool] | None:
        """What slot ``number`` says, as :func:`wald.format.transfers.decode_transfer`."""
        return decode_transfer(os.pread(self._file.descriptor, SLOT_BYTES, number * SLOT_BYTES))

    def restore(self) -> None:
        """Make the file anew if somebody has removed or replaced it.

        Raises:
            OSError: as for the class.
        """
        if self._file.restore():
            self._map.close()
            self._map = self._mapped()

    def tell(self, number: int, transfer: Transfer) -> None:
        """
        Raises:
            OSError: somebody has shortened the file, and there is no room to make it longer again.
        """
        self._file.write(encode_transfer(transfer), number * SLOT_BYTES)

    def mark(self, number: int) -> memoryview:
        """The byte to hand to the kernel; to be released before :meth:`restore`."""
        at = number * SLOT_BYTES + MARK_OFFSET
        return memoryview(self._map)[at : at + 1]

    def clear(self, number: int) -> None:
        """Empty a slot; errors as of :meth:`tell`."""
        self._file.write(bytes(SLOT_BYTES), number * SLOT_BYTES)

    def close(self) -> None:
        self._map.close()
        self._file.close()

    def _mapped(self) -> mmap.mmap:
        return mmap.mmap(self._file.descriptor, self._count * SLOT_BYTES)
