"""Bundles made on executors: first they measure the records of a run, then each bundle is made by one of them.

The driver reads no more of the log than the indexes and the batches in which bundles end. An executor reads the records
of a bundle from the log, writes the bundle to the destination, and reads it back; the driver checks that it is there.
Log and destination need the same path on every machine, unless the destination is a URL.

A task that is tried again makes the same bytes, and continues what the first attempt has left, as an interrupted run
does. In a directory two attempts may run at once, as both write the same bytes. In an object store only one of them
succeeds, and the other fails; Spark makes such attempts only if spark.speculation is set.

A bundle ends where :class:`wald_archive.api.BundleBatches` would end it. How records are batched does not matter, as
each record adds the same to a bundle in every batch. So it is enough to know how much each stretch of records adds, and
to read again the stretch in which a bundle ends.
"""

from __future__ import annotations

import os
import pickle
import socket
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from wald.errors import Unavailable
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.log import Log
from wald.reading.assembler import Batch
from wald.segments.durable_end import Bound
from wald_archive.api import PAYLOAD, Bundle, Destination, Run, Size, open_destination, split, write_bundle
from wald_spark.blocks import Range
from wald_spark.locations import LogLocation
from wald_spark.pieces import LogPiece, pieces_of
from wald_spark.tasks import run as run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STRETCH_BYTES = 1 << 20  # of payload; a stretch is 24 bytes for the driver, and is read again if a bundle ends in it
PIECE_BYTES = 64 << 20  # a task measures that much in less than a second


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive records ``first`` to ``last`` of a route, and how much they add to a bundle."""

    first: int
    last: int
    adds: int


@dataclass(frozen=True, slots=True)
class Share:
    """The records of one bundle: ``first`` to ``last`` of the route; ``after`` is the last one of the bundle before."""

    after: int
    first: int
    last: int


def stretches(batches: Iterable[Batch], size: Size, *, limit_bytes: int = STRETCH_BYTES) -> Iterator[Stretch]:
    """The records of ``batches`` in stretches of up to ``limit_bytes``; a larger batch is a stretch by itself."""
    stretch: Stretch | None = None
    room = 0
    for batch in batches:
        adds = size.of(batch)
        if stretch is not None and len(batch.payload) <= room:
            stretch = Stretch(stretch.first, batch.last_sequence, stretch.adds + adds)
        else:
            if stretch is not None:
                yield stretch
            stretch, room = Stretch(batch.first_sequence, batch.last_sequence, adds), limit_bytes
        room -= len(batch.payload)
    if stretch is not None:
        yield stretch


def encode(measured: Iterable[Stretch]) -> bytes:
    """24 bytes for each stretch."""
    return array("Q", [number for each in measured for number in (each.first, each.last, each.adds)]).tobytes()


def decode(data: bytes) -> Iterator[Stretch]:
    """The inverse of :func:`encode`."""
    numbers = iter(memoryview(data).cast("Q"))
    return (Stretch(first, last, adds) for first, last, adds in zip(numbers, numbers, numbers, strict=True))


def shares(
    measured: Iterable[Stretch], size: Size, *, after: int, read: Callable[[Stretch], Iterable[Batch]]
) -> Iterator[Share]:
    """The records of each bundle.

    Args:
        measured: the stretches of the whole run, in order.
        after: the last record that was packed before the run.
        read: returns the records of a stretch.
    """
    first = last = 0  # of the current bundle; 0: it is empty
    room = size.limit
    for stretch in measured:
        if stretch.adds <= room:
            first, last = first or stretch.first, stretch.last
            room -= stretch.adds
            continue
        for batch in read(stretch):
            rest: Batch | None = batch
            while rest is not None:
                count = size.fitting(rest, room) if first else max(1, size.fitting(rest, room))
                head, rest = split(rest, count)
                if head is not None:
                    first, last = first or head.first_sequence, head.last_sequence
                    room -= size.of(head)
                if rest is not None:
                    yield Share(after, first, last)
                    after, first, room = last, 0, size.limit
    if first:
        yield Share(after, first, last)


class SparkEngine:
    """Makes the bundles of a run on Spark.

    Args:
        spark: makes the session; called only if there is a bundle to make.
    """

    def __init__(self, log: Log, destination: Destination, spark: Callable[[], SparkSession]) -> None:
        self._location = LogLocation(Root(Path(os.path.abspath(log.root.path))), log.identity.log_id)
        self._destination = destination
        self._spark = spark

    def bundles(self, run: Run, on_record: Callable[[int], None]) -> Iterator[Bundle]:
        """As of :class:`wald_archive.api.Engine`.

        Raises:
            Unavailable: Spark does not start or gives up, or the log or the destination is not on all machines; the
                next run goes on with this one.
        """
        view = self._location.view()
        bound = view.bound
        wanted = Range(frozenset([run.origin.route]), run.first, run.last)
        pieces = pieces_of(view, wanted, limit_bytes=PIECE_BYTES)
        measured = self._measured(pieces, run.size)

        def read(stretch: Stretch) -> Iterator[Batch]:
            return LogPiece(self._location, wanted.routes, stretch.first, stretch.last, bound, 0).batches()

        parted = list(shares(measured, run.size, after=run.after, read=read))
        yield from self._made(run, bound, parted, on_record)

    def _measured(self, pieces: list[LogPiece], size: Size) -> Iterator[Stretch]:
        found = dict(run_tasks(self._spark(), pieces, _Measure(size), on_done=_ignore))
        for number in range(len(pieces)):
            yield from decode(found[number])

    def _made(self, run: Run, bound: Bound, parted: list[Share], on_record: Callable[[int], None]) -> Iterator[Bundle]:
        """The bundles in order, each as soon as those before it are made, too."""
        made: dict[int, Bundle] = {}
        done, due = run.first - 1, 0
        with closing(run_tasks(self._spark(), parted, _Make(run, self._location, bound), on_done=_ignore)) as results:
            for number, result in results:
                made[number] = pickle.loads(result)  # noqa: S301 - it comes from an executor of this session
                self._require_written(run, made[number])
                done += parted[number].last - max(parted[number].after, run.first - 1)
                on_record(done)
                while due in made:
                    yield made.pop(due)
                    due += 1

    def _require_written(self, run: Run, made: Bundle) -> None:
        """Check that an executor has written to the destination, and not to a disk of its own."""
        name = f"{run.bag}/{PAYLOAD}/{made.name}"
        try:
            found = self._destination.length(name)
        except FileNotFoundError:
            found = None
        if found != made.bytes:
            raise Unavailable(
                f"{self._destination.full_name(name)}: an executor has written it, but it is not here; nothing was "
                "acknowledged",
                hint="--dest has to name the same directory on every machine, or a URL",
            )


@dataclass(frozen=True, slots=True)
class _Measure:
    """Measures a piece."""

    size: Size

    def __call__(self, piece: LogPiece) -> bytes:
        _require(piece.location)
        return encode(stretches(piece.batches(), self.size))


@dataclass(frozen=True, slots=True)
class _Make:
    """Makes the bundle of a share, writes it and reads it back."""

    run: Run
    location: LogLocation
    bound: Bound

    def __call__(self, share: Share) -> bytes:
        _require(self.location)
        route = frozenset([self.run.origin.route])
        batches = LogPiece(self.location, route, share.first, share.last, self.bound, 0).batches()
        made = write_bundle(open_destination(self.run.dest, Disk()), self.run, batches, share.after)
        return pickle.dumps(replace(made, frames=()))


def _require(location: LogLocation) -> None:
    """
    Raises:
        Unavailable: the log is not on this machine. That is not damage.
    """
    if not location.root.identity.exists():
        raise Unavailable(
            f"{location.root.path}: there is no log here on {socket.gethostname()}",
            hint="every machine needs the log under the same path; --engine local needs no other machine",
        )


def _ignore(_: int) -> None:
    """The results are enough to report progress."""
