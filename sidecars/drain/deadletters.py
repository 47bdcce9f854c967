"""Dead letters: records as they were, with headers that say where they come from and why nobody wanted them.

    wald.origin.log  wald.origin.route  wald.origin.sequence  wald.origin.append_time_ns     where it was
    wald.group  wald.reason  wald.tries                                                      what happened there

Value, key, event time and the other headers are kept; headers that are not a JSON object of strings, which headers are
asked to be, are kept in hexadecimal as ``wald.origin.headers``.

They are sent in windows of as many requests as the daemon remembers of one producer, each window under an id made of
its content. So a window that is sent again, after a crash of ours, is recognised; and one that differs in anything, as
when damage has taken one of its records meanwhile, is another window, of which nothing is mistaken for sent.

A record may be too large: a pipe brings longer ones than a request to the daemon takes. It is never passed over unless
somebody decides so, and what comes before it is sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby, islice
from pathlib import Path

from sidecars.drain.handover import Handover
from wald.errors import InvalidInput
from wald.format.columns import encode
from wald.format.control import WINDOW
from wald.format.framing import REQUEST_MAX_BYTES
from wald.format.record import Record
from wald.producer import FRAME_MAX_BYTES, Durable, Producer
from wald.store.directory import Root

RETRY_SECONDS = 10.0  # for which a daemon that restarts is waited for
_FIXED_BYTES = 128  # of a payload besides its records: count, last offsets, padding
_RECORD_BYTES = 24  # of a record besides its bytes: a time, three offsets, its bits
PAYLOAD_MAX_BYTES = FRAME_MAX_BYTES  # the least that a daemon can be configured to take


class Undeliverable(Exception):
    """The daemon does not take a dead letter; its message says why.

    Attributes:
        sent: how many records are on disk as dead letters before the one it does not take.
    """

    def __init__(self, message: str, *, sent: int) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Origin:
    """Where records come from, and who could not process them."""

    log_id: bytes
    route: str
    group: str


def headers_of(handover: Handover, origin: Origin) -> dict[str, str]:
    """What all dead letters of a handover say."""
    return {
        "wald.origin.log": origin.log_id.hex(),
        "wald.origin.route": origin.route,
        "wald.group": origin.group,
        "wald.reason": handover.reason,
        "wald.tries": str(handover.tries),
    }


def payloads(records: Iterable[Record], headers: Mapping[str, str]) -> Iterator[bytes]:
    """The dead letters of ``records``, in order, as ``columns`` payloads of at most :data:`PAYLOAD_MAX_BYTES`.

    A record that is larger by itself goes alone, and the daemon judges it.
    """
    # Times are all there or all absent in one payload.
    for timed, run in groupby(records, lambda record: record.event_time_ns is not None):
        taken: list[tuple[Record, bytes]] = []
        taken_bytes = 0
        for record in run:
            header = _header(record, headers)
            record_bytes = _letter_bytes(record, header)
            if taken and taken_bytes + record_bytes > PAYLOAD_MAX_BYTES - _FIXED_BYTES:
                yield _payload(taken, timed=timed)
                taken, taken_bytes = [], 0
            taken.append((record, header))
            taken_bytes += record_bytes
        yield _payload(taken, timed=timed)


def fits(record: Record, headers: Mapping[str, str], *, bytes_max: int = REQUEST_MAX_BYTES) -> bool:
    """Whether a record by itself makes a payload of at most ``bytes_max``; more than the default no daemon takes."""
    return _letter_bytes(record, _header(record, headers)) + _FIXED_BYTES <= bytes_max


def prepare(daemon: Path, root: Root, route: str) -> None:
    """Make the dead-letter route if it is missing.

    Raises:
        Unavailable: no daemon.
        Refused: the daemon does not let us.
    """
    with Producer(daemon, retry_for=RETRY_SECONDS) as producer:
        if not root.route(route).is_dir():
            producer.command("ROUTE", "ADD", route)


def send(daemon: Path, route: str, letters: Iterator[bytes], *, seed: bytes) -> list[Durable]:
    """Send payloads of dead letters; on disk when this returns. What was sent before under this seed is not doubled.

    Raises:
        Undeliverable: a payload is too large; all before it are on disk.
        WaldError: as :meth:`wald.producer.Producer.publish`.
    """
    durable: list[Durable] = []
    while window := list(islice(letters, WINDOW)):
        with Producer(daemon, producer_id=producer_id(seed, window), retry_for=RETRY_SECONDS) as producer:
            try:
                for payload in window:
                    producer.publish(route, payload, columns=True)
                durable += producer.flush()
            except InvalidInput as error:
                durable += producer.flush()
                raise Undeliverable(error.message, sent=sum(last - first + 1 for first, last in durable)) from error
    return durable


def seed_of(handover: Handover, origin: Origin) -> bytes:
    """What tells this handover from any other."""
    told = (origin.log_id.hex(), origin.route, origin.group, *astuple(handover))
    return hashlib.sha256(repr(told).encode()).digest()


def producer_id(seed: bytes, window: Sequence[bytes]) -> int:
    """Under which these payloads are sent."""
    digest = hashlib.sha256(seed)
    for payload in window:
        digest.update(payload)
    return int.from_bytes(digest.digest()[:8]) or 1


def _letter_bytes(record: Record, header: bytes) -> int:
    return len(record.value) + len(record.key or b"") + len(header) + _RECORD_BYTES


def _header(record: Record, headers: Mapping[str, str]) -> bytes:
    told = _own_headers(record) | dict(headers)
    told["wald.origin.sequence"] = str(record.sequence)
    told["wald.origin.append_time_ns"] = str(record.append_time_ns)
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()


def _own_headers(record: Record) -> dict[str, str]:
    if record.headers is None:
        return {}
    try:
        told = json.loads(record.headers.decode())
        if isinstance(told, dict) and all(isinstance(value, str) for value in told.values()):
            json.dumps(told, ensure_ascii=False).encode()  # half of a surrogate pair could not be sent
            return told
    except (ValueError, RecursionError):
        pass
    return {"wald.origin.headers": record.headers.hex()}


def _payload(taken: Sequence[tuple[Record, bytes]], *, timed: bool) -> bytes:
    keys = [record.key for record, _ in taken]
    return encode(
        [record.value for record, _ in taken],
        keys=keys if any(key is not None for key in keys) else None,
        times_ns=[record.event_time_ns or 0 for record, _ in taken] if timed else None,
        headers=[header for _, header in taken],
    )
