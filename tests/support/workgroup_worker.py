"""A worker process of a group: it leases records, and handles them correctly or incorrectly.

    python workgroup_worker.py SOCKET NAME SEED NOTES

It connects to the owner at SOCKET, reconnects after a failure, and logs its deliveries and its answered
acknowledgements. Records whose number is :func:`poison` are never acknowledged.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from workgroup_history import Notes

_PAUSE_SECONDS = 0.02


def _wait(seconds: float) -> None:
    """Wait, as if working."""
    threading.Event().wait(max(0.0, seconds))


def poison(number: int) -> bool:
    """True if no worker can process the record with this number."""
    return number % 101 == 7


class Worker:
    """One worker, and its connection to the owner."""

    def __init__(self, address: str, name: str, seed: int, notes: Path) -> None:
        self._address = address
        self._name = name
        self._chance = random.Random(seed)
        self._notes = Notes(notes)

    def work(self) -> None:
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(self._address)
                    with connection.makefile("rwb") as self._stream:
                        while True:
                            self._lease()
            except (OSError, EOFError):
                _wait(_PAUSE_SECONDS)  # the owner is started again

    def _ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self._stream.write(json.dumps({"do": do, "worker": self._name, **arguments}).encode() + b"\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        self._notes.write(do=do, at_ns=time.monotonic_ns(), **arguments, **answer)
        return answer

    def _lease(self) -> None:
        chance = self._chance
        seconds = chance.choice((0.2, 1.0, 1.0, 5.0))
        began = time.monotonic()
        given = self._ask("lease", limit=chance.randrange(1, 40), seconds=seconds)["given"]
        good = [sequence for sequence, _, _, _, number in given if not poison(number)]
        bad = [sequence for sequence, _, _, _, number in given if poison(number)]
        if bad and chance.random() < 0.8:
            self._ask("nack", sequences=bad, reason=f"poison {chance.randrange(1000)}")
        if chance.random() < 0.1:
            _wait(chance.uniform(0, 2 * _PAUSE_SECONDS))
        dice = chance.random()
        if dice < 0.02:
            os._exit(0)  # with all that it has
        if dice < 0.06:  # forgets all of it
            return
        if dice < 0.10:  # is late
            _wait(began + seconds * chance.choice((0.9, 1.0, 1.1)) - time.monotonic())
        if dice > 0.94 and good:
            self._ask("extend", sequences=good, seconds=chance.choice((0.1, 2.0)))
        back = [sequence for sequence in good if chance.random() < 0.03]
        done = [sequence for sequence in good if sequence not in back]
        half = chance.randrange(len(done) + 1)
        for part in (done[:half], done[half:]):
            if part:
                self._ask("ack", sequences=part)
        if back:
            self._ask("nack", sequences=back, seconds=chance.choice((0.0, 0.3)), reason=chance.choice(("", "busy")))


if __name__ == "__main__":
    Worker(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])).work()
