"""Dead letters: records as they were, with headers that say where they come from and why nobody wanted them.

    wald.origin.log  wald.origin.route  wald.origin.sequence  wald.origin.append_time_ns     where it was
    wald.group  wald.reason  wald.tries                                                      what happened there

Value, key, event time and the other headers are kept; headers that are not a JSON object of strings, which headers are
asked to be, are kept in hexadecimal as ``wald.origin.headers``.

So each can be put back to where it came from, as it was.

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
from dataclasses import astuple, dataclass, replace
from itertools import groupby, islice
from pathlib import Path

from wald.errors import InvalidInput, command_line
from wald.format.columns import encode
from wald.format.names import is_route
from wald.format.protocol import REQUEST_MAX_BYTES
from wald.format.record import Record
from wald.format.state import WINDOW
from wald.payloads import FRAME_MAX_BYTES
from wald.producer import Durable, Producer
from wald.store.files.directory import Root
from wald_drain.handover import Handover

RETRY_SECONDS = 10.0  # for which a daemon that restarts is waited for
_FIXED_BYTES = 128  # of a payload besides its records: count, last offsets, padding
_RECORD_BYTES = 24  # of a record besides its bytes: a time, three offsets, its bits
PAYLOAD_MAX_BYTES = FRAME_MAX_BYTES  # the least that a daemon can be configured to take
_LOG, _ROUTE, _SEQUENCE, _TIME = (f"wald.origin.{name}" for name in ("log", "route", "sequence", "append_time_ns"))
_ODD = "wald.origin.headers"
_OURS = frozenset({_LOG, _ROUTE, _SEQUENCE, _TIME, "wald.group", "wald.reason", "wald.tries"})


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
        _LOG: origin.log_id.hex(),
        _ROUTE: origin.route,
        "wald.group": origin.group,
        "wald.reason": handover.reason,
        "wald.tries": str(handover.tries),
    }


def dead_letter(record: Record, headers: Mapping[str, str], route: str) -> Record:
    """What goes to ``route`` for a record that was given up; its sequence is still that of the record."""
    told = _own_headers(record) | dict(headers)
    told[_SEQUENCE] = str(record.sequence)
    told[_TIME] = str(record.append_time_ns)
    return replace(record, route=route, headers=_encoded(told))


def original(letter: Record, log_id: bytes, root: Path) -> Record:
    """What goes back to where a dead letter came from; its sequence is still that of the letter.

    Raises:
        InvalidInput: it is no dead letter of the log with this id, which is at ``root``.
    """
    told = _own_headers(letter)
    route = told.get(_ROUTE, "")
    if told.get(_LOG) != log_id.hex() or not is_route(route):
        passing = command_line(root, f"cursor set {letter.route} {letter.sequence}")
        raise InvalidInput(
            f"{letter.route} {letter.sequence}: is not a dead letter of this log",
            hint=f"{passing} passes over it; then the same again",
        )
    own = {name: value for name, value in told.items() if name not in _OURS}
    try:
        headers = bytes.fromhex(own[_ODD]) if _ODD in own else _encoded(own) if own else None
    except ValueError:  # that was not ours
        headers = _encoded(own)
    return replace(letter, route=route, headers=headers)


def payloads(letters: Iterable[Record]) -> Iterator[tuple[str, bytes]]:
    """Letters, in order, as routes and ``columns`` payloads of at most :data:`PAYLOAD_MAX_BYTES`.

    A letter that is larger by itself goes alone, and the daemon judges it.
    """
    # Times are all there or all absent in one payload.
    for (route, timed), run in groupby(letters, lambda letter: (letter.route, letter.event_time_ns is not None)):
        taken: list[Record] = []
        taken_bytes = 0
        for letter in run:
            letter_bytes = _letter_bytes(letter)
            if taken and taken_bytes + letter_bytes > PAYLOAD_MAX_BYTES - _FIXED_BYTES:
                yield route, _payload(taken, timed=timed)
                taken, taken_bytes = [], 0
            taken.append(letter)
            taken_bytes += letter_bytes
        yield route, _payload(taken, timed=timed)


def fits(letter: Record, *, bytes_max: int = REQUEST_MAX_BYTES) -> bool:
    """Whether a letter by itself makes a payload of at most ``bytes_max``; more than the default no daemon takes."""
    return _letter_bytes(letter) + _FIXED_BYTES <= bytes_max


def prepare(daemon: Path, root: Root, route: str) -> None:
    """Make the dead-letter route if it is missing.

    Raises:
        Unavailable: no daemon.
        Refused: the daemon does not let us.
    """
    with Producer(daemon, retry_for=RETRY_SECONDS) as producer:
        if not root.route(route).is_dir():
            producer.command("ROUTE", "ADD", route)


def send(daemon: Path, letters: Iterator[tuple[str, bytes]], *, seed: bytes) -> list[Durable]:
    """Send routes and payloads; on disk when this returns. What was sent before under this seed is not doubled.

    Raises:
        Undeliverable: a payload is too large; all before it are on disk.
        WaldError: as :meth:`wald.producer.Producer.publish`.
    """
    durable: list[Durable] = []
    while window := list(islice(letters, WINDOW)):
        with Producer(daemon, producer_id=producer_id(seed, window), retry_for=RETRY_SECONDS) as producer:
            try:
                for route, payload in window:
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


def producer_id(seed: bytes, window: Sequence[tuple[str, bytes]]) -> int:
    """Under which these payloads are sent to these routes."""
    digest = hashlib.sha256(seed)
    for route, payload in window:
        digest.update(f"{route} {len(payload)} ".encode())
        digest.update(payload)
    return int.from_bytes(digest.digest()[:8]) or 1


def _letter_bytes(letter: Record) -> int:
    return len(letter.value) + len(letter.key or b"") + len(letter.headers or b"") + _RECORD_BYTES


def _encoded(headers: Mapping[str, str]) -> bytes:
    return json.dumps(headers, ensure_ascii=False, separators=(",", ":")).encode()


def _own_headers(record: Record) -> dict[str, str]:
    if record.headers is None:
        return {}
    try:
        told = json.loads(record.headers.decode())
        if isinstance(told, dict) and all(isinstance(value, str) for value in told.values()):
            _encoded(told)  # half of a surrogate pair could not be sent
            return told
    except (ValueError, RecursionError):
        pass
    return {_ODD: record.headers.hex()}


def _payload(taken: Sequence[Record], *, timed: bool) -> bytes:
    keys = [letter.key for letter in taken]
    headers = [letter.headers for letter in taken]
    return encode(
        [letter.value for letter in taken],
        keys=keys if any(key is not None for key in keys) else None,
        times_ns=[letter.event_time_ns or 0 for letter in taken] if timed else None,
        headers=headers if any(header is not None for header in headers) else None,
    )
