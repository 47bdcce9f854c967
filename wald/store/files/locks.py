"""Whether a process holds the lock of a file, and which, as the kernel lists them in /proc."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from wald.store.files.disk import Disk
from wald.store.files.processes import all_processes

_IS_LINK_OR_SOCKET = (errno.ELOOP, errno.ENXIO)


def is_held(path: Path, disk: Disk) -> bool:
    """Whether a process holds the exclusive lock of a file now.

    If the file may not be opened, the kernel's list of locks says so.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        return _is_listed(path)
    except OSError as error:
        if error.errno in _IS_LINK_OR_SOCKET:
            return False
        raise
    try:
        return not disk.lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def holders(path: Path) -> list[int]:
    """The processes that hold the lock of a file; those of other PID namespaces are not listed."""
    try:
        return [int(line.split()[4]) for line in _listed(path)]
    except (OSError, IndexError, ValueError):
        return []


def sharers(paths: Iterable[Path]) -> dict[Path, list[int]]:
    """The processes that have the lock of each of these files: all that share the descriptor by which it was taken.

    So also those that have inherited it of a process that has ended. Processes that this user may not look at are
    missing.
    """
    found: dict[Path, list[int]] = {}
    marked = {}
    for path in paths:
        with suppress(OSError):
            marked[_mark(path)] = path
    for process in all_processes() if marked else ():
        for line in _locks_of(process):
            for mark in [each for each in marked if each in line]:
                found.setdefault(marked[mark], []).append(process)
    return found


def _locks_of(process: int) -> set[str]:
    """The lines about locks of the open files of a process; see proc_pid_fdinfo(5)."""
    lines: set[str] = set()
    about = f"/proc/{process}/fdinfo"
    with suppress(OSError):
        for name in os.listdir(about):
            with suppress(OSError), open(f"{about}/{name}") as file:  # it may be closed meanwhile
                lines.update(line for line in file if line.startswith("lock:"))
    return lines


def _is_listed(path: Path) -> bool:
    try:
        return bool(_listed(path))
    except FileNotFoundError:
        return False


def _listed(path: Path) -> list[str]:
    """Its lines in /proc/locks; see proc_locks(5): ``1: FLOCK  ADVISORY  WRITE 123 fe:00:4711 0 EOF``."""
    mark = _mark(path)
    return [line for line in Path("/proc/locks").read_text().splitlines() if mark in line]


def _mark(path: Path) -> str:
    """By what a line about a lock names the file."""
    major, minor = _file_system(path)
    return f" {major:02x}:{minor:02x}:{os.stat(path).st_ino} "


def _file_system(path: Path) -> tuple[int, int]:
    """The device that a file is on, as the kernel lists it; that of stat(2) differs on btrfs and overlayfs."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        about = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()
    finally:
        os.close(descriptor)
    mount = about[about.index("mnt_id:") + 1]
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        number, _, device, *_ = line.split()
        if number == mount:
            major, _, minor = device.partition(":")
            return int(major), int(minor)
    raise FileNotFoundError(path)
