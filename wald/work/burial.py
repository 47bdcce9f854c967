"""Giving a record up: it becomes a dead letter, and is done after that; exactly once over a crash in between.

    the journal says so, synced ─▶ the dead letter is durable ─▶ the journal says that the record is done

The producer id of a dead letter is made from what the journal says. So the daemon knows a letter that is sent again.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple
from pathlib import Path

from wald.format.record import Record
from wald.format.work import Dead
from wald.log import Log
from wald.work.deadletters import GROUP, LOG, REASON, ROUTE, TRIES, dead_letter, payloads, prepare, send


def bury(log: Log, daemon: Path, group: str, record: Record, dead: Dead) -> tuple[int, int]:
    """Make a dead letter of a record that is given up; on disk when this returns.

    Returns:
        the first and the last sequence of the dead letter.

    Raises:
        Undeliverable: it is too large for a dead letter.
        WaldError: no daemon runs, or it refuses the letter.
    """
    identity = log.identity.log_id.hex()
    headers = {
        LOG: identity,
        ROUTE: record.route,
        GROUP: group,
        REASON: dead.reason,
        TRIES: str(dead.tries),
    }
    prepare(daemon, log.root, dead.route)
    seed = hashlib.sha256(repr((identity, record.route, group, *astuple(dead))).encode()).digest()
    letter = dead_letter(record, headers, dead.route)
    (durable,) = send(daemon, payloads([letter]), seed=seed)
    return durable
