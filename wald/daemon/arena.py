"""The memory of one turn: every byte that arrives lies in here until it is durable, so the daemon's size is fixed."""

from __future__ import annotations

ARENA_BYTES = 4 << 20  # several pipe chunks; at a millisecond a turn more would not be faster


class Arena:
    """A buffer that is handed out from the front and emptied when a turn begins."""

    def __init__(self, length: int = ARENA_BYTES) -> None:
        self.buffer = bytearray(length)
        self.view = memoryview(self.buffer)
        self.used = 0

    @property
    def free(self) -> int:
        """Bytes that can still be handed out in this turn."""
        return len(self.buffer) - self.used

    def reset(self) -> None:
        """Begin a turn: what was handed out is no longer needed."""
        self.used = 0
