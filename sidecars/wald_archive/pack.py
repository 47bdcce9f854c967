"""Runs: bundles, tag files, ledger, cursor, in this order; each step can be repeated.

An engine makes the bundles: this process, or Spark if the names and indexes of the segments show that there is enough
to pack. The bundles depend on the run and the records alone, so one engine can continue what another has begun. A
crash leaves a line ``begun`` without a line ``finished``. The next run makes the same bytes again and finds its own
files. Nothing is acknowledged, in the ledger or by the cursor, until it has been read back from the destination.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import Any

import wald
from wald.cli.output import json_line, progress
from wald.errors import Damaged, DiskFailure, InvalidInput, NotFound, NotPermitted, Refused, wrong_type
from wald.files.disk import Disk
from wald.files.ledger_read import LedgerLines
from wald.files.ledger_write import Ledger
from wald.files.listing import Segment
from wald.format.ledger_lines import Entry
from wald.format.names import Kind, check_route
from wald.format.times import utc
from wald.hints import command_line, room_commands
from wald.log import Log
from wald.reading.assembler import Batch
from wald.reading.reader import read_without_waiting
from wald.reading.selection import Start
from wald.retention.blockers import sealed_index
from wald.retention.cursor_moves import move_cursor, start_position
from wald.retention.cursors import CursorState
from wald.retention.history import History
from wald.retention.missing import count_missing, span_text
from wald.retention.progress import last_sequences
from wald.segments.seek import end_of
from wald.segments.view import View
from wald.setting_types import GIB, MIB, format_bytes
from wald.status.schema import time_fields
from wald_archive.bundle import Bundle, Bytes, Origin, Records, Size, bundle, bundle_batches
from wald_archive.codecs import WORKERS_MAX, BadStream, Codec, in_order
from wald_archive.ledger import Past, Request, Run, last_recorded, past
from wald_archive.manifest import BadManifest, BundleEntry, Manifest, count_bundles, decode_manifest, tag_files
from wald_archive.objects import (
    DIGEST_SUFFIX,
    MANIFEST,
    PAYLOAD,
    Destination,
    bundle_stem,
    digest_line,
    open_destination,
    parse_bag_name,
)

Engine = Callable[[Run, Callable[[int], None]], Iterator[Bundle]]
"""Yields the bundles of a run in order, each once it has been written and read back; calls the function with the last
sequence so far. Raises NotFound or Damaged if records are gone or unreadable, NotGivenBack, Refused or OSError."""


class NotGivenBack(Damaged):
    """Data read back from the destination differs from what was written."""


def local_bundles(log: Log, destination: Destination, run: Run, on_record: Callable[[int], None]) -> Iterator[Bundle]:
    """Make one bundle after the other in this process."""

    def watched() -> Iterator[Batch]:
        for batch in log.batches(run.origin.route, run.first, run.last):
            on_record(batch.last_sequence)
            yield batch

    after = run.after
    for portion in bundle_batches(watched(), run.size):
        made = write_bundle(destination, run, portion, after)
        yield made
        after = made.contents.last


def write_bundle(destination: Destination, run: Run, batches: Iterator[Batch], after: int) -> Bundle:
    """Write one bundle of at least one batch after record ``after``, and its digest, and read both back."""
    begin = next(batches)
    name = f"{run.bag}/{PAYLOAD}/{bundle_stem(run.origin.route, begin.first_sequence)}{run.codec.suffix}"
    with destination.writing(name) as write:
        made = bundle(chain([begin], batches), origin=run.origin, codec=run.codec, after=after, sink=write)
    _read_back(destination, name, made, run.codec)
    write_file(destination, name + DIGEST_SUFFIX, digest_line(made.sha256, made.name))
    return made


def write_file(destination: Destination, name: str, data: bytes) -> None:
    with destination.writing(name) as write:
        write(data)
    if b"".join(destination.read(name)) != data:
        raise _not_given_back(destination.full_name(name))


def _read_back(destination: Destination, name: str, made: Bundle, codec: Codec) -> None:
    stored, tar = hashlib.sha256(), hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        for chunk in destination.read(name):
            stored.update(chunk)
            yield chunk

    frames = zip(_reparted(chunks(), [length for length, _ in made.frames]), made.frames, strict=True)
    try:
        for content in in_order(lambda frame: codec.expand(frame[0], frame[1][1]), frames):
            tar.update(content)
        same = (stored.hexdigest(), tar.hexdigest()) == (made.sha256, made.tar_sha256)
    except (BadStream, ValueError):
        same = False
    if not same:
        raise _not_given_back(destination.full_name(name))


def _reparted(chunks: Iterator[bytes], lengths: Sequence[int]) -> Iterator[bytes]:
    pending = b""
    for length in lengths:
        pieces, missing = [pending], length - len(pending)
        while missing > 0 and (chunk := next(chunks, b"")):
            pieces.append(chunk)
            missing -= len(chunk)
        pending = b"".join(pieces)
        yield pending[:length]
        pending = pending[length:]
    if pending or (pending := next(chunks, b"")):
        yield pending


def _not_given_back(name: str) -> NotGivenBack:
    return NotGivenBack(
        f"{name}: read back, it differs from what was written; nothing was acknowledged",
        hint="the destination does not return the written bytes; archive to another place: --dest DIR",
    )


AUTO, LOCAL, SPARK = "auto", "local", "spark"
# On two cores Spark takes 10 s to start and then a fifth longer than one process (measured), which uses both, too.
SPARK_PAYS_BYTES = 8 * GIB


def choose_engine(
    name: str, master: str | None, log: Log, destination: Destination, requests: Sequence[Request], stack: ExitStack
) -> Engine:
    """Return the requested engine, by default the faster one; closing ``stack`` stops Spark."""
    if name == LOCAL and master is not None:
        raise InvalidInput("--engine local runs in this process and takes no --master", hint="--engine spark")
    optional = name == AUTO and master is None
    if name == LOCAL or (optional and not spark_pays(log, requests)):
        return partial(local_bundles, log, destination)
    # The module wald_spark.engine, if it is installed:
    spark = next((found.load() for found in entry_points(group="wald_archive.engines", name=SPARK)), None)
    if optional and not (spark is not None and spark.is_there()):
        return partial(local_bundles, log, destination)
    if spark is None:
        raise NotFound("the engine for Spark is not installed", hint="in a clone of wald: pip install '.[spark]'")
    engine: Engine = spark.start(log, destination, master, stack)
    return engine


def spark_pays(log: Log, requests: Iterable[Request]) -> bool:
    """Return True if this machine has more cores than one process uses, and there is enough work for them."""
    cores = len(os.sched_getaffinity(0))
    return cores > WORKERS_MAX and sum(due_bytes(log, request) for request in requests) > SPARK_PAYS_BYTES


def due_bytes(log: Log, request: Request) -> int:
    """Return an upper estimate of the bytes to pack; damage counts as 0, because packing reports it."""
    total = 0
    with suppress(NotFound, Damaged):
        after = log.cursor(request.route, request.group).effective
        view = log.view()
        last = view.bound.segment if request.to is None else min(view.bound.segment, request.to)
        for segment in view.segments[view.listing.index_covering(after + 1) :]:
            if segment.base_sequence > last:
                break
            with suppress(Damaged):
                total += view.follow(segment, lambda found: _bytes_in(view, found, request.route, after))
    return total


def _bytes_in(view: View, segment: Segment, route: str, after: int) -> int:
    """Return the bytes of ``route`` after sequence ``after``; a raw segment counts completely."""
    if segment.kind.form is Kind.RAW:
        limit = view.limit(segment)
        return segment.path.stat().st_size if limit is None else limit
    entries = sealed_index(segment, view.log_id).routes
    return sum(entry.payload_bytes for entry in entries if entry.route == route and entry.last > after)


BUNDLE_BYTES = 256 * MIB


def pack_routes(
    root: Path,
    routes: Sequence[str],
    *,
    dest: str | None,
    group: str,
    records_per_bundle: int | None,
    bytes_per_bundle: int | None,
    to: int | None,
    engine: str,
    master: str | None,
    codec: str,
    as_json: bool,
    write: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Archive routes, and report each run with a progress bar and a line for each bundle."""
    for route in routes:
        check_route(route)
    log, disk = Log(root), Disk()
    size = _size(records_per_bundle, bytes_per_bundle)
    destination = open_destination(dest or str(log.root.archive), disk)
    software = f"wald {wald.__version__}"
    requests = [Request(route, group, size, Codec(codec), software, to) for route in dict.fromkeys(routes)]
    reported: list[dict[str, Any]] = []  # Any: it is JSON
    at = 0
    advance: Callable[[int], None] = _ignore
    with _failures(root, destination), ExitStack() as stack, ExitStack() as bar:

        def begin(run: Run, resumed: bool) -> None:
            nonlocal at, advance
            if resumed:
                warn(f"continuing the interrupted run {run.bag} with its own sizes and codec ({run.codec.value})")
            at = run.first - 1
            advance = bar.enter_context(progress(run.origin.route, run.last - at))

        def reached(sequence: int) -> None:
            nonlocal at
            advance(sequence - at)
            at = sequence

        ledger = stack.enter_context(closing(Ledger(log.root.ledger / "archive.jsonl", disk, owner="wald-archive")))
        chosen = choose_engine(engine, master, log, destination, requests, stack)
        packer = Packer(log, disk, ledger, destination, chosen, on_begin=begin, on_record=reached, warn=warn)
        for request in requests:
            done: Packed | None = None
            for done in packer.archive(request):
                bar.close()
                if as_json:
                    reported.append(_fields(done))
                else:
                    write("\n".join(_lines(done)))
            if done is None and not as_json:
                upto = "" if to is None else f" up to record {to}"
                write(f"nothing to archive: group {group} has read all of {request.route}{upto}")
    if as_json:
        write(json_line("archive.pack", {"runs": reported}))


