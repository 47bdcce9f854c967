"""Pieces of a log: ranges of sequences, each of which a task reads in one go.

The driver plans pieces, an executor reads them as Arrow. A piece that is read again gives the same records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from zlib import crc32

from wald.errors import Damaged, NotFound
from wald.hints import command_line
from wald.reading.assembler import Batch
from wald.reading.reader import read_selection
from wald.reading.selection import Selection
from wald.retention.history import History
from wald.retention.missing import Missing
from wald.segments.continuity import Continuity, LastSeen, last_seen_at
from wald.segments.durable_end import Bound, lost_head
from wald.segments.view import View, read_view
from wald_spark.blocks import Block, Range, Unreadable, blocks_of, fair_share, joined_blocks
from wald_spark.damage import PARTIAL_HINT, STRICT, DamageReport, Tolerance
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
        gaps: whether what shrinking has dropped is no loss, because these records were not asked for by number.
        seen: the end of the log when this was planned; None if unknown.
    """

    location: LogLocation
    routes: frozenset[str] | None
    first: int
    last: int
    bound: Bound
    raw_bytes: int
    tolerance: Tolerance = STRICT
    gaps: bool = False
    seen: LastSeen | None = None

    @property
    def log(self) -> str:
        return self.location.log

    @property
    def name(self) -> str:
        """A name that no other piece has."""
        return f"{self.log}-{self.first:020d}-{self.last:020d}{_suffix(self.routes)}"

    def batches(self) -> Iterator[Batch]:
        """The records, in order.

        Raises:
            NotFound: RECLAIM has deleted some of them since.
            Damaged: some cannot be read, and that is not tolerated; the message names segment and offset.
            Replaced: another log, or an older copy, has taken the place of the one that was planned.
        """
        with closing(DamageReport(self.tolerance, self.name)) as damage:

            def pass_over(missing: Missing) -> None:
                damage.pass_over(missing.message())

            continuity = Continuity(self.location.root, self.location.log_id, self.seen) if self.seen else None
            try:
                yield from read_selection(
                    read_view(self.location.root, self.location.log_id, bound=self.bound, continuity=continuity),
                    Selection(self.routes, self.first, last=self.last),
                    on_missing="skip" if self.gaps else pass_over if self.tolerance.loss else "error",
                    on_damage=damage.add,
                )
            except NotFound as error:
                raise NotFound(error.message, hint=LOSS_HINT) from error
            if continuity is not None:
                continuity.require()

    def arrow(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The records as :func:`record_batches` gives them; errors as of :meth:`batches`."""
        from wald.reading.arrow import record_batches

        return record_batches(self.batches(), columns)


def first_record(view: View, *, partial: bool) -> int:
    """Return the first record to read of a whole log: the oldest one, or one that is missing without explanation.

    Args:
        partial: whether records before the oldest segment may be missing.
    """
    oldest = view.segments[0].base_sequence if view.segments else 1
    if partial or oldest == 1:
        return oldest
    try:
        return next(History(view.root).unexplained_spans(1, oldest - 1), (oldest, oldest))[0]
    except Damaged:  # of the ledger; planning reports it
        return 1


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
    name = f"{location.log}-planning-{wanted.first:020d}{_suffix(wanted.routes)}"
    with closing(DamageReport(tolerance, name)) as damage:
        if bound.head_lost and active and bound.sequence is not None and wanted.last > bound.sequence:
            damage.add(lost_head(location.root, bound))
        planning = _Planning(History(location.root), damage, tolerance.loss, gaps)
        blocks = list(planning.blocks(view, wanted, active=active))
    limit = fair_share(sum(block.raw_bytes for block in blocks), limit_bytes)
    seen = last_seen_at(view.root, view.head) if view.head else None
    return [
        LogPiece(location, wanted.routes, block.first, block.last, bound, block.raw_bytes, tolerance, gaps, seen)
        for block in joined_blocks(blocks, first=wanted.first, last=wanted.last, limit_bytes=limit)
    ]


@dataclass(frozen=True, slots=True)
class _Planning:
    """Search for the blocks to read, which reports records that are missing between them.

    Attributes:
        loss: whether deletions by RECLAIM are passed over.
        gaps: whether such deletions are not even reported.
    """

    history: History
    damage: DamageReport
    loss: bool
    gaps: bool

    def blocks(self, view: View, wanted: Range, *, active: bool) -> Iterator[Block]:
        for found in blocks_of(view, wanted, active=active):
            if isinstance(found, Block):
                yield found
            elif found.error is not None:
                self.damage.add(found.error)
            elif (complete := self._report(view, wanted, found)) is not view:
                yield from self.blocks(complete, replace(wanted, first=found.first), active=active)
                return

    def _report(self, view: View, wanted: Range, missing: Unreadable) -> View:
        """Report missing records; if RECLAIM has undone their deletion, return a view that has them instead.

        Raises:
            NotFound: RECLAIM has removed wanted records, and that is not passed over.
        """
        if errors := self._errors(view, missing):
            complete = view.including_restored(missing.first, missing.next - 1)
            if complete is not view:
                return complete
            errors = self._errors(view, missing)  # RECLAIM may have deleted them since the view was made
        if not errors and not self.gaps:
            try:
                self._report_loss(view, wanted.routes, missing.first, missing.next - 1)
            except Damaged as damaged:  # the ledger
                errors = [damaged]
        for error in errors:
            self.damage.add(error)
        return view

    def _errors(self, view: View, missing: Unreadable) -> list[Damaged]:
        """Return the errors for missing records that no ledger explains, or for the ledger itself."""
        hint = PARTIAL_HINT if missing.oldest else f"{command_line(view.root.path, 'verify')} lists all damage"
        try:
            unexplained = list(self.history.unexplained_spans(missing.first, missing.next - 1))
        except Damaged as error:
            return [error]
        return [
            Damaged(f"{view.root.segments}: {_missing(*each)}, and no ledger explains why", hint=hint)
            for each in unexplained
        ]

    def _report_loss(self, view: View, routes: frozenset[str] | None, first: int, last: int) -> None:
        """Report the deletion of records that may belong to ``routes``.

        Raises:
            NotFound: they are not passed over.
            Damaged: the ledger cannot be read.
        """
        if not self._may_have_held(routes, first, last):
            return
        why = "; ".join(loss.reason for loss in self.history.losses(first, last))
        message = f"{_range(first, last)} lost: {why}" if why else f"RECLAIM has removed {_range(first, last)}"
        if not self.loss:
            raise NotFound(f"{view.root.segments}: {message}", hint=LOSS_HINT)
        self.damage.pass_over(f"{view.root.segments}: {message}")

    def _may_have_held(self, routes: frozenset[str] | None, first: int, last: int) -> bool:
        """Return True if the missing segments may have contained records of ``routes``."""
        last_of = self.history.routes_between(first, last)
        return routes is None or last_of is None or any(last_of.get(route, 0) >= first for route in routes)


def _suffix(routes: frozenset[str] | None) -> str:
    """Return a name suffix that identifies ``routes``."""
    return "" if routes is None else f"-{crc32(','.join(sorted(routes)).encode()):08x}"


def _range(first: int, last: int) -> str:
    return f"record {first}" if first == last else f"records {first} to {last}"


def _missing(first: int, last: int) -> str:
    return f"{_range(first, last)} {'is' if first == last else 'are'} missing"
