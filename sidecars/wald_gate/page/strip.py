"""Layout of the log as a strip, from its oldest record to its head: widths of segments, positions of head and cursors.

It knows neither HTML nor files. Positions are in percent of the width. The number of pieces is limited: similar
neighbouring old segments are joined first, then different ones, which are drawn like the worst of them. ::

    reclaimed │ sealed … │ sealed │ cut │ active ▏
              ▲ cursors                  head
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, groupby
from typing import NamedTuple


class Look(Enum):
    """Appearance of a segment, the worst last."""

    RECLAIMED = "reclaimed"
    DOOMED = "pending deletion"
    SEALED = "sealed"
    CUT = "cut"
    ACTIVE = "active"
    DAMAGED = "damaged"


_BY_RANK = list(Look)


@dataclass(frozen=True, slots=True)
class Piece:
    """One segment, or several neighbours."""

    first: int
    last: int  # of the active segment, the head
    look: Look
    held: int = 0  # number of pinned segments
    segments: int = 1
    stored_bytes: int = 0
    fill: float = 1.0  # written share of the width
    archived: int = 0  # records of segments that are archived whole, and in part
    partly: int = 0

    @property
    def records(self) -> int:
        return max(0, self.last - self.first + 1)

    @property
    def is_archived(self) -> bool:
        return 0 < self.records <= self.archived

    @property
    def is_partly_archived(self) -> bool:
        return not self.is_archived and self.archived + self.partly > 0


class Drawn(NamedTuple):
    """A piece and its place."""

    piece: Piece
    x: float
    width: float


class Mark(NamedTuple):
    """Cursors that are so close that they share a marker."""

    number: int
    x: float
    names: tuple[str, ...]  # of the groups, in the order of their positions
    first: int
    last: int
    row: int  # of the sign on a narrow strip, so that signs do not overlap


@dataclass(frozen=True, slots=True)
class Strip:
    """Layout of a log."""

    drawn: Sequence[Drawn]
    marks: Sequence[Mark] = ()
    head_x: float | None = None

    def at(self, sequence: int) -> float:
        """Return the x position of a record's end."""
        number = bisect_right(self.drawn, sequence, key=lambda each: each.piece.first) - 1
        if number < 0:
            return self.drawn[0].x if self.drawn else 0.0
        piece, x, width = self.drawn[number]
        return x + width * piece.fill * min(1.0, (sequence - piece.first + 1) / piece.records) if piece.records else x


PIECES_MAX = 160
_SINGLE = 24  # of the newest segments, which are drawn one by one
_LEAST = 0.35  # percent
_RECLAIMED = 4.0
_MARKS_MAX = 12
_CLOSE = 1.6  # percent: a sign is 18 px wide
_ROWS = 4  # of signs, on a phone


def strip(
    pieces: Sequence[Piece],
    head: int | None,
    cursors: Iterable[tuple[str, int]],
    gone: Callable[[int, int], tuple[int, int]] = lambda _first, _last: (0, 0),
) -> Strip:
    """Lay out the segments of a log, with the position of its head and of each group.

    Records between two pieces were deleted; ``gone`` returns ``archived`` and ``partly`` of them.
    """
    bare = Strip(_placed(_joined(list(_with_gaps(pieces, gone)))))
    head_x = bare.at(head) if head is not None and bare.drawn else None
    return replace(bare, marks=_marks(bare, cursors), head_x=head_x)


def _with_gaps(pieces: Sequence[Piece], gone: Callable[[int, int], tuple[int, int]]) -> Iterator[Piece]:
    end = 1
    for piece in pieces:
        if piece.first > end:
            archived, partly = gone(end, piece.first - 1)
            yield Piece(end, piece.first - 1, Look.RECLAIMED, segments=0, archived=archived, partly=partly)
        yield piece
        end = max(end, piece.last + 1)


def _joined(pieces: list[Piece]) -> list[Piece]:
    if len(pieces) <= PIECES_MAX:
        return pieces
    old, new = pieces[:-_SINGLE], pieces[-_SINGLE:]
    runs = [
        _as_one(list(run))
        for _, run in groupby(old, lambda each: (each.look, each.held > 0, each.is_archived, each.is_partly_archived))
    ]
    size = -(-len(runs) // (PIECES_MAX - _SINGLE))
    return [_as_one(runs[at : at + size]) for at in range(0, len(runs), size)] + new


def _as_one(pieces: list[Piece]) -> Piece:
    return Piece(
        pieces[0].first,
        pieces[-1].last,
        max((piece.look for piece in pieces), key=_BY_RANK.index),
        sum(piece.held for piece in pieces),
        sum(piece.segments for piece in pieces),
        sum(piece.stored_bytes for piece in pieces),
        archived=sum(piece.archived for piece in pieces),
        partly=sum(piece.partly for piece in pieces),
    )


def _placed(pieces: list[Piece]) -> list[Drawn]:
    """Share the width by records, with a visible minimum; deleted segments take little."""
    kept = [piece for piece in pieces if piece.look is not Look.RECLAIMED]
    gaps = len(pieces) - len(kept)
    of_gap = min(_RECLAIMED, 20.0 / gaps) if gaps else 0.0
    room = 100.0 - of_gap * gaps
    least = min(_LEAST, room / len(kept)) if kept else 0.0
    typical = sum(piece.records for piece in kept if piece.look is not Look.ACTIVE) / (len(kept) - 1 or 1)
    weights = [piece.records if piece.look is not Look.ACTIVE else max(piece.records, typical) for piece in kept]
    if not any(weights):
        weights = [1] * len(kept)
    spare, total = room - least * len(kept), sum(weights)
    shares = (least + spare * weight / total for weight in weights)
    widths = [of_gap if piece.look is Look.RECLAIMED else next(shares) for piece in pieces]
    return list(map(Drawn, pieces, accumulate(widths, initial=0.0), widths))


def _marks(bare: Strip, cursors: Iterable[tuple[str, int]]) -> list[Mark]:
    """Return one mark for each set of nearby cursors; if there are too many, the closest are joined first."""
    placed = sorted((bare.at(at), at, name) for name, at in cursors)
    clusters: list[list[tuple[float, int, str]]] = []
    close = _CLOSE
    while not clusters or len(clusters) > _MARKS_MAX:
        clusters = [[]]
        for each in placed:
            if clusters[-1] and each[0] - clusters[-1][0][0] >= close:
                clusters.append([])
            clusters[-1].append(each)
        close *= 2
    marks: list[Mark] = []
    ends = [0.0] * _ROWS  # of the last sign in each row
    for number, cluster in enumerate(filter(None, clusters), start=1):
        x, names = cluster[0][0], tuple(name for _, _, name in cluster)
        row = next((row for row, end in enumerate(ends) if end <= x), _ROWS - 1)
        ends[row] = x + _ROWS * _CLOSE
        marks.append(Mark(number, x, names, cluster[0][1], cluster[-1][1], row))
    return marks
