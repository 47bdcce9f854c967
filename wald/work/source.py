"""The records of a route for a work group: in order, by a thread that reads ahead; and again, by their numbers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from wald.errors import Damaged, WaldError
from wald.hints import command_line
from wald.log import Log
from wald.reading.assembler import Rows
from wald.retention.history import History
from wald.retention.missing import Missing, skip_lost
from wald.work.kept import Decoded, Kept
from wald.work.window import Run

_AHEAD_BYTES = 4 << 20
_KEPT_BYTES = 8 << 20


class Lost(Exception):
    """Records that were taken before were given up by a repair, or are in no copy of the log.

    Attributes:
        run: those.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.run = run


class Source:
    """Reads ``route`` from ``start`` on. It passes over what a repair has given up.

    Args:
        lost: called with what it passes over.
        arrived: called when there is more, or when reading has failed, after :meth:`next` had none.
    """

    def __init__(
        self, log: Log, route: str, start: int, arrived: Callable[[], None], lost: Callable[[Missing], None]
    ) -> None:
        self._log = log
        self._route = route
        self._arrived = arrived
        self._lost = lost
        self._changed = threading.Condition()
        self._ahead: deque[Decoded] = deque()  # by the thread that reads, so that no turn waits for that
        self._ahead_bytes = 0
        self._is_awaited = False
        self._at_end = False
        self._failed: Exception | None = None
        self._kept = Kept(_KEPT_BYTES, partial(log.batches, route))
        self._taken_end = start
        self._cancel = threading.Event()
        self._begin(start)

    def next(self, behind: int) -> Run | None:
        """The records that are next in the order of the log, a batch of them; None if there are none yet.

        Where a repair has given up records, it is these, and :meth:`take` returns none.

        Args:
            behind: up to there all is done.

        Raises:
            WaldError, OSError: reading has failed, after all batches before that place were given out. It is tried
                again from there.
        """
        with self._changed:
            if self._ahead:
                return self._ahead[0].run
            if self._failed is None:
                self._is_awaited = True
                return None
            error, self._failed = self._failed, None
        self._thread.join()
        self._begin(max(self._start, behind + 1))
        raise error

    @property
    def is_at_end(self) -> bool:
        """Whether it has read to the end of the log since the start."""
        return self._at_end

    def take(self) -> Rows | None:
        """The records of the batch that is next, None if they are lost; then the one behind it is next."""
        with self._changed:
            batch = self._ahead.popleft()
            was_full = self._ahead_bytes > _AHEAD_BYTES
            self._ahead_bytes -= batch.size
            if was_full:
                self._changed.notify_all()
        if batch.rows is not None:
            self._kept.add(batch)
            self._taken_end = batch.run.last + 1
        return batch.rows

    def rows(self, first: int) -> Rows:
        """The batch with the record ``first``, which was taken before.

        Raises:
            Lost: the record is given up.
            NotFound, Damaged: it cannot be read any more.
        """
        if (rows := self._kept.rows(first, self._taken_end)) is not None:
            return rows
        lost: list[Missing] = []
        # As a whole: the next ones are often asked for next.
        batch = next(self._log.batches(self._route, first, on_missing=lost.append), None)
        for missing in lost:
            skip_lost(missing)
        if not lost and (batch is None or batch.first_sequence > first):
            lost += self._passed_over(first)
        for missing in lost:
            self._lost(missing)
        if lost:
            raise Lost(Run(first, lost[-1].last))
        if batch is None or batch.first_sequence > first:  # the log is older than the journal, or shorter
            raise Damaged(
                f"{self._log.root.segments}: record {first} of route {self._route} was read before, but is missing now",
                hint=f"{command_line(self._log.root.path, 'verify')} checks the log",
            )
        self._kept.add(Decoded.of(batch, is_again=True))
        return self.rows(first)

    def _passed_over(self, first: int) -> Iterator[Missing]:
        """What a start of the daemon has passed over from ``first`` on, as the log is older than the journal."""
        entry = History(self._log.root).skip_of(first)
        if entry is not None:
            last, why = int(entry["last"]), f"a start of the daemon passed over them, as {entry.get('why')}"
            count, routes = last + 1 - first, frozenset([self._route])
            yield Missing(self._log.root.path, first, last, count, False, self._route, routes, asked=False, lost=why)

    def close(self) -> None:
        """End the threads."""
        self._kept.close()
        self._cancel.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()

    def _begin(self, start: int) -> None:
        """Read from ``start`` on, in a thread."""
        self._start = start
        self._thread = threading.Thread(target=self._read, args=(start,), name=f"wald-work-{self._route}", daemon=True)
        self._thread.start()

    def _read(self, start: int) -> None:
        try:
            following = self._log.batches(
                self._route,
                start,
                follow=True,
                cancel=self._cancel,
                on_missing=self._pass_over,
                on_wait=self._reach_end,
            )
            for batch in following:
                self._add(Decoded.of(batch))
                with self._changed:
                    while self._ahead_bytes > _AHEAD_BYTES and not self._cancel.is_set():
                        self._changed.wait()
                if self._cancel.is_set():
                    return
        except Exception as error:  # noqa: BLE001 - who leases gets it
            self._failed = error if isinstance(error, WaldError | OSError) else OSError(f"{self._route}: {error!r}")
            self._arrive()

    def _pass_over(self, missing: Missing) -> None:
        skip_lost(missing)
        self._lost(missing)
        self._add(Decoded(Run(missing.first, missing.last), None, 0))

    def _add(self, decoded: Decoded) -> None:
        with self._changed:
            self._start = decoded.run.last + 1
            self._ahead.append(decoded)
            self._ahead_bytes += decoded.size
        self._arrive()

    def _reach_end(self) -> None:
        if not self._at_end:
            self._at_end = True
            self._arrive()

    def _arrive(self) -> None:
        with self._changed:
            is_awaited, self._is_awaited = self._is_awaited, False
        if is_awaited:
            self._arrived()
