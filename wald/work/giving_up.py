"""Giving a record up: it becomes a dead letter, and is done after that; exactly once over a crash in between.

    the journal says so, synced ─▶ the dead letter is durable ─▶ the journal says that the record is done

The producer id of a dead letter is made from what the journal says. So the daemon knows a letter that is sent again.
And as it forgets the oldest of its producers, a letter that may be in the log is looked for before it is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

from wald.format.records import Record
from wald.format.work import DeadRecord
from wald.log import Log
from wald.work.deadletters import (
    GROUP,
    LOG,
    REASON,
    ROUTE,
    SEQUENCE,
    TRIES,
    dead_letter,
    headers_of,
    payloads,
    prepare,
    send,
)

_RETRY_SECONDS = 1.0  # who has it done tries again, and is not to be held up at its end


def give_up(log: Log, daemon: Path, group: str, record: Record, dead: DeadRecord, *, may_be_sent: bool) -> int:
    """Make a dead letter of a record that is given up; on disk when this returns.

    Args:
        may_be_sent: whether it may be in the log already.

    Returns:
        the sequence of the dead letter.

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
    if may_be_sent and (found := _sent(log, dead, headers)):
        return found
    prepare(daemon, log.root, dead.route, retry_for=_RETRY_SECONDS)
    seed = hashlib.sha256(repr((identity, record.route, group, *astuple(dead))).encode()).digest()
    letter = dead_letter(record, headers, dead.route)
    (durable,) = send(daemon, payloads([letter]), seed=seed, retry_for=_RETRY_SECONDS)
    return durable.first


def _sent(log: Log, dead: DeadRecord, headers: Mapping[str, str]) -> int | None:
    """The sequence of the dead letter, if it is in the log."""
    if dead.route not in log.routes():
        return None
    wanted = {**headers, SEQUENCE: str(dead.sequence)}
    for letter in log.records(dead.route, dead.after + 1, on_missing="skip"):
        if wanted.items() <= headers_of(letter).items():
            return letter.sequence
    return None
