"""Making the journal of a work group durable: one sync for all threads that wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from wald.format.work import Line
from wald.work.journal import Journal


class Commits:
    """What the threads of an owner write to ``journal``.

    After a failed write or sync it is not known what is on disk, so nothing is written any more.

    Args:
        changed: held by the caller of :meth:`write`, and by no caller of :meth:`wait`.
        snapshot: what the journal is to say when it is written anew.
    """

    def __init__(self, journal: Journal, changed: threading.Condition, snapshot: Callable[[], Iterable[Line]]) -> None:
        self._journal = journal
        self._changed = changed
        self._snapshot = snapshot
        self._syncing = False
        self._failed: OSError | None = None

    @property
    def written(self) -> int:
        """What :meth:`wait` takes to wait for all that was written."""
        return self._journal.written

    def write(self, line: Line) -> None:
        """Append a line.

        Raises:
            OSError: it cannot be written, or an earlier one could not.
        """
        if self._failed is not None:
            raise self._failed
        try:
            self._journal.append(line)
            if self._journal.has_grown and not self._syncing:
                self._journal.rewrite(self._snapshot())
        except OSError as error:
            self._failed = error
            raise

    def wait(self, written: int) -> None:
        """Return when the first ``written`` bytes are on disk.

        Raises:
            OSError: they cannot be synced, or could not be written.
        """
        with self._changed:
            while self._journal.durable < written:
                if self._failed is not None:
                    raise self._failed
                if self._syncing:
                    self._changed.wait()
                else:
                    self._sync()

    def _sync(self) -> None:
        self._syncing = True
        self._changed.release()
        try:
            self._journal.sync()
        except OSError as error:
            self._failed = error
            raise
        finally:
            self._changed.acquire()
            self._syncing = False
            self._changed.notify_all()
