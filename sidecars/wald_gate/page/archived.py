"""What of the log is in archives, by the ledger: of each segment, and of those that were reclaimed.

A segment is archived where no record of it is missing in bundles, whatever its route. What has been found is kept: the
ledger is read on, a segment that is archived stays so, and so does one that was reclaimed. Of deletions, the newest are
looked at first, some of them in each walk, so that a long history does not make a walk long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

from wald.errors import Damaged
from wald.files.layout import Root
from wald.format.spans import Spans
from wald.retention.backlog import SegmentStatus
from wald.retention.history import History
from wald.retention.missing import ReclaimedSegment
from wald.segments.view import State
from wald.status.rates import SegmentSeen
from wald_gate.page.strip import Look, Piece

_AT_MOST = 1000  # deletions that are looked at in a walk


@dataclass(frozen=True, slots=True)
class Archived:
    """What is in archives.

    Attributes:
        whole, partly: the first sequences of the segments of which all records are there, or some.
        gone, gone_partly: the sequences that were in such segments, which have been reclaimed.
        trouble: why it cannot be said.
    """

    whole: frozenset[int] = frozenset()
    partly: frozenset[int] = frozenset()
    gone: Spans = field(default_factory=Spans)
    gone_partly: Spans = field(default_factory=Spans)
    trouble: str = ""

    def marked(self, piece: Piece) -> Piece:
        """The piece of a segment with how many of its records are archived."""
        if piece.first in self.whole and piece.look is not Look.ACTIVE:
            return replace(piece, archived=piece.records)
        return replace(piece, partly=piece.records) if piece.first in self.partly else piece

    def of_gone(self, first: int, last: int) -> tuple[int, int]:
        """How many of these sequences, which have been reclaimed, were in segments all in archives, and partly."""
        return self.gone.count(first, last), self.gone_partly.count(first, last)


class Bundled:
    """Finds it, in walks through the segments: :meth:`begin`, :meth:`take` for each of them, :meth:`end`.

    Attributes:
        newest: what the newest walk has found; it is never changed.
    """

    def __init__(self, root: Root) -> None:
        self.newest = Archived()
        self._history = History(root)
        self._runs: Mapping[str, Spans] = {}
        self._whole: set[int] = set()
        self._met: set[int] = set()
        self._partly: set[int] = set()
        self._forget()

    def _forget(self) -> None:
        """Judge all deletions again."""
        self._judged, self._gone, self._gone_partly = Spans(), Spans(), Spans()

    def begin(self) -> None:
        """Read what is new in the ledger."""
        self._met, self._partly = set(), set()
        self._trouble = ""
        try:
            self._read_on()
        except (Damaged, OSError) as error:
            self._trouble = str(error)

    def take(self, status: SegmentStatus) -> None:
        """Judge a segment."""
        base = status.segment.base_sequence
        self._met.add(base)
        if self._trouble or base in self._whole:
            return
        if self._judged.overlaps(base, base):  # it was taken back
            self._forget()
        if status.state is State.ACTIVE:  # there may be more in it by now
            if any(runs.overlaps(base, max(base, status.last_sequence or 0)) for runs in self._runs.values()):
                self._partly.add(base)
            return
        is_whole, is_partly = _share(self._runs, ((each.route, each.first, each.last) for each in status.routes))
        if is_whole:
            self._whole.add(base)
        elif is_partly:
            self._partly.add(base)

    def end(self, segments: Iterable[SegmentSeen]) -> None:
        """Judge what has been reclaimed around the segments that there are."""
        self._whole &= self._met
        try:
            if not self._trouble:
                self._judge(list(_gaps(segments)))
        except (Damaged, OSError) as error:
            self._trouble = str(error)
        if self._trouble:
            self.newest = Archived(trouble=self._trouble)
            return
        gone, gone_partly = Spans(self._gone), Spans(self._gone_partly)
        self.newest = Archived(frozenset(self._whole), frozenset(self._partly), gone, gone_partly)

    def _read_on(self) -> None:
        runs = self._history.archived_spans()
        if runs is not self._runs:  # other lines stand in the ledger
            self._runs = runs
            self._whole.clear()
            self._forget()

    def _judge(self, gaps: Sequence[tuple[int, int]]) -> None:
        found: list[ReclaimedSegment] = []
        read: list[tuple[int, int]] = []
        for first, last in reversed(gaps):
            for run in list(self._judged.gaps(first, last)):
                left = _AT_MOST - len(found)
                some = list(islice(self._history.reclaimed_segments(*run), left))
                found += some
                if len(some) < left:
                    read.append(run)
        if found:
            self._read_on()  # after the deletions: what is archived before one has its line before that one's
        for each in found:
            is_whole, is_partly = _share(
                self._runs, ((held.route, held.first, held.last) for held in each.routes or ())
            )
            if is_whole or is_partly:
                (self._gone if is_whole else self._gone_partly).add(each.first, each.last)
            self._judged.add(each.first, each.last)
        for run in read:
            self._judged.add(*run)


def _share(runs: Mapping[str, Spans], routes: Iterable[tuple[str, int, int]]) -> tuple[bool, bool]:
    """Whether all records of a segment are in bundles, and whether any is.

    Args:
        routes: what it holds: a name, and the first and the last record of it.
    """
    if not runs:
        return False, False
    held = [(runs.get(name), first, last) for name, first, last in routes]
    is_partly = any(found is not None and found.overlaps(first, last) for found, first, last in held)
    return is_partly and all(found is not None and found.covers(first, last) for found, first, last in held), is_partly


def _gaps(segments: Iterable[SegmentSeen]) -> Iterator[tuple[int, int]]:
    """What is between the segments, and in front of them."""
    end = 1
    for each, following in pairwise((*sorted(segments, key=lambda seen: seen.base), None)):
        assert each is not None
        if each.base > end:
            yield end, each.base - 1
        if following is not None:
            end = max(end, (following.base - 1 if each.last is None else each.last) + 1)
