"""The log as a strip from its oldest record to its head: how wide segments are drawn, and where head and cursors are.

Nothing here knows HTML or files. Positions are in percent of the width. A strip has room for so many pieces: where
there are more segments, old ones that are alike and beside each other are drawn as one, and if these are still too
many, unlike ones as well, which then look like the worst of them. ::

    reclaimed │ sealed … │ sealed │ cut │ active ▏
              ▲ cursors                  head
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby


class Look(Enum):
    """How a segment is drawn, the worst last."""

    RECLAIMED = "reclaimed"
    DOOMED = "pending deletion"
    SEALED = "sealed"
    CUT = "cut"
    ACTIVE = "active"
    DAMAGED = "damaged"


_BY_RANK = list(Look)


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment, or several beside each other.

    Attributes:
        first, last: sequences; of the active one, up to the head.
        held: how many of its segments cursors pin.
        segments, stored_bytes: how many it stands for, and their bytes.
        archived: records of its segments that are in archives with all their records.
        partly: the same of those of which some are.
        fill: how much of its width is written, of the active one.
    """

    first: int
    last: int
    look: Look
    held: int = 0
    segments: int = 1
    stored_bytes: int = 0
    fill: float = 1.0
    archived: int = 0
    partly: int = 0

    @property
    def records(self) -> int:
        return max(0, self.last - self.first + 1)

    @property
    def is_archived(self) -> bool:
        """Whether no record of it is missing in the archives."""
        return 0 < self.records <= self.archived

    @property
    def is_partly_archived(self) -> bool:
        return not self.is_archived and self.archived + self.partly > 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """A piece and where it is drawn, in percent."""

    piece: Piece
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Mark:
    """Cursors that are so close to each other that one sign stands for them.

    Attributes:
        number: of the sign, from 1 on, from the left.
        names: of the groups, by how far they are.
        first, last: the sequences of the first and the last of these cursors.
        row: of the sign where the strip is narrow, so that no sign covers another one.
    """

    number: int
    x: float
    names: tuple[str, ...]
    first: int
    last: int
    row: int = 0


@dataclass(frozen=True, slots=True)
class Strip:
    """A log as it is drawn."""

    drawn: tuple[Drawn, ...]
    marks: tuple[Mark, ...]
    head_x: float | None

    def at(self, sequence: int) -> float:
        """Where the end of a record is."""
        if not self.drawn:
            return 0.0
        number = bisect_right(self.drawn, sequence, key=lambda each: each.piece.first) - 1
        if number < 0:
            return self.drawn[0].x
        found = self.drawn[number]
        if not found.piece.records:
            return found.x
        share = min(1.0, (sequence - found.piece.first + 1) / found.piece.records)
        return found.x + found.width * found.piece.fill * share


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
    """Lay out a log.

    Args:
        pieces: one for each segment, in order; what is between two of them has been reclaimed.
        cursors: the name of each group, and the last sequence that it has processed.
        gone: called with the first and the last sequence of what has been reclaimed; ``archived`` and ``partly`` of it.
    """
    drawn = tuple(_placed(_joined(_with_gaps(pieces, gone))))
    bare = Strip(drawn, (), None)
    head_x = None if head is None or not drawn else bare.at(head)
    return Strip(drawn, tuple(_marks(bare, cursors)), head_x)


def _with_gaps(pieces: Sequence[Piece], gone: Callable[[int, int], tuple[int, int]]) -> list[Piece]:
    found: list[Piece] = []
    end = 1
    for piece in pieces:
        if piece.first > end:
            archived, partly = gone(end, piece.first - 1)
            gap = Piece(end, piece.first - 1, Look.RECLAIMED, segments=0, archived=archived, partly=partly)
            found.append(gap)
        found.append(piece)
        end = max(end, piece.last + 1)
    return found


def _joined(pieces: list[Piece]) -> list[Piece]:
    """At most so many pieces."""
    if len(pieces) <= PIECES_MAX:
        return pieces
    old, new = pieces[:-_SINGLE], pieces[-_SINGLE:]
    runs = [_as_one(list(run)) for _, run in groupby(old, key=_alike)]
    if (size := -(-len(runs) // (PIECES_MAX - _SINGLE))) > 1:
        runs = [_as_one(runs[at : at + size]) for at in range(0, len(runs), size)]
    return runs + new


def _alike(piece: Piece) -> tuple[Look, bool, bool, bool]:
    """What is drawn of it."""
    return piece.look, piece.held > 0, piece.is_archived, piece.is_partly_archived


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
    """A share of the width for each: by its records, and at least what can be seen; reclaimed ones take little."""
    if not pieces:
        return []
    kept = [piece for piece in pieces if piece.look is not Look.RECLAIMED]
    gaps = len(pieces) - len(kept)
    of_gap = min(_RECLAIMED, 20.0 / gaps) if gaps else 0.0
    room = 100.0 - of_gap * gaps
    least = min(_LEAST, room / len(kept)) if kept else 0.0
    typical = sum(piece.records for piece in kept if piece.look is not Look.ACTIVE) / (len(kept) - 1 or 1)
    weights = [piece.records if piece.look is not Look.ACTIVE else max(piece.records, typical) for piece in kept]
    total = sum(weights) or 1
    spare = room - least * len(kept)
    shares = iter([least + spare * weight / total for weight in weights])
    if not sum(weights):
        shares = iter([room / len(kept) for _ in kept])
    x = 0.0
    found = []
    for piece in pieces:
        width = of_gap if piece.look is Look.RECLAIMED else next(shares)
        found.append(Drawn(piece, x, width))
        x += width
    return found


def _marks(bare: Strip, cursors: Iterable[tuple[str, int]]) -> list[Mark]:
    """One for cursors that are close to each other; the closer ones are joined first where there are too many."""
    placed = sorted((bare.at(at), at, name) for name, at in cursors)
    close = _CLOSE
    while True:
        clusters: list[list[tuple[float, int, str]]] = []
        for each in placed:
            if clusters and each[0] - clusters[-1][0][0] < close:
                clusters[-1].append(each)
            else:
                clusters.append([each])
        if len(clusters) <= _MARKS_MAX:
            break
        close *= 2
    marks: list[Mark] = []
    ends = [0.0] * _ROWS  # of the last sign in each row
    for number, cluster in enumerate(clusters, start=1):
        x, names = cluster[0][0], tuple(name for _, _, name in cluster)
        row = next((row for row, end in enumerate(ends) if end <= x), _ROWS - 1)
        ends[row] = x + _ROWS * _CLOSE
        marks.append(Mark(number, x, names, cluster[0][1], cluster[-1][1], row))
    return marks
