"""Engines, which make the bundles of a run: each is written to the destination with its digest, and read back.

The bundles depend on the run and the records alone, so one engine can continue what another has begun. This process
makes them, or Spark if there is enough to pack, which the names and indexes of segments show.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import chain
from typing import Protocol

from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.listing import Segment
from wald.format.names import Kind
from wald.log import Log
from wald.reading.assembler import Batch
from wald.retention.blockers import sealed_index
from wald.segments.view import View
from wald.setting_types import GIB
from wald_archive.bundle import Bundle, bundle
from wald_archive.codecs import WORKERS_MAX, BadStream, Codec, in_order
from wald_archive.ledger import Request, Run
from wald_archive.objects import DIGEST_SUFFIX, PAYLOAD, Destination, bundle_stem, digest_line
from wald_archive.parts import bundle_batches


class Engine(Protocol):
    """Maker of the bundles of a run."""

    def bundles(self, run: Run, on_record: Callable[[int], None]) -> Iterator[Bundle]:
        """Yield the bundles of ``run`` in order, each after it was written to the destination and read back.

        Raise NotFound or Damaged if some of its records are gone or unreadable, NotGivenBack, Refused if a file exists
        with other content, or OSError.
        """


class NotGivenBack(Damaged):
    """The destination does not return the written bytes."""


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """Engine in this process, which makes one bundle after the other."""

    log: Log
    destination: Destination

    def bundles(self, run: Run, on_record: Callable[[int], None]) -> Iterator[Bundle]:
        def watched() -> Iterator[Batch]:
            for batch in self.log.batches(run.origin.route, run.first, run.last):
                on_record(batch.last_sequence)
                yield batch

        after = run.after
        for portion in bundle_batches(watched(), run.size):
            made = write_bundle(self.destination, run, portion, after)
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
    """Write a small file, and read it back."""
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
    """Yield the same bytes in pieces of these lengths, and then the rest."""
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
    """Return the requested engine, or the faster one; closing ``stack`` stops Spark."""
    if name == LOCAL and master is not None:
        raise InvalidInput("--engine local runs in this process, on no --master", hint="--engine spark")
    optional = name == AUTO and master is None
    if name == LOCAL or (optional and not spark_pays(log, requests)):
        return LocalEngine(log, destination)
    # The module wald_spark.engine, if it is installed:
    spark = next((found.load() for found in entry_points(group="wald_archive.engines", name=SPARK)), None)
    if optional and not (spark is not None and spark.is_there()):
        return LocalEngine(log, destination)
    if spark is None:
        raise NotFound("the engine for Spark is not installed", hint="in a clone of wald: pip install '.[spark]'")
    engine: Engine = spark.start(log, destination, master, stack)
    return engine


def spark_pays(log: Log, requests: Iterable[Request]) -> bool:
    """Return True if this machine has more cores than one process uses, and there is enough work for them."""
    cores = len(os.sched_getaffinity(0))
    return cores > WORKERS_MAX and sum(due_bytes(log, request) for request in requests) > SPARK_PAYS_BYTES


def due_bytes(log: Log, request: Request) -> int:
    """Estimate at most how many bytes there are to pack; damage counts 0, because packing reports it."""
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
    """Return the bytes of ``route`` after sequence ``after``; for a raw segment, all of its bytes."""
    if segment.kind.form is Kind.RAW:
        limit = view.limit(segment)
        return segment.path.stat().st_size if limit is None else limit
    entries = sealed_index(segment, view.log_id).routes
    return sum(entry.payload_bytes for entry in entries if entry.route == route and entry.last > after)
