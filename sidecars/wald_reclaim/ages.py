"""The least age of a segment, by the moments that ledgers have recorded; the wall clock is not read.

    segments.jsonl   "sealed": this segment existed at this moment
    reclaim.jsonl    "seen": every complete segment up to this one existed at this moment

Each ledger adds up the time between its own lines. The longer of the two sums counts, because both are certain. Time
that no line covers (before the first pass of a boot, after the last line of the previous boot, around damaged lines)
does not count: an age may be too small, and is never too large.
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

_WITNESS_NS = 3600 * 10**9  # between two lines "seen" of a boot; the end of the boot loses no more than this


class _Witness:
    """The moments in the lines of a ledger with one event.

    Attributes:
        elapsed: the time until its last line.
        at_ns: for each value of ``key``, the time until the first line with it.
        last: moment of the last line with the event.
        damage: lines that cannot be read, and the sequences that they may be about.
    """

    def __init__(self, path: Path, event: str, key: str) -> None:
        self._lines = LedgerLines(path)
        self._event, self._key = event, key
        self._generation = 0
        self._forget()

    def _forget(self) -> None:
        self._read = 0
        self.elapsed = Elapsed()
        self.at_ns: dict[int, int] = {}
        self.last: Moment | None = None
        self.damage: list[tuple[str, Span]] = []

    def read(self) -> None:
        """Read the lines that were appended since the last call.

        Raises:
            Damaged: the current file is damaged.
        """
        for line in self._lines.oldest_first(after=self._read, with_routes=False, on_damage=self._note_damage):
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
            self._forget()
            self.read()

    def _note_damage(self, error: Damaged, span: Span) -> None:
        self.damage.append((error.message, span))


class Ages:
    """The ages of the segments of ``root``.

    Args:
        moment: returns the present moment.

    Attributes:
        trouble: the reason why the ledger of the segments cannot be used; "" if it can.
    """

    def __init__(self, root: Root, moment: Callable[[], Moment]) -> None:
        self._moment = moment
        self._sealed = _Witness(root.ledger / "segments.jsonl", "sealed", "base")
        self._own = _Witness(root.ledger / "reclaim.jsonl", "seen", "through")
        self._seen: list[tuple[int, int]] = []
        """The highest segment that each line "seen" covers, and the time elapsed by then; both grow."""
        self.trouble = ""

    def witness(self, through: int, *, now_ns: int) -> Entry | None:
        """Return the line "seen" up to segment ``through`` if one is due."""
        self._own.read()
        now, last = self._moment(), self._own.last
        if last is not None and now.boot == last.boot and now.boottime_ns - last.boottime_ns < _WITNESS_NS:
            return None
        return {"event": "seen", "through": through, "at": now_ns} | now.as_entry()

    def learn(self, bases: Collection[int]) -> None:
        """Read the new lines of both ledgers, for the ages of the segments ``bases``."""
        self._own.read()
        self._seen = []
        for through, elapsed_ns in self._own.at_ns.items():
            if not self._seen or through > self._seen[-1][0]:
                self._seen.append((through, elapsed_ns))
        self.trouble = ""
        try:
            self._sealed.read()
        except Damaged as error:
            self._sealed.at_ns.clear()
            self._report(error.message)
        unknown = sorted(set(bases) - self._sealed.at_ns.keys())
        for message, (low, high) in self._sealed.damage:
            if bisect_left(unknown, low) < bisect_left(unknown, high + 1):
                self._report(message)

    def _report(self, message: str) -> None:
        self.trouble = f"{message}; ages are counted from when wald-reclaim first saw a segment"

    def at_least_ns(self, base: int) -> int:
        """Return the least age of the segment; 0 if nothing is known."""
        now = self._moment()
        number = bisect_left(self._seen, base, key=itemgetter(0))
        own_ns = self._own.elapsed.until(now) - self._seen[number][1] if number < len(self._seen) else 0
        at_ns = self._sealed.at_ns.get(base)
        return own_ns if at_ns is None else max(own_ns, self._sealed.elapsed.until(now) - at_ns)
