"""One write to the system for all that a connection is sent in a round of the event loop: the head of an answer and its
body, or several requests to the daemon.
"""

from __future__ import annotations

import asyncio
from typing import Any

_AT_ONCE_BYTES = 64 << 10  # are written without waiting for the end of the round


class JoinedWrites:
    """A transport that keeps what is written until the end of the round, or until there is a lot of it.

    All else is that of ``transport``.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._call_soon = asyncio.get_running_loop().call_soon
        self._kept: list[bytes | bytearray | memoryview] = []
        self._kept_bytes = 0
        # as they are asked for each time
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, in the order of the calls."""
        if not self._kept:
            self._call_soon(self.flush)
        self._kept.append(data)
        self._kept_bytes += len(data)
        if self._kept_bytes >= _AT_ONCE_BYTES:
            self.flush()

    def close(self) -> None:
        """Close, once all is sent."""
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """Send what is kept, as nothing follows soon."""
        if self._kept:
            kept, self._kept, self._kept_bytes = self._kept, [], 0
            if not self._transport.is_closing():  # it may have been lost in this round
                self._transport.writelines(kept)