def _size(records: int | None, size_bytes: int | None) -> Size:
    if records is not None and size_bytes is not None:
        message = "--records-per-bundle and --bytes-per-bundle are mutually exclusive"
        raise InvalidInput(message, hint="wald-archive pack --help")
    if size_bytes == 0:
        raise InvalidInput("a bundle of 0 bytes cannot contain records", hint="--bytes-per-bundle 256MiB")
    return Records(records) if records is not None else Bytes(size_bytes or BUNDLE_BYTES)


@contextmanager
def _failures(root: Path, destination: Destination) -> Iterator[None]:
    """Convert operating system errors to errors with the file and a hint."""
    try:
        yield
    except PermissionError as error:
        raise NotPermitted.from_error(error, error.filename or root) from error
    except OSError as error:
        if (misplaced := wrong_type(error)) is not None:
            raise misplaced from error
        raise DiskFailure(
            f"{error.filename or f'{root} or {destination.address}'}: {error.strerror or error}; nothing is lost, and "
            "nothing that is not at the destination was acknowledged",
            hint=f"{room_commands(root, destination.address, error=error)}; then rerun the same command to continue",
        ) from error


def _fields(done: Packed) -> dict[str, Any]:
    run, entries = done.run, done.manifest.entries if done.manifest else ()
    return {
        "route": run.origin.route,
        "group": run.origin.group,
        "dest": run.dest,
        "bag": str(run.bag),
        "first": run.first,
        "last": run.last,
        "records": done.manifest.count if done.manifest else None,
        "resumed": done.resumed,
        "bundles": [
            {
                "bundle": bundle.name,
                "first": contents.first,
                "last": contents.last,
                "records": contents.count,
                "record_bytes": contents.record_bytes,
                "bytes": bundle.bytes,
                "sha256": bundle.sha256,
                **time_fields("earliest", contents.earliest_ns),
                **time_fields("latest", contents.latest_ns),
            }
            for bundle, contents in ((entry.bundle, entry.bundle.contents) for entry in entries)
        ],
    }


