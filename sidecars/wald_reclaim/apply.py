"""Carrying a plan out, in steps of which each can be repeated.

    complete    the ledger's line, synced; then the name ``.released``
    released    after the grace period the name ``.deleting``; before that and after it the cursors are read again, in
                the same run and in each later one
    deleting    unlinked

Whoever sets a cursor writes it first and looks at the names then. So either the cursor is seen here after the name has
changed, and the segment gets its old name back, or the new name is seen there. The sealer and a raw segment meet in
the same way: it makes its temporary file first, and opens the segment by its old name then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from wald.format.names import Kind
from wald.store.files.directory import Root, Segment
from wald.store.files.disk import Disk
from wald.store.files.ledger import Ledger
from wald.store.retention.history import Entry
from wald_reclaim.plan import Decision, Planner
from wald_reclaim.policy import Verdict

# Told with one sync of the ledger, and renamed with one of the directory:
_SEGMENTS_AT_ONCE = 64
_DELETED_AT_ONCE = 1024  # for them the cursors are read again once, which takes a while if there are thousands
_ROUTES_AT_ONCE = 2048  # in all of them; so that a thousand in each take no more memory than a few


@dataclass(frozen=True, slots=True)
class Reclaim:
    """The one program that deletes what is published.

    Raises:
        OSError: by every method: a step failed. What the ledger has been told stays to be done, or to be taken back, at
            the next look.
    """

    root: Root
    disk: Disk
    ledger: Ledger
    planner: Planner

    def tell(self, *entries: Entry) -> None:
        """Write lines of the ledger; they are on disk when this returns."""
        self.ledger.append(*entries)
        for entry in entries:
            self.planner.heard(entry)

    def release(self, decisions: Iterable[Decision]) -> Iterator[Decision]:
        """Rename the segments that go; each decision comes back once it is carried out, or has turned out otherwise.

        What has been renamed has to be judged again, which :meth:`delete` does.
        """
        for group in _groups(decisions):
            if entries := [decision.entry for decision in group if decision.entry is not None]:
                self.tell(*entries)
            for number, decision in enumerate(group):
                if not decision.verdict.goes:
                    continue
                segment = decision.segment
                try:
                    self._renamed(segment, segment.kind.released)
                except FileNotFoundError:
                    if segment.kind is not Kind.RAW:
                        raise
                    # Sealed since it was judged. The next look judges what it has become, and corrects the ledger.
                    group[number] = replace(decision, verdict=Verdict.SEALING)
            if any(decision.verdict.goes for decision in group):
                self.disk.sync_directory(self.root.segments)
            yield from group

    def delete(self, released: Sequence[Segment], waited: Sequence[Segment], *, now_ns: int) -> Iterator[Decision]:
        """Unlink what has ``waited`` out its grace period; what comes back is what has become of all the ``released``.

        One that the ledger does not know of (it was lost, or somebody else has renamed the file) is told first.
        """
        over = {segment.base_sequence for segment in waited}
        for begin in range(0, len(released), _DELETED_AT_ONCE):
            there = [
                self._renamed(segment, segment.kind.deleting) if segment.base_sequence in over else segment
                for segment in released[begin : begin + _DELETED_AT_ONCE]
            ]
            decisions = self.planner.again(there, now_ns=now_ns)
            decisions = self._take_back(decisions)
            going = [decision for decision in decisions if decision.verdict.goes]
            if entries := [decision.entry for decision in going if decision.entry is not None]:
                self.tell(*entries)
            for decision in going:
                if decision.segment.kind is decision.segment.kind.deleting:
                    if decision.segment.kind.form is Kind.RAW:
                        with suppress(FileNotFoundError):
                            self.disk.unlink(self.root.segment(decision.segment.base_sequence, Kind.INDEX))
                    self.disk.unlink(decision.segment.path)
                    self.planner.gone(decision.segment)
            if over:
                self.disk.sync_directory(self.root.segments)
            yield from decisions

    def _renamed(self, segment: Segment, kind: Kind) -> Segment:
        """The same segment under the name that stands for another state."""
        path = self.root.segment(segment.base_sequence, kind)
        if path != segment.path:
            self.disk.rename(segment.path, path)
        return Segment(segment.base_sequence, kind, path)

    def _take_back(self, decisions: Iterable[Decision]) -> list[Decision]:
        """Give those that stay their old names back, and say so in the ledger; messages name the file as it is then."""
        judged = []
        entries = []
        for decision in decisions:
            if decision.verdict.goes:
                judged.append(decision)
                continue
            old = self._renamed(decision.segment, decision.segment.kind.form)
            words = decision.message.replace(str(decision.segment.path), str(old.path))
            judged.append(replace(decision, message=words))
            entries += [decision.entry] if decision.entry is not None else []
        if any(not decision.verdict.goes for decision in judged):
            self.disk.sync_directory(self.root.segments)  # before the line: until it is there, the name is judged again
        if entries:
            self.tell(*entries)
        return judged


def _groups(decisions: Iterable[Decision]) -> Iterator[list[Decision]]:
    """All of them, as many at a time as are worth a sync."""
    group: list[Decision] = []
    routes = 0
    for decision in decisions:
        group.append(decision)
        routes += len(decision.entry.get("routes", ())) if decision.entry else 0
        if len(group) == _SEGMENTS_AT_ONCE or routes >= _ROUTES_AT_ONCE:
            yield group
            group, routes = [], 0
    if group:
        yield group
