"""Making the index of a ledger's sealed part from its lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from wald.format.ledger import NO_SPAN, span_of
from wald.format.ledger_part import CLOCK_ZERO, Clock, PartFrame, PartIndex, Run
from wald.format.spans import Spans
from wald.store.files.uptime import Elapsed, moment_of

CLOCK_UNKNOWN: Clock = (1 << 62, "", 0)
"""Where the part before is not known: it makes ages by this part too small rather than too large."""
NO_TIMES = ((1 << 63) - 1, -1)


class IndexBuilder:
    """Takes the lines of a part frame by frame.

    Args:
        line: the number of its first one in the ledger; prev: the digest of the line before it; clock: at that line.
    """

    def __init__(self, line: int, prev: str, clock: Clock = CLOCK_ZERO) -> None:
        self._index = PartIndex(line, 0, prev, prev, [], clock)
        self._elapsed = Elapsed(clock)
        self._reclaimed: dict[int, int] = {}
        self._kept: set[int] = set()
        self._archived: dict[str, Spans] = {}

    @property
    def tip(self) -> str:
        return self._index.tip

    @property
    def lines(self) -> int:
        return self._index.lines

    def add(self, stored_bytes: int, raw_bytes: int, entries: Sequence[dict[str, Any]], tip: str) -> None:
        """Take in a frame, whose last line has the digest ``tip``."""
        index, clock = self._index, self._elapsed.clock
        for entry in entries:
            self._take(entry)
        about = (*span_of_all(entries), *times_of_all(entries))
        index.frames.append(PartFrame(stored_bytes, raw_bytes, len(entries), *about, index.tip, clock))
        index.lines += len(entries)
        index.tip = tip

    def finish(self) -> PartIndex:
        """The index, after the last frame."""
        index = self._index
        index.clock = self._elapsed.clock
        index.reclaimed = list(Spans(self._reclaimed.items()))
        index.kept = sorted(self._kept)
        index.archived = {route: list(spans) for route, spans in self._archived.items()}
        return index

    def _take(self, entry: dict[str, Any]) -> None:
        moment = moment_of(entry)
        elapsed_ns = self._elapsed.advance(moment) if moment else 0
        match entry:
            case {"event": "seen", "through": int(through)} if moment:
                self._index.seen.append((through, elapsed_ns))
            case {"event": "reclaimed", "base": int(base), "last": int(last)} if base <= last:
                self._reclaimed[base] = last
                self._kept.discard(base)
            case {"event": "kept", "base": int(base)}:
                self._reclaimed.pop(base, None)
                self._kept.add(base)
            case {"event": "archived", "first": int(), "last": int()} if (run := archived_run(entry)) is not None:
                self._archived.setdefault(str(entry.get("route")), Spans()).add(*run)


def archived_run(entry: dict[str, Any]) -> Run | None:
    """From where to where a bundle has every record of its route; None if its line makes no sense.

    A bundle holds every record of its route behind ``after``, so it joins the one that ends there.
    """
    first, last = span_of(entry)
    after = entry.get("after")
    begin = after + 1 if isinstance(after, int) else first
    return (min(begin, first), last) if first <= last else None


def span_of_all(entries: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """The lowest and the highest sequence that any of them is about."""
    low, high = NO_SPAN
    for entry in entries:
        span = span_of(entry)
        low, high = min(low, span[0]), max(high, span[1])
    return low, high


def times_of_all(entries: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """The earliest and the latest time in any of them."""
    earliest_ns, latest_ns = NO_TIMES
    for entry in entries:
        if isinstance(at := entry.get("at"), int):
            earliest_ns, latest_ns = min(earliest_ns, at), max(latest_ns, at)
    return earliest_ns, latest_ns