def _lines(done: Packed) -> Iterator[str]:
    run, manifest = done.run, done.manifest
    if manifest is None:
        yield f"bag {run.bag}: already complete; now acknowledged"
        return
    for made in (entry.bundle for entry in manifest.entries):
        contents = made.contents
        yield (
            f"{made.name}: {contents.count} records, {contents.first} to {contents.last}, "
            f"{format_bytes(contents.record_bytes)} in {format_bytes(made.bytes)}, sha256 {made.sha256}"
        )
    yield f"bag {run.bag}: {manifest.count} records in {count_bundles(len(manifest.entries))} at {run.dest}"


@dataclass(frozen=True, slots=True)
class Packed:
    """Finished run."""

    run: Run
    manifest: Manifest | None  # None if all of its bundles were already recorded and only had to be acknowledged
    resumed: bool  # an earlier process began it


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Packer:
    """Packer of routes of one log for one destination."""

    log: Log
    disk: Disk
    ledger: Ledger
    destination: Destination
    engine: Engine
    now_ns: Callable[[], int] = time.time_ns
    moment: Callable[[], str] = field(default=lambda: utc(time.time_ns()))
    on_begin: Callable[[Run, bool], None] = field(default=_ignore)
    on_record: Callable[[int], None] = field(default=_ignore)
    warn: Callable[[str], None] = field(default=_ignore)

    def archive(self, request: Request) -> Iterator[Packed]:
        """Finish an interrupted run, then pack the records after it, if any."""
        log_id = self.log.identity.log_id.hex()
        self.ledger.cut()
        before = past(
            self._newest_entries(), log=log_id, route=request.route, group=request.group, dest=self.destination.address
        )
        if (run := before.unfinished) is not None:
            if not before.complete and self.log.cursor(request.route, request.group).effective > run.after:
                # Another process moved the cursor, so some of the run's records may be reclaimed.
                self._abandon(run)
                reason = f"the cursor of {run.origin.group} was moved in the meantime"
                self.warn(
                    f"the interrupted run {run.bag} is abandoned: {reason}; its files at {run.dest} may be removed"
                )
            else:
                self.on_begin(run, True)
                yield self._finish(run, before, resumed=True)
        begun = self._next(request, log_id)
        if begun is not None:
            self.ledger.append(begun.begun(at_ns=self.now_ns()))
            self.on_begin(begun, False)
            yield self._finish(begun, Past(), resumed=False)

    def _newest_entries(self) -> Iterator[Entry]:
        """Return the ledger lines, newest first, except one whose append failed."""
        self.ledger.settle()
        return (line.entry for line in LedgerLines(self.ledger.path).newest_first())

    def _next(self, request: Request, log_id: str) -> Run | None:
        """Return the run from the cursor to the route's last complete record; None if there are no records."""
        after, first = self._begin(request)
        try:
            last = None if first is None else self._last_complete(request, first)
        except (NotFound, Damaged) as error:
            raise self._explained(error, request, first) from error
        if first is None or last is None:
            return None
        manifests = list(self._manifests(request.route, after, request.group))
        check_lineage(manifests, log=log_id, root=self.log.root.path, group=request.group, first=first, last=last)
        previous = last_recorded(self._newest_entries(), route=request.route, group=request.group, after=after)
        if previous is None:  # the ledger may be lost
            earlier = (m for _, m in manifests if m.origin.group == request.group and m.last <= after)
            previous = next((manifest.entries[-1].as_previous() for manifest in earlier), None)
        origin = Origin(log_id, request.route, request.group, request.software, self.moment())
        return Run(origin, self.destination.address, after, first, last, request.size, request.codec, previous)

    def _begin(self, request: Request) -> tuple[int, int | None]:
        """Return the last processed or reclaimed record, and the first record after that."""
        cursor = self.log.cursor(request.route, request.group)
        after = cursor.effective
        start: Start = after + 1
        view = self.log.view()
        if cursor.state is CursorState.ABSENT:
            start = "earliest"  # records that were reclaimed before this group existed are not missing
        elif cursor.state is not CursorState.VALID:
            bags = self._manifests(request.route, 0, request.group)
            archived = max((bag.last for _, bag in bags if bag.origin.group == request.group), default=0)
            raise Damaged(
                f"{cursor.message}; it is unknown which records have been processed",
                hint=self._setting_cursor(request, f"{archived} --rewind"),
            )
        with closing(self._batches(request.route, start, None)) as batches:
            try:
                batch = next(batches, None)
            except (NotFound, Damaged) as error:
                raise type(error)(error.message, hint=self._passing(request, start)) from error
        if cursor.state is CursorState.ABSENT:
            after, reclaimed = start_position(view, request.route, request.group)
            if reclaimed:
                self.warn(reclaimed)
            if batch is not None:  # records may have been reclaimed although an older segment is pinned
                first, root = batch.first_sequence, self.log.root
                segments = History(root).reclaimed_segments(after + 1, first - 1)
                routes = frozenset([request.route])
                if missing := count_missing(root.path, segments, routes, after + 1, first - 1):
                    self.warn(
                        f"group {request.group} is new on route {request.route} and starts at record {first}: "
                        f"{span_text(missing.first, missing.last)} "
                        f"{'was' if missing.first == missing.last else 'were'} already reclaimed"
                    )
                    after = missing.last
        return after, batch.first_sequence if batch else None

    def _explained(self, error: NotFound | Damaged, request: Request, first: int | None) -> NotFound | Damaged:
        """Return the error with a hint: the command that packs the records before the problem, or skips it."""
        last = 0
        with suppress(NotFound, Damaged), closing(self._batches(request.route, first or 1, request.to)) as batches:
            for batch in batches:
                last = batch.last_sequence
        message = f"{error.message}; nothing was acknowledged"
        if not last:
            return type(error)(message, hint=self._passing(request, first or 1))
        size = "--records-per-bundle" if isinstance(request.size, Records) else "--bytes-per-bundle"
        root, address = (shlex.quote(str(path)) for path in (self.log.root.path, self.destination.address))
        return type(error)(
            message,
            hint=f"wald-archive pack {request.route} --root {root} --dest {address} --group {request.group} {size} "
            f"{request.size.limit} --codec {request.codec.value} --to {last} packs the records before it",
        )

    def _passing(self, request: Request, start: Start) -> str:
        """Return the command that skips the records missing at ``start``; an incomplete record is not skipped."""
        steps = read_without_waiting(
            self.log.view(), route=request.route, start=start, stop=None, on_damage=_ignore, on_missing="skip"
        )
        with closing(steps):
            found = next(step for step in steps if step is not None)
        sequence = found.first_sequence - 1 if isinstance(found, Batch) else found
        return f"{self._setting_cursor(request, sequence)} skips it"

    def _setting_cursor(self, request: Request, sequence: int | str) -> str:
        return command_line(self.log.root.path, f"cursor set {request.route} {sequence} --group {request.group}")

    def _last_complete(self, request: Request, first: int) -> int | None:
        """Return the last complete record to pack; the newest record may still lack its end."""
        begun = last_sequences(self.log.view()).get(request.route)
        if begun is None and request.to is not None:  # --to SEQUENCE says that records exist
            begun = end_of(self.log.view()) - 1
        if not begun:
            raise Damaged(
                f"{self.log.root.path}: the last record of {request.route} is unknown",
                hint=f"{command_line(self.log.root.path, 'verify')} lists it",
            )
        end = begun if request.to is None else min(begun, request.to)
        for start in (end, first) if first <= end else ():
            last = 0
            try:
                for batch in self._batches(request.route, start, end):
                    last = batch.last_sequence
            except (NotFound, Damaged):
                if start == first:
                    raise
                continue  # reading from the first record reports everything that is missing
            if last:
                return last
        return None

    def _batches(self, route: str, start: Start, stop: int | None) -> Generator[Batch]:
        yield from self.log.batches(route, start, stop)

    def _manifests(self, route: str, after: int, group: str) -> Iterator[tuple[str, Manifest]]:
        """Yield the bags of a route, newest first, back to the predecessor of a run that starts after ``after``.

        Incomplete or damaged bags are skipped; ``wald-archive verify`` reports them.
        """
        names = (parse_bag_name(route, folder) for folder in self.destination.listing(route).folders)
        for bag in sorted(filter(None, names), key=lambda name: name.last, reverse=True):
            with suppress(FileNotFoundError, BadManifest):
                manifest = decode_manifest(b"".join(self.destination.read(f"{bag}/{MANIFEST}")))
                yield self.destination.full_name(str(bag)), manifest
                if manifest.origin.group == group and manifest.last <= after:
                    return

    def _finish(self, run: Run, before: Past, *, resumed: bool) -> Packed:
        manifest: Manifest | None = None
        if not before.complete:
            manifest = self._write(run)
            new = (entry for entry in manifest.entries if entry.bundle.name not in before.recorded)
            self.ledger.append(*(run.archived(entry, at_ns=self.now_ns()) for entry in new))
        route, group = run.origin.route, run.origin.group
        if self.log.cursor(route, group).effective < run.last:
            log_id = self.log.identity.log_id
            move_cursor(self.log.root, route, group, run.last, log_id=log_id, disk=self.disk, now=self.moment())
        self.ledger.append(run.ended("finished", at_ns=self.now_ns()))
        return Packed(run, manifest, resumed)

    def _write(self, run: Run) -> Manifest:
        entries: list[BundleEntry] = []
        previous, after = run.previous, run.after
        try:
            for made in self.engine(run, self.on_record):
                entries.append(BundleEntry(made, previous))
                previous, after = entries[-1].as_previous(), made.contents.last
        except NotGivenBack:
            raise
        except (Damaged, NotFound) as error:
            # The next run would fail in the same way, so it may pack fewer records.
            self._abandon(run)
            request = Request(run.origin.route, run.origin.group, run.size, run.codec, run.origin.software)
            raise self._explained(error, request, run.first) from error
        if not entries or (entries[0].bundle.contents.first, after) != (run.first, run.last):
            self._abandon(run)
            raise Damaged(
                f"{self.log.root.path}: records {run.first} to {run.last} of {run.origin.route} no longer begin "
                "and end where they did; nothing was acknowledged",
                hint=f"{command_line(self.log.root.path, 'verify')}; then the same command again",
            )
        manifest = Manifest(run.origin, run.codec, tuple(entries))
        for name, data in tag_files(manifest).items():
            write_file(self.destination, f"{run.bag}/{name}", data)
        self.destination.sync_folder(f"{run.bag}/{PAYLOAD}")
        return manifest

    def _abandon(self, run: Run) -> None:
        self.ledger.append(run.ended("abandoned", at_ns=self.now_ns()))


def check_lineage(
    manifests: Sequence[tuple[str, Manifest]], *, log: str, root: Path, group: str, first: int, last: int
) -> None:
    """Raise Refused if a bag of the route belongs to another log, or already has some of these records."""
    for place, manifest in manifests:
        hint = "archive to another place: --dest DIR"
        if manifest.origin.log != log:
            raise Refused(f"{place}: this bag belongs to log {manifest.origin.log}, not to {log}", hint=hint)
        if (manifest.first, manifest.last) == (first, last) and manifest.origin.group != group:
            raise Refused(f"{place}: group {manifest.origin.group} already has a bag of these records here", hint=hint)
        if manifest.origin.group == group and manifest.first <= last and first <= manifest.last:
            setting = command_line(root, f"cursor set {manifest.origin.route} {manifest.last} --group {group}")
            raise Refused(
                f"{place}: this bag of the same group already has records {manifest.first} to {manifest.last}, "
                "but neither the ledger nor the cursor lists them",
                hint=f"{setting}, or another --dest",
            )
