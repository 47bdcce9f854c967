"""``wald-archive restore``: records to stdout, the same bytes as ``wald read`` writes, or a new log.

A new log merges the bundles of all its routes by sequence: sequences, append times, event times, keys, headers and
values are those of the archived log. Each route has one bundle open at a time, so memory grows by about 10 MiB per
route.
"""

from __future__ import annotations

import heapq
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wald
from wald.cli.output import json_line, progress, write_stdout
from wald.errors import Damaged, DiskFailure, InvalidInput, NotFound, NotPermitted
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.ledger_read import entries_of
from wald.format.names import is_route
from wald.format.segment import pack_version
from wald.format.times import utc
from wald.hints import command_line, room_commands
from wald.repairing.restore import NewLog, RestoredBatch
from wald.retention.missing import span_text
from wald_archive.ledger import recorded_at
from wald_archive.lookup import bundles_of, require_bundles, runs_of
from wald_archive.objects import Destination, open_destination


def restore_to_stdout(
    address: str, route: str, root: Path | None, start: int | None, last: int | None, *, as_json: bool
) -> None:
    """Write the records of a route to stdout; raise NotFound if no bundle has the first or the last ones."""
    destination, first = open_destination(address, Disk()), start or 1
    (extent,) = extents(destination, [route])
    due = max(first, last or 0)
    if root is not None and last is None:
        read_identity(Root(root))
        recorded = recorded_at(entries_of(Root(root).ledger / "archive.jsonl"), destination.address)
        due = max(due, recorded.last_of(route))
    at = max(extent.first, first) - 1
    with progress("restore", (extent.last if last is None else min(extent.last, last)) - at) as advance:
        for run in runs_of(destination, route, first, last):
            write_stdout(run.lines(as_json=as_json))
            advance(run.last - at)
            at = run.last
    missing = (extent.last + 1, due)
    if start is not None and first <= extent.after:
        missing = first, min(extent.after, last or extent.after)
    if missing[0] <= missing[1]:
        asking = command_line("ROOT" if root is None else root, f"where {missing[0]}")
        raise NotFound(
            f"{address}: no bundle covers {span_text(*missing)} of route {route}",
            hint=f"{asking} shows what happened to it in the log",
        )


def restore_to_root(
    address: str,
    routes: Sequence[str],
    into: Path,
    first: int,
    last: int | None,
    *,
    as_json: bool,
    write: Callable[[str], None],
) -> None:
    """Create a log, and report it with the data that an archive does not have."""
    destination = open_destination(address, Disk())
    end = max(extent.last for extent in extents(destination, routes))
    at = first - 1
    with _failures(into), progress("restore", max(0, (end if last is None else min(end, last)) - at)) as advance:

        def reached(sequence: int) -> None:
            nonlocal at
            advance(sequence - at)
            at = sequence

        made = restore_into(destination, routes, into, disk=Disk(), first=first, last=last, on_record=reached)
    if as_json:
        write(json_line("archive.restore", made))
        return
    for each in made["routes"]:
        write(f"{each['route']}: {each['records']} records")
    write(f"log {made['log']} at {made['root']}: records {made['first']} to {made['last']} of log {made['from_log']}")
    if made["missing"]:
        write(f"not restored: {made['missing']} sequences, in {made['holes']} runs, because no bundle has them")
    write("not in an archive: cursors, the senders of records, and the batch numbers of producers")


@contextmanager
def _failures(into: Path) -> Iterator[None]:
    """Convert operating system errors to errors with the file and a hint."""
    try:
        yield
    except PermissionError as error:
        raise NotPermitted.from_error(error, error.filename or into) from error
    except OSError as error:
        place = shlex.quote(str(into))
        raise DiskFailure(
            f"{error.filename or into}: {error.strerror or error}; the restore is incomplete, and no log was created",
            hint=f"{room_commands(into, error=error)}; rm -r {place}; then the same command again",
        ) from error


@dataclass(frozen=True, slots=True)
class Extent:
    """Archived records of a route: ``first`` to ``last``. None is missing after ``after``."""

    route: str
    log: str
    first: int
    after: int
    last: int


