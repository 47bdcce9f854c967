"""Producers under load while a test disturbs the daemon: writers of FIFOs and clients of the socket.

Each line is `NAME-NUMBER` and written once. They record failures that no producer may see: a broken pipe, a refused
connection.
"""

import itertools
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from running import Client, eventually


class Load:
    """Threads that write until :meth:`finish`."""

    def __init__(self, root: Path) -> None:
        self.written: list[bytes] = []
        self.seen: list[BaseException] = []
        self._fifo = root / "routes/access/in"
        self._own_fifo = root / "routes/half/in"
        self._socket = root / "wald.sock"
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._go, args=(way,))
            for way in (self._hold_fifo, self._open_fifo, self._open_fifo, self._connect, self._connect)
        ]
        for thread in self._threads:
            thread.start()

    def await_lines(self, count: int) -> None:
        """Return once ``count`` more lines were written."""
        wanted = len(self.written) + count
        eventually(lambda: self.seen or len(self.written) >= wanted)

    def finish(self) -> None:
        """Let each producer finish its line."""
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _go(self, way: Callable[[Iterator[bytes]], None]) -> None:
        name = f"{way.__name__}-{secrets.token_hex(2)}"
        try:
            way(self._lines(name))
        except BaseException as error:  # noqa: BLE001  (whatever a producer meets is judged by the test)
            self.seen.append(error)

    def _lines(self, name: str) -> Iterator[bytes]:
        """Yield lines; each counts as written once the next one is requested."""
        for number in itertools.count():
            if self._ending.is_set():
                return
            line = f"{name}-{number}".encode()
            yield line
            self.written.append(line)
            self._ending.wait(0.002)

    def _hold_fifo(self, lines: Iterator[bytes]) -> None:
        """Keep a FIFO open in one writer, with half a line in it most of the time."""
        with self._own_fifo.open("wb", buffering=0) as fifo:
            for line in lines:
                fifo.write(line[:3])
                self._ending.wait(0.01)
                fifo.write(line[3:] + b"\n")

    def _open_fifo(self, lines: Iterator[bytes]) -> None:
        """Open and close a FIFO for each writer."""
        for line in lines:
            with self._fifo.open("wb", buffering=0) as fifo:
                fifo.write(line + b"\n")

    def _connect(self, lines: Iterator[bytes]) -> None:
        """Open a connection for each line, and retry without an answer, as a producer must."""
        producer = secrets.token_hex(8)
        for number, line in enumerate(lines, 1):
            while not self._is_durable(line, f"pid={producer} pseq={number}"):
                pass

    def _is_durable(self, line: bytes, options: str) -> bool:
        try:
            with Client(self._socket) as client:
                client.publish("access", line + b"\n", options)
                reply = client.reply()
        except (BrokenPipeError, ConnectionResetError):  # accepted, and closed by a daemon that ends
            return False
        assert reply.startswith("OK ") or not reply, reply
        return bool(reply)


@contextmanager
def under_load(root: Path) -> Iterator[Load]:
    load = Load(root)
    try:
        yield load
    finally:
        load.finish()
