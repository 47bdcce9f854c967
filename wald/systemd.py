"""The service manager: what is sent to systemd, and what it hands over; without one, nothing is sent.

Messages are datagrams (sd_notify(3)): READY, RELOADING, STOPPING, WATCHDOG, and FDSTORE to hand over pipes, so that
their content outlives a restart. Descriptors come back as sd_listen_fds(3) describes, named as they were handed over.
Socket units hand over FIFOs and listening sockets likewise.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass

_FIRST_LISTENED = 3  # SD_LISTEN_FDS_START


@dataclass(frozen=True, slots=True)
class Given:
    """A descriptor that systemd handed over, and the name that it has there."""

    name: str
    descriptor: int


class Systemd:
    """The service manager; without one, nothing is sent."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        for_this_process = environ.get("WATCHDOG_PID") in (None, str(os.getpid()))
        microseconds = environ.get("WATCHDOG_USEC", "")
        # A quarter of what systemd waits for: input that comes at the moment of a check looks as if it stood still.
        self.watchdog_seconds = int(microseconds) / 4e6 if for_this_process and microseconds.isdigit() else 0.0
        self._given = _listened(environ)

    def ready(self) -> None:
        self._send("READY=1")

    def reloading(self) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def take_sockets(self) -> list[socket.socket]:
        """The sockets that systemd handed over."""
        files = [file for file, each in self._given.items() if stat.S_ISSOCK(os.fstat(each.descriptor).st_mode)]
        return [socket.socket(fileno=self._given.pop(file).descriptor) for file in files]

    def take(self, file: tuple[int, int]) -> int | None:
        """The descriptor that systemd handed over for a FIFO, by its device and inode; None if there is none."""
        given = self._given.pop(file, None)
        return None if given is None else given.descriptor

    def kept(self, name: str) -> int | None:
        """A descriptor that systemd handed over under this name and that was not taken yet; None if there is none."""
        return next((given.descriptor for given in self._given.values() if given.name == name), None)

    def take_rest(self) -> list[Given]:
        """Those that are left: of FIFOs that are at the path of no route."""
        rest, self._given = list(self._given.values()), {}
        return rest

    def keep(self, name: str, descriptor: int) -> None:
        """Ask systemd to hold a pipe too, hung up or not; it does if FileDescriptorStoreMax allows."""
        self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [descriptor])

    def forget(self, name: str) -> None:
        """Ask systemd to close the pipes that it holds under a name."""
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def _send(self, message: str, descriptors: list[int] | None = None) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as datagram:
            try:
                datagram.connect(address)
                socket.send_fds(datagram, [message.encode()], descriptors or [])
            except OSError:  # a manager that does not listen is no reason to stop
                return


def _listened(environ: Mapping[str, str]) -> dict[tuple[int, int], Given]:
    """What was handed over, by device and inode; of two descriptors of one file the first is closed."""
    count = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID") != str(os.getpid()) or not count.isdigit():
        return {}
    descriptors = range(_FIRST_LISTENED, _FIRST_LISTENED + int(count))
    names = environ.get("LISTEN_FDNAMES", "").split(":") + [""] * len(descriptors)
    listened: dict[tuple[int, int], Given] = {}
    for name, descriptor in zip(names, descriptors, strict=False):
        os.set_blocking(descriptor, False)
        os.set_inheritable(descriptor, False)
        status = os.fstat(descriptor)
        file = status.st_dev, status.st_ino
        if file in listened:
            os.close(listened[file].descriptor)
        listened[file] = Given(name, descriptor)
    return listened
