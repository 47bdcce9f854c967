"""Requests with an Idempotency-Key, and their answers."""

from __future__ import annotations

from gating import ORDERS, TEXT, Answer, Gate
from running import Daemon, reclaim

import wald as library


def send(
    gate: Gate, key: str, body: bytes = b"one\ntwo\n", media_type: str = TEXT, path: str = ORDERS, **headers: str
) -> Answer:
    """Send records for ``orders`` under a key."""
    return gate.ask("POST", path, body, {"Content-Type": media_type, "Idempotency-Key": key, **headers})


def outcome(answer: Answer) -> tuple[int, bool, bytes]:
    """Return the status, the replay flag of the answer, and the body."""
    return answer.status, answer.headers.get("idempotency-replayed") == "true", answer.body


def release(daemon: Daemon) -> None:
    """Move the cursor to the head, and let RECLAIM delete everything."""
    log = library.open(daemon.root)
    head = log.head()
    assert head
    log.set_cursor("orders", head.sequence)
    assert daemon.ask("CUT").startswith("OK cut")
    reclaim(daemon.root, "--grace", "0")
