"""How long a segment has been there at least, by what ledgers have witnessed; no wall clock is asked.

    segments.jsonl   "sealed": this segment was there at this moment
    reclaim.jsonl    "seen": every complete segment up to this one was there at this moment

Either adds up the time between its own lines; of the two answers the longer one counts, as both are certain. What no
line has witnessed (before the first look of a boot, after the last line of the one before) does not count: an age may
be told too small, and never too large.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from operator import itemgetter

from wald.errors import Damaged
from wald.store.files.directory import Root
from wald.store.files.ledger import entries_of
from wald.store.files.uptime import Elapsed, Moment, moment_of
from wald.store.retention.history import Entry

_WITNESS_NS = 3600 * 10**9  # between two lines "seen" in a boot: so much of it may be forgotten when it ends


class Ages:
    """Of the segments of ``root``.

    Args:
        moment: gives the present one.

    Attributes:
        trouble: why the ledger of the segments tells nothing; "" if it does.
    """

    def __init__(self, root: Root, moment: Callable[[], Moment]) -> None:
        self._path = root.ledger / "segments.jsonl"
        self._moment = moment
        self._own = Elapsed()
        self._seen: list[tuple[int, int]] = []
        """Segment up to which all were there, and what had elapsed then: by our own ledger, both growing."""
        self._witnessed: Moment | None = None
        self._sealing = Elapsed()
        self._sealed: dict[int, int] = {}
        """What had elapsed when a segment was sealed, by the ledger of the segments."""
        self._read_bytes = -1
        self.trouble = ""

    def hear(self, entry: Entry) -> None:
        """A line of our own ledger, in its order."""
        moment = moment_of(entry)
        if moment is None:
            return
        elapsed_ns = self._own.advance(moment)
        if entry.get("event") == "seen":
            self._witnessed = moment
            through = entry.get("through")
            if isinstance(through, int) and (not self._seen or through > self._seen[-1][0]):
                self._seen.append((through, elapsed_ns))

    def witness(self, through: int, *, now_ns: int) -> Entry | None:
        """The line that our ledger is to be told now; None: the last one will do.

        Args:
            through: the newest complete segment.
        """
        now = self._moment()
        last = self._witnessed
        if last is not None and now.boot == last.boot and now.boottime_ns - last.boottime_ns < _WITNESS_NS:
            return None
        return {"event": "seen", "through": through, "at": now_ns} | now.told()

    def learn(self, bases: Collection[int]) -> None:
        """Read the ledger of the segments, if it has grown and there are some in ``bases`` that it may tell of."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size == self._read_bytes or self._sealed.keys() >= set(bases):
            return
        self._read_bytes = size
        self._sealing, self._sealed, self.trouble = Elapsed(), {}, ""
        wanted = set(bases)
        try:
            for entry in entries_of(self._path):
                if (moment := moment_of(entry)) is not None:
                    elapsed_ns = self._sealing.advance(moment)
                    if entry.get("event") == "sealed" and entry.get("base") in wanted:
                        self._sealed.setdefault(entry["base"], elapsed_ns)
        except Damaged as error:
            self._sealing, self._sealed = Elapsed(), {}
            self.trouble = f"{error.message}; ages are counted from when wald-reclaim first saw a segment"

    def at_least_ns(self, base: int) -> int:
        """How long the segment has been there, at least; 0 where nothing is known."""
        now = self._moment()
        number = bisect_left(self._seen, base, key=itemgetter(0))
        own_ns = self._own.until(now) - self._seen[number][1] if number < len(self._seen) else 0
        return max(own_ns, self._sealing.until(now) - self._sealed[base] if base in self._sealed else 0)
