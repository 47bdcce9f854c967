"""Query planner: turns options and paths into pieces of logs and bundles to read.

Bundles are planned from their manifests, and read as Arrow one part at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import quote

import pyarrow as pa

from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.disk import Disk
from wald.format.batch import BatchHeader
from wald.format.names import is_route
from wald.reading.arrow import record_batches
from wald.reading.assembler import Batch
from wald.segments.seek import sequence_since, sequence_until
from wald_archive.bundle import Bundle
from wald_archive.codecs import Codec
from wald_archive.lookup import bundles_of, checked_runs
from wald_archive.manifest import BundleEntry, Previous
from wald_archive.objects import BagName, open_destination
from wald_spark.locations import ArchiveLocation, Location, LogLocation, Shipped, find_locations
from wald_spark.options import PARTIAL_HINT, STRICT, DamageReport, Options, Tolerance
from wald_spark.plan import LogPiece, Range, first_record, pieces_of

_ALWAYS = (-(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class BundlePiece:
    """Records ``first`` to ``last`` of one bundle that were appended at ``from_ns`` ≤ t < ``until_ns``."""

    location: ArchiveLocation
    log: str
    bag: BagName
    codec: Codec
    bundle: Bundle
    first: int
    last: int
    from_ns: int
    until_ns: int
    tolerance: Tolerance = STRICT

    @property
    def raw_bytes(self) -> int:
        return self.bundle.contents.record_bytes

    @property
    def name(self) -> str:
        return f"{self.log}-{str(self.bag).replace('/', '-')}-{self.bundle.name}"

    def arrow(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the records as :func:`record_batches` does; the segment is 0, because bundles do not record it."""
        with closing(DamageReport(self.tolerance, self.name)) as damage:
            try:
                yield from record_batches(self._batches(), columns)
            except Damaged as error:
                damage.add(error)

    def _batches(self) -> Iterator[Batch]:
        destination = open_destination(self.location.address, Disk())
        for run in checked_runs(destination, self.bag, self.codec, self.bundle, self.first, self.last):
            if self.from_ns <= run.append_time_ns < self.until_ns:
                encoding, payload = run.payload()
                count, time_ns = run.count, run.append_time_ns
                header = BatchHeader(0, len(payload), run.first, time_ns, 0, 0, count, 0, encoding, 0, 0)
                data = memoryview(payload)
                yield Batch(self.bag.route, run.first, run.last, data, run.terminated, header, 0, 0)


def bundle_pieces(
    location: ArchiveLocation, options: Options, others: Sequence[ArchiveLocation] = ()
) -> list[BundlePiece]:
    """Plan the pieces of an archive, with one bundle for each set of records; ``others`` may have earlier bundles."""
    destination, tolerance = open_destination(location.address, Disk()), options.tolerance
    routes, first, last = options.routes, options.first or 1, options.last
    begin = _ALWAYS[0] if options.from_ns is None else options.from_ns
    end = _ALWAYS[1] if options.until_ns is None else options.until_ns
    pieces: list[BundlePiece] = []
    with closing(DamageReport(tolerance, f"planning-{quote(location.address, safe='')}")) as damage:
        for route in sorted(filter(is_route, destination.listing("").folders)):
            if routes is not None and route not in routes:
                continue
            reached: dict[str, int] = {}  # the last record of the bundles so far, by log
            for manifest, entry in bundles_of(destination, route):
                contents, log, codec = entry.bundle.contents, manifest.origin.log, manifest.codec
                known = reached.get(log)
                if contents.after > max(known or 0, first - 1) and (known or 0) < last:
                    message = f"{location.address}/{manifest.bag}: begins after record {contents.after}, and"
                    if known is not None:
                        message = f"{message} no bundle has the records after record {known}"
                        damage.add(Damaged(message, hint=f"wald-archive verify {location.address}"))
                    elif not tolerance.partial and (previous := _lost_previous(entry, route, others)):
                        message = f"{message} the bundle before it, {previous.bundle}, is missing"
                        damage.add(Damaged(message, hint=PARTIAL_HINT.replace("segments", "bags")))
                begins, ends = max(contents.first, first, (known or 0) + 1), min(contents.last, last)
                reached[log] = max(known or 0, contents.last)
                if begins <= ends and contents.latest_ns >= begin and contents.earliest_ns < end:
                    of_bundle = location, log, manifest.bag, codec, entry.bundle
                    pieces.append(BundlePiece(*of_bundle, begins, ends, begin, end, tolerance))
    return pieces


def _lost_previous(entry: BundleEntry, route: str, others: Sequence[ArchiveLocation]) -> Previous | None:
    found = (each for other in others for _, each in bundles_of(open_destination(other.address, Disk()), route))
    return None if any(each.as_previous() == entry.previous for each in found) else entry.previous


Piece = LogPiece | BundlePiece


def plan_query(options: Options) -> list[Piece]:
    locations = find_locations(options.paths)
    require_routes(locations, options.routes or frozenset())
    pieces: list[Piece] = []
    archives = [location for location in locations if isinstance(location, ArchiveLocation)]
    for location in locations:
        if isinstance(location, LogLocation):
            pieces += _log_pieces(location, options)
        else:
            pieces += bundle_pieces(location, options, [other for other in archives if other != location])
    _refuse_overlaps(pieces)
    return pieces


def _refuse_overlaps(pieces: Sequence[Piece]) -> None:
    """Check that no record is read from two locations, such as a log and its archive."""
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
    """Return the hint for two overlapping locations; ``one`` begins first or, if both begin together, ends first."""
    (begin, last), (first, end) = span, other_span
    contained = [(one, two)] * (begin == first) + [(two, one)] * (end <= last)
    archives = [pair for pair in contained if isinstance(pair[0], ArchiveLocation)]  # an archive may lack other routes
    for less, more in archives or contained * (begin == first):
        return f"leave out {_name(less)}: {_name(more)} has records with all of these numbers"
    return (
        f'two queries: .option("endingSequence", "{first - 1}") with {_name(one)}, .option("startingSequence", '
        f'"{first}") with {_name(two)}; then union'
    )


def _name(location: Location) -> str:
    return location.address if isinstance(location, ArchiveLocation) else str(location.root.path)


def require_routes(locations: Sequence[Location], routes: frozenset[str]) -> None:
    """Check that each of ``routes`` exists; the routes of shipped segments are known only once they are read."""
    known: set[str] = set()
    for location in locations:
        if isinstance(location, ArchiveLocation):
            known |= {*open_destination(location.address, Disk()).listing("").folders}
        elif isinstance(location.root, Shipped):
            return
        else:
            known |= {*location.root.route_names()}
    if unknown := sorted(routes - known):
        raise NotFound(f"the data has no route {unknown[0]!r}", hint=f"routes: {', '.join(sorted(known))}")


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
