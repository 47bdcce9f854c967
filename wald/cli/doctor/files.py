"""File operations that a log needs, tested in a scratch directory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from wald.cli.doctor.findings import Facts, Paths, Verdict, fail, ok, warn
from wald.cli.doctor.medium import COPY_ON_WRITE, NETWORK, milliseconds, reason_of
from wald.errors import DISK_FULL
from wald.files.disk import Disk
from wald.files.layout import TEMPORARY
from wald.files.locks import is_locked
from wald.format.names import ROUTE_MAX_LENGTH, cursor_name
from wald.setting_types import format_bytes

_PREFIX = "wald-doctor-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCAL_DISK = "put the root on a local file system, such as ext4 or xfs"
_ALLOCATED_BYTES = 1 << 20  # small, because a running daemon may need the remaining space
_EVENT_SECONDS = 1.0
_IN_CREATE = 0x100
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def scratch_in(directory: Path) -> Iterator[Path]:
    """Create a scratch directory, yield a path to it, and remove it.

    The path leads through a descriptor, so a user who renames the directory cannot redirect anything. Its lock shows
    that its program runs; an unlocked one was left by a program that was killed.
    """
    parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    name = f"{_PREFIX}{secrets.token_hex(8)}{TEMPORARY}"
    descriptor, umask = -1, os.umask(0o077)
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
        descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        if descriptor >= 0:
            _remove(parent, name, descriptor)
            os.close(descriptor)
        else:  # interrupted before the directory was opened or even created
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=parent)
        os.close(parent)
        os.umask(umask)


def remove_leftovers(directory: Path) -> int:
    """Remove the scratch directories of killed programs; return their number."""
    removed = 0
    parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in os.listdir(parent):
            if name.startswith(_PREFIX) and name.endswith(TEMPORARY):
                with contextlib.suppress(OSError):  # another doctor uses it or has removed it, or it is another user's
                    removed += _remove_unlocked(parent, name)
    finally:
        os.close(parent)
    return removed


def _remove_unlocked(parent: int, name: str) -> bool:
    descriptor = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(parent, name, descriptor)
        return True
    finally:
        os.close(descriptor)


def _remove(parent: int, name: str, descriptor: int) -> None:
    # On btrfs a directory does not list files that were created after it was opened, so open it again.
    listed = os.open(".", _DIRECTORY, dir_fd=descriptor)
    try:
        for each in os.listdir(listed):
            os.unlink(each, dir_fd=listed)
    finally:
        os.close(listed)
        os.rmdir(name, dir_fd=parent)


@dataclass(frozen=True, slots=True)
class _Attempt(Facts):
    """Duration of an operation; ``error`` is from the operating system, empty if it worked."""

    error: str = ""
    seconds: float = 0.0


class Replacement(_Attempt):
    """Atomic replacement of a file, synced with its directory, as for a cursor."""

    def verdict(self, paths: Paths) -> Verdict:
        if self.error:
            return fail(f"cannot replace a file: {self.error}", _LOCAL_DISK)
        return ok(f"replaced a file and synced its directory in {milliseconds(self.seconds)}")


def replace(scratch: Path) -> Replacement:
    """Replace a file twice, so that the second replacement finds an existing file."""
    path, disk = scratch / "replaced", Disk()

    def replace_twice() -> None:
        disk.replace(path, b"old")
        disk.replace(path, b"new")
        _require(path.read_bytes() == b"new", "the old content was read back")

    return Replacement(*_time(replace_twice))


class Links(_Attempt):
    """Hard links, which create the identity of a log."""

    def verdict(self, paths: Paths) -> Verdict:
        if self.error:
            return fail(f"no hard links, so no log can be created here: {self.error}", _LOCAL_DISK)
        return ok("a hard link does not replace an existing file")


def links(scratch: Path) -> Links:
    path, disk = scratch / "linked", Disk()

    def create_twice() -> None:
        disk.replace(path, b"first", exclusive=True)
        try:
            disk.replace(path, b"second", exclusive=True)
        except FileExistsError:
            return
        _require(False, "a hard link replaced another file")

    return Links(*_time(create_twice))


class Fifos(_Attempt):
    """FIFOs and unix sockets."""

    def verdict(self, paths: Paths) -> Verdict:
        if self.error:
            return fail(f"a FIFO or a socket does not work here: {self.error}", _LOCAL_DISK)
        return ok("a FIFO and a socket work here")


def fifos(scratch: Path) -> Fifos:
    def use_both() -> None:
        os.mkfifo(scratch / "in", 0o600)
        pipe = os.open(scratch / "in", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(pipe, b"line\n")
            _require(os.read(pipe, 5) == b"line\n", "the FIFO returned different bytes")
        finally:
            os.close(pipe)
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
            listener.bind(str(scratch / "socket"))
            listener.listen()
            client.connect(str(scratch / "socket"))

    return Fifos(*_time(use_both))


@dataclass(frozen=True, slots=True)
class Locks(Facts):
    """Mutual exclusion of processes by flock."""

    type: str
    excludes: bool = False
    error: str = ""

    def verdict(self, paths: Paths) -> Verdict:
        if self.error:
            return fail(f"flock does not work: {self.error}", _LOCAL_DISK)
        if not self.excludes:
            return fail(
                "two processes got the same lock, so two daemons could start; the later one then stops the earlier",
                _LOCAL_DISK,
            )
        if self.type in NETWORK or self.type.startswith("fuse"):
            message = f"flock excludes other processes of this host; on {self.type} it may not exclude other hosts"
            return warn(message, "start a daemon on one host only")
        return ok("flock excludes other processes")


def locks(scratch: Path, file_system: str) -> Locks:
    path, disk = scratch / "lock", Disk()
    try:
        descriptor = disk.open_lock(path)
        try:
            excludes = disk.lock(descriptor) and _in_child(lambda: is_locked(path, disk))
        finally:
            disk.close(descriptor)
    except OSError as error:
        return Locks(file_system, error=reason_of(error))
    return Locks(file_system, excludes)


@dataclass(frozen=True, slots=True)
class Events(Facts):
    """Detection of new files by inotify, which --watch needs."""

    error: str = ""
    arrived: bool = False
    seconds: float = 0.0

    def verdict(self, paths: Paths) -> Verdict:
        if self.error:
            message = f"inotify: {self.error}; programs with --watch only poll"
            return warn(message, "sysctl fs.inotify.max_user_instances=512 fs.inotify.max_user_watches=65536")
        if not self.arrived:
            return warn("inotify did not report a new file; programs with --watch only poll", _LOCAL_DISK)
        return ok(f"inotify reported a new file after {milliseconds(self.seconds)}")


def events(scratch: Path) -> Events:
    descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        return Events(error=os.strerror(ctypes.get_errno()))
    try:
        if _libc.inotify_add_watch(descriptor, os.fsencode(scratch), _IN_CREATE) < 0:
            return Events(error=os.strerror(ctypes.get_errno()))
        begun = time.monotonic()
        (scratch / "event").touch()
        ready, _, _ = select.select([descriptor], [], [], _EVENT_SECONDS)
        return Events(arrived=bool(ready), seconds=time.monotonic() - begun)
    except OSError as error:
        return Events(error=reason_of(error))
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Allocation(Facts):
    """Preallocation of space for a segment."""

    type: str
    asked_bytes: int = 0
    allocated_bytes: int = 0
    error: str = ""
    is_full: bool = False

    def verdict(self, paths: Paths) -> Verdict:
        asked = format_bytes(self.asked_bytes)
        if self.is_full:
            return fail(f"cannot allocate {asked}: {self.error}", f"df -h {paths.at}; quota -v")
        if self.error:
            return warn(
                f"{self.type} does not allocate ({self.error}): segments grow while they are written, which makes "
                "syncs slower",
                _LOCAL_DISK,
            )
        if self.type in COPY_ON_WRITE:
            message = f"{self.type} copies on write, so allocated space may still run out; the daemon then waits"
            return warn(message, f"keep free_space_min large; on btrfs chattr +C on an empty {paths.at}")
        if self.allocated_bytes < self.asked_bytes:
            return warn(f"{self.type} allocated only {format_bytes(self.allocated_bytes)} of {asked}", _LOCAL_DISK)
        return ok(f"allocated {asked}, which stay writable when the disk is full")


def allocation(scratch: Path, file_system: str) -> Allocation:
    """Call fallocate(2) itself: posix_fallocate of the C library writes zeros if the file system cannot allocate."""
    path, disk = scratch / "allocated", Disk()
    try:
        descriptor = disk.create(path)
    except OSError as error:
        is_full = error.errno in DISK_FULL
        return Allocation(file_system, _ALLOCATED_BYTES, error=error.strerror or str(error), is_full=is_full)
    try:
        failed = _libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(_ALLOCATED_BYTES))
        code = ctypes.get_errno() if failed else 0
        allocated = os.fstat(descriptor).st_blocks * 512
    finally:
        disk.close(descriptor)
        os.unlink(path)  # at once: other programs may need the space
    is_full = code in (*DISK_FULL, errno.EFBIG)
    return Allocation(file_system, _ALLOCATED_BYTES, allocated, os.strerror(code) if code else "", is_full)


@dataclass(frozen=True, slots=True)
class Mapping(Facts):
    """Memory-mapped writes, as for the head, that another process reads immediately."""

    error: str = ""
    is_coherent: bool = False

    def verdict(self, paths: Paths) -> Verdict:
        if self.error:
            return fail(f"cannot map a file into memory: {self.error}", _LOCAL_DISK)
        if not self.is_coherent:
            return fail(
                "another process read old bytes of a mapped file, so readers would see an old head", _LOCAL_DISK
            )
        return ok("another process reads bytes written through a map immediately")


def mapping(scratch: Path) -> Mapping:
    path, disk = scratch / "mapped", Disk()
    try:
        disk.replace(path, bytes(mmap.PAGESIZE))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
            mapped[:4] = b"head"
            return Mapping(is_coherent=_in_child(lambda: path.read_bytes()[:4] == b"head"))
    except OSError as error:
        return Mapping(error=reason_of(error))


@dataclass(frozen=True, slots=True)
class Names(Facts):
    """File names as long as wald's, and names that differ only in case."""

    longest_bytes: int
    error: str = ""
    is_case_sensitive: bool = True

    def verdict(self, paths: Paths) -> Verdict:
        if not self.is_case_sensitive:
            hint = f"put the root on a case-sensitive file system; on ext4 chattr -F on an empty {paths.at}"
            return fail("names that differ only in case are one file, so two routes would be one", hint)
        if self.error:
            message = f"cannot create a name of {self.longest_bytes} bytes ({self.error}): groups need shorter names"
            return warn(message, "keep names of routes and groups below 100 characters")
        return ok(f"names may have {self.longest_bytes} bytes and are case-sensitive")


