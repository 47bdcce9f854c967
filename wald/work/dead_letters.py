"""Dead letters: records with headers for their origin and the reason why they were not processed.

    wald.origin.log  wald.origin.route  wald.origin.sequence  wald.origin.append_time_ns     origin
    wald.group  wald.reason  wald.tries                                                      failure

Value, key, event time and the other headers are kept, so each record can be put back unchanged. Headers that are not
the JSON object of strings that headers should be are kept in hexadecimal as ``wald.origin.headers``.

Dead letters are sent in windows of as many requests as the daemon remembers for one producer, each window under a
producer id made from its contents. So the daemon recognises a window that is sent again after a crash. Because it
forgets its oldest producers, a retry first looks in the log, where each batch has the id of its producer. A window that
differs in anything, for example because a record was damaged in between, has another id, and all of it is sent.

A record may be too large for a dead letter, because a pipe takes longer records than a request to the daemon. Such a
record ends the run: everything before it is sent, and only the operator can pass over it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

from wald.client.payloads import encode_headers, record_payloads
from wald.client.producer import Durable, Producer, socket_at
from wald.client.session import Session
from wald.errors import InvalidInput
from wald.files.cursor_directory import UNKNOWN_USER
from wald.files.layout import Root
from wald.format.log_state import PRODUCER_WINDOW, stored_producer_id
from wald.format.names import is_route
from wald.format.records import Record
from wald.hints import command_line
from wald.log import Log

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RETRY_SECONDS = 10.0  # how long to wait for a daemon that restarts
_FIXED_BYTES = 128  # of a payload besides its records: count, last offsets, padding
_RECORD_BYTES = 24  # of a record besides its bytes: a time, three offsets, its bits
LOG, ROUTE, SEQUENCE, _TIME = (f"wald.origin.{name}" for name in ("log", "route", "sequence", "append_time_ns"))
GROUP, REASON, TRIES = "wald.group", "wald.reason", "wald.tries"
_ODD = "wald.origin.headers"
_OURS = frozenset({LOG, ROUTE, SEQUENCE, _TIME, GROUP, REASON, TRIES})


class Undeliverable(Exception):
    """The daemon refused a dead letter. ``sent`` records before it are on disk as dead letters."""

    def __init__(self, message: str, *, sent: int) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Origin:
    """Log and route of records, and the group that could not process them."""

    log_id: bytes
    route: str
    group: str

    def headers(self, reason: str, tries: int) -> dict[str, str]:
        values = (self.log_id.hex(), self.route, self.group, reason, str(tries))
        return dict(zip((LOG, ROUTE, GROUP, REASON, TRIES), values, strict=True))

    def seed(self, handover: DataclassInstance) -> bytes:
        identity = (self.log_id.hex(), self.route, self.group, *astuple(handover))
        return hashlib.sha256(repr(identity).encode()).digest()


def dead_letter(record: Record, headers: Mapping[str, str], route: str) -> Record:
    """Return the dead letter on ``route`` of a record that was given up; it keeps the record's sequence."""
    own = {SEQUENCE: str(record.sequence), _TIME: str(record.append_time_ns)}
    return record._replace(route=route, headers=encode_headers(headers_of(record) | dict(headers) | own))


def original(letter: Record, log_id: bytes, root: Path) -> Record:
    """Return the original of a dead letter; it keeps the dead letter's sequence.

    Raise InvalidInput if it is not a dead letter of the log with this id in ``root``.
    """
    headers = headers_of(letter)
    route = headers.get(ROUTE, "")
    if headers.get(LOG) != log_id.hex() or not is_route(route):
        passing = command_line(root, f"cursor set {letter.route} {letter.sequence}")
        raise InvalidInput(
            f"{letter.route} {letter.sequence}: is not a dead letter of this log",
            hint=f"{passing} skips it; then run the same command again",
        )
    own = {name: value for name, value in headers.items() if name not in _OURS}
    try:
        encoded = bytes.fromhex(own[_ODD]) if _ODD in own else encode_headers(own) if own else None
    except ValueError:  # a header of the producer that has this name
        encoded = encode_headers(own)
    return letter._replace(route=route, headers=encoded)


