"""A payload too large for memory, gathered in an unnamed file beside the segments.

The file has no name, so nothing of it is left if the daemon dies; its bytes go to the segment inside the kernel.
"""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path

from stringzilla import count as count_bytes

from wald.format.batch import padding
from wald.format.checksum import crc32c
from wald.format.columns import decode as decode_columns
from wald.format.protocol import Publish
from wald.store.writing.drafts import Route


class Spooling:
    """One request's payload on its way into the file.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, request: Publish, route: Route, directory: Path) -> None:
        self.request = request
        self.route = route
        self.missing_bytes = request.payload_bytes
        self.newlines = 0
        self.ends_in_newline = False
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  (closed after the turn)
        self._checksum = crc32c(route.prefix)

    def feed(self, part: memoryview) -> None:
        """Add the next part of the payload.

        Raises:
            OSError: there is no room for it, and the payload cannot become whole.
        """
        if part:
            self._checksum = crc32c(part, self._checksum)
            self.newlines += int(count_bytes(part, b"\n"))
            self.ends_in_newline = part[-1] == ord("\n")
            self.missing_bytes -= len(part)
        while part:
            part = part[self._file.write(part) :]

    @property
    def descriptor(self) -> int:
        """The descriptor of the file."""
        return self._file.fileno()

    @property
    def promised_bytes(self) -> int:
        """What it may still take on the disk: the rest of the file, and a copy of it in the log."""
        return self.missing_bytes + self.request.payload_bytes

    @property
    def body_checksum(self) -> int:
        """The checksum of the batch that the whole payload makes."""
        return crc32c(padding(self.request.payload_bytes), self._checksum)

    def columns_count(self) -> int:
        """How many records the payload has as columns.

        Raises:
            BadColumns: it is not well-formed.
        """
        mapped = mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ)  # unmapped with the last view of it
        return decode_columns(memoryview(mapped)).count

    def close(self) -> None:
        self._file.close()