def names(scratch: Path) -> Names:
    longest = f"{cursor_name('g' * ROUTE_MAX_LENGTH)}.{'0' * 16}.tmp"  # that of a cursor while it is replaced
    error = ""
    try:
        (scratch / longest).touch()
    except OSError as failure:
        error = reason_of(failure)
    (scratch / "case").touch()
    return Names(len(longest), error, not (scratch / "CASE").exists())


def _time(action: Callable[[], None]) -> tuple[str, float]:
    begun = time.monotonic()
    try:
        action()
    except OSError as error:
        return reason_of(error), 0.0
    return "", time.monotonic() - begun


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise OSError(errno.EIO, message)


def _in_child(question: Callable[[], bool]) -> bool:
    """Run a test in a child process; raise the child's error here."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, struct.pack("ii", question(), 0))
        except OSError as error:
            os.write(writer, struct.pack("ii", 0, error.errno or errno.EIO))
        finally:
            os._exit(0)  # without cleanup, which the parent does
    os.close(writer)
    try:
        answer = os.read(reader, 8)
    finally:
        os.close(reader)
        os.waitpid(child, 0)
    answered, code = struct.unpack("ii", answer.ljust(8, b"\0"))
    if code:
        raise OSError(code, os.strerror(code))
    return bool(answered)
