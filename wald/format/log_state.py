"""Log states and peers, the payloads of control batches.

The first batch of each segment stores the log state, so that recovery need not read older segments.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, Self

from wald.format.batch import BatchHeader, Flag
from wald.format.checksum import crc32c

UNKNOWN_PEER, FIFO_PEER, STDIN_PEER = 0, 1, 2
PEER_POSITION_MAX = (1 << 35) - 8  # a peer's number has 32 bits
_VERSION = 1
PRODUCERS_MAX = 1024  # limits the control batch to 400 KiB
PRODUCER_WINDOW = 16  # batches that a client may have in flight and retry
_CONTINUED, _CONTROL, _DROPPED = int(Flag.CONTINUED), int(Flag.CONTROL), int(Flag.DROPPED)  # enums are slow
_WINDOW_HEADER = struct.Struct("<QQ")
_WINDOW_ENTRY = struct.Struct("<QQII")
_OWNER_AND_PRODUCER = struct.Struct("<IQ")
_FINGERPRINT_FIELDS = struct.Struct("<IBH")
_DECODE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, struct.error)


@lru_cache(maxsize=1024)
def stored_producer_id(user_id: int, producer_id: int) -> int:
    """Hash a client's producer id, so that readers cannot learn it, nor other users forge it."""
    if not producer_id:
        return 0
    return int.from_bytes(blake2b(_OWNER_AND_PRODUCER.pack(user_id, producer_id), digest_size=8).digest()) or 1


class BadControl(ValueError):
    """Neither a log state nor a peer, or of a newer version."""


class Peer(NamedTuple):
    """A process that has sent batches; a tuple, because every batch looks up its peer.

    Attributes:
        user: user id.
        pid: process id, as in the daemon's own /proc.
        process: command name when the connection sent its first record; "" if unknown.
    """

    user: int
    pid: int
    process: str


@lru_cache(maxsize=256)  # called for the length, then for the batch
def encode_peer(peer: Peer) -> bytes:
    return json.dumps(peer._asdict(), separators=(",", ":")).encode() + b"\n"


def decode_peer(payload: bytes | memoryview) -> Peer:
    try:
        line = json.loads(bytes(payload))
        return Peer(int(line["user"]), int(line["pid"]), str(line["process"]))
    except _DECODE_ERRORS as error:
        raise BadControl(f"the payload is not a peer: {error}") from error


def peer_number(position: int) -> int:
    """Return the number of the peer that the batch at ``position`` introduces."""
    return position >> 3


def peer_position(number: int) -> int:
    """Invert :func:`peer_number`."""
    return number << 3


class PreviousEnd(NamedTuple):
    """The previous segment's salt, and the end of its last batch."""

    salt: int
    position: int


class DedupEntry(NamedTuple):
    """A producer's batch, kept to recognize a retry by its producer sequence and :func:`fingerprint`."""

    producer_sequence: int
    first: int
    count: int  # type: ignore[assignment]
    fingerprint: int

    @classmethod
    def from_header(cls, header: BatchHeader) -> Self:
        digest = fingerprint(header.body_checksum, header.payload_bytes, header.encoding, header.route_bytes)
        return cls(header.producer_sequence, header.base_sequence, header.count, digest)

    @property
    def last(self) -> int:
        return self.first + self.count - 1


def fingerprint(body_checksum: int, payload_bytes: int, encoding: int, route_bytes: int) -> int:
    """Return a checksum of route, encoding and payload: the body's checksum does not show where the route ends."""
    return crc32c(_FINGERPRINT_FIELDS.pack(payload_bytes, encoding, route_bytes), body_checksum)


@dataclass(slots=True)
class Producers:
    """Deduplication windows, least recently active producer first."""

    table: dict[int, deque[DedupEntry]] = field(default_factory=dict)

    def find(self, producer_id: int, producer_sequence: int) -> DedupEntry | None:
        for entry in reversed(self.table.get(producer_id, ())):
            if entry.producer_sequence == producer_sequence:
                return entry
        return None

    def next_expected(self, producer_id: int) -> int | None:
        """Return a producer's next producer sequence; None if every number is allowed."""
        window = self.table.get(producer_id)
        return window[-1].producer_sequence + 1 if window else None

    def evicted_upto(self) -> int:
        """Return an upper bound for the sequences of evicted producers; 0 if none was evicted.

        The last batch of every evicted producer is older than that of the next to be evicted.
        """
        return next(iter(self.table.values()))[-1].first - 1 if len(self.table) >= PRODUCERS_MAX else 0

    def add(self, producer_id: int, entry: DedupEntry) -> None:
        window = self.table.pop(producer_id, None) or deque(maxlen=PRODUCER_WINDOW)
        window.append(entry)
        self.table[producer_id] = window
        while len(self.table) > PRODUCERS_MAX:
            del self.table[next(iter(self.table))]


