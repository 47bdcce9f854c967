"""Sealing: a raw segment that was cut becomes a compressed one, in steps of which each can be repeated after a crash.

    raw                  compress into a temporary file, sync it, read every frame back, compare the digests
    raw + temporary      rename, sync the directory
    raw + sealed         ledger: cut, damaged, sealed; then unlink the sparse index and the raw file
    sealed               done

The names in the directory say which state a segment is in; the ledger has no line about a segment before its sealed
form is in place, so it is looked into only where a crash has left both forms. Both are the same bytes, and readers may
use either. A raw file is never unlinked before its sealed form was read back whole and its name is durable.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wald.errors import Damaged, UnsupportedFormat
from wald.format.names import Kind, parse_segment_name, segment_name
from wald.format.segment import BadHeader, NewerVersion
from wald.store.files import uptime
from wald.store.files.directory import TEMPORARY, Root, Segment
from wald.store.files.disk import Disk
from wald.store.files.ledger import Ledger
from wald.store.files.regular import open_file
from wald.store.files.uptime import Moment
from wald.store.segments.compression import LEVEL, Compressed, SealedFile, compress_segment
from wald.store.segments.raw import DamagedBytes
from wald.store.writing.room import sealed_bytes_max

_OURS = f".{secrets.token_hex(8)}{TEMPORARY}"  # of this process: one that was taken over may still be sealing


@dataclass(frozen=True, slots=True)
class Sealed:
    """One segment that is sealed now.

    Attributes:
        sha256: of the raw bytes, hexadecimal.
        gaps: damage that was found in the raw segment, and kept.
    """

    base_sequence: int
    last_sequence: int
    raw_bytes: int
    sealed_bytes: int
    sha256: str
    gaps: tuple[DamagedBytes, ...]


def pending(root: Root, active_base: int) -> list[Segment]:
    """The raw segments older than the active one, oldest first: what there is to seal."""
    # Among thousands of sealed ones, which it would take longer to look at than to seal the next.
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
    """Replace one raw segment by its sealed form; repeat it after a failure or a crash.

    Args:
        ledger: of the root's segments.
        reserve: whether to hold the room for the largest sealed form first, so that what there was when this was begun
            is there to its end; on a tmpfs that takes as long as writing it.
        now: the time, ns since 1970; for the ledger.
        moment: the same by the clock that nobody can set.

    Raises:
        Damaged: the raw file has no valid header, or the sealed one does not read back as it; the raw file stays.
        UnsupportedFormat: the raw file was written by a newer wald.
        FileNotFoundError: somebody has reclaimed it.
        OSError: a step failed; the raw file stays.
    """
    target = root.segment(segment.base_sequence, Kind.SEALED)
    temporary = target.with_name(target.name + _OURS)
    cut_ns = segment.path.stat().st_mtime_ns  # nobody writes to it after the cut
    both = target.exists()
    try:
        compressed = _compress(segment, temporary, disk, level, reserve=reserve)
        digest = compressed.index.sha256
        if _digest(temporary) != digest:
            raise _damaged(temporary, f"does not read back as {segment.path.name}")
        if both and _holds(target, digest):
            disk.unlink(temporary)
        else:
            disk.rename(temporary, target)
    except Exception:
        with contextlib.suppress(OSError):  # it is in the way of nothing but disk space
            temporary.unlink(missing_ok=True)
        raise
    disk.sync_directory(root.segments)  # before the unlink: else a power cut could leave neither name
    sealed_bytes = target.stat().st_size
    told: list[dict[str, Any]] = []
    if both:
        with contextlib.suppress(Damaged):  # at worst it is told twice; the segments are the truth
            told = ledger.entries()
    for entry in _entries(compressed, sealed_bytes, moment(), cut_ns=cut_ns, now_ns=now()):
        if not any(_is_about(line, entry) for line in told):
            ledger.append(entry)
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(root.segment(segment.base_sequence, Kind.INDEX))
    disk.unlink(segment.path)
    index = compressed.index
    return Sealed(
        index.base_sequence,
        index.next_sequence - 1,
        index.raw_bytes,
        sealed_bytes,
        index.sha256.hex(),
        tuple(compressed.gaps),
    )


def remove_temporaries(root: Root, disk: Disk) -> list[str]:
    """Remove the segment files whose making was interrupted; returns their names. Only before anybody makes any."""
    names = sorted(entry.name for entry in os.scandir(root.segments) if entry.name.endswith(TEMPORARY))
    for name in names:
        disk.unlink(root.segments / name)
    return names


def _compress(segment: Segment, temporary: Path, disk: Disk, level: int, *, reserve: bool) -> Compressed:
    """Make the temporary file, and return when it is on disk."""
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
        # So that it is read back from the disk and not from memory.
        os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)
    except NewerVersion as error:
        raise UnsupportedFormat(f"{segment.path}: offset 0: {error}", hint="pip install --upgrade wald") from error
    except BadHeader as error:
        raise _damaged(segment.path, str(error)) from error
    finally:
        disk.close(target)
    if compressed.index.base_sequence != segment.base_sequence:
        raise _damaged(segment.path, f"the header is that of segment {compressed.index.base_sequence}")
    return compressed


def _digest(path: Path) -> bytes:
    """The sha256 of the raw bytes in the sealed file at ``path``, every frame read.

    Raises:
        Damaged: it is not whole.
    """
    with SealedFile(path) as sealed:
        return sealed.sha256()


def _holds(path: Path, digest: bytes) -> bool:
    """Whether the sealed file at ``path`` is whole and holds these raw bytes; False if it is not whole.

    Raises:
        Damaged: it is whole and holds other bytes; which of the two forms is right, nobody here can tell.
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
    """The ledger's lines about one segment, in order. ``Any``: they are JSON."""
    index = compressed.index
    base = index.base_sequence
    cut = {"event": "cut", "base": base, "next": index.next_sequence, "bytes": index.raw_bytes, "at": cut_ns}
    damaged = [
        {
            "event": "damaged",
            "base": base,
            "position": gap.offset,
            "length": gap.length,
            "reason": gap.reason,
            "at": now_ns,
        }
        for gap in compressed.gaps
    ]
    sealed = {
        "event": "sealed",
        "base": base,
        "last": index.next_sequence - 1,
        "raw_bytes": index.raw_bytes,
        "bytes": sealed_bytes,
        "sha256": index.sha256.hex(),
        "routes": [[entry.route, entry.count, entry.first, entry.last, entry.payload_bytes] for entry in index.routes],
        "epoch": index.epoch,
        "at": now_ns,
    } | moment.as_entry()
    times = [frame for frame in index.frames if frame.earliest_ns <= frame.latest_ns]
    if times:
        sealed |= {"earliest": times[0].earliest_ns, "latest": times[-1].latest_ns}
    return [cut, *damaged, sealed]


def _is_about(line: dict[str, Any], entry: dict[str, Any]) -> bool:
    """Whether the ledger's ``line`` tells what ``entry`` would tell again."""
    return all(line.get(key) == entry.get(key) for key in ("event", "base", "position"))


def _damaged(path: Path, reason: str) -> Damaged:
    return Damaged(f"{path}: offset 0: {reason}", hint=f"wald dump {path} shows what it holds")
