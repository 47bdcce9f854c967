"""Which engine makes the bundles: this process, or Spark where there is enough for it to do.

How much there is to pack is read from the names and the indexes of segments only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import entry_points

from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.listing import Segment
from wald.format.names import Kind
from wald.log import Log
from wald.retention.blockers import sealed_index
from wald.segments.view import View
from wald.setting_types import GIB
from wald_archive.codecs import WORKERS_MAX
from wald_archive.destination import Destination
from wald_archive.engine import Engine, EngineMaker, LocalEngine
from wald_archive.pack import Request

AUTO, LOCAL, SPARK = "auto", "local", "spark"
# On two cores Spark takes 10 s to start and then a fifth longer than one process (measured), which uses both, too.
SPARK_PAYS_BYTES = 8 * GIB


def choose_engine(
    name: str, master: str | None, log: Log, destination: Destination, requests: Sequence[Request], stack: ExitStack
) -> Engine:
    """The engine asked for, or the faster one; Spark is started when it is needed and ends with ``stack``.

    Raises:
        InvalidInput: a cluster was given for the engine that uses none.
        NotFound: Spark is asked for, and PySpark or its Java is not installed.
    """
    if name == LOCAL and master is not None:
        raise InvalidInput("--engine local runs in this process, on no --master", hint="--engine spark")
    if name == LOCAL or (name == AUTO and master is None and not spark_pays(log, requests)):
        return LocalEngine(log, destination)
    spark = _installed(SPARK)
    if name == AUTO and master is None and not (spark is not None and spark.is_there()):
        return LocalEngine(log, destination)
    if spark is None:
        raise NotFound("the engine for Spark is not installed", hint="in a clone of wald: pip install '.[spark]'")
    return spark.start(log, destination, master, stack)


def spark_pays(log: Log, requests: Iterable[Request]) -> bool:
    """Whether this machine has cores that one process leaves idle, and there is enough work for them."""
    cores = len(os.sched_getaffinity(0))
    return cores > WORKERS_MAX and sum(due_bytes(log, request) for request in requests) > SPARK_PAYS_BYTES


def due_bytes(log: Log, request: Request) -> int:
    """An upper estimate of the bytes to pack; what is damaged counts 0, because packing reports it."""
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
    """The bytes of ``route`` after sequence ``after``; all bytes of a raw segment."""
    if segment.kind.form is Kind.RAW:
        limit = view.limit(segment)
        return segment.path.stat().st_size if limit is None else limit
    entries = sealed_index(segment, view.log_id).routes
    return sum(entry.payload_bytes for entry in entries if entry.route == route and entry.last > after)


def _installed(name: str) -> EngineMaker | None:
    """The engine ``name`` of another package, found by its entry point."""
    found = next(iter(entry_points(group="wald_archive.engines", name=name)), None)
    return None if found is None else found.load()
