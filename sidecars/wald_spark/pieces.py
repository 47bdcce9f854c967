"""Pieces of a log: ranges of sequences, each of which a task reads in one go.

The driver plans pieces, an executor reads them as Arrow. A piece that is read again gives the same records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

from wald.errors import Damaged, NotFound, command_line
from wald.store.reading.batches import Batch
from wald.store.reading.reader import read_span
from wald.store.retention.history import History
from wald.store.segments.head import Bound, lost_head
from wald.store.segments.view import View, read_view
from wald_spark.blocks import Block, Range, Unreadable, blocks_of, fair_share, joined_blocks
from wald_spark.damage import STRICT, DamageReport, Tolerance
from wald_spark.locations import LogLocation

if TYPE_CHECKING:
    import pyarrow as pa

LOSS_HINT = (
    'a cursor that the query\'s owner moves keeps them; .option("failOnDataLoss", "false") goes on with what is there'
)


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Records ``first`` to ``last`` of ``routes`` (None: all) in one log.

    Attributes:
        bound: how far the log could be read when this was planned.
        raw_bytes: about how many raw bytes have to be read.
        gaps: whether what relief has dropped is no loss, because these records were not asked for by number.
    """

    location: LogLocation
    routes: frozenset[str] | None
    first: int
    last: int
    bound: Bound
    raw_bytes: int
    tolerance: Tolerance = STRICT
    gaps: bool = False

    @property
    def log(self) -> str:
        return self.location.log

    @property
    def name(self) -> str:
        """A name that no other piece has."""
        routes = "" if self.routes is None else f"-{crc32(','.join(sorted(self.routes)).encode()):08x}"
        return f"{self.log}-{self.first:020d}-{self.last:020d}{routes}"

    def batches(self) -> Iterator[Batch]:
        """The records, in order.

        Raises:
            NotFound: RECLAIM has deleted some of them since.
            Damaged: some cannot be read, and that is not tolerated; the message names segment and offset.
        """
        with closing(DamageReport(self.tolerance, self.name)) as damage:
            try:
                yield from read_span(
                    read_view(self.location.root, self.location.log_id, bound=self.bound),
                    routes=self.routes,
                    first=self.first,
                    last=self.last,
                    loss=self.tolerance.loss or self.gaps,
                    on_damage=damage.add,
                )
            except NotFound as error:
                raise NotFound(error.message, hint=LOSS_HINT) from error

    def arrow(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The records as :func:`record_batches` gives them; errors as of :meth:`batches`."""
        from wald.store.reading.arrow import record_batches

        return record_batches(self.batches(), columns)


def pieces_of(
    view: View,
    wanted: Range,
    *,
    limit_bytes: int,
    active: bool = True,
    tolerance: Tolerance = STRICT,
    gaps: bool = False,
) -> list[LogPiece]:
    """The pieces for ``wanted``: each is a fair share, up to ``limit_bytes``, or one larger block.

    Args:
        gaps: whether deletions by RECLAIM are no loss, because these records were not asked for by number.

    Raises:
        NotFound: RECLAIM has deleted wanted records, and loss is not tolerated.
        Damaged: a segment is missing or cannot be opened, or there is no head, and damage is not tolerated.
    """
    location, bound = LogLocation(view.root, view.log_id), view.bound
    history = History(location.root)
    blocks: list[Block] = []
    with closing(DamageReport(tolerance, f"{location.log}-planning-{wanted.first:020d}")) as damage:
        if bound.lost and active and bound.sequence is not None and wanted.last > bound.sequence:
            damage.add(lost_head(location.root, bound))
        for found in blocks_of(view, wanted, active=active):
            if isinstance(found, Block):
                blocks.append(found)
            elif found.error is not None:
                damage.add(found.error)
            else:
                excused = gaps or tolerance.loss or not _may_have_held(history, wanted.routes, found)
                _add_missing(location, found, history, damage, excused=excused)
    limit = fair_share(sum(block.raw_bytes for block in blocks), limit_bytes)
    return [
        LogPiece(location, wanted.routes, block.first, block.last, bound, block.raw_bytes, tolerance, gaps)
        for block in joined_blocks(blocks, first=wanted.first, last=wanted.last, limit_bytes=limit)
    ]


def _may_have_held(history: History, routes: frozenset[str] | None, missing: Unreadable) -> bool:
    """Whether the missing segments may have had records of ``routes``; if not, the query does not need them."""
    last_of = history.routes_between(missing.first, missing.next - 1)
    return routes is None or last_of is None or any(last_of.get(route, 0) >= missing.first for route in routes)


def _add_missing(
    location: LogLocation, missing: Unreadable, history: History, damage: DamageReport, *, excused: bool
) -> None:
    first, last = missing.first, missing.next - 1
    unexplained = list(history.unexplained(first, last))
    for begin, end in unexplained:
        damage.add(
            Damaged(
                f"{location.root.segments}: no segment holds {_range(begin, end)}, and no ledger says why",
                hint=f"{command_line(location.root.path, 'verify')} lists all damage",
            )
        )
    if not unexplained and not excused:
        why = "; ".join(loss.reason for loss in history.losses(first, last))
        message = f"{_range(first, last)} lost: {why}" if why else f"RECLAIM has removed {_range(first, last)}"
        raise NotFound(f"{location.root.segments}: {message}", hint=LOSS_HINT)


def _range(first: int, last: int) -> str:
    return f"record {first}" if first == last else f"records {first} to {last}"
