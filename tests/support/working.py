"""A process that owns a work group with some workers, and logs deliveries and acknowledgements.

    python working.py ROOT ROUTE GROUP WORKERS

Lines on stdout: ``got SEQUENCE TRIES WORKER`` for a delivered record, and ``done SEQUENCE`` once its acknowledgement is
on disk. It ends when all is acknowledged and nothing arrives for a second.
"""

from __future__ import annotations

import os
import random
import sys
import threading

from wald.work.group import WorkGroup


def main() -> None:
    root, route, group, workers = sys.argv[1:]
    with WorkGroup(root, route, group) as work:
        threads = [threading.Thread(target=_work, args=(work, f"w{number}")) for number in range(int(workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _work(work: WorkGroup, worker: str) -> None:
    chance = random.Random()
    while got := work.lease(worker, chance.randint(1, 50), wait=1):
        _say(*(f"got {record.sequence} {tries} {worker}" for record, tries in got))
        processed = [record.sequence for record, _ in got if chance.random() < 0.8]
        work.ack(worker, processed)
        _say(*(f"done {sequence}" for sequence in processed))
        work.nack(worker, [record.sequence for record, _ in got if record.sequence not in processed])


def _say(*lines: str) -> None:
    if lines:
        os.write(1, "".join(f"{line}\n" for line in lines).encode())


if __name__ == "__main__":
    main()
