"""Client of systemd: notifications, and descriptors that survive a restart.

Notifications are datagrams (sd_notify(3)). FDSTORE stores pipes, so that their contents survive a restart: the next
start inherits the pipes by name (sd_listen_fds(3)), along with the FIFOs and listening sockets of socket units.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Mapping, Sequence

_FIRST_LISTENED = 3  # SD_LISTEN_FDS_START


class Systemd:
    """Connection to systemd; drops notifications that cannot be sent."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        is_for_this_process = environ.get("WATCHDOG_PID") in (None, str(os.getpid()))
        microseconds = environ.get("WATCHDOG_USEC", "")
        # A quarter of systemd's timeout, because input that arrives during a check looks stalled.
        self.watchdog_seconds = int(microseconds) / 4e6 if is_for_this_process and microseconds.isdigit() else 0.0
        self._inherited = _inherited(environ)

    def ready(self) -> None:
        self._send("READY=1")

    def reloading(self) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def take_sockets(self) -> list[socket.socket]:
        files = [file for file, (_, number) in self._inherited.items() if stat.S_ISSOCK(os.fstat(number).st_mode)]
        return [socket.socket(fileno=self._inherited.pop(file)[1]) for file in files]

    def take_fifo(self, file: tuple[int, int]) -> int | None:
        """Hand over a FIFO's inherited descriptor, by device and inode."""
        _, descriptor = self._inherited.pop(file, ("", None))
        return descriptor

    def descriptor_named(self, name: str) -> int | None:
        return next((descriptor for each, descriptor in self._inherited.values() if each == name), None)

    def take_remaining(self) -> list[tuple[str, int]]:
        remaining, self._inherited = list(self._inherited.values()), {}
        return remaining

    def keep(self, name: str, descriptor: int) -> None:
        """Ask systemd to store a pipe even after a hangup; FileDescriptorStoreMax limits their number."""
        self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [descriptor])

    def forget(self, name: str) -> None:
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def _send(self, message: str, descriptors: Sequence[int] = ()) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
            datagram.connect(self._address)
            socket.send_fds(datagram, [message.encode()], descriptors)


def _inherited(environ: Mapping[str, str]) -> dict[tuple[int, int], tuple[str, int]]:
    """Return inherited names and descriptors by device and inode; close a file's duplicates."""
    count = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID") != str(os.getpid()) or not count.isdigit():
        return {}
    descriptors = range(_FIRST_LISTENED, _FIRST_LISTENED + int(count))
    names = environ.get("LISTEN_FDNAMES", "").split(":") + [""] * len(descriptors)
    inherited: dict[tuple[int, int], tuple[str, int]] = {}
    for name, descriptor in zip(names, descriptors, strict=False):
        os.set_blocking(descriptor, False)
        os.set_inheritable(descriptor, False)
        status = os.fstat(descriptor)
        file = status.st_dev, status.st_ino
        if file in inherited:
            os.close(inherited[file][1])
        inherited[file] = name, descriptor
    return inherited
