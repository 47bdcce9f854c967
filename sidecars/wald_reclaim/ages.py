"""The least age of a segment, by the moments that ledgers have recorded; the wall clock is not read.

    segments.jsonl   "sealed": this segment existed at this moment
    reclaim.jsonl    "seen": every complete segment up to this one existed at this moment

Each ledger adds up the time between its own lines; the longer of the two sums counts, because both are certain. Time
that no line covers (before the first pass of a boot, after the last line of the boot before) does not count: an age may
be too small, and is never too large.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from operator import itemgetter

from wald.errors import Damaged
from wald.store.files.directory import Root
from wald.store.files.lines import Entry, Lines
from wald.store.files.uptime import Elapsed, Moment, moment_of

_WITNESS_NS = 3600 * 10**9  # between two lines "seen" of one boot: at most so much of it is lost when it ends


class Ages:
    """The ages of the segments of ``root``.

    Args:
        moment: returns the present moment.

    Attributes:
        trouble: why the ledger of the segments cannot be used; "" if it can.
    """

    def __init__(self, root: Root, moment: Callable[[], Moment]) -> None:
        self._lines = Lines(root.ledger / "segments.jsonl")
        self._moment = moment
        self._own = Elapsed()
        self._seen: list[tuple[int, int]] = []
        """Up to which segment all existed, and the time elapsed by then, from reclaim's ledger; both grow."""
        self._witnessed: Moment | None = None
        self._sealing = Elapsed()
        self._sealed: dict[int, int] = {}
        """The time elapsed when each segment was sealed, from the ledger of the segments."""
        self._generation = 0
        self.trouble = ""
        self._begin(Lines(root.ledger / "reclaim.jsonl"))

    def _begin(self, own: Lines) -> None:
        """Take in what reclaim's own ledger says."""
        read = 0
        for index in own.sealed():
            for through, elapsed_ns in index.seen:
                self._see(through, elapsed_ns)
            self._own, read = Elapsed(index.clock), index.line + index.lines - 1
        for line in own.oldest_first(behind=read):
            self.record(line.entry)

    def record(self, entry: Entry) -> None:
        """Take in the next line of that ledger."""
        moment = moment_of(entry)
        if moment is None:
            return
        elapsed_ns = self._own.advance(moment)
        if entry.get("event") == "seen":
            self._witnessed = moment
            through = entry.get("through")
            if isinstance(through, int):
                self._see(through, elapsed_ns)

    def _see(self, through: int, elapsed_ns: int) -> None:
        if not self._seen or through > self._seen[-1][0]:
            self._seen.append((through, elapsed_ns))

    def witness(self, through: int, *, now_ns: int) -> Entry | None:
        """The line "seen" that is due now; None if none is.

        Args:
            through: the newest complete segment.
        """
        now = self._moment()
        last = self._witnessed
        if last is not None and now.boot == last.boot and now.boottime_ns - last.boottime_ns < _WITNESS_NS:
            return None
        return {"event": "seen", "through": through, "at": now_ns} | now.as_entry()

    def learn(self, bases: Collection[int]) -> None:
        """Look up in the ledger of the segments when those of ``bases`` were sealed that are not known yet."""
        try:
            self._sealing, self.trouble = self._lines.elapsed(), ""
            if self._lines.generation != self._generation:
                self._generation, self._sealed = self._lines.generation, {}
            for base in sorted(set(bases) - self._sealed.keys()):
                for line in self._lines.about(base, base):
                    if line.low == base and line.is_range("sealed") and moment_of(line.entry) is not None:
                        self._sealed[base] = self._lines.elapsed_ns(line)  # of several the first one counts
        except Damaged as error:
            self._sealing, self._sealed = Elapsed(), {}
            self.trouble = f"{error.message}; ages are counted from when wald-reclaim first saw a segment"

    def at_least_ns(self, base: int) -> int:
        """The least age of the segment; 0 if nothing is known."""
        now = self._moment()
        number = bisect_left(self._seen, base, key=itemgetter(0))
        own_ns = self._own.until(now) - self._seen[number][1] if number < len(self._seen) else 0
        return max(own_ns, self._sealing.until(now) - self._sealed[base] if base in self._sealed else 0)
