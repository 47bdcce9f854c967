"""Records from an archive: the same bytes as ``wald read`` writes, a new log, or one record.

A bundle is read twice: once for its digest, and only if that is right for its records. Bundles outside the requested
range are not read. A new log merges the bundles of all its routes by sequence: sequences, append times, event times,
keys, headers and values are those of the archived log. Each route has one bundle open at a time, so memory grows by
about 10 MiB per route.
"""

from __future__ import annotations

import hashlib
import heapq
import json
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
from wald_archive.bundle import Bundle
from wald_archive.codecs import Codec, ahead
from wald_archive.layout import MANIFEST, PAYLOAD, BagName, bundle_stem, parse_bag_name
from wald_archive.manifest import BadManifest, BundleEntry, Manifest, decode_manifest
from wald_archive.objects import Destination
from wald_archive.parts import Form, IndexEntry, Part
from wald_archive.reader import BadBundle, BundleReader


@dataclass(frozen=True, slots=True)
class Restored:
    """Encoded consecutive records up to sequence ``last``."""

    data: bytes
    last: int


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Consecutive records from one stored batch in the form of their bundle."""

    form: Form
    data: bytes
    entry: IndexEntry


def restore(destination: Destination, route: str, first: int, last: int | None, *, as_json: bool) -> Iterator[Restored]:
    """Yield the records ``first`` to ``last`` (None for the end) of ``route``; raise as :func:`runs_of`."""
    for run in runs_of(destination, route, first, last):
        yield Restored(_encode(route, run.form, run.data, run.entry, as_json=as_json), run.entry.last)


def runs_of(destination: Destination, route: str, first: int, last: int | None) -> Iterator[StoredRun]:
    """Yield the same records in their archived form."""
    at = 0  # end of the previous bundles
    for manifest, entry in require_bundles(destination, route):
        contents = entry.bundle.contents
        known = max(at, first - 1)
        if last is not None and known >= last:
            return
        if contents.after > known and (at or entry.previous):
            name = destination.full_name(f"{manifest.bag}/{PAYLOAD}/{entry.bundle.name}")
            raise Damaged(
                f"{name}: begins after record {contents.after}, and no bundle has the records after record {known}",
                hint=f"wald-archive verify {destination.address}; --from {contents.after + 1} leaves out lost records",
            )
        if contents.last <= known:
            at = max(at, contents.last)
            continue
        if last is not None and contents.first > last:
            return
        for part in checked_parts(destination, manifest.bag, manifest.codec, entry.bundle):
            for run in part.runs:
                wanted = _cut(part, run, max(first, at + 1), last)
                if wanted is not None:
                    yield StoredRun(part.form, *wanted)
        at = contents.last


def extent_of(destination: Destination, route: str) -> tuple[int, int, int]:
    """Return the first and last archived record of a route, and the record after which the archive is complete."""
    entries = [entry.bundle.contents for _, entry in require_bundles(destination, route)]
    first = entries[0].first
    after = min(contents.after for contents in entries if contents.first == first)
    return first, max(contents.last for contents in entries), after


def bundles_of(destination: Destination, route: str) -> list[tuple[Manifest, BundleEntry]]:
    """Return the bundles of a route by first record; two groups may have archived the same records."""
    bags = [parse_bag_name(route, folder) for folder in destination.listing(route).folders]
    found = []
    for bag in bags:
        if bag is None:
            continue
        name = f"{bag}/{MANIFEST}"
        try:
            manifest = decode_manifest(b"".join(destination.read(name)))
        except FileNotFoundError:
            continue  # an interrupted run, of which nothing is acknowledged
        except BadManifest as error:
            raise _damaged(destination, name, str(error)) from error
        found += [(manifest, entry) for entry in manifest.entries]
    return sorted(found, key=lambda each: (each[1].bundle.contents.first, -each[1].bundle.contents.last))


def require_bundles(destination: Destination, route: str) -> list[tuple[Manifest, BundleEntry]]:
    """Return :func:`bundles_of`; raise NotFound if the result is empty."""
    found = bundles_of(destination, route)
    if not found:
        raise NotFound(
            f"{destination.address}: there is no route {route!r} here",
            hint=f"wald-archive restore DEST ROUTE; here: {', '.join(destination.listing('').folders) or 'none'}",
        )
    return found


def checked_parts(destination: Destination, bag: BagName, codec: Codec, bundle: Bundle) -> Iterator[Part]:
    """Yield the parts of a bundle after checking the digest of the whole file."""
    name = f"{bag}/{PAYLOAD}/{bundle.name}"
    digest = hashlib.sha256()
    try:
        for chunk in destination.read(name):
            digest.update(chunk)
        if digest.hexdigest() != bundle.sha256:
            raise _damaged(destination, name, f"its sha256 is not {bundle.sha256}")
        stem = bundle_stem(bag.route, bundle.contents.first)
        yield from BundleReader(stem, bundle.contents, ahead(codec.decompress(destination.read(name)))).parts()
    except FileNotFoundError:
        raise _damaged(destination, name, "missing") from None
    except BadBundle as error:
        raise _damaged(destination, name, str(error)) from error


def _cut(part: Part, run: IndexEntry, first: int, last: int | None) -> tuple[bytes, IndexEntry] | None:
    """Return the records of a run between ``first`` and ``last``, or None."""
    begin, end = max(first, run.first), run.last if last is None else min(last, run.last)
    if begin > end:
        return None
    data = bytes(part.data[0][run.offset : run.offset + run.bytes])
    if (begin, end) == (run.first, run.last):
        return data, run
    lines = data.split(b"\n")[begin - run.first : end - run.first + 1]
    terminated = run.terminated or end < run.last
    cut = IndexEntry(run.part, run.offset, run.bytes, begin, end - begin + 1, run.append_time_ns, terminated)
    return b"".join(line + b"\n" for line in lines), cut


def _encode(route: str, form: Form, data: bytes, run: IndexEntry, *, as_json: bool) -> bytes:
    if as_json == (form is Form.OBJECTS):
        return data
    lines = data.removesuffix(b"\n").split(b"\n")
    if not as_json:
        return b"".join(_value(line) + b"\n" for line in lines)
    records = (
        Record(route, number, line, run.append_time_ns, terminated=run.terminated or number < run.last)
        for number, line in enumerate(lines, start=run.first)
    )
    return "".join(record.to_json() + "\n" for record in records).encode()


def _value(line: bytes) -> bytes:
    fields: dict[str, Any] = json.loads(line)  # Any: it is JSON
    return str(fields["value"]).encode() if "value" in fields else bytes.fromhex(fields["value_hex"])


def _damaged(destination: Destination, name: str, message: str) -> Damaged:
    return Damaged(
        f"{destination.full_name(name)}: {message}",
        hint=f"wald-archive verify {destination.address} lists all damage",
    )


@dataclass(frozen=True, slots=True)
class Extent:
    """Archived records of a route: all after ``after``, up to ``last``."""

    route: str
    log: str
    after: int
    last: int


@dataclass(slots=True)
class Outcome:
    """Result of a restore; ``missing`` sequences in ``holes`` runs are in no bundle."""

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
    """Create a log at ``path`` from the records ``first`` to ``last`` of ``routes`` (empty for all in the archive).

    Args:
        on_record: called with each sequence reached.
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
    """Return the last archived record of ``routes``, or of all if empty."""
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


def _columns(destination: Destination, route: str, run: StoredRun) -> bytes:
    """Return the payload of records that a bundle has as objects."""
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
    """Return why a run of sequences is not restored, and the routes that may have had records there."""
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
