"""One sealed segment shrunk, without the program that decides about it."""

from pathlib import Path

from logs import Built, write_entries

from wald.files.disk import Disk
from wald.format.batch import BatchHeader
from wald.format.names import Kind
from wald.format.spans import pack, run_lengths
from wald.segments.sealed_file import SealedFile
from wald.segments.shrinking import Keeps, Shrinkage, check_shrunk, shrink_segment


def behind(**floors: int) -> Keeps:
    """Keep records after these cursors, and everything of a route without one."""

    def keeps(header: BatchHeader, route: str) -> bool:
        return header.last_sequence > floors.get(route, 0)

    return keeps


def shrink_file(source: Path, target: Path, keeps: Keeps) -> Shrinkage:
    """Write the shrunk form of a sealed segment and read it back."""
    disk = Disk()
    descriptor = disk.create(target)
    with SealedFile(source) as old:
        shrinking = shrink_segment(old, descriptor, disk, keeps)
        disk.close(descriptor)
        with SealedFile(target) as made:
            check_shrunk(old, made, shrinking, keeps)
    assert shrinking.stored_bytes == target.stat().st_size
    return shrinking


def shrink(built: Built, base: int, **floors: int) -> Shrinkage:
    """Shrink a segment of a log in place; the ledger gets the line that ``wald-reclaim`` writes, without cursors."""
    path = built.path(base, Kind.SEALED)
    made = path.with_suffix(".made")
    with SealedFile(path) as sealed:
        old = sealed.index
    shrinking = shrink_file(path, made, behind(**floors))
    write_entries(
        built.root.ledger / "reclaim.jsonl",
        {
            "event": "shrunk",
            "base": base,
            "last": old.next_sequence - 1,
            "at": built.now_ns,
            "sha256": shrinking.index.sha256.hex(),
            "was_sha256": old.sha256.hex(),
            "routes": [list(entry) for entry in shrinking.index.routes],
            "dropped": [
                {"route": entry.route, "count": entry.count, "first": entry.first, "last": entry.last, "cursors": {}}
                for entry in shrinking.dropped
            ],
            "runs": {
                entry.route: pack(run_lengths(shrinking.spans[entry.route], entry.first)) for entry in shrinking.dropped
            },
        },
    )
    made.rename(path)
    return shrinking
