"""Carrying a plan out, in steps of which each can be repeated.

    complete    the ledger's line, synced; then the name ``.released``
    released    after the grace period the name ``.deleting``; before that and after it the cursors are read again, in
                the same run and in each later one
    deleting    unlinked

A process that sets a cursor writes it first and reads the names afterwards. So either the cursor is read here after the
name has changed, and the segment gets its old name back, or that process sees the new name. The sealer and a raw
segment work in the same way: the sealer makes its temporary file first, and opens the segment by its old name then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.ledger_write import Ledger
from wald.files.listing import Segment
from wald.format.ledger_lines import Entry
from wald.format.names import Kind
from wald.hints import command_line
from wald.segments.index_builder import remove_index
from wald_reclaim.decision import Decision
from wald_reclaim.entries import SEALED_SINCE, excused_entry
from wald_reclaim.excuses import Excuses, joined
from wald_reclaim.plan import Planner
from wald_reclaim.policy import Verdict

# Recorded with one sync of the ledger, and renamed with one of the directory:
_SEGMENTS_AT_ONCE = 128
_DELETED_AT_ONCE = 2048  # for all of them the cursors are read again once, which is slow if there are thousands
_BYTES_AT_ONCE = 1 << 20  # of their lists of routes, which limits the memory for segments with a thousand routes


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Carries out decisions; the only code that deletes segments.

    Args:
        require: raises an error if the root now has another log or an older copy; called before each change.

    Raises:
        OSError: by every method: a step failed. The next pass finishes what the ledger records, or takes it back.
    """

    root: Root
    disk: Disk
    ledger: Ledger
    planner: Planner
    require: Callable[[], None] = lambda: None
    excuses: Excuses = field(default_factory=Excuses)

    def record(self, *entries: Entry) -> None:
        """Write lines into the ledger; they are on disk when this returns."""
        self.require()  # the open ledger belongs to the log that was here when it was opened
        self.ledger.append(*entries)
        self.ledger.cut()
        for entry in entries:
            self.planner.record(entry)

    def release(self, decisions: Iterable[Decision], *, now_ns: int) -> Iterator[Decision]:
        """Rename the segments that go; yield each decision after it is carried out or changed.

        Renamed segments must be confirmed, which :meth:`delete` does.
        """
        for group in _groups(decisions):
            self.require()
            if entries := self._lines(group):
                self.record(*entries)
            withdrawn: list[Entry] = []
            for number, decision in enumerate(group):
                if not decision.verdict.goes:
                    continue
                segment = decision.segment
                try:
                    self._renamed(segment, segment.kind.released)
                except FileExistsError:
                    message = str(_taken(segment, self.root.segment(segment.base_sequence, segment.kind.released)))
                    group[number] = replace(decision, verdict=Verdict.UNREADABLE, message=message)
                    withdrawn.append(self.planner.kept(segment, Verdict.UNREADABLE.value, now_ns))
                except FileNotFoundError:
                    sealed = self.root.segment(segment.base_sequence, Kind.SEALED)
                    if segment.kind is not Kind.RAW or not sealed.exists():
                        raise
                    # The next pass decides about the sealed form; it withdraws the line if this one is killed.
                    group[number] = replace(decision, verdict=Verdict.SEALING)
                    withdrawn.append(self.planner.kept(segment, SEALED_SINCE, now_ns))
            if any(decision.verdict.goes for decision in group):
                self.disk.sync_directory(self.root.segments)
            if withdrawn:
                self.record(*withdrawn)
            yield from group

    def delete(self, released: Sequence[Segment], due: Sequence[Segment], *, now_ns: int) -> Iterator[Decision]:
        """Unlink the segments whose grace period is over; yield what was decided about each of the ``released``.

        A segment without a line in the ledger (which was lost, or the file was renamed by hand) gets one first.
        """
        due_bases = {segment.base_sequence for segment in due}
        for begin in range(0, len(released), _DELETED_AT_ONCE):
            self.require()
            there = []
            for segment in released[begin : begin + _DELETED_AT_ONCE]:
                with suppress(FileExistsError):  # retried until the other file is gone
                    due_now = segment.base_sequence in due_bases
                    there.append(self._renamed(segment, segment.kind.deleting) if due_now else segment)
            decisions = self.planner.confirm(there, now_ns=now_ns)
            decisions = self._take_back(decisions)
            going = [decision for decision in decisions if decision.verdict.goes]
            if entries := self._lines(going):
                self.record(*entries)
            for decision in going:
                if decision.segment.kind is decision.segment.kind.deleting:
                    if decision.segment.kind.form is Kind.RAW:
                        remove_index(self.root.segment(decision.segment.base_sequence, Kind.INDEX), self.disk)
                    self.disk.unlink(decision.segment.path)
                    self.planner.forget(decision.segment)
            if due_bases:
                self.disk.sync_directory(self.root.segments)
            yield from decisions

    def _lines(self, group: Sequence[Decision]) -> list[Entry]:
        """The lines about a group, and before them those that take earlier ones back and the one that some share."""
        withdrawals = [decision.withdrawal for decision in group if decision.withdrawal is not None]
        lines = [(decision.entry, decision.excuse) for decision in group if decision.entry is not None]
        sharing = [(entry, excuse) for entry, excuse in lines if excuse is not None]
        if not sharing:
            return [*withdrawals, *(entry for entry, _ in lines)]
        routes = joined([excuse.routes for _, excuse in sharing])
        shared = excused_entry([entry for entry, _ in sharing], self.excuses.text(routes, sharing[0][1].claims, {}))
        shares = {"evidence": shared["base"]}
        return [*withdrawals, shared, *(entry if excuse is None else entry | shares for entry, excuse in lines)]

    def _renamed(self, segment: Segment, kind: Kind) -> Segment:
        """Rename the segment to the name of another state, and return it.

        Raises:
            FileExistsError: another file has that name.
        """
        path = self.root.segment(segment.base_sequence, kind)
        if path != segment.path:
            self.disk.rename_to_free(segment.path, path)
        return Segment(segment.base_sequence, kind, path)

    def _take_back(self, decisions: Iterable[Decision]) -> list[Decision]:
        """Give the segments that stay their old names back, and record it; messages name the file as it is then."""
        judged = []
        entries = []
        for decision in decisions:
            if decision.verdict.goes or decision.stays:
                judged.append(decision)
                continue
            try:
                old = self._renamed(decision.segment, decision.segment.kind.form)
            except FileExistsError:
                path = self.root.segment(decision.segment.base_sequence, decision.segment.kind.form)
                judged.append(replace(decision, message=str(_taken(decision.segment, path)), stays=True))
                continue
            message = decision.message.replace(str(decision.segment.path), str(old.path))
            judged.append(replace(decision, message=message))
            entries += [decision.entry] if decision.entry is not None else []
        if any(not decision.verdict.goes for decision in judged):
            self.disk.sync_directory(
                self.root.segments
            )  # before the line: until that is durable, a released name is confirmed again
        if entries:
            self.record(*entries)
        return judged


def _taken(segment: Segment, path: Path) -> Damaged:
    return Damaged(
        f"{segment.path}: not renamed: {path.name} already exists",
        hint=f"{command_line(path.parents[1], 'repair --dry-run')} shows what can be done",
    )


def _groups(decisions: Iterable[Decision]) -> Iterator[list[Decision]]:
    """The decisions in groups, each recorded with one sync; those of one that share a line rest on the same cursors."""
    group: list[Decision] = []
    size, claims = 0, None
    for decision in decisions:
        under = decision.excuse.claims if decision.excuse is not None else claims
        if claims is not None and under is not claims:
            yield group
            group, size = [], 0
        claims = under
        group.append(decision)
        size += len(decision.entry.get("routes", "")) if decision.entry else 0
        if len(group) == _SEGMENTS_AT_ONCE or size >= _BYTES_AT_ONCE:
            yield group
            group, size, claims = [], 0, None
    if group:
        yield group
