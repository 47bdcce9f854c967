"""Lock holders, processes in ``/proc``, and temporary files of dead processes.

What Linux says of a process in /proc; see proc(5).

Whether a process holds the lock of a file, and which, as the kernel lists them in /proc.

Temporary files that killed programs have left behind.

:meth:`Disk.replace` holds a lock on its temporary file until the file has its final name. So a file that can be locked
belongs to a dead process, of any user or container, or to one that has not locked its new file yet. Therefore a file is
removed while its lock is held, and :meth:`Disk.replace` then creates another; and a file that was written within the
last minute stays for the next start. On a file system without locks, nothing is removed.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.safe_open import FileIdentity, open_regular

_STOPPED_STATES = "Tt"  # by a signal, or by a debugger; see proc_pid_stat(5)
_NS = 10**9


def all_processes() -> Iterator[int]:
    """The processes that run now."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def command_of(process: int) -> str:
    """The command line of a process; "" if this user may not see it, or it has ended."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words)


def name_of(process: int) -> str:
    """The name of a process, which :func:`take_name` can change; "" if it has ended."""
    try:
        return Path(f"/proc/{process}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


def set_process_name(name: str) -> None:
    """Have this process listed by another name, of at most 15 bytes, until it executes another program."""
    try:
        with Path("/proc/self/comm").open("r+b", buffering=0) as file:  # never made, if it is not there
            file.write(name.encode())
    except OSError:  # a sandbox may forbid it, and nothing but a list depends on it
        return


def parent_of(process: int) -> int | None:
    """The parent of a process; None if it has ended."""
    found = _status(process)
    return int(found[1]) if found else None


def process_group_of(process: int) -> int | None:
    """The process group of a process; None if it has ended."""
    found = _status(process)
    return int(found[2]) if found else None


def started_ns(process: int) -> int | None:
    """When a process was started, in ns since 1970; None if it has ended."""
    found = _status(process)
    if not found:
        return None
    since_boot = int(found[19]) * _NS // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot


def is_stopped(process: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    found = _status(process)
    return bool(found) and found[0] in _STOPPED_STATES


def _status(process: int) -> list[str]:
    """The fields of proc_pid_stat(5) from the state on, which is the third; none if there is no process any more."""
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


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


_TEMPORARY = re.compile(r".+\.[0-9a-f]{16}\.tmp")
_YOUNG_SECONDS = 60  # a program locks its new file a moment after it has created it


def leftovers(root: Root, disk: Disk) -> list[Path]:
    """Return the abandoned temporary files in the root, its ledgers and its routes."""
    directories = (root.path, root.ledger, *root.route_directories())
    return [path for directory in directories for path in abandoned(directory, disk)]


def abandoned(directory: Path, disk: Disk, *, prefix: str = "") -> list[Path]:
    """Return the temporary files in a directory that no process is writing; an unreadable directory has none."""
    try:
        names = [entry.name for entry in os.scandir(directory)]
    except OSError:
        return []
    paths = (directory / name for name in sorted(names) if name.startswith(prefix) and _TEMPORARY.fullmatch(name))
    return [path for path in paths if _is_abandoned(path, disk)]


def remove(paths: list[Path], disk: Disk) -> None:
    """Remove leftovers, as far as this user may."""
    for path in paths:
        with suppress(OSError, Damaged):
            remove_abandoned(path, disk)


def remove_abandoned(path: Path, disk: Disk) -> None:
    """Remove a temporary file unless a process is writing it.

    Raises:
        OSError: this user may not remove it, or it is gone.
        Damaged: it is not a regular file.
    """
    with _claimed(path, disk) as claimed:
        if claimed:
            disk.unlink(path)


def _is_abandoned(path: Path, disk: Disk) -> bool:
    with suppress(OSError, Damaged), _claimed(path, disk) as claimed:
        return claimed
    return False


@contextmanager
def _claimed(path: Path, disk: Disk) -> Iterator[bool]:
    """Hold the lock of a temporary file; False if a process is writing it, or has done so within the last minute."""
    descriptor = open_regular(path)
    try:
        yield _is_old(descriptor) and disk.lock(descriptor) and FileIdentity(path, descriptor).holds()
    finally:
        os.close(descriptor)


def _is_old(descriptor: int) -> bool:
    return time.time() - os.fstat(descriptor).st_mtime >= _YOUNG_SECONDS  # one from the future is young
