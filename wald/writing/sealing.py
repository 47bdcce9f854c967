"""Compression of cut segments in repeatable steps.

Sealing: a raw segment that was cut becomes a compressed one. Each step can be repeated after a crash.

    raw                  compress into a temporary file, sync it, read every frame back, compare the digests
    raw + temporary      rename, sync the directory
    raw + sealed         ledger: cut, damaged, sealed; then unlink the sparse index and the raw file
    sealed               done

The names in the directory say which state a segment is in. The ledger has no line about a segment before its sealed
form is in place, so the ledger is read only if a crash has left both forms. Both hold the same bytes, and readers may
use either. A raw file is never unlinked before its sealed form has been read back and its name is durable.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wald.errors import Damaged, Locked, UnsupportedFormat
from wald.files import locks, uptime
from wald.files.disk import Disk
from wald.files.layout import RELIEF_SUFFIX, TEMPORARY, Root
from wald.files.ledger_read import Lines
from wald.files.ledger_write import Ledger, lock_ledger
from wald.files.listing import Segment
from wald.files.safe_open import open_file
from wald.files.uptime import Moment
from wald.format.names import Kind, parse_segment_name, segment_name
from wald.format.sealed_index import SealedIndex
from wald.format.segment import BadHeader, NewerVersion
from wald.segments.index_builder import remove_index
from wald.segments.raw_scan import DamagedBytes
from wald.segments.sealed_file import LEVEL, Compressed, SealedFile, compress_segment
from wald.segments.view import recorded_end, truncated, view_after
from wald.writing.disk_budget import sealed_bytes_max

_OURS = f".{secrets.token_hex(8)}{TEMPORARY}"  # unique: a daemon that another one has taken over may still be sealing


@dataclass(frozen=True, slots=True)
class Sealed:
    """One segment that was sealed.

    Attributes:
        sha256: of the raw bytes, hexadecimal.
        gaps: damage in the raw segment, whose bytes are kept.
    """

    base_sequence: int
    last_sequence: int
    raw_bytes: int
    sealed_bytes: int
    sha256: str
    gaps: tuple[DamagedBytes, ...]


def pending(root: Root, active_base: int) -> list[Segment]:
    """The segments to seal: the raw ones older than the active one, oldest first."""
    # A complete listing of thousands of sealed segments would take longer than sealing the next one.
    files = (entry.name for entry in os.scandir(root.segments) if entry.name.endswith(Kind.RAW.value))
    names = (parse_segment_name(name) for name in files)
    raw = (name.base_sequence for name in names if name is not None and name.kind is Kind.RAW)
    return [Segment(base, Kind.RAW, root.segment(base, Kind.RAW)) for base in sorted(raw) if base < active_base]


def seal(
    root: Root,
    segment: Segment,
    disk: Disk,
    ledger: Ledger,
    *,
    level: int = LEVEL,
    reserve: bool = True,
    now: Callable[[], int],
    moment: Callable[[], Moment] = uptime.now,
) -> Sealed:
    """Replace one raw segment by its sealed form. The call may be repeated after a failure or a crash.

    Args:
        ledger: of the root's segments.
        reserve: whether to allocate the largest possible sealed form first, so that no other file can take the room in
            the meantime. On a tmpfs this takes as long as writing it.
        now: the time for the ledger, ns since 1970.
        moment: the time by a clock that cannot be set.

    Raises:
        Damaged: the raw file has no valid header or was truncated after the cut, or the sealed one does not read back
            as it. The raw file is kept.
        UnsupportedFormat: the raw file was written by a newer wald.
        FileNotFoundError: the segment was reclaimed.
        OSError: a step failed. The raw file is kept.
    """
    target = root.segment(segment.base_sequence, Kind.SEALED)
    cut_ns = segment.path.stat().st_mtime_ns  # the cut was the last change of the file
    both = target.exists()
    compressed = _publish(root, segment, target, disk, level, reserve=reserve, both=both)
    disk.sync_directory(root.segments)  # before the unlink: else a power cut could leave neither name
    sealed_bytes = target.stat().st_size
    known: list[dict[str, Any]] = []
    if both:
        ledger.settle()
        with contextlib.suppress(Damaged):  # at worst a line is written twice
            base = segment.base_sequence
            known = [line.entry for line in Lines(ledger.path).about(base, base)]
    for entry in _entries(compressed, sealed_bytes, moment(), cut_ns=cut_ns, now_ns=now()):
        if not any(_is_about(line, entry) for line in known):
            ledger.append(entry)
    remove_index(root.segment(segment.base_sequence, Kind.INDEX), disk)
    disk.unlink(segment.path)
    index, last = compressed.index, compressed.index.next_sequence - 1
    digest, gaps = index.sha256.hex(), tuple(compressed.gaps)
    return Sealed(index.base_sequence, last, index.raw_bytes, sealed_bytes, digest, gaps)


def _publish(
    root: Root, segment: Segment, target: Path, disk: Disk, level: int, *, reserve: bool, both: bool
) -> Compressed:
    """Give the sealed form its name, if the file of that name (``both``) is not the sealed form already."""
    temporary = target.with_name(target.name + _OURS)
    try:
        compressed = _compress(segment, temporary, disk, level, reserve=reserve)
        index, digest = compressed.index, compressed.index.sha256
        end = recorded_end(view_after(root, index.log_id, segment.base_sequence), segment)
        if index.raw_bytes < end:
            raise truncated(segment.path, index.raw_bytes, end)
        if _digest(temporary) != digest:
            raise _damaged(temporary, f"does not read back as {segment.path.name}")
        if both and _holds(target, digest):
            disk.unlink(temporary)
        else:
            disk.rename(temporary, target)
    except Exception:
        with contextlib.suppress(OSError):  # it only takes room
            temporary.unlink(missing_ok=True)
        raise
    return compressed


def remove_temporaries(root: Root, disk: Disk) -> list[str]:
    """Remove the unfinished files of killed programs; return the names of those in ``segments/``. Only for a start.

    Files of a running ``wald-reclaim`` are kept.
    """
    names = sorted(entry.name for entry in os.scandir(root.segments) if entry.name.endswith(TEMPORARY))
    shrunk = [name for name in names if name.endswith(RELIEF_SUFFIX)]
    for name in names:
        if name not in shrunk:
            disk.unlink(root.segments / name)
    if shrunk:
        try:
            lock = lock_ledger(root.ledger / "reclaim.jsonl", disk, "wald-reclaim")
        except (Locked, OSError):
            names = [name for name in names if name not in shrunk]
        else:
            try:
                for name in shrunk:
                    disk.unlink(root.segments / name)
            finally:
                disk.close(lock)
    locks.remove_leftovers(locks.leftovers(root, disk), disk)
    return names


def _compress(segment: Segment, temporary: Path, disk: Disk, level: int, *, reserve: bool) -> Compressed:
    """Write the temporary file and sync it."""
    if temporary.exists():
        disk.unlink(temporary)
    target = disk.create(temporary)
    try:
        with open_file(segment.path) as source:
            if reserve:
                disk.reserve(target, 0, sealed_bytes_max(os.fstat(source.fileno()).st_size))
            compressed = compress_segment(
                source.fileno(),
                target,
                disk,
                index_path=segment.path.with_name(segment_name(segment.base_sequence, Kind.INDEX)),
                level=level,
            )
        disk.truncate(target, compressed.stored_bytes)
        disk.sync(target)
        # It is to be read back from the disk and not from memory.
        os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)
    except NewerVersion as error:
        raise UnsupportedFormat(f"{segment.path}: offset 0: {error}", case="newer-format") from error
    except BadHeader as error:
        raise _damaged(segment.path, str(error)) from error
    finally:
        disk.close(target)
    if compressed.index.base_sequence != segment.base_sequence:
        raise _damaged(segment.path, f"the header is that of segment {compressed.index.base_sequence}")
    return compressed


def _digest(path: Path) -> bytes:
    """The sha256 of the raw bytes in the sealed file at ``path``. Every frame is read.

    Raises:
        Damaged: the file is damaged.
    """
    with SealedFile(path) as sealed:
        return sealed.sha256()


def _holds(path: Path, digest: bytes) -> bool:
    """Whether the sealed file at ``path`` holds these raw bytes; False if it is damaged.

    Raises:
        Damaged: it holds other bytes and is not damaged. It is not known which of the two forms is right.
    """
    try:
        found = _digest(path)
    except Damaged:
        return False
    if found != digest:
        raise _damaged(path, f"its raw bytes have sha256 {found.hex()}, those of the raw file beside it {digest.hex()}")
    return True


def _entries(
    compressed: Compressed, sealed_bytes: int, moment: Moment, *, cut_ns: int, now_ns: int
) -> list[dict[str, Any]]:
    """The lines of the ledger about one segment, in order. ``Any``: they are JSON."""
    index = compressed.index
    cut = {"base": index.base_sequence, "next": index.next_sequence, "bytes": index.raw_bytes, "at": cut_ns}
    damaged = [
        {"base": index.base_sequence, "position": gap.offset, "length": gap.length, "reason": gap.reason, "at": now_ns}
        for gap in compressed.gaps
    ]
    return [
        {"event": "cut"} | cut,
        *({"event": "damaged"} | entry for entry in damaged),
        {"event": "sealed"} | sealed_entry(index, sealed_bytes, moment, now_ns),
    ]


def sealed_entry(index: SealedIndex, sealed_bytes: int, moment: Moment, now_ns: int) -> dict[str, Any]:
    """What the line about the sealing of a segment says, but for its event."""
    entry = {
        "base": index.base_sequence,
        "last": index.next_sequence - 1,
        "raw_bytes": index.raw_bytes,
        "bytes": sealed_bytes,
        "sha256": index.sha256.hex(),
        "routes": [[entry.route, entry.count, entry.first, entry.last, entry.payload_bytes] for entry in index.routes],
        "epoch": index.epoch,
        "at": now_ns,
    } | moment.as_entry()
    times = [frame for frame in index.frames if frame.earliest_ns <= frame.latest_ns]
    return entry | ({"earliest": times[0].earliest_ns, "latest": times[-1].latest_ns} if times else {})


def _is_about(line: dict[str, Any], entry: dict[str, Any]) -> bool:
    """Whether ``line`` of the ledger says what ``entry`` says."""
    return all(line.get(key) == entry.get(key) for key in ("event", "base", "position"))


def _damaged(path: Path, reason: str) -> Damaged:
    return Damaged(f"{path}: offset 0: {reason}", case="raw-segment-damaged", path=path)
