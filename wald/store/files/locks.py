"""Whether a process holds the lock of a file, and which, as the kernel lists them in /proc/locks."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from wald.store.files.disk import Disk

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


def command_of(process: int) -> str:
    """The command line of a process; "" if this user may not see it, or it has ended."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words)


def _is_listed(path: Path) -> bool:
    try:
        return bool(_listed(path))
    except FileNotFoundError:
        return False


def _listed(path: Path) -> list[str]:
    """Its lines in /proc/locks; see proc_locks(5): ``1: FLOCK  ADVISORY  WRITE 123 fe:00:4711 0 EOF``."""
    major, minor = _file_system(path)
    file = f" {major:02x}:{minor:02x}:{os.stat(path).st_ino} "
    return [line for line in Path("/proc/locks").read_text().splitlines() if file in line]


def _file_system(path: Path) -> tuple[int, int]:
    """The device that a file is on, as the kernel lists it; that of stat(2) differs on btrfs and overlayfs."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        about = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()
    finally:
        os.close(descriptor)
    mount = about[about.index("mnt_id:") + 1]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        number, _, device, *_ = line.split()
        if number == mount:
            major, _, minor = device.partition(":")
            return int(major), int(minor)
    raise FileNotFoundError(path)