def payloads(letters: Iterable[Record]) -> Iterator[tuple[str, bytes]]:
    """Encode letters, in order, as pairs of a route and a ``columns`` payload.

    A letter longer than a payload gets a separate one, which the daemon accepts or refuses.
    """
    for route, run in groupby(letters, lambda letter: letter.route):
        fields = [(letter.value, letter.key, letter.event_time_ns, letter.headers) for letter in run]
        yield from ((route, payload) for payload in record_payloads(fields))


def fits(letter: Record, bytes_max: int) -> bool:
    size = len(letter.value) + len(letter.key or b"") + len(letter.headers or b"")
    return size + _RECORD_BYTES + _FIXED_BYTES <= bytes_max


def prepare(daemon: Path, root: Root, route: str, *, retry_for: float = RETRY_SECONDS) -> None:
    """Create the dead-letter route if it is missing; wait ``retry_for`` seconds for a daemon."""
    with Producer(daemon, retry_for=retry_for) as producer:
        if not root.route(route).is_dir():
            producer.command("ROUTE", "ADD", route)


def send(
    daemon: Path,
    letters: Iterator[tuple[str, bytes]],
    *,
    seed: bytes,
    retry_for: float = RETRY_SECONDS,
    sent_before: SentBefore | None = None,
) -> list[Durable]:
    """Send payloads to routes. They are on disk when this returns, and never sent twice under the same seed.

    Args:
        retry_for: seconds to wait for a daemon.
        sent_before: for a retry, finds in the log the payloads that the daemon may have forgotten.
    """
    durable: list[Durable] = []
    while window := list(islice(letters, PRODUCER_WINDOW)):
        sender = producer_id(seed, window)
        known = sent_before.batches(sender, {route for route, _ in window}) if sent_before else {}
        durable += (known[number] for number in sorted(known))
        at = max(known, default=0)  # they were sent in order
        if at >= len(window):
            continue
        session = Session(socket_at(daemon), producer_id=sender, retry_for=retry_for, number=at)
        session.connect(retry_for)
        try:
            for route, payload in window[at:]:
                session.publish(route, payload, True, [])
            session.receive_all()
        except InvalidInput as error:
            session.receive_all()
            durable += session.pop_durable()
            raise Undeliverable(error.message, sent=sum(last - first + 1 for first, last in durable)) from error
        finally:
            session.close()
        durable += session.pop_durable()
    return durable


@dataclass(frozen=True, slots=True)
class SentBefore:
    """Search of the log for the batches of an interrupted handover, which come after the sequence ``after``."""

    log: Log
    after: int

    def batches(self, sender: int, routes: Collection[str]) -> dict[int, Durable]:
        # The user ids that the daemon may have seen as the sender: they differ between user namespaces.
        users = os.geteuid(), 0, self.log.root.path.stat().st_uid, UNKNOWN_USER
        ids = {stored_producer_id(user, sender) for user in users}
        found = {}
        for route in sorted(set(routes).intersection(self.log.routes())):
            for batch in self.log.batches(route, self.after + 1, on_missing="skip"):
                if batch.header.producer_id in ids:
                    found[batch.header.producer_sequence] = Durable(batch.first_sequence, batch.last_sequence)
        return found


def headers_of(record: Record) -> dict[str, str]:
    """Return the headers of a record; unless they are a JSON object of strings, one header in hexadecimal."""
    if record.headers is None:
        return {}
    try:
        headers = json.loads(record.headers.decode())
        if isinstance(headers, dict) and all(isinstance(value, str) for value in headers.values()):
            encode_headers(headers)  # raises for half of a surrogate pair, which cannot be sent
            return headers
    except (ValueError, RecursionError):
        pass
    return {_ODD: record.headers.hex()}


def producer_id(seed: bytes, window: Sequence[tuple[str, bytes]]) -> int:
    """Return the id of the producer that sends these payloads to these routes."""
    digest = hashlib.sha256(seed)
    for route, payload in window:
        digest.update(f"{route} {len(payload)} ".encode())
        digest.update(payload)
    return int.from_bytes(digest.digest()[:8]) or 1
