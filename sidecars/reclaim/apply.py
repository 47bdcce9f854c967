"""Carrying a plan out, in steps of which each can be repeated: the ledger first, then the name, then the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sidecars.reclaim.plan import Decision, Planner
from wald.format.names import Kind
from wald.store.directory import Root, Segment
from wald.store.disk import Disk
from wald.store.ledger import Ledger

# Told with one sync of the ledger, and renamed with one of the directory:
_SEGMENTS_AT_ONCE = 64
_ROUTES_AT_ONCE = 2048  # in all of them; so that a thousand in each take no more memory than a few


def doom(root: Root, disk: Disk, ledger: Ledger, planner: Planner, decisions: Iterable[Decision]) -> Iterator[Decision]:
    """Rename the segments that go; each decision comes back once it is carried out, also those that change nothing.

    Raises:
        OSError: a step failed. What the ledger has been told stays to be done, or to be taken back, at the next look.
    """
    for group in _groups(decisions):
        if entries := [decision.entry for decision in group if decision.entry is not None]:
            ledger.append(*entries)
        going = [decision.segment for decision in group if decision.verdict.goes]
        planner.told -= {decision.segment.base_sequence for decision in group if not decision.verdict.goes}
        planner.told |= {segment.base_sequence for segment in going}
        for segment in going:
            disk.rename(segment.path, root.segment(segment.base_sequence, Kind.DOOMED))
        if going:
            disk.sync_directory(root.segments)
        yield from group


def unlink(root: Root, disk: Disk, ledger: Ledger, planner: Planner, doomed: Iterable[Segment], *, now_ns: int) -> None:
    """Delete what has waited out its grace period.

    One that the ledger does not know of, because the ledger was lost or somebody else has renamed it, is told first.

    Raises:
        OSError: a step failed.
    """
    unlinked = False
    for segment in doomed:
        if segment.base_sequence not in planner.told:
            ledger.append(planner.unexplained(segment, now_ns=now_ns))
        disk.unlink(segment.path)
        planner.told.discard(segment.base_sequence)
        unlinked = True
    if unlinked:
        disk.sync_directory(root.segments)


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