@dataclass(slots=True)
class LogState:
    """State accumulated from the batches of a log."""

    next_sequence: int = 1
    append_time_ns: int = 0  # never decreases
    routes: dict[str, int] = field(default_factory=dict)
    open_records: dict[str, int] = field(default_factory=dict)  # route → record that its next batch must continue
    producers: Producers = field(default_factory=Producers)
    previous: PreviousEnd | None = field(default=None, compare=False)  # it describes files, not the log

    def apply(self, header: BatchHeader, route: str, dropped: Mapping[str, int] | None = None) -> None:
        """Update the state from the next batch. See :func:`still_open` for ``dropped``."""
        _, _, base, time_ns, producer_id, _, count, _, _, flags, _, _ = header
        if time_ns > self.append_time_ns:
            self.append_time_ns = time_ns
        if flags & _DROPPED:
            self.next_sequence = max(self.next_sequence, base + count)
            self.open_records = still_open(self.open_records, dropped)
        if flags & _CONTROL:
            return
        end = base + count
        if end > self.next_sequence:
            self.next_sequence = end
        if count:
            self.routes[route] = end - 1
        if flags & _CONTINUED:
            self.open_records[route] = header.open_sequence
        elif self.open_records:
            self.open_records.pop(route, None)
        if producer_id:
            self.producers.add(producer_id, DedupEntry.from_header(header))


def still_open(open_records: Mapping[str, int], dropped: Mapping[str, int] | None) -> dict[str, int]:
    """Return the open records that did not end in dropped batches.

    ``dropped`` is each route's last dropped sequence. If that is unknown, any record may have ended.
    """
    if dropped is None:
        return {}
    return {route: sequence for route, sequence in open_records.items() if sequence > dropped.get(route, 0)}


def encode_state(state: LogState) -> bytes:
    line = {
        "version": _VERSION,
        "next": state.next_sequence,
        "at": state.append_time_ns,
        "routes": state.routes,
        "open": state.open_records,
        "producers": len(state.producers.table),
    }
    if state.previous is not None:
        line["previous"] = [f"{state.previous.salt:08x}", state.previous.position]
    parts = [json.dumps(line, separators=(",", ":")).encode(), b"\n"]
    for producer_id, window in state.producers.table.items():
        parts.append(_WINDOW_HEADER.pack(producer_id, len(window)))
        parts += [_WINDOW_ENTRY.pack(w.producer_sequence, w.first, w.count, w.fingerprint) for w in window]
    return b"".join(parts)


def decode_state(payload: bytes | memoryview) -> LogState:
    data = bytes(payload)
    text, newline, rest = data.partition(b"\n")
    try:
        line = json.loads(text)
        if line["version"] != _VERSION or not newline:
            raise BadControl(f"version {line['version']} of the log state is unknown")
        state = LogState(int(line["next"]), int(line["at"]), _int_values(line["routes"]), _int_values(line["open"]))
        state.previous = _previous_end(line)
        position = 0
        for _ in range(int(line["producers"])):
            producer_id, count = _WINDOW_HEADER.unpack_from(rest, position)
            position += _WINDOW_HEADER.size
            if count > PRODUCER_WINDOW:
                raise BadControl(f"a producer has {count} batches; the limit is {PRODUCER_WINDOW}")
            entries = [_WINDOW_ENTRY.unpack_from(rest, position + i * _WINDOW_ENTRY.size) for i in range(count)]
            state.producers.table[producer_id] = deque(map(DedupEntry._make, entries), PRODUCER_WINDOW)
            position += count * _WINDOW_ENTRY.size
        if position != len(rest):
            raise BadControl(f"{len(rest) - position} bytes follow the last producer")
    except _DECODE_ERRORS as error:
        raise BadControl(str(error)) from error
    return state


def decode_previous(payload: bytes | memoryview) -> PreviousEnd | None:
    """Decode only :attr:`LogState.previous`; None if it is unknown."""
    try:
        line = json.loads(bytes(payload).partition(b"\n")[0])
        return _previous_end(line) if line["version"] == _VERSION else None
    except _DECODE_ERRORS:
        return None


def _previous_end(line: Mapping[str, Any]) -> PreviousEnd | None:
    if line.get("previous") is None:
        return None
    salt, position = line["previous"]
    return PreviousEnd(int(salt, 16), int(position))


def _int_values(numbers: dict[str, int]) -> dict[str, int]:
    return {str(name): int(number) for name, number in numbers.items()}