def restore_into(
    destination: Destination,
    routes: Sequence[str],
    path: Path,
    *,
    disk: Disk,
    first: int,
    last: int | None,
    on_record: Callable[[int], None],
) -> dict[str, Any]:  # Any: it is JSON
    """Create a log at ``path`` from the records ``first`` to ``last`` of ``routes``; of every route if that is empty.

    Return its JSON; ``missing`` sequences in ``holes`` runs are in no bundle.
    """
    found = extents(destination, routes)
    batches = heapq.merge(
        *(_batches(destination, extent.route, first, last) for extent in found), key=lambda batch: batch.first
    )
    before = next(batches, None)
    if before is None:
        raise NotFound(
            f"{destination.address}: no bundle has a record from {first} to {last or 'the end'}",
            hint=f"wald-archive restore {shlex.quote(destination.address)} --into {shlex.quote(str(path))}",
        )
    with NewLog(
        path,
        disk,
        describe=lambda begin, end: _why(destination, found, routes, begin, end, first=first),
        now=time.time_ns,
        moment=utc(time.time_ns(), 3),
        version=pack_version(wald.__version__),
    ) as log:
        records: Counter[str] = Counter()
        begin = before.first
        batch: RestoredBatch | None = before
        while batch is not None:
            log.add(batch)
            records[batch.route] += batch.count
            on_record(batch.last)
            before, batch = batch, next(batches, None)
            if batch is not None and batch.first <= before.last:
                raise Damaged(
                    f"{destination.address}: record {batch.first} is in bundles of {before.route} and of {batch.route}",
                    hint=f"wald-archive verify {destination.address}",
                )
        log.finish()
        return {
            "root": str(path),
            "log": log.log_id.hex,
            "dest": destination.address,
            "from_log": found[0].log,
            "first": begin,
            "last": before.last,
            "records": records.total(),
            "routes": [{"route": route, "records": count} for route, count in sorted(records.items())],
            "missing": log.missing,
            "holes": log.holes,
        }


def extents(destination: Destination, routes: Sequence[str]) -> list[Extent]:
    """Return the extent of each route, by default of all; raise InvalidInput if they are from several logs."""
    if routes:
        found = [(route, require_bundles(destination, route)) for route in dict.fromkeys(routes)]
    else:
        names = filter(is_route, destination.listing("").folders)
        found = [(route, bundles) for route in names if (bundles := bundles_of(destination, route))]
    if not found:
        raise NotFound(
            f"{destination.address}: there is no archive here", hint="DEST is the --dest of wald-archive pack"
        )
    logs = {manifest.origin.log: route for route, bundles in found for manifest, _ in bundles}
    if len(logs) > 1:
        pairs = ", ".join(f"log {log}: {route}" for log, route in sorted(logs.items()))
        raise InvalidInput(
            f"{destination.address}: the bundles are from several logs whose sequences overlap ({pairs})",
            hint="name the routes of one log: wald-archive restore DEST ROUTE... --into ROOT",
        )
    (log,) = logs
    result = []
    for route, bundles in found:
        contents = [entry.bundle.contents for _, entry in bundles]
        first = contents[0].first
        after = min(each.after for each in contents if each.first == first)
        result.append(Extent(route, log, first, after, max(each.last for each in contents)))
    return result


def _batches(destination: Destination, route: str, first: int, last: int | None) -> Iterator[RestoredBatch]:
    for run in runs_of(destination, route, first, last):
        encoding, payload = run.payload()
        yield RestoredBatch(route, run.first, run.count, run.append_time_ns, payload, encoding, run.terminated)


def _why(
    destination: Destination, found: list[Extent], routes: Sequence[str], begin: int, end: int, *, first: int
) -> dict[str, Any]:
    of = f" of {', '.join(routes[:4])}{' and others' if len(routes) > 4 else ''}" if routes else ""
    why = f"before --from {first}" if end < first else f"in no bundle{of} in {destination.address}"
    may_have = []
    for extent in found:
        after = max(extent.after, first - 1)
        if begin <= after:
            may_have.append([extent.route, 0, begin, min(end, after)])
        elif end > extent.last:
            may_have.append([extent.route, 0, max(begin, extent.last + 1), end])
    return {"why": why, "routes": may_have}
