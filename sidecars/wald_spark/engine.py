"""Spark engine of ``wald-archive``: executors measure the records of a run, then each makes bundles.

The driver reads only indexes, and the batches in which bundles end. An executor reads the records
of a bundle from the log, writes the bundle to the destination and reads it back; the driver checks that it exists. Log
and destination need the same path on every machine, unless the destination is a URL.

A retried task makes the same bytes, and continues the first attempt as an interrupted run would. In a directory two
attempts may run at once, because both write the same bytes. In an object store only one of them succeeds; Spark makes
such attempts only if spark.speculation is set.

A bundle ends where the engine in one process would end it. A record adds the same number of bytes to a
bundle in every batch, so it is enough to know the bytes of each stretch of records, and to reread the stretch in which
a bundle ends.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wald.errors import NotFound, Unavailable
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.log import Log
from wald.reading.assembler import Batch
from wald.segments.durable_end import Bound
from wald_archive.bundle import Bundle, Size, split
from wald_archive.ledger import Run
from wald_archive.objects import PAYLOAD, Destination, open_destination
from wald_archive.pack import Engine, write_bundle
from wald_spark.locations import LogLocation
from wald_spark.plan import LogPiece, Range, pieces_of
from wald_spark.session import LOCAL, find_java, require_java, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STRETCH_BYTES = (
    1 << 20
)  # of payload; the driver gets three numbers per stretch, and rereads a stretch in which a bundle ends
PIECE_BYTES = 64 << 20  # a task measures that much in less than a second


def is_there() -> bool:
    return all(map(find_spec, ("pyspark", "pyarrow"))) and find_java() is not None


def start(log: Log, destination: Destination, master: str | None, stack: ExitStack) -> Engine:
    """Return the engine on ``master``, a Spark URL; None for all cores of this machine.

    Spark starts with the first bundle, and stops when ``stack`` closes.
    """
    try:
        import pyspark  # noqa: F401
    except ImportError as error:
        raise NotFound(
            f"{error}, which --engine spark needs", hint="in a clone of wald: pip install '.[spark]'"
        ) from error
    require_java()
    spark = cache(lambda: stack.enter_context(session("wald-archive", master=master or LOCAL)))
    return partial(spark_bundles, log, destination, spark)


class Stretch(NamedTuple):
    """Consecutive records ``first`` to ``last`` of a route, and the bytes they add to a bundle."""

    first: int
    last: int
    adds: int


class Share(NamedTuple):
    """Records ``first`` to ``last`` of one bundle; ``after`` is the last record of the previous bundle."""

    after: int
    first: int
    last: int


def stretches(batches: Iterable[Batch], size: Size, *, limit_bytes: int = STRETCH_BYTES) -> Iterator[Stretch]:
    """Yield the records of ``batches`` in stretches of up to ``limit_bytes``; a larger batch is a separate stretch."""
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


def shares(
    measured: Iterable[Stretch], size: Size, *, after: int, read: Callable[[Stretch], Iterable[Batch]]
) -> Iterator[Share]:
    """Yield the records of each bundle of a run after record ``after``, from its stretches in order."""
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


def spark_bundles(
    log: Log,
    destination: Destination,
    spark: Callable[[], SparkSession],
    run: Run,
    on_record: Callable[[int], None],
) -> Iterator[Bundle]:
    """Make the bundles of a run on Spark; ``spark`` is called only if there is a bundle to make."""
    from wald_spark.progress import run_tasks  # needs PySpark, unlike the check for PySpark

    location = LogLocation(Root(Path(os.path.abspath(log.root.path))), log.identity.log_id)
    view = location.view()
    wanted = Range(frozenset([run.origin.route]), run.first, run.last)
    pieces = pieces_of(view, wanted, limit_bytes=PIECE_BYTES)
    found = dict(run_tasks(spark(), pieces, partial(_measure, run.size), on_done=_ignore))
    measured = (Stretch(*each) for number in range(len(pieces)) for each in pickle.loads(found[number]))  # noqa: S301

    def read(stretch: Stretch) -> Iterator[Batch]:
        return LogPiece(location, wanted.routes, stretch.first, stretch.last, view.bound, 0).batches()

    parted = list(shares(measured, run.size, after=run.after, read=read))
    made: dict[int, Bundle] = {}
    done, due = run.first - 1, 0
    with closing(run_tasks(spark(), parted, partial(_make, run, location, view.bound), on_done=_ignore)) as results:
        for number, result in results:
            made[number] = pickle.loads(result)  # noqa: S301 - it comes from an executor of this session
            _require_written(destination, run, made[number])
            done += parted[number].last - max(parted[number].after, run.first - 1)
            on_record(done)
            while due in made:  # in order
                yield made.pop(due)
                due += 1


def _require_written(destination: Destination, run: Run, made: Bundle) -> None:
    """Check that an executor has written to the shared destination rather than to its own disk."""
    name, found = f"{run.bag}/{PAYLOAD}/{made.name}", None
    with suppress(FileNotFoundError):
        found = destination.length(name)
    if found != made.bytes:
        raise Unavailable(
            f"{destination.full_name(name)}: an executor has written it, but it is not here; nothing was acknowledged",
            hint="--dest has to name the same directory on every machine, or a URL",
        )


def _measure(size: Size, piece: LogPiece) -> bytes:
    """On an executor, return the stretches of a piece as plain tuples."""
    _require(piece.location)
    return pickle.dumps([tuple(each) for each in stretches(piece.batches(), size)])


def _make(run: Run, location: LogLocation, bound: Bound, share: Share) -> bytes:
    """On an executor, make the bundle of a share, write it and read it back."""
    _require(location)
    route = frozenset([run.origin.route])
    batches = LogPiece(location, route, share.first, share.last, bound, 0).batches()
    made = write_bundle(open_destination(run.dest, Disk()), run, batches, share.after)
    return pickle.dumps(replace(made, frames=()))


def _require(location: LogLocation) -> None:
    if not location.root.identity.exists():
        raise Unavailable(
            f"{location.root.path}: not a log on {socket.gethostname()}",
            hint="every machine needs the log under the same path; --engine local needs no other machine",
        )


def _ignore(_: int) -> None:
    """Ignore progress; the results show it."""
