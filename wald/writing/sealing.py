"""Compression of cut segments, in steps that can be repeated after a crash.

    raw                  compress into a temporary file, sync it, read every frame back, compare the digests
    raw + temporary      rename, sync the directory
    raw + sealed         ledger: cut, damaged, sealed; then unlink the sparse index and the raw file
    sealed               done

If a crash leaves both forms, they hold the same bytes, and readers may use either.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from wald.errors import Damaged, Locked, UnsupportedFormat
from wald.files import locks, uptime
from wald.files.disk import Disk
from wald.files.layout import SHRUNK_SUFFIX, TEMPORARY, Root
from wald.files.ledger_read import LedgerLines
from wald.files.ledger_write import Ledger, lock_ledger
from wald.files.listing import Segment
from wald.files.safe_open import open_file
from wald.files.uptime import Moment
from wald.format.names import Kind, parse_segment_name
from wald.format.sealed_index import SealedIndex
from wald.format.segment import BadHeader, NewerVersion
from wald.segments.index_builder import find_index, remove_index
from wald.segments.sealed_file import LEVEL, CompressedSegment, SealedFile, compress_segment
from wald.segments.view import recorded_end, truncated_segment, view_after
from wald.writing.disk_budget import sealed_bytes_max

_TEMPORARY_SUFFIX = f".{secrets.token_hex(8)}{TEMPORARY}"  # unique: a superseded daemon may still be sealing


def segments_to_seal(root: Root, active_base: int) -> list[Segment]:
    """Return the segments to seal: raw, older than the active one, oldest first."""
    # Listing thousands of sealed segments would take longer than sealing the next one.
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
) -> CompressedSegment:
    """Replace a raw segment by its sealed form.

    ``reserve`` first allocates the largest possible sealed form, so that nothing else takes the room. On a tmpfs, this
    takes as long as writing.
    """
    base = segment.base_sequence
    target = root.segment(base, Kind.SEALED)
    cut_ns = segment.path.stat().st_mtime_ns  # the cut was the file's last change
    has_both = target.exists()
    compressed = _publish(root, segment, target, disk, level, reserve=reserve, has_both=has_both)
    disk.sync_directory(root.segments)  # before the unlink: otherwise a power cut could leave neither name
    sealed = replace(compressed, stored_bytes=target.stat().st_size)
    recorded: list[dict[str, Any]] = []
    if has_both:
        ledger.settle()
        with suppress(Damaged):  # at worst a line is written twice
            recorded = [line.entry for line in LedgerLines(ledger.path).about(base, base)]
    for entry in _ledger_entries(sealed, moment(), cut_ns=cut_ns, now_ns=now()):
        if not any(all(line.get(key) == entry.get(key) for key in ("event", "base", "position")) for line in recorded):
            ledger.append(entry)
    remove_index(root.segment(base, Kind.INDEX), disk)
    disk.unlink(segment.path)
    return sealed


def _publish(
    root: Root, segment: Segment, target: Path, disk: Disk, level: int, *, reserve: bool, has_both: bool
) -> CompressedSegment:
    """Compress and verify a segment; rename the result to ``target`` unless that exists (``has_both``) and is right."""
    temporary = target.with_name(target.name + _TEMPORARY_SUFFIX)
    try:
        compressed = _compress(segment, temporary, disk, level, reserve=reserve)
        index, digest = compressed.index, compressed.index.sha256
        end = recorded_end(view_after(root, index.log_id, segment.base_sequence), segment)
        if index.raw_bytes < end:
            raise truncated_segment(segment.path, index.raw_bytes, end)
        if _digest(temporary) != digest:
            raise _damaged(temporary, f"its contents differ from {segment.path.name} when read back")
        target_digest = None
        if has_both:
            with suppress(Damaged):
                target_digest = _digest(target)
        if target_digest is None:
            disk.rename(temporary, target)
        elif target_digest == digest:
            disk.unlink(temporary)
        else:  # either may be right
            raise _damaged(target, f"its raw bytes have sha256 {target_digest.hex()}, the raw file has {digest.hex()}")
    except Exception:
        with suppress(OSError):  # it only uses space
            temporary.unlink(missing_ok=True)
        raise
    return compressed


def remove_temporaries(root: Root, disk: Disk) -> list[str]:
    """Remove temporary files, except those of a running ``wald-reclaim``; return the names in ``segments/``."""
    names = sorted(entry.name for entry in os.scandir(root.segments) if entry.name.endswith(TEMPORARY))
    with ExitStack() as stack:
        if any(name.endswith(SHRUNK_SUFFIX) for name in names):
            try:
                stack.callback(disk.close, lock_ledger(root.ledger / "reclaim.jsonl", disk, "wald-reclaim"))
            except (Locked, OSError):
                names = [name for name in names if not name.endswith(SHRUNK_SUFFIX)]
        for name in names:
            disk.unlink(root.segments / name)
    locks.remove_leftovers(locks.leftovers(root, disk), disk)
    return names


def _compress(segment: Segment, temporary: Path, disk: Disk, level: int, *, reserve: bool) -> CompressedSegment:
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
                index=partial(find_index, segment.path.parent, None, segment.base_sequence),
                level=level,
            )
        disk.truncate(target, compressed.stored_bytes)
        disk.sync(target)
        # Verification must read from the disk, not from memory.
        os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)
    except NewerVersion as error:
        raise UnsupportedFormat(f"{segment.path}: offset 0: {error}", case="newer-format") from error
    except BadHeader as error:
        raise _damaged(segment.path, str(error)) from error
    finally:
        disk.close(target)
    if compressed.index.base_sequence != segment.base_sequence:
        raise _damaged(segment.path, f"the header belongs to segment {compressed.index.base_sequence}")
    return compressed


def _digest(path: Path) -> bytes:
    with SealedFile(path) as sealed:
        return sealed.sha256()


def _ledger_entries(sealed: CompressedSegment, moment: Moment, *, cut_ns: int, now_ns: int) -> Iterator[dict[str, Any]]:
    index, base = sealed.index, sealed.index.base_sequence
    yield {"event": "cut", "base": base, "next": index.next_sequence, "bytes": index.raw_bytes, "at": cut_ns}
    for gap in sealed.gaps:
        place = {"position": gap.offset, "length": gap.length}
        yield {"event": "damaged", "base": base, **place, "reason": gap.reason, "at": now_ns}
    yield {"event": "sealed"} | sealed_entry(index, sealed.stored_bytes, moment, now_ns)


def sealed_entry(index: SealedIndex, sealed_bytes: int, moment: Moment, now_ns: int) -> dict[str, Any]:
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


def _damaged(path: Path, reason: str) -> Damaged:
    return Damaged(f"{path}: offset 0: {reason}", case="raw-segment-damaged", path=path)
