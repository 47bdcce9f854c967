"""Fill a small disk, kill the daemon, read and reclaim everything: input must flow again in every combination.

Used by the tests (a few small disks) and by ``scripts/torture --mode full-disk`` (the whole table). The daemon never
cuts by age here, so only the reserved space can recover it from a full disk.
"""

import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contents import errors
from full_disk import small_file_system
from running import Client, Daemon, readable, run, sidecar

from wald.files.disk import free_bytes
from wald.log import Log
from wald.setting_types import MIB, format_bytes

SEGMENTS = (4 * MIB, 64 * MIB, 256 * MIB)
RESERVES = (8 * MIB, 48 * MIB, 248 * MIB, 256 * MIB)
ROUNDS = 2
_LINE_BYTES = 4000  # up to this size, a write to a FIFO is atomic
_LINES = 40  # of a request
_FLOW_SECONDS = 120.0  # time in which a row that is not stuck accepts another two segments
_QUIET_SECONDS = 2.0  # time in which a request that does not wait for space is answered


@dataclass(frozen=True, slots=True)
class Row:
    """A disk and its contents; sizes in bytes."""

    disk: int
    segment: int
    reserve: int
    random: bool

    def __str__(self) -> str:
        sizes = (self.disk, self.segment, self.reserve)
        disk, segment, reserve = (format_bytes(size).replace(" ", "") for size in sizes)
        return f"{disk}-segments-{segment}-reserve-{reserve}-{'random' if self.random else 'equal'}"


def table(disks: Iterable[int]) -> list[Row]:
    """Return every combination."""
    return [Row(*row) for row in itertools.product(disks, SEGMENTS, RESERVES, (True, False))]


def walk(row: Row) -> list[str]:
    """Fill, kill, read and reclaim repeatedly; yield the faults."""
    env = {
        "WALD_SEGMENT_MAX_BYTES": str(row.segment),
        "WALD_FREE_SPACE_MIN": str(row.reserve),
        "WALD_SEGMENT_MAX_AGE": "0",
        "WALD_LOG_LEVEL": "warning",
    }
    with (
        tempfile.TemporaryDirectory(prefix="wald-") as scratch,
        small_file_system(Path(scratch) / "disk", row.disk) as root,
        Daemon(root, env=env) as daemon,
    ):
        return _Walk(row, daemon).rounds()


@dataclass
class _Walk:
    row: Row
    daemon: Daemon
    sent: dict[str, int] = field(default_factory=lambda: {"pipe": 0, "socket": 0})
    read: dict[str, int] = field(default_factory=lambda: {"pipe": 0, "socket": 0})
    taken_bytes: int = 0

    def rounds(self) -> list[str]:
        for words in ("ROUTE ADD pipe fifo", "ROUTE ADD socket"):
            self.daemon.ask(words)
        # Both ends, like a service manager: the pipe's contents outlive the daemon.
        fifo = os.open(self.daemon.root / "routes/pipe/in", os.O_RDWR | os.O_NONBLOCK)
        try:
            return [fault for _ in range(ROUNDS) for fault in self._round(fifo)] or errors(self.daemon.root)
        finally:
            os.close(fifo)

    def _round(self, fifo: int) -> Iterator[str]:
        self._flood(fifo, 2 * self.row.disk)
        reported = self._stat()
        if reported["degraded"] and (free := free_bytes(self.daemon.root)) < reported["free_space_min"]:
            yield f"{free} bytes are free, less than the effective reserve, {reported['free_space_min']}"
        self.daemon.kill()
        self.daemon.spawn()
        if not self.daemon.wait_or_ready():
            yield f"it does not start on the full disk: {self.daemon.log[-400:]}"
            return
        deadline = time.monotonic() + _FLOW_SECONDS
        begun, wanted = self.taken_bytes, 2 * self._stat()["segment_max_bytes"]
        while self.taken_bytes - begun < wanted:
            yield from self._read_everything()
            done = run(sidecar("reclaim", "--root", self.daemon.root, "--grace", 0))
            if done.returncode:
                yield f"wald-reclaim: {done.stderr.decode()}"
                return
            if time.monotonic() > deadline:
                yield f"wedged: {self._stat()}; {sorted(os.listdir(self.daemon.root / 'segments'))}"
                return
            self._flood(fifo, wanted - (self.taken_bytes - begun))

    def _flood(self, fifo: int, limit: int) -> None:
        """Write to both routes until writes block, or more than ``limit`` bytes are written."""
        end = self.taken_bytes + limit
        with closing(Client(self.daemon.socket_path)) as client:
            while self.taken_bytes < end:
                with suppress(BlockingIOError):
                    for _ in range(_LINES):
                        self.taken_bytes += os.write(fifo, self._line(self.sent["pipe"]))
                        self.sent["pipe"] += 1
                first = self.sent["socket"]
                payload = b"".join(self._line(first + number) for number in range(_LINES))
                client.publish("socket", payload)
                while not readable(client.socket.fileno(), within=_QUIET_SECONDS):
                    reported = self._stat()
                    if reported["degraded"] or reported["held_requests"]:
                        return
                if not client.reply().startswith("OK "):
                    return
                self.sent["socket"] += _LINES
                self.taken_bytes += len(payload)

    def _line(self, number: int) -> bytes:
        filler = os.urandom(_LINE_BYTES).replace(b"\n", b" ") if self.row.random else b"." * _LINE_BYTES
        return b"%010d %b\n" % (number, filler[: _LINE_BYTES - 12])

    def _read_everything(self) -> Iterator[str]:
        """Read from the cursors and move them to the end: acknowledged lines appear once, in order."""
        log = Log(self.daemon.root)
        for route in self.read:
            expected, last = self.read[route], 0
            for record in log.records(route, start="cursor"):
                number, last = int(record.value[:10]), record.sequence
                if number != expected:
                    # Unacknowledged requests of a connection that ended may be in the log, and are sent again then.
                    if route == "pipe" or not self._again(number, expected):
                        yield f"{route}: line {number} stands where {expected} belongs"
                    expected = number
                expected += 1
            if route == "socket" and expected < self.sent[route]:
                yield f"{route}: {self.sent[route] - expected} acknowledged lines are lost"
            self.read[route] = expected
            if last:
                log.set_cursor(route, last)

    def _again(self, number: int, expected: int) -> bool:
        return expected - _LINES <= number < expected

    def _stat(self) -> dict[str, Any]:
        """``Any``: it is JSON."""
        reported: dict[str, Any] = json.loads(self.daemon.ask("STAT").removeprefix("OK "))
        return reported
