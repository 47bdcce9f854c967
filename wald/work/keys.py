"""The order of the records of each key: which is first, and which follows a record."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from wald.work.window import Run, State, Window

_COMPACTED_FROM = 64


class _Queue:
    """The records of one key that were not done when last looked at; in order, as they were taken in."""

    __slots__ = ("key", "sequences", "start")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.sequences: array[int] = array("Q")
        self.start = 0


class KeyOrder:
    """The open records of a window that have a key.

    What is done is left in the queues until it is in front, so that nothing is moved in the middle of a long one.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._queue_of: dict[int, _Queue] = {}
        self._queues: dict[bytes, _Queue] = {}

    def add(self, sequence: int, key: bytes) -> bool:
        """Take in a record behind all others of its key; returns whether it is the first one."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue(key)
        self._queue_of[sequence] = queue
        queue.sequences.append(sequence)
        return len(queue.sequences) - queue.start == 1

    def remove(self, sequence: int) -> int | None:
        """Take in that a record is done; returns the first one of its key by now, if there is one."""
        queue = self._queue_of.pop(sequence, None)
        if queue is None:
            return None
        while queue.start < len(queue.sequences) and self._done(queue.sequences[queue.start]):
            queue.start += 1
        if queue.start == len(queue.sequences):
            del self._queues[queue.key]
            return None
        if queue.start > max(_COMPACTED_FROM, len(queue.sequences) // 2):
            del queue.sequences[: queue.start]
            queue.start = 0
        return queue.sequences[queue.start]

    def is_first(self, sequence: int) -> bool:
        """Whether no record of the same key is open before this one."""
        queue = self._queue_of.get(sequence)
        if queue is None:
            return True
        place = bisect_left(queue.sequences, sequence, queue.start)
        return all(self._done(before) for before in queue.sequences[queue.start : place])

    def behind(self, sequence: int) -> Iterator[int]:
        """The open records of the same key after this one, in order."""
        queue = self._queue_of.get(sequence)
        if queue is None:
            return
        for place in range(bisect_right(queue.sequences, sequence, queue.start), len(queue.sequences)):
            if not self._done(queue.sequences[place]):
                yield queue.sequences[place]

    def of(self, run: Run) -> list[int]:
        """The records of a run that have a key, in order."""
        return run.among(self._queue_of)

    def _done(self, sequence: int) -> bool:
        return self._window.state(sequence) is State.DONE
