"""How far a job has read a log, and what has come since.

A route whose newest record has begun and not ended is held back; the other routes go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from wald.errors import InvalidInput, NotFound
from wald.hints import command_line
from wald.segments.continuity import Continuity, LastSeen, last_seen_at
from wald.segments.view import View
from wald_spark.blocks import Range, packed
from wald_spark.damage import Tolerance
from wald_spark.locations import LogLocation, Shipped, find_locations
from wald_spark.log_end import LogEnd, log_end
from wald_spark.pieces import LogPiece, first_record, pieces_of

PIECE_BYTES = 32 << 20  # of a piece; chunks are made of pieces


@dataclass(frozen=True, slots=True)
class Progress:
    """Up to which record a log is done.

    Attributes:
        last: of all routes except those in ``held_back``.
        held_back: for each route that a record without an end holds back, the last record that is done.
        epoch, life: the daemon's start when that was read, as in :class:`LastSeen`.
    """

    last: int
    held_back: Mapping[str, int] = field(default_factory=dict)
    epoch: int = field(default=0, compare=False)
    life: str = field(default="", compare=False)

    def to(self, end: LogEnd) -> Progress:
        """How far a job can get by ``end``; no further than here, if it is not known which routes are held back."""
        unknown = end.routes is None and (end.begun or self.held_back)
        if unknown or end.last < self.last:
            return self
        return Progress(end.last, {route: begun - 1 for route, begun in end.begun.items()})

    def ranges(self, after: Progress, end: LogEnd, wanted: frozenset[str] | None) -> list[Range]:
        """The records from here to ``after``, each once.

        Args:
            end: the end by which ``after`` was made.
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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring pieces of one log, which one task reads."""

    pieces: tuple[LogPiece, ...]

    @property
    def log(self) -> str:
        return self.pieces[0].log

    @property
    def raw_bytes(self) -> int:
        return sum(piece.raw_bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class NewRecords:
    """What has come in one log since the last run.

    Attributes:
        before, after: ``pieces``, which may be none, hold all wanted records between them.
    """

    location: LogLocation
    before: Progress
    after: Progress
    pieces: list[LogPiece]

    @property
    def due(self) -> bool:
        """Whether there is anything to do."""
        return self.before != self.after

    @property
    def raw_bytes(self) -> int:
        return sum(piece.raw_bytes for piece in self.pieces)

    def chunks(self, limit_bytes: int) -> list[Chunk]:
        return [Chunk(pieces) for pieces in packed(self.pieces, limit_bytes=limit_bytes)]


def find_logs(paths: Sequence[str], routes: Sequence[str] | None) -> list[LogLocation]:
    """The logs at ``paths``; they have all of ``routes``, unless there are shipped segments, which do not list them.

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
    """What has come behind ``before``; None: all there is.

    Raises:
        Damaged: something is missing, and that is not tolerated.
        NotFound: RECLAIM has deleted records behind ``before``, and that is not tolerated.
        RolledBack: the log is an older copy of the one that ``before`` is about.
    """
    view = location.view()
    wanted = None if routes is None else frozenset(routes)
    if before is not None:
        _require_same_past(view, before)
    end = log_end(view, wanted)
    begun = before or Progress(first_record(view, partial=tolerance.partial) - 1)
    after = begun.to(end)
    ranges = begun.ranges(after, end, wanted)
    if view.head is not None:
        seen = last_seen_at(view.root, view.head)
        after = replace(after, epoch=seen.epoch, life=seen.life)
    return NewRecords(location, begun, after, _pieces(view, ranges, tolerance, gaps=before is None))


def _require_same_past(view: View, before: Progress) -> None:
    if view.head is not None:
        hint = f"another --out begins with the oldest record; {command_line(view.root.path, 'verify')} checks the log"
        seen = LastSeen(before.last, before.epoch, before.life)
        Continuity(view.root, view.log_id, seen, hint=hint).check(view.head)


def _pieces(view: View, ranges: Sequence[Range], tolerance: Tolerance, *, gaps: bool) -> list[LogPiece]:
    return [
        piece
        for wanted in ranges
        for piece in pieces_of(view, wanted, limit_bytes=PIECE_BYTES, tolerance=tolerance, gaps=gaps)
    ]


def passed_over(new: NewRecords, notes: Path) -> list[str]:
    """Messages about what of ``new`` could not be read.

    Args:
        notes: the directory of the reports, as in the tolerance with which ``new`` was planned.
    """
    reports = sorted(notes.glob(f"{new.location.log}-*.jsonl"))
    messages = [
        json.loads(line)["message"] for path in reports for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return list(dict.fromkeys(messages))  # two ranges of one log may report the same damage
