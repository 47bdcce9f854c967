"""Whether there is so much to archive that Spark is worth its start: sizes are asked of names and indexes only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from wald.errors import Damaged, NotFound
from wald.format.names import Kind
from wald.kinds import GIB
from wald.log import Log
from wald.store.files.directory import Segment
from wald.store.retention.pins import sealed_index
from wald.store.segments.head import look
from wald_archive.codecs import WORKERS_MAX
from wald_archive.pack import Wish

# On two cores Spark takes 10 s to start and then a fifth longer than one process (measured), which uses both, too.
SPARK_PAYS_BYTES = 8 * GIB


def spark_pays(log: Log, wishes: Iterable[Wish]) -> bool:
    """Whether this machine has cores that one process leaves idle, and there is enough for them to do."""
    cores = len(os.sched_getaffinity(0))
    return cores > WORKERS_MAX and sum(due_bytes(log, wish) for wish in wishes) > SPARK_PAYS_BYTES


def due_bytes(log: Log, wish: Wish) -> int:
    """About as many as there are to pack, rather too many; what is damaged counts nothing, as packing will tell."""
    total = 0
    with suppress(NotFound, Damaged):
        after = log.cursor(wish.route, wish.group).effective
        bound, listing = look(log.root)
        for segment in listing.segments[listing.covering(after + 1) :]:
            if segment.base_sequence > bound.segment or (wish.to is not None and segment.base_sequence > wish.to):
                break
            with suppress(FileNotFoundError, Damaged):
                total += _bytes_in(log, segment, bound.limit(segment.base_sequence), wish.route, after)
    return total


def _bytes_in(log: Log, segment: Segment, limit: int | None, route: str, after: int) -> int:
    """Behind ``after``; of a raw segment everything."""
    if segment.kind is Kind.RAW:
        return segment.path.stat().st_size if limit is None else limit
    entries = sealed_index(segment, log.identity.log_id).routes
    return sum(entry.payload_bytes for entry in entries if entry.route == route and entry.last > after)
