"""How far a job has done a log: a route whose newest record has not ended yet holds back itself, and no other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from wald.errors import Damaged, InvalidInput, NotFound, command_line
from wald_spark.blocks import Range, packed
from wald_spark.damage import Tolerance
from wald_spark.locations import LogLocation, Shipped, find_locations
from wald_spark.log_end import LogEnd, log_end
from wald_spark.pieces import LogPiece, pieces_of


@dataclass(frozen=True, slots=True)
class Progress:
    """Up to where the records of a log are done.

    Attributes:
        last: of all routes but those in ``held_back``.
        held_back: of each route that was held back by a record without an end, the last one that is done.
    """

    last: int
    held_back: Mapping[str, int] = field(default_factory=dict)

    def to(self, end: LogEnd) -> Progress:
        """As far as a job can get now; no further, where nobody can say which routes are held back and which not."""
        unknown = end.routes is None and (end.begun or self.held_back)
        if unknown or end.last < self.last:
            return self
        return Progress(end.last, {route: begun - 1 for route, begun in end.begun.items()})

    def ranges(self, after: Progress, end: LogEnd, wanted: frozenset[str] | None) -> list[Range]:
        """The records from here to ``after``, each once.

        Args:
            end: what ``after`` was made of.
            wanted: the routes; None: all.
        """
        apart = {*self.held_back, *after.held_back} if wanted is None else {*self.held_back, *after.held_back} & wanted
        others = wanted
        if apart:
            others = (end.routes or frozenset()) - apart
        ranges = [Range(others, self.last + 1, after.last)]
        ranges += [
            Range(frozenset({route}), self.held_back.get(route, self.last) + 1, after.held_back.get(route, after.last))
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
class NewRecords:
    """What is to be done of one log.

    Attributes:
        before, after: all that is wanted of the records between them is in ``pieces``, which may be none.
        lost: what RECLAIM had removed before it was done, in words; "": nothing.
    """

    location: LogLocation
    before: Progress
    after: Progress
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


def find_logs(paths: Sequence[str], routes: Sequence[str] | None) -> list[LogLocation]:
    """The logs at ``paths``, which have all of ``routes``; of shipped segments nobody knows before they are read.

    Raises:
        InvalidInput: an archive is among them.
        NotFound: a path names nothing, or no log has such a route.
    """
    locations = []
    for location in find_locations(paths):
        if not isinstance(location, LogLocation):
            raise InvalidInput(
                f"{location.address}: an archive; jobs read logs", hint='spark.read.format("wald") reads an archive'
            )
        locations.append(location)
    known = {route for location in locations for route in location.root.route_names()}
    unknown = [route for route in routes or () if route not in known]
    if unknown and not any(isinstance(location.root, Shipped) for location in locations):
        raise NotFound(f"there is no route {unknown[0]!r}", hint=f"there are {', '.join(sorted(known))}")
    return locations


def new_records(
    location: LogLocation, before: Progress | None, routes: Sequence[str] | None, tolerance: Tolerance
) -> NewRecords:
    """What has come behind ``before``, None: all there is.

    Raises:
        Damaged: something is missing, and that is not tolerated.
        NotFound: RECLAIM has removed records behind ``before``, and that is not tolerated.
    """
    view = location.view()
    bound = view.bound
    wanted = None if routes is None else frozenset(routes)
    if before is not None and not bound.lost and bound.sequence is not None and bound.sequence < before.last:
        raise Damaged(
            f"{location.root.path}: it ends with record {bound.sequence}, and record {before.last} was read before: an "
            "older copy was put back",
            hint=f"another --out begins anew; {command_line(location.root.path, 'verify')} tells what is there",
        )
    end = log_end(view, wanted)
    oldest = view.segments[0].base_sequence if view.segments else 1
    begun = before or Progress(oldest - 1)
    after = begun.to(end)
    ranges = begun.ranges(after, end, wanted)

    def planned(tolerance: Tolerance, *, gaps: bool) -> list[LogPiece]:
        return [
            piece
            for span in ranges
            for piece in pieces_of(view, span, limit_bytes=PIECE_BYTES, tolerance=tolerance, gaps=gaps)
        ]

    lost = ""
    try:
        pieces = planned(replace(tolerance, loss=False), gaps=before is None)
    except NotFound as error:
        if not tolerance.loss:
            raise
        lost = error.message
        pieces = planned(tolerance, gaps=False)
    return NewRecords(location, begun, after, pieces, lost)


def passed_over(new: NewRecords, notes: Path) -> list[str]:
    """What of ``new`` could not be read, and was not to be.

    Args:
        notes: the directory for reports of the tolerance with which it was planned.
    """
    lines = [
        line for path in sorted(notes.glob(f"{new.location.log}-*.jsonl")) for line in path.read_text().splitlines()
    ]
    return [new.lost] * bool(new.lost) + [json.loads(line)["message"] for line in lines]
