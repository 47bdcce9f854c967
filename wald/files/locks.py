"""Processes in ``/proc``, lock holders, and temporary files of dead processes.

:meth:`Disk.replace` keeps its temporary file locked until the rename. An unlocked file belongs to a dead process, or to
one about to lock it. So only files older than a minute are removed, under their lock (:meth:`Disk.replace` then creates
another). Without locks in the file system, all files stay.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.safe_open import FileIdentity, open_regular

_STOPPED_STATES = "Tt"  # proc_pid_stat(5)
_SECOND_NS = 10**9
_TEMPORARY_NAME = r".+\.[0-9a-f]{16}\.tmp"
_YOUNG_SECONDS = 60


def process_command(process: int) -> str:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:  # hidden or ended
        return ""
    return " ".join(word.decode(errors="replace") for word in words)


def process_name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


def set_process_name(name: str) -> None:
    """Set this process's name (at most 15 bytes) until execve(2)."""
    try:
        with Path("/proc/self/comm").open("r+b", buffering=0) as file:  # does not create the file
            file.write(name.encode())
    except OSError:  # a sandbox may forbid it
        return


class ProcessStatus(NamedTuple):
    """Fields of proc_pid_stat(5)."""

    state: str
    parent: int
    group: int
    started_ns: int  # since 1970


def process_status(process: int) -> ProcessStatus | None:
    """Return the status of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    booted_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    started_ns = booted_ns + int(fields[19]) * _SECOND_NS // os.sysconf("SC_CLK_TCK")
    return ProcessStatus(fields[0], int(fields[1]), int(fields[2]), started_ns)


def is_stopped(process: int) -> bool:
    status = process_status(process)
    return status is not None and status.state in _STOPPED_STATES


def is_locked(path: Path, disk: Disk) -> bool:
    try:
        descriptor = open_regular(path)
    except (FileNotFoundError, Damaged):
        return False
    except PermissionError:
        with suppress(FileNotFoundError):
            return bool(_kernel_locks(path))
        return False
    try:
        return not disk.lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def holders(path: Path) -> list[int]:
    """Return the processes in this PID namespace that hold a file's lock."""
    try:
        return [int(line.split()[4]) for line in _kernel_locks(path)]
    except (OSError, IndexError, ValueError):
        return []


def sharers(paths: Iterable[Path]) -> dict[Path, list[int]]:
    """Return the processes that share each file's locked descriptor, from proc_pid_fdinfo(5)."""
    processes: dict[Path, list[int]] = {}
    by_key = {}
    for path in paths:
        with suppress(OSError):
            by_key[_lock_key(path)] = path
    for process in (int(name) for name in os.listdir("/proc") if name.isdecimal()) if by_key else ():
        lines: set[str] = set()
        with suppress(OSError):
            for name in os.listdir(f"/proc/{process}/fdinfo"):
                with suppress(OSError), open(f"/proc/{process}/fdinfo/{name}") as file:
                    lines.update(line for line in file if line.startswith("lock:"))
        for key, path in by_key.items():
            if any(key in line for line in lines):
                processes.setdefault(path, []).append(process)
    return processes


def _kernel_locks(path: Path) -> list[str]:
    """Return a file's lines in proc_locks(5): ``1: FLOCK  ADVISORY  WRITE 123 fe:00:4711 0 EOF``."""
    key = _lock_key(path)
    return [line for line in Path("/proc/locks").read_text().splitlines() if key in line]


def _lock_key(path: Path) -> str:
    """Return a file's device and inode in the format of /proc/locks.

    On btrfs and overlayfs, stat(2) returns another device.
    """
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        fields = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()
    finally:
        os.close(descriptor)
    mount = fields[fields.index("mnt_id:") + 1]
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        number, _, device, *_ = line.split()
        if number == mount:
            major, minor = map(int, device.split(":"))
            return f" {major:02x}:{minor:02x}:{os.stat(path).st_ino} "
    raise FileNotFoundError(path)


def leftovers(root: Root, disk: Disk) -> list[Path]:
    directories = (root.path, root.ledger, *root.route_directories())
    return [path for directory in directories for path in abandoned_files(directory, disk)]


def abandoned_files(directory: Path, disk: Disk, *, prefix: str = "") -> list[Path]:
    """Return the temporary files that no process writes; [] if ``directory`` is unreadable."""
    try:
        names = [entry.name for entry in os.scandir(directory)]
    except OSError:
        return []
    abandoned = []
    for path in (directory / name for name in sorted(names) if name.startswith(prefix)):
        with suppress(OSError, Damaged):
            if re.fullmatch(_TEMPORARY_NAME, path.name) and remove_abandoned(path, disk, dry_run=True):
                abandoned.append(path)
    return abandoned


def remove_leftovers(paths: list[Path], disk: Disk) -> None:
    for path in paths:
        with suppress(OSError, Damaged):
            remove_abandoned(path, disk)


def remove_abandoned(path: Path, disk: Disk, *, dry_run: bool = False) -> bool:
    """Remove a temporary file unless a process is writing it or wrote it within the last minute.

    Return True if it is abandoned. Raise Damaged if it is not regular.
    """
    descriptor = open_regular(path)
    try:
        age_seconds = time.time() - os.fstat(descriptor).st_mtime  # negative after a clock step
        is_abandoned = age_seconds >= _YOUNG_SECONDS and disk.lock(descriptor)
        is_abandoned = is_abandoned and FileIdentity(path, descriptor).is_current()
        if is_abandoned and not dry_run:
            disk.unlink(path)
        return is_abandoned
    finally:
        os.close(descriptor)
