"""A process that owns a work group and serves workers over a socket, one thread each; it logs each call.

    python workgroup_owner.py JSON

JSON: root, route, group, order, window, max_tries, socket, notes, seed. A request is a line of JSON with ``do``, the
method, and its arguments, and so is the answer. SIGTERM closes the group while workers wait in it. The exit code is 3
if the disk failed, 4 after any other failure.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from workgroup_history import Notes

import wald
from wald.format.records import NOT_BEFORE
from wald.work import journal
from wald.work.group import WorkGroup

GROWN_BYTES = 16 << 10  # so that the journal is compacted during the run


class Owner:
    """The group and its connections."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._notes = Notes(Path(options["notes"]))
        self._numbers = itertools.count()
        self._chance = random.Random(options["seed"])
        self.closing = threading.Event()
        self.work = WorkGroup(
            options["root"],
            options["route"],
            options["group"],
            order=options["order"],
            window=options["window"],
            max_tries=options["max_tries"],
        )

    def serve(self, connection: socket.socket) -> None:
        """Answer one worker until it disconnects."""
        worker = ""
        try:
            with connection, connection.makefile("rwb") as stream:
                for line in stream:
                    request = json.loads(line)
                    worker = request["worker"]
                    answer = self.carry_out(**request)
                    stream.write(json.dumps(answer).encode() + b"\n")
                    stream.flush()
        except (BrokenPipeError, ConnectionResetError):
            pass
        except BaseException as error:  # noqa: BLE001  (any exception ends this process)
            self._end(error)
        if worker and self._chance.random() < 0.5:  # otherwise its leases expire
            try:
                self.carry_out("release", worker)
            except BaseException as error:  # noqa: BLE001
                self._end(error)

    def carry_out(
        self,
        do: str,
        worker: str,
        sequences: tuple[int, ...] = (),
        seconds: float = 0.0,
        limit: int = 1,
        reason: str = "",
    ) -> dict[str, Any]:
        number = next(self._numbers)
        told = {"seconds": seconds, "reason": reason, "sequences": sequences}
        self._notes.write(call=number, kind=do, worker=worker, at_ns=time.monotonic_ns(), **told)
        answer: dict[str, Any] = {}
        match do:
            case "lease":
                got = self.work.lease(worker, limit, lease_for=seconds, wait=0.5)
                answer["given"] = [_given(delivery.record, delivery.tries) for delivery in got]
            case "ack":
                answer["refused"] = [each.sequence for each in self.work.ack(worker, sequences)]
            case "nack":
                refused = self.work.nack(worker, sequences, delay=seconds, reason=reason)
                answer["refused"] = [each.sequence for each in refused]
            case "extend":
                refused = self.work.extend(worker, sequences, lease_for=seconds)
                answer["refused"] = [each.sequence for each in refused]
            case "release":
                self.work.release(worker)
        self._notes.write(call=number, at_ns=time.monotonic_ns(), **answer)
        return answer

    def _end(self, error: BaseException) -> None:
        if self.closing.is_set():
            return
        traceback.print_exception(error)
        os._exit(3 if isinstance(error, OSError) else 4)


def _given(record: wald.Record, tries: int) -> tuple[int, int, str | None, int, int]:
    headers = json.loads(record.headers) if record.headers else {}
    key = record.key.decode() if record.key is not None else None
    return record.sequence, tries, key, int(headers.get(NOT_BEFORE, 0)), int(record.value)


def main() -> None:
    options = json.loads(sys.argv[1])
    journal._GROWN_BYTES = GROWN_BYTES
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        owner = Owner(options)
        address = Path(options["socket"])
        address.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(address))
        listening.listen(64)
    except BaseException as error:  # noqa: BLE001
        traceback.print_exception(error)
        os._exit(3 if isinstance(error, OSError) else 4)

    def accept() -> None:
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=owner.serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    signal.sigwait([signal.SIGTERM])
    owner.closing.set()
    try:
        owner.work.close()
    except OSError:
        os._exit(3)
    os._exit(0)


if __name__ == "__main__":
    main()
