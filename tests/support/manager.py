"""A service manager for a daemon started without one: it receives notifications and stores descriptors."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from running import TIMEOUT_SECONDS, readable


class Manager:
    """A service manager that receives notifications on NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.messages: list[str] = []
        self.descriptors: dict[str, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.settimeout(TIMEOUT_SECONDS)

    def hear(self, wanted: str) -> str:
        """Return the next message that begins with ``wanted``; store descriptors under their names."""
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 4)
            message = data.decode()
            self.messages.append(message)
            fields = dict(line.split("=", 1) for line in message.splitlines())
            if descriptors:
                (self.descriptors[fields["FDNAME"]],) = descriptors
            if message.startswith(wanted):
                return message

    def is_silent(self, *, seconds: float) -> bool:
        """Return True if no more notifications arrive for ``seconds``."""
        while readable(self._socket.fileno()):
            self._socket.recv(4096)
        return not readable(self._socket.fileno(), within=seconds)

    def close(self) -> None:
        self._socket.close()
        for descriptor in self.descriptors.values():
            os.close(descriptor)


@contextmanager
def manager_at(address: str) -> Iterator[Manager]:
    manager = Manager(address)
    try:
        yield manager
    finally:
        manager.close()
