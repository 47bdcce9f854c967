"""A process that owns a work group, with its workers as threads; it logs each call.

    python workgroup_owner.py JSON

JSON: root, route, group, order, window, max_tries, notes, seed. The workers lease records, and handle them correctly or
incorrectly; some die with what they have. Records whose number is :func:`poison` are never acknowledged. SIGTERM closes
the group while workers wait in it. The exit code is 3 if the disk failed, 4 after any other failure.
"""

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from workgroup_oracle import Notes

from wald.work import journal
from wald.work.group import WorkGroup

GROWN_BYTES = 16 << 10  # so that the journal is compacted during the run
WORKERS = 4
_PAUSE_SECONDS = 0.02


class Owner:
    """The group and the notes of its calls."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._notes = Notes(Path(options["notes"]))
        self._numbers = itertools.count()
        self.closing = threading.Event()
        self.work = WorkGroup(
            options["root"],
            options["route"],
            options["group"],
            order=options["order"],
            window=options["window"],
            max_tries=options["max_tries"],
        )

    def call(self, kind: str, worker: str, *what: Any, **options: Any) -> list[tuple[int, int, str | None, int]]:
        """Call a method of the group; return what a lease has delivered."""
        number, sequences = next(self._numbers), () if kind in ("lease", "release") else what[0]
        seconds = options.get("lease_for", options.get("delay", 0.0))
        told = {"kind": kind, "worker": worker, "sequences": sequences, "seconds": seconds}
        self._notes.write(call=number, at_ns=time.monotonic_ns(), **told)
        found = getattr(self.work, kind)(worker, *what, **options)
        given = [
            (record.sequence, tries, record.key.decode() if record.key else None, int(record.value))
            for record, tries in (found if kind == "lease" else ())
        ]
        refused = [each.sequence for each in found] if kind in ("ack", "nack", "extend") else []
        answer = {"given": given} if kind == "lease" else {"refused": refused}
        self._notes.write(call=number, at_ns=time.monotonic_ns(), **answer)
        return given

    def serve(self, worker: str, seed: int) -> None:
        """Work as this worker until the group is closed."""
        chance = random.Random(seed)
        try:
            while True:
                if not self._work(worker, chance) and chance.random() < 0.5:  # it has died; others' leases expire
                    self.call("release", worker)
        except BaseException as error:  # noqa: BLE001  (any exception ends this process)
            if not self.closing.is_set():
                _end(error)

    def _work(self, worker: str, chance: random.Random) -> bool:
        """Lease some records and settle them; return False if the worker dies before that."""
        seconds = chance.choice((0.2, 1.0, 1.0, 5.0))
        began = time.monotonic()
        given = self.call("lease", worker, chance.randrange(1, 40), lease_for=seconds, wait=0.5)
        good = [sequence for sequence, _, _, number in given if not poison(number)]
        bad = [sequence for sequence, _, _, number in given if poison(number)]
        if bad and chance.random() < 0.8:
            self.call("nack", worker, bad, reason=f"poison {chance.randrange(1000)}")
        if chance.random() < 0.1:
            _wait(chance.uniform(0, 2 * _PAUSE_SECONDS))
        dice = chance.random()
        if dice < 0.02:
            return False
        if dice < 0.06:  # forgets all of it
            return True
        if dice < 0.10:  # is late
            _wait(began + seconds * chance.choice((0.9, 1.0, 1.1)) - time.monotonic())
        if dice > 0.94 and good:
            self.call("extend", worker, good, lease_for=chance.choice((0.1, 2.0)))
        back = [sequence for sequence in good if chance.random() < 0.03]
        done = [sequence for sequence in good if sequence not in back]
        half = chance.randrange(len(done) + 1)
        for part in (done[:half], done[half:]):
            if chance.random() < 0.01:
                return False
            if part:
                self.call("ack", worker, part)
        if back:
            self.call("nack", worker, back, delay=chance.choice((0.0, 0.3)), reason=chance.choice(("", "busy")))
        return True


def poison(number: int) -> bool:
    """True if no worker can process the record with this number."""
    return number % 101 == 7


def _wait(seconds: float) -> None:
    """Wait, as if working."""
    threading.Event().wait(max(0.0, seconds))


def _end(error: BaseException) -> None:
    traceback.print_exception(error)
    os._exit(3 if isinstance(error, OSError) else 4)


def main() -> None:
    options = json.loads(sys.argv[1])
    journal._GROWN_BYTES = GROWN_BYTES
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        owner = Owner(options)
    except BaseException as error:  # noqa: BLE001
        _end(error)
    chance = random.Random(options["seed"])
    for number in range(WORKERS):
        work = (f"worker-{number}", chance.randrange(1 << 32))
        threading.Thread(target=owner.serve, args=work, daemon=True).start()
    signal.sigwait([signal.SIGTERM])
    owner.closing.set()
    try:
        owner.work.close()
    except OSError:
        os._exit(3)
    os._exit(0)


if __name__ == "__main__":
    main()
