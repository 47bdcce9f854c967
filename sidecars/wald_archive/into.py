"""A new log out of an archive: the bundles of all wanted routes, merged by sequence.

Sequences, append times, event times, keys, headers and values are those of the log that was archived. Each route has
one bundle open at a time, so memory grows with the number of routes, by about 10 MiB each.
"""

from __future__ import annotations

import heapq
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wald
from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.disk import Disk
from wald.format.batch import Encoding
from wald.format.names import is_route
from wald.format.records import Record, encode_columns, record_from_json
from wald.format.segment import pack_version
from wald.format.times import utc
from wald.repairing.restore import NewLog, RestoredBatch
from wald_archive.destination import Destination
from wald_archive.parts import Form
from wald_archive.restore import Run, bundles_of, require_bundles, runs_of


@dataclass(frozen=True, slots=True)
class Extent:
    """What the archive has of a route: all records after ``after``, up to ``last``."""

    route: str
    log: str
    after: int
    last: int


@dataclass(slots=True)
class Outcome:
    """What was restored; ``holes`` is how many runs of sequences are in no bundle, ``missing`` how many sequences."""

    root: Path
    log: str
    from_log: str
    first: int = 0
    last: int = 0
    holes: int = 0
    missing: int = 0
    records: dict[str, int] = field(default_factory=dict)


def restore_into(
    destination: Destination,
    routes: Sequence[str],
    path: Path,
    *,
    disk: Disk,
    first: int,
    last: int | None,
    on_record: Callable[[int], None],
) -> Outcome:
    """Make a log at ``path`` of the records ``first`` to ``last`` of ``routes`` (none: of all in the archive).

    Args:
        on_record: gets each sequence that is reached.

    Raises:
        NotFound: there are none.
        InvalidInput: the directory is not empty, or the bundles are those of several logs.
        Damaged: a manifest or a bundle is not as it was written.
        Locked: another process makes a log there.
        OSError: the destination cannot be read, or the log not written.
    """
    extents = _extents(destination, routes)
    batches = heapq.merge(
        *(_batches(destination, extent.route, first, last) for extent in extents), key=lambda batch: batch.first
    )
    start = next(batches, None)
    if start is None:
        raise NotFound(
            f"{destination.address}: no bundle has a record from {first} to {last or 'the end'}",
            hint=f"wald-archive restore {shlex.quote(destination.address)} --into {shlex.quote(str(path))}",
        )
    with NewLog(
        path,
        disk,
        describe=lambda begin, end: _why(destination, extents, routes, begin, end, first=first),
        now=time.time_ns,
        moment=utc(time.time_ns(), 3),
        version=pack_version(wald.__version__),
    ) as log:
        outcome = Outcome(path, log.log_id.hex, extents[0].log, first=start.first)
        for batch in _in_order(destination, start, batches):
            log.add(batch)
            outcome.records[batch.route] = outcome.records.get(batch.route, 0) + batch.count
            outcome.last = batch.last
            on_record(batch.last)
        log.finish()
        outcome.holes, outcome.missing = log.holes, log.missing
    return outcome


def end_of(destination: Destination, routes: Sequence[str]) -> int:
    """The last record that the archive has of ``routes``; none: of all."""
    return max(extent.last for extent in _extents(destination, routes))


def _extents(destination: Destination, routes: Sequence[str]) -> list[Extent]:
    if routes:
        found = [(route, require_bundles(destination, route)) for route in dict.fromkeys(routes)]
    else:
        names = filter(is_route, destination.listing("").folders)
        found = [(route, bundles) for route in names if (bundles := bundles_of(destination, route))]
    if not found:
        raise NotFound(
            f"{destination.address}: there is no archive here", hint="DEST is the --dest of wald-archive pack"
        )
    extents = []
    for route, bundles in found:
        logs = {manifest.origin.log for manifest, _ in bundles}
        last = max(entry.bundle.contents.last for _, entry in bundles)
        extents += [Extent(route, log, bundles[0][1].bundle.contents.after, last) for log in sorted(logs)]
    logs_of = {extent.log: extent.route for extent in extents}
    if len(logs_of) > 1:
        pairs = ", ".join(f"log {log}: {route}" for log, route in logs_of.items())
        raise InvalidInput(
            f"{destination.address}: the bundles are from several logs whose sequences overlap ({pairs})",
            hint="name the routes of one log: wald-archive restore DEST ROUTE... --into ROOT",
        )
    return extents


def _batches(destination: Destination, route: str, first: int, last: int | None) -> Iterator[RestoredBatch]:
    for run in runs_of(destination, route, first, last):
        entry = run.entry
        encoding, payload = Encoding.LINES, run.data
        if run.form is Form.OBJECTS:
            encoding, payload = Encoding.COLUMNS, _columns(destination, route, run)
        elif not entry.terminated:
            payload = payload[:-1]
        yield RestoredBatch(route, entry.first, entry.count, entry.append_time_ns, payload, encoding, entry.terminated)


def _columns(destination: Destination, route: str, run: Run) -> bytes:
    """The payload of records that a bundle has as objects."""
    try:
        records = [record_from_json(line) for line in run.data.removesuffix(b"\n").split(b"\n")]
        found = [(record.route, record.sequence) for record in records]
        if found != [(route, number) for number in range(run.entry.first, run.entry.last + 1)]:
            raise ValueError("they are not the records that the index names")
        return encode_columns(
            [record.value for record in records],
            keys=_column(records, lambda record: record.key),
            times_ns=_times(records),
            headers=_column(records, lambda record: record.headers),
        )
    except ValueError as error:
        raise Damaged(
            f"{destination.address}: route {route}, records {run.entry.first} to {run.entry.last}: {error}",
            hint=f"wald-archive verify {destination.address} lists all damage",
        ) from error


def _column(records: list[Record], value: Callable[[Record], bytes | None]) -> list[bytes | None] | None:
    values = [value(record) for record in records]
    return None if all(each is None for each in values) else values


def _times(records: list[Record]) -> list[int] | None:
    times = [record.event_time_ns for record in records if record.event_time_ns is not None]
    if times and len(times) < len(records):
        raise ValueError("some of them have an event time, and others have none")
    return times or None


def _in_order(
    destination: Destination, start: RestoredBatch, others: Iterator[RestoredBatch]
) -> Iterator[RestoredBatch]:
    yield start
    before = start
    for batch in others:
        if batch.first <= before.last:
            raise Damaged(
                f"{destination.address}: record {batch.first} is in bundles of {before.route} and of {batch.route}",
                hint=f"wald-archive verify {destination.address}",
            )
        yield batch
        before = batch


def _why(
    destination: Destination, extents: list[Extent], routes: Sequence[str], begin: int, end: int, *, first: int
) -> dict[str, Any]:
    """Why a run of sequences is not restored, and which routes may have had records there; ``Any``: it is JSON."""
    of = f" of {', '.join(routes[:4])}{' and others' if len(routes) > 4 else ''}" if routes else ""
    why = f"before --from {first}" if end < first else f"in no bundle{of} in {destination.address}"
    may_have = []
    for extent in extents:
        after = max(extent.after, first - 1)
        if begin <= after:
            may_have.append([extent.route, 0, begin, min(end, after)])
        elif end > extent.last:
            may_have.append([extent.route, 0, max(begin, extent.last + 1), end])
    return {"why": why, "routes": may_have}
