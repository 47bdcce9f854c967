"""Planning a query: by its options and what its paths hold, which pieces have to be read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from wald.errors import InvalidInput, NotFound
from wald.files.disk import Disk
from wald.segments.seek import sequence_since, sequence_until
from wald_archive.api import open_destination
from wald_spark.blocks import Range
from wald_spark.bundles import BundlePiece, bundle_pieces
from wald_spark.locations import ArchiveLocation, Location, LogLocation, Shipped, find_locations
from wald_spark.options import Options
from wald_spark.pieces import LogPiece, first_record, pieces_of

Piece = LogPiece | BundlePiece


def plan_query(options: Options) -> list[Piece]:
    """All that has to be read, location by location and in order.

    Raises:
        NotFound: no such path or route, or RECLAIM has deleted records that were asked for by number.
        Damaged: something is missing or cannot be read, and damage is not tolerated.
        InvalidInput: two paths hold the same records.
    """
    locations = find_locations(options.paths)
    require_routes(locations, options.routes or frozenset())
    pieces: list[Piece] = []
    archives = [location for location in locations if isinstance(location, ArchiveLocation)]
    for location in locations:
        if isinstance(location, LogLocation):
            pieces += _log_pieces(location, options)
        else:
            pieces += bundle_pieces(
                location,
                options.routes,
                options.first or 1,
                options.last,
                options.from_ns,
                options.until_ns,
                options.tolerance,
                [other for other in archives if other != location],
            )
    _refuse_overlaps(pieces)
    return pieces


def _refuse_overlaps(pieces: Sequence[Piece]) -> None:
    """No record may come from two locations, as from a log and an archive of it."""
    spans: dict[tuple[str, Location], tuple[int, int]] = {}
    for piece in pieces:
        first, last = spans.get((piece.log, piece.location), (piece.first, piece.last))
        spans[piece.log, piece.location] = min(first, piece.first), max(last, piece.last)
    ordered = sorted(spans.items(), key=lambda item: (item[0][0], item[1]))
    for ((log, one), span), ((other_log, two), other_span) in pairwise(ordered):
        if log == other_log and other_span[0] <= span[1]:
            raise InvalidInput(
                f"{_name(one)} and {_name(two)} both have records of log {log}, starting at {other_span[0]}",
                hint=_how_to_read_both(one, span, two, other_span),
            )


def _how_to_read_both(one: Location, span: tuple[int, int], two: Location, other_span: tuple[int, int]) -> str:
    """Return the hint for two locations with the same records; ``one`` begins first, or else ends first."""
    (begin, last), (first, end) = span, other_span
    contained = [(one, two)] * (begin == first) + [(two, one)] * (end <= last)
    archives = [pair for pair in contained if isinstance(pair[0], ArchiveLocation)]  # it may have one of several routes
    for less, more in archives or contained * (begin == first):
        return f"leave out {_name(less)}: {_name(more)} has records with all of these numbers"
    return (
        f'two queries: .option("endingSequence", "{first - 1}") with {_name(one)}, .option("startingSequence", '
        f'"{first}") with {_name(two)}; then union'
    )


def _name(location: Location) -> str:
    return location.address if isinstance(location, ArchiveLocation) else str(location.root.path)


def require_routes(locations: Sequence[Location], routes: frozenset[str]) -> None:
    """Check that each of ``routes`` exists; in shipped segments this is known only when they are read.

    Raises:
        NotFound: one does not.
    """
    known: set[str] = set()
    for location in locations:
        if isinstance(location, ArchiveLocation):
            known |= {*open_destination(location.address, Disk()).listing("").folders}
        elif isinstance(location.root, Shipped):
            return
        else:
            known |= {*location.root.route_names()}
    if unknown := sorted(routes - known):
        raise NotFound(f"there is no route {unknown[0]!r} in the data", hint=f"there are {', '.join(sorted(known))}")


def _log_pieces(location: LogLocation, options: Options) -> list[LogPiece]:
    view = location.view()
    first, last = options.first or first_record(view, partial=options.tolerance.partial), options.last
    # The range of sequences that contains all records of a time range; with clock steps, it may contain others too.
    if options.from_ns is not None:
        first = max(first, sequence_since(view, options.from_ns))
    if options.until_ns is not None:
        last = min(last, sequence_until(view, options.until_ns) - 1)
    return pieces_of(
        view,
        Range(options.routes, first, last),
        limit_bytes=options.partition_bytes,
        active=options.active,
        tolerance=options.tolerance,
        gaps=options.first is None,
    )
