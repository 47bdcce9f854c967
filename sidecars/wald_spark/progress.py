"""How far a job has done a log: a route whose newest record has not ended yet holds back itself, and no other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from wald.errors import Damaged, InvalidInput, NotFound, command_line
from wald_spark.blocks import Range, packed
from wald_spark.damage import Tolerance
from wald_spark.ends import End, end_of
from wald_spark.locations import LogPlace, Shipped, find_places
from wald_spark.pieces import LogPiece, pieces_of


@dataclass(frozen=True, slots=True)
class Reached:
    """Up to where the records of a log are done.

    Attributes:
        last: of all routes but those in ``held``.
        held: of each route that was held back by a record without an end, the last one that is done.
    """

    last: int
    held: Mapping[str, int] = field(default_factory=dict)

    def to(self, end: End) -> Reached:
        """As far as a job can get now; no further, where nobody can say which routes are held back and which not."""
        unknown = end.routes is None and (end.begun or self.held)
        if unknown or end.last < self.last:
            return self
        return Reached(end.last, {route: begun - 1 for route, begun in end.begun.items()})

    def ranges(self, after: Reached, end: End, wanted: frozenset[str] | None) -> list[Range]:
        """The records from here to ``after``, each once.

        Args:
            end: what ``after`` was made of.
            wanted: the routes; None: all.
        """
        apart = {*self.held, *after.held} if wanted is None else {*self.held, *after.held} & wanted
        others = wanted
        if apart:
            others = (end.routes or frozenset()) - apart
        ranges = [Range(others, self.last + 1, after.last)]
        ranges += [
            Range(frozenset({route}), self.held.get(route, self.last) + 1, after.held.get(route, after.last))
            for route in sorted(apart)
        ]
        return [each for each in ranges if each.first <= each.last and (each.routes is None or each.routes)]


PIECE_BYTES = 32 << 20  # what is planned in one go; chunks are made of these


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring pieces of one log, which one task takes."""

    pieces: tuple[LogPiece, ...]

    @property
    def log(self) -> str:
        return self.pieces[0].log

    @property
    def raw_bytes(self) -> int:
        return sum(piece.raw_bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Portion:
    """What is to be done of one log.

    Attributes:
        before, after: all that is wanted of the records between them is in ``pieces``, which may be none.
        lost: what RECLAIM had removed before it was done, in words; "": nothing.
    """

    place: LogPlace
    before: Reached
    after: Reached
    pieces: list[LogPiece]
    lost: str = ""

    @property
    def due(self) -> bool:
        """Whether anything has come."""
        return self.before != self.after

    @property
    def raw_bytes(self) -> int:
        return sum(piece.raw_bytes for piece in self.pieces)

    def chunks(self, limit_bytes: int) -> list[Chunk]:
        return [Chunk(pieces) for pieces in packed(self.pieces, limit_bytes=limit_bytes)]


def find_logs(paths: Sequence[str], routes: Sequence[str] | None) -> list[LogPlace]:
    """The logs at ``paths``, which have all of ``routes``; of shipped segments nobody knows before they are read.

    Raises:
        InvalidInput: an archive is among them.
        NotFound: a path names nothing, or no log has such a route.
    """
    places = []
    for place in find_places(paths):
        if not isinstance(place, LogPlace):
            raise InvalidInput(
                f"{place.place}: an archive; jobs read logs", hint='spark.read.format("wald") reads an archive'
            )
        places.append(place)
    known = {route for place in places for route in place.root.route_names()}
    unknown = [route for route in routes or () if route not in known]
    if unknown and not any(isinstance(place.root, Shipped) for place in places):
        raise NotFound(f"there is no route {unknown[0]!r}", hint=f"there are {', '.join(sorted(known))}")
    return places


def since(place: LogPlace, before: Reached | None, routes: Sequence[str] | None, tolerance: Tolerance) -> Portion:
    """What has come behind ``before``, None: all there is.

    Raises:
        Damaged: something is missing, and that is not tolerated.
        NotFound: RECLAIM has removed records behind ``before``, and that is not tolerated.
    """
    bound, listing = place.look()
    wanted = None if routes is None else frozenset(routes)
    if before is not None and not bound.lost and bound.sequence is not None and bound.sequence < before.last:
        raise Damaged(
            f"{place.root.path}: it ends with record {bound.sequence}, and record {before.last} was read before: an "
            "older copy was put back",
            hint=f"another --out begins anew; {command_line(place.root.path, 'verify')} tells what is there",
        )
    end = end_of(place, bound, listing, wanted)
    oldest = listing.segments[0].base_sequence if listing.segments else 1
    begun = before or Reached(oldest - 1)
    after = begun.to(end)
    ranges = begun.ranges(after, end, wanted)

    def planned(tolerance: Tolerance, *, gaps: bool) -> list[LogPiece]:
        return [
            piece
            for span in ranges
            for piece in pieces_of(place, bound, listing, span, limit_bytes=PIECE_BYTES, tolerance=tolerance, gaps=gaps)
        ]

    lost = ""
    try:
        pieces = planned(replace(tolerance, loss=False), gaps=before is None)
    except NotFound as error:
        if not tolerance.loss:
            raise
        lost = error.message
        pieces = planned(tolerance, gaps=False)
    return Portion(place, begun, after, pieces, lost)


def passed_over(portion: Portion, notes: Path) -> list[str]:
    """What of ``portion`` could not be read, and was not to be.

    Args:
        notes: the directory for reports of the tolerance with which it was planned.
    """
    lines = [
        line for path in sorted(notes.glob(f"{portion.place.log}-*.jsonl")) for line in path.read_text().splitlines()
    ]
    return [portion.lost] * bool(portion.lost) + [json.loads(line)["message"] for line in lines]
