"""Operations that the log needs, tried in a scratch directory, with a second process where it takes two."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from wald.cli.doctor.judging.files import Allocation, Events, Locks, Mapping, Names, Tried
from wald.errors import DISK_FULL
from wald.files.disk import Disk
from wald.format.names import ROUTE_MAX_LENGTH, cursor_name

_EVENT_SECONDS = 1.0
_IN_CREATE = 0x100
_libc = ctypes.CDLL(None, use_errno=True)


def replace(scratch: Path) -> Tried:
    """As a cursor is replaced; the second one meets the first."""
    path, disk = scratch / "replaced", Disk()

    def twice() -> None:
        disk.replace(path, b"old")
        disk.replace(path, b"new")
        _expect(path.read_bytes() == b"new", "the old content was read back")

    return _tried(twice)


def links(scratch: Path) -> Tried:
    """As ``log.json`` is made: with a name that another file may have taken."""
    path, disk = scratch / "linked", Disk()

    def twice() -> None:
        disk.replace(path, b"first", exclusive=True)
        try:
            disk.replace(path, b"second", exclusive=True)
        except FileExistsError:
            return
        _expect(False, "the name of another file was taken")

    return _tried(twice)


def fifos(scratch: Path) -> Tried:
    """Bytes through a FIFO, and a connection to a socket."""

    def both() -> None:
        os.mkfifo(scratch / "in", 0o600)
        pipe = os.open(scratch / "in", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(pipe, b"line\n")
            _expect(os.read(pipe, 5) == b"line\n", "a FIFO gave back other bytes")
        finally:
            os.close(pipe)
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
            listener.bind(str(scratch / "socket"))
            listener.listen()
            caller.connect(str(scratch / "socket"))

    return _tried(both)


def locks(scratch: Path, type_: str) -> Locks:
    """Take a lock, and let another process try."""
    path, disk = scratch / "lock", Disk()
    try:
        descriptor = disk.open_lock(path)
        try:
            taken = disk.lock(descriptor)
            excludes = taken and _in_other_process(lambda: not _can_lock(path))
        finally:
            disk.close(descriptor)
    except OSError as error:
        return Locks(type_, error=words_of(error))
    return Locks(type_, excludes)


def _can_lock(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def events(scratch: Path) -> Events:
    """Watch the directory, and make a file in it."""
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
        return Events(error=words_of(error))
    finally:
        os.close(descriptor)


def allocation(scratch: Path, type_: str, length: int) -> Allocation:
    """fallocate(2) itself: the C library's posix_fallocate writes zeros where the file system cannot."""
    path, disk = scratch / "allocated", Disk()
    try:
        descriptor = disk.create(path)
    except OSError as error:
        return Allocation(type_, length, error=error.strerror or str(error), is_full=error.errno in DISK_FULL)
    try:
        failed = _libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(length))
        code = ctypes.get_errno() if failed else 0
        held = os.fstat(descriptor).st_blocks * 512
    finally:
        disk.close(descriptor)
        os.unlink(path)  # a large one, on a disk that others use
    is_full = code in (*DISK_FULL, errno.EFBIG)
    return Allocation(type_, length, held, os.strerror(code) if code else "", is_full)


def mapping(scratch: Path) -> Mapping:
    """Write through a map, as the daemon writes the head, and let another process read, as readers do."""
    path, disk = scratch / "mapped", Disk()
    try:
        disk.replace(path, bytes(mmap.PAGESIZE))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
            mapped[:4] = b"head"
            return Mapping(is_coherent=_in_other_process(lambda: path.read_bytes()[:4] == b"head"))
    except OSError as error:
        return Mapping(error=words_of(error))


def names(scratch: Path) -> Names:
    """The longest name that wald makes is that of a cursor while it is replaced."""
    longest = f"{cursor_name('g' * ROUTE_MAX_LENGTH)}.{'0' * 16}.tmp"
    error = ""
    try:
        (scratch / longest).touch()
    except OSError as failure:
        error = words_of(failure)
    (scratch / "case").touch()
    return Names(len(longest), error, not (scratch / "CASE").exists())


def words_of(error: OSError) -> str:
    """What the operating system says of something that does not work here.

    Raises:
        OSError: the same error, as the disk is full: that says nothing of what the file system can do.
    """
    if error.errno in DISK_FULL:
        raise error
    return error.strerror or str(error)


def _tried(action: Callable[[], None]) -> Tried:
    begun = time.monotonic()
    try:
        action()
    except OSError as error:
        return Tried(error=words_of(error))
    return Tried(seconds=time.monotonic() - begun)


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise OSError(errno.EIO, message)


def _in_other_process(question: Callable[[], bool]) -> bool:
    """The answer of a child process; an error in it is an error here."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _answer(question, writer)
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


def _answer(question: Callable[[], bool], writer: int) -> None:
    """In the child, which ends without what its parent would do at its end."""
    try:
        os.write(writer, struct.pack("ii", question(), 0))
    except OSError as error:
        os.write(writer, struct.pack("ii", 0, error.errno or errno.EIO))
    finally:
        os._exit(0)
