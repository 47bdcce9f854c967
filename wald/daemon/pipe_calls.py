"""System calls on pipes: opening and enlarging them, and reading what they hold before it is consumed."""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import select
import stat
import termios
from pathlib import Path
from typing import TextIO

from wald.errors import InvalidInput

_TRASH_BYTES = 16 << 10  # consumed bytes go over and over into this, so it stays in the first-level cache
_SPLICE_NONBLOCK = 2
_PIPE_SIZES = tuple(1 << shift for shift in range(20, 15, -1))  # 1 MiB is the usual limit for the unprivileged
_NEW_PIPE_MAX_BYTES = 64 << 10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_libc = ctypes.CDLL(None, use_errno=True)
_tee = _libc.tee
_tee.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint)
_tee.restype = ctypes.c_ssize_t


def tee(source: int, target: int, length: int) -> int | None:
    """Copy up to ``length`` bytes that ``source`` holds into ``target``.

    Returns:
        how many; None: it holds nothing now; 0: it holds nothing, and no process has it open for writing.
    """
    copied: int = _tee(source, target, length, _SPLICE_NONBLOCK)
    if copied >= 0:
        return copied
    code = ctypes.get_errno()
    if code in (errno.EAGAIN, errno.EINTR):
        return None
    raise OSError(code, os.strerror(code))


def enlarge(descriptor: int) -> int:
    """Make a pipe as large as the system allows; returns its size in bytes."""
    present = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    for length in _PIPE_SIZES:
        if length <= present:
            break
        try:
            return fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, length)
        except PermissionError:  # this user's pipes have used up their share of memory
            continue
    return present


def was_enlarged(descriptor: int) -> bool:
    """Whether a pipe seems to be one that the last life of the daemon read; enlarges it.

    A pipe lives as long as a process holds it open, and keeps the size that it was given. A FIFO that no process held,
    and any other stdin, begins with the system's size. The size proves nothing where pipes could not be enlarged, then
    or now. A pipe that could not be enlarged then, and can be now, is taken for a new one: an unfinished record ends,
    and what a kill left both in the log and in the pipe is there twice. A pipe that cannot be enlarged now is taken for
    the old one: a new line may continue an unfinished record.
    """
    before = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    return not before <= _NEW_PIPE_MAX_BYTES < enlarge(descriptor)


def held_bytes(descriptor: int) -> int:
    """How many bytes a pipe holds."""
    length = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, length)
    return length[0]


def can_be_full(descriptor: int, held: int) -> bool:
    """Whether a pipe that holds so many bytes may be full: splice(2) fills a page with as little as a byte."""
    return held >= fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) // _PAGE_BYTES


def poll_events(descriptor: int, events: int) -> int:
    """Which of ``events`` hold for a descriptor now, besides errors and hang-ups."""
    poller = select.poll()
    poller.register(descriptor, events)
    ready = poller.poll(0)
    return ready[0][1] if ready else 0


def file_of(status: os.stat_result) -> tuple[int, int]:
    """What identifies a file: its device and inode."""
    return status.st_dev, status.st_ino


class Scratch:
    """The pipe into which other pipes are copied to be read, and the buffer that consumed bytes go to."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.capacity = enlarge(self._writer)
        self._trash = memoryview(bytearray(_TRASH_BYTES))

    def peek(self, source: int, into: memoryview) -> int | None:
        """Copy what ``source`` holds to ``into``, up to its length; returns what :func:`tee` does."""
        length = tee(source, self._writer, len(into))
        done = 0
        while length and done < length:
            done += os.readv(self._reader, [into[done:length]])
        return length

    def consume(self, source: int, length: int, mark: memoryview) -> int:
        """Take ``length`` bytes, all of which are there, out of ``source``; the first lands in ``mark``.

        Returns:
            how many were taken; fewer only if another process reads the pipe.
        """
        whole, rest = divmod(length - 1, _TRASH_BYTES)
        # If the transfers file was shortened, the mark is gone, and so is what it would be compared with.
        for first in (mark, self._trash[:1]):
            try:
                return os.readv(source, [first, *[self._trash] * whole, self._trash[:rest]])
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EFAULT:
                    raise
        return 0

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class Relay:
    """A pipe of the daemon's own in front of a stdin that is a file, so that there is one way of reading."""

    def __init__(self, source: int) -> None:
        self._source = source
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        enlarge(self._writer)
        self._open = True

    def refill(self) -> None:
        """Fill the pipe up from the file; close its writing end at the file's end."""
        while self._open:
            try:
                if os.splice(self._source, self._writer, 1 << 20, flags=_SPLICE_NONBLOCK) == 0:
                    self.close()
            except BlockingIOError:
                return

    def close(self) -> None:
        if self._open:
            os.close(self._writer)
            self._open = False


def open_fifo(path: Path) -> tuple[int, bool]:
    """Open a FIFO for reading and writing, so that it does not end when a writer leaves.

    If the FIFO can be opened for writing only, another process has it open for reading. If not, there may be a producer
    that has been writing to the old pipe all along, or one that has just made a new pipe and waits for the daemon;
    :func:`was_enlarged` tells these apart.

    Returns:
        the descriptor, and whether another process held the pipe: its content and an unfinished line can have survived.
    """
    try:
        writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        writer = None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        if writer is not None:
            os.close(writer)
    return descriptor, was_enlarged(descriptor) or writer is not None


def open_stdin(stdin: TextIO | None, root: Path, route: str) -> tuple[int, bool, Relay | None]:
    """The pipe behind stdin, with a relay in front of it if stdin is a file.

    Returns:
        the descriptor, whether the pipe can have outlived the last life of the daemon, and the relay.

    Raises:
        InvalidInput: stdin is neither a pipe nor a file.
    """
    descriptor = -1 if stdin is None else stdin.fileno()  # None: it was closed
    mode = 0 if stdin is None else os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode):
        return os.dup(descriptor), was_enlarged(descriptor), None
    if stat.S_ISREG(mode):
        relay = Relay(descriptor)
        return relay.reader, False, relay
    raise InvalidInput("stdin is neither a pipe nor a file", case="stdin-is-no-pipe", root=root, route=route)
