"""Small appends with a sync each, timed, beside what the device counts meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

from wald.cli.doctor.judging.medium import IN_MEMORY, Device, Mount, Sync
from wald.cli.doctor.probing.files import words_of
from wald.cli.doctor.probing.mounts import completed
from wald.files.disk import Disk

_SYNCS = 300
_SYNCS_SECONDS = 1.0
_APPEND = b"0123456789abcdef" * 8
_ALLOCATED_BYTES = 1 << 20


def sync(scratch: Path, mount: Mount, device: Device) -> Sync:
    """As the daemon commits: into an allocated file."""
    try:
        before = completed(scratch, mount)
        seconds = sorted(_appends(scratch / "sync"))
        after = completed(scratch, mount)
    except OSError as error:
        return Sync(error=words_of(error))
    writes, flushes = (
        None if was is None or now is None else now - was for was, now in zip(before, after, strict=True)
    )
    counts = not device.is_stacked  # what is made of others counts in its own way
    return Sync(
        is_in_memory=mount.type in IN_MEMORY,
        syncs=len(seconds),
        p50_seconds=_percentile(seconds, 50),
        p90_seconds=_percentile(seconds, 90),
        p99_seconds=_percentile(seconds, 99),
        max_seconds=seconds[-1],
        device_writes=writes if counts else None,
        device_flushes=flushes if counts else None,
        needs_flushes=device.write_cache == "write back",
    )


def _appends(path: Path) -> list[float]:
    disk = Disk()
    descriptor = disk.create(path)
    seconds = []
    try:
        disk.allocate(descriptor, _ALLOCATED_BYTES)
        disk.sync(descriptor)
        end = time.monotonic() + _SYNCS_SECONDS
        for number in range(_SYNCS):
            begun = time.monotonic()
            disk.write(descriptor, [_APPEND], number * len(_APPEND))
            disk.sync(descriptor)
            seconds.append(time.monotonic() - begun)
            if time.monotonic() > end:
                break
    finally:
        disk.close(descriptor)
        os.unlink(path)
    return seconds


def _percentile(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
