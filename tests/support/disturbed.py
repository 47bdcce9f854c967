"""Invariants of a running daemon, judged from outside while a test disturbs it.

They read ``/proc`` and the files of the log, never the daemon's own reports.
"""

import os
import re
from pathlib import Path

from wald.files.layout import Root
from wald.format.head import Head
from wald.format.names import Kind
from wald.segments.durable_end import read_head
from wald.segments.raw_scan import RawFile, ScannedBatch, SegmentEnd

THREADS_MIN = 2  # commit rounds and background calls
DESCRIPTORS_MAX = 512
MEMORY_MAX_BYTES = 512 << 20
_LOOKS = 1000  # attempts at a segment that is cut during the check


def invariants(
    pid: int, root: Path, *, descriptors_max: int = DESCRIPTORS_MAX, memory_max_bytes: int = MEMORY_MAX_BYTES
) -> list[str]:
    """Return the broken invariants of the daemon ``pid`` on the log at ``root``.

    Its open files in ``segments/`` have names, including the newest raw segment; complete batches reach the head; every
    thread is alive; descriptors and memory are within a budget.
    """
    found = _nameless(pid, root) + _newest_segment(pid, Root(root))
    threads, descriptors = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("task", "fd"))
    if threads < THREADS_MIN:
        found.append(f"{threads} of {THREADS_MIN} threads are left")
    if descriptors > descriptors_max:
        found.append(f"{descriptors} descriptors are open, more than {descriptors_max}")
    memory = _resident_bytes(pid)
    if memory > memory_max_bytes:
        found.append(f"{memory} bytes of memory are in use, more than {memory_max_bytes}")
    return found


def _nameless(pid: int, root: Path) -> list[str]:
    """Return files open for writing without a name, except one that is about to be closed after a rename over it."""
    looks = [{path for path, status in _written(pid, root) if status.st_nlink == 0} for _ in range(2)]
    return [f"{path}: written to, and the file has no name" for path in sorted(looks[0] & looks[1])]


def _written(pid: int, root: Path) -> list[tuple[str, os.stat_result]]:
    """Return every file in ``segments/`` that the process has open for writing: the kernel's path and the status."""
    folder = f"{(root / 'segments').resolve()}/"
    found = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{number}"
        try:
            path, mode, status = os.readlink(link), os.lstat(link).st_mode, os.stat(link)
        except FileNotFoundError:  # closed in between
            continue
        if path.startswith(folder) and mode & 0o200:
            found.append((path, status))
    return found


def _newest_segment(pid: int, root: Root) -> list[str]:
    """Return the problems of the active segment and of the one that contains the head."""
    found = []
    for _ in range(_LOOKS):
        newest, head = _newest_raw(root), read_head(root)
        if newest is None or head is None:  # reading a directory while its names change may miss one
            found = [f"{root.path}: there is no raw segment, or no head"]
            continue
        found = []
        try:
            inode = newest.stat().st_ino
            if inode not in [status.st_ino for _, status in _written(pid, root.path)]:
                found.append(f"{newest}: the newest segment, and the daemon writes to another file")
            whole = _whole_until(root.segment(head.segment, Kind.RAW), head)
            if whole != (head.position, head.sequence):
                found.append(f"{root.head}: {head}; its segment is whole up to {whole}")
        except FileNotFoundError as error:  # the head may still be in it when it is already sealed
            found = [f"{error.filename}: is not there"]
            continue
        now = read_head(root)
        if now is not None and (_newest_raw(root), now.segment) == (newest, head.segment):
            return found
    return found or [f"{root.segments}: no segment is the newest for long enough to be looked at"]


def _newest_raw(root: Root) -> Path | None:
    raw = [name for name in os.listdir(root.segments) if name.endswith(Kind.RAW.value)]
    return root.segments / max(raw) if raw else None


def _whole_until(path: Path, head: Head) -> tuple[int, int]:
    """Return the end of the complete batches of a raw segment up to ``head``, and their last record."""
    sequence = head.segment - 1
    with path.open("rb") as file:
        for found in RawFile(file.fileno(), limit=head.position).scan():
            if isinstance(found, ScannedBatch):
                sequence = max(sequence, found.header.end_sequence - 1)
            elif isinstance(found, SegmentEnd):
                return found.offset, sequence
            else:
                break
    return found.offset, sequence


def _resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) << 10 if found else 0
