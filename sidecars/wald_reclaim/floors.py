"""What of a pinned segment no group needs any more, and whether it pays to write the segment again without it.

A batch stays if a group has not processed its last record, or if it must be archived first. Shrinking pays if at least
half of the file goes, and more than the line in the ledger and the blocks of the file system take.
"""

from __future__ import annotations

from dataclasses import dataclass

from wald.format.batch import BatchHeader
from wald.format.sealed_index import SealedIndex
from wald.retention.blockers import CursorSnapshot
from wald.retention.history import History

LEAST_SHARE = 0.5
LEAST_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Floors:
    """Up to which record each route of a segment is not needed any more.

    Attributes:
        of_routes: of those in the segment; a route that is not in it is needed.
    """

    of_routes: dict[str, int]

    def keeps(self, header: BatchHeader, route: str) -> bool:
        """Whether a batch is still needed."""
        return header.last_sequence > self.of_routes.get(route, 0)

    def freed_bytes(self, index: SealedIndex, stored_bytes: int) -> int:
        """About how many bytes of the file go; 0 if it is not worth the work."""
        payload_bytes = sum(entry.payload_bytes for entry in index.routes)
        begun = sum(entry.payload_bytes for entry in index.routes if self.of_routes.get(entry.route, 0) >= entry.first)
        if not _pays(begun, payload_bytes, stored_bytes):  # without a look at the batches, of which there may be many
            return 0
        kept = self._kept_records(index)
        left = sum(
            entry.payload_bytes * records // max(1, entry.count)
            for entry, records in zip(index.routes, kept, strict=True)
        )
        if not _pays(payload_bytes - left, payload_bytes, stored_bytes):
            return 0
        return stored_bytes * (payload_bytes - left) // payload_bytes

    def _kept_records(self, index: SealedIndex) -> list[int]:
        """Of each route how many records are in batches that stay."""
        floors = [self.of_routes.get(entry.route, 0) for entry in index.routes]
        kept = [0] * len(floors)
        table = index.batch_table()
        for route, base, count in zip(table.routes, table.bases, table.counts, strict=True):
            if base + count - 1 > floors[route]:
                kept[route] += count
        return kept


def floors_of(index: SealedIndex, claims: CursorSnapshot, archived: History | None) -> Floors:
    """The floors of a segment.

    Args:
        archived: what knows the bundles, if only archived records may go; None: archived or not.

    Raises:
        Damaged: the ledger of the archive cannot be read.
    """
    floors = {}
    for entry in index.routes:
        floor = claims.floor(entry.route)
        unneeded = min(floor, entry.last)
        waits = archived is not None and entry.route not in claims.retired and unneeded >= entry.first
        if waits and archived is not None and not archived.all_archived(entry.route, entry.first, unneeded):
            floor = 0
        floors[entry.route] = floor
    return Floors(floors)


def _pays(going_bytes: int, payload_bytes: int, stored_bytes: int) -> bool:
    if not payload_bytes:
        return False
    share = going_bytes / payload_bytes
    return share >= LEAST_SHARE and share * stored_bytes >= LEAST_BYTES
