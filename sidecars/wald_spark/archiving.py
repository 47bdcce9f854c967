"""Bundles made on executors: first all measure what there is, then each bundle of the run is made by one of them.

The driver reads no more of the log than the indexes and the places at which bundles end. An executor reads the records
of a bundle from the log, writes the bundle to the destination, and reads it back; the driver looks that it is there.
Both the log and the destination have to be where they are under the same path on every machine, unless the destination
is a URL.

A task that is tried again makes the same bytes and meets what the first attempt has left, as a run does that was
interrupted. In a directory, even two attempts at once do each other no harm: what both write is the same. Into an
object store only one of them can, and the other fails; Spark makes such attempts only where spark.speculation is set.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from wald.errors import Unavailable
from wald.log import Log
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald.store.reading.batches import Batch
from wald.store.segments.head import Bound
from wald_archive.api import PAYLOAD, Bundle, Destination, Run, Size, open_destination, write_bundle
from wald_spark.blocks import Range
from wald_spark.pieces import LogPiece, pieces_of
from wald_spark.places import LogPlace
from wald_spark.shares import Share, Stretch, decode, encode, shares, stretches
from wald_spark.tasks import run as run_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIECE_BYTES = 64 << 20  # measured by one task, in less than a second


class SparkEngine:
    """
    Args:
        spark: gives the session; asked only when there is a bundle to make.
    """

    def __init__(self, log: Log, destination: Destination, spark: Callable[[], SparkSession]) -> None:
        self._place = LogPlace(Root(Path(os.path.abspath(log.root.path))), log.identity.log_id)
        self._destination = destination
        self._spark = spark

    def bundles(self, run: Run, on_record: Callable[[int], None]) -> Iterator[Bundle]:
        """As of :class:`wald_archive.api.Engine`.

        Raises:
            Unavailable: Spark does not start or gives up, or the log or the destination is not on all machines; the
                next run goes on with this one.
        """
        bound, listing = self._place.look()
        wanted = Range(frozenset([run.origin.route]), run.first, run.last)
        pieces = pieces_of(self._place, bound, listing, wanted, limit_bytes=PIECE_BYTES)
        measured = self._measured(pieces, run.size)

        def read(stretch: Stretch) -> Iterator[Batch]:
            return LogPiece(self._place, wanted.routes, stretch.first, stretch.last, bound, 0).batches()

        parted = list(shares(measured, run.size, after=run.after, read=read))
        yield from self._made(run, bound, parted, on_record)

    def _measured(self, pieces: list[LogPiece], size: Size) -> Iterator[Stretch]:
        found = dict(run_tasks(self._spark(), pieces, _Measure(size), on_done=_ignore))
        for number in range(len(pieces)):
            yield from decode(found[number])

    def _made(self, run: Run, bound: Bound, parted: list[Share], on_record: Callable[[int], None]) -> Iterator[Bundle]:
        """Each as soon as those in front of it are made, too."""
        made: dict[int, Bundle] = {}
        done, due = run.first - 1, 0
        with closing(run_tasks(self._spark(), parted, _Make(run, self._place, bound), on_done=_ignore)) as results:
            for number, told in results:
                made[number] = pickle.loads(told)  # noqa: S301 - it comes from an executor of ours
                self._look_at(run, made[number])
                done += parted[number].last - max(parted[number].after, run.first - 1)
                on_record(done)
                while due in made:
                    yield made.pop(due)
                    due += 1

    def _look_at(self, run: Run, made: Bundle) -> None:
        """What an executor has written has to be here, too, and not on a disk of its own."""
        name = f"{run.bag}/{PAYLOAD}/{made.name}"
        try:
            found = self._destination.length(name)
        except FileNotFoundError:
            found = None
        if found != made.bytes:
            raise Unavailable(
                f"{self._destination.full_name(name)}: an executor has written it, and it is not here; nothing was "
                "acknowledged",
                hint="--dest has to be a place that is the same on every machine, or a URL",
            )


@dataclass(frozen=True, slots=True)
class _Measure:
    """What is in a piece."""

    size: Size

    def __call__(self, piece: LogPiece) -> bytes:
        _require(piece.place)
        return encode(stretches(piece.batches(), self.size))


@dataclass(frozen=True, slots=True)
class _Make:
    """The bundle of a share: made, written, read back, and told."""

    run: Run
    place: LogPlace
    bound: Bound

    def __call__(self, share: Share) -> bytes:
        _require(self.place)
        route = frozenset([self.run.origin.route])
        batches = LogPiece(self.place, route, share.first, share.last, self.bound, 0).batches()
        made = write_bundle(open_destination(self.run.dest, Disk()), self.run, batches, share.after)
        return pickle.dumps(replace(made, frames=()))


def _require(place: LogPlace) -> None:
    """
    Raises:
        Unavailable: the log is not on this machine. It is not damaged for that.
    """
    if not place.root.identity.exists():
        raise Unavailable(
            f"{place.root.path}: there is no log here on {socket.gethostname()}",
            hint="every machine needs the log under the same path; --engine local needs no other machine",
        )


def _ignore(_: int) -> None:
    """What a piece gives tells enough."""
