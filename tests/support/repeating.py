"""Requests with an Idempotency-Key, and their answers."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count

from gating import ORDERS, TEXT, Answer, Gate
from running import TIMEOUT_SECONDS, Daemon, reclaim

import wald as library
from wald.client.payloads import column_payloads
from wald_gate.records_in.daemon import DaemonClient
from wald_gate.records_in.keys import key_of
from wald_gate.records_in.publisher import IdempotentPublisher


def send(
    gate: Gate, key: str, body: bytes = b"one\ntwo\n", media_type: str = TEXT, path: str = ORDERS, **headers: str
) -> Answer:
    """Send records for ``orders`` under a key."""
    return gate.ask("POST", path, body, {"Content-Type": media_type, "Idempotency-Key": key, **headers})


def outcome(answer: Answer) -> tuple[int, bool, bytes]:
    """Return the status, the replay flag of the answer, and the body."""
    return answer.status, answer.headers.get("idempotency-replayed") == "true", answer.body


def keys_of_slot(slot: int, route: str = "orders") -> Iterator[str]:
    """Yield keys that share a slot: one byte of the hash of client, route and key."""
    for number in count():
        key = key_of([f"k{number}"], "anyone", route)
        if key is not None and key[0] == slot:
            yield f"k{number}"


def release(daemon: Daemon) -> None:
    """Move the cursor to the head, and let RECLAIM delete everything."""
    log = library.open(daemon.root)
    head = log.head()
    assert head
    log.set_cursor("orders", head.sequence)
    assert daemon.ask("CUT").startswith("OK cut")
    reclaim(daemon.root, "--grace", "0")


@asynccontextmanager
async def publishing(daemon: Daemon) -> AsyncIterator[IdempotentPublisher]:
    """Yield the idempotent publisher of a gate in this process."""
    to_daemon = DaemonClient(daemon.root, daemon.socket_path, patience=TIMEOUT_SECONDS)
    repeats = IdempotentPublisher(library.open(daemon.root), to_daemon)
    try:
        yield repeats
    finally:
        await repeats.close()
        await to_daemon.close()


async def store(repeats: IdempotentPublisher, key: int, values: list[bytes]) -> list[int]:
    """Store the parts of a body and return their sequences; all keys share one slot."""
    found: list[int] = []
    of_slot = bytes([7] + [key] * 15)
    async with repeats.request(of_slot, "orders", lambda durable, _, __: found.append(durable.first)) as request:
        for value in values:
            await request.add(*column_payloads([value]), columns=True)
        await request.finish()
    return found
