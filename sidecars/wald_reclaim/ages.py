"""Least ages of segments, from the moments in ledgers; the wall clock is not read.

    segments.jsonl   "sealed": this segment existed at this moment
    reclaim.jsonl    "seen": every complete segment up to this one existed at this moment

Each ledger adds up the time between its own lines. The longer of the two sums counts, because both are certain. Time
that no line covers (before the first pass of a boot, after the last line of the previous boot, around damaged lines)
does not count: an age may be underestimated, and is never overestimated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from operator import itemgetter
from pathlib import Path

from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.ledger_read import LedgerLines
from wald.files.uptime import Elapsed, Moment, parse_moment
from wald.format.ledger_lines import Entry
from wald.format.spans import Span

_SEEN_INTERVAL_NS = 3600 * 10**9  # between two lines "seen" of a boot; at most this is lost at the end of a boot


class _LedgerTimes:
    """Moments of one event in a ledger."""

    def __init__(self, path: Path, event: str, key: str) -> None:
        self._lines = LedgerLines(path)
        self._event, self._key = event, key
        self._generation = 0
        self._reset()

    def _reset(self) -> None:
        self._read = 0
        self.elapsed = Elapsed()  # up to the last line
        self.at_ns: dict[int, int] = {}  # for each value of ``key``, the time up to the first line with it
        self.last: Moment | None = None  # of the event
        self.damage: list[tuple[str, Span]] = []  # unreadable lines, with the sequences that they may be about

    def update(self) -> None:
        """Read the lines appended since the last call; raise Damaged if the current file is damaged."""
        lines = self._lines.oldest_first(
            after=self._read, with_routes=False, on_damage=lambda error, span: self.damage.append((error.message, span))
        )
        for line in lines:
            if self._lines.generation != self._generation:
                break
            self._read = line.number
            if (moment := parse_moment(line.entry)) is None:
                continue
            elapsed_ns, value = self.elapsed.advance(moment), line.entry.get(self._key)
            if line.entry.get("event") == self._event and isinstance(value, int):
                self.last = moment
                self.at_ns.setdefault(value, elapsed_ns)
        if self._lines.generation != self._generation:  # the lines that were read no longer exist
            self._generation = self._lines.generation
            self._reset()
            self.update()


class Ages:
    """Ages of the segments of ``root``."""

    def __init__(self, root: Root, moment: Callable[[], Moment]) -> None:
        self._moment = moment
        self._sealed = _LedgerTimes(root.ledger / "segments.jsonl", "sealed", "base")
        self._own = _LedgerTimes(root.ledger / "reclaim.jsonl", "seen", "through")
        self._seen: list[tuple[int, int]] = []  # (highest segment of a "seen" line, time up to it), both increasing
        self.problem = ""  # reason why the ledger of the segments cannot be used

    def seen_entry(self, through: int, *, now_ns: int) -> Entry | None:
        """Return the line "seen" for segments up to ``through`` if one is due."""
        self._own.update()
        now, last = self._moment(), self._own.last
        if last is not None and now.boot == last.boot and now.boottime_ns - last.boottime_ns < _SEEN_INTERVAL_NS:
            return None
        return {"event": "seen", "through": through, "at": now_ns} | now.as_entry()

    def update(self, bases: Collection[int]) -> None:
        """Read the new lines of both ledgers, for the ages of the segments ``bases``."""
        self._own.update()
        self._seen = []
        for through, elapsed_ns in self._own.at_ns.items():
            if not self._seen or through > self._seen[-1][0]:
                self._seen.append((through, elapsed_ns))
        messages = []
        try:
            self._sealed.update()
        except Damaged as error:
            self._sealed.at_ns.clear()
            messages.append(error.message)
        unknown = sorted(set(bases) - self._sealed.at_ns.keys())
        for message, (low, high) in self._sealed.damage:
            if bisect_left(unknown, low) < bisect_left(unknown, high + 1):
                messages.append(message)
        suffix = "ages are counted from when wald-reclaim first saw a segment"
        self.problem = f"{messages[-1]}; {suffix}" if messages else ""

    def at_least_ns(self, base: int) -> int:
        """Return the least age of the segment; 0 if nothing is known."""
        now = self._moment()
        number = bisect_left(self._seen, base, key=itemgetter(0))
        own_ns = self._own.elapsed.until(now) - self._seen[number][1] if number < len(self._seen) else 0
        at_ns = self._sealed.at_ns.get(base)
        return own_ns if at_ns is None else max(own_ns, self._sealed.elapsed.until(now) - at_ns)
