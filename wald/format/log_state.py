"""State of the log as control batches record it: routes, producers, peers.

The producer id that a batch has in the log, made from the id that a client gives and the user that it runs as.

The peer of a batch: the process that sent it, as the kernel reported it when the process connected.

The header of a batch has the number of its peer, which holds within the segment:

    0       not known: a program without the daemon wrote the batch
    1       the FIFO of the route, which does not say who writes to it
    2       the stdin of the daemon
    others  a process on the socket. Batch number x 8 of the segment introduced it: a CONTROL batch with the same number

The payload of the batch that introduces a peer is one line of JSON with the keys ``user``, ``pid`` and ``process`` (the
command name; "" where it could not be read). It stands in front of the first batch of the peer in the segment, and
was written together with it. So a segment says of itself who sent what is in it.

The state of a log, which its batches build up, and the payload of a CONTROL batch, which carries the state.

A CONTROL batch is the first batch of every segment and takes no sequence. It holds what recovery would otherwise have
to read older segments for. The payload, little-endian:

    one line of JSON, terminated by a newline:
        version    1
        next       the sequence that the next record gets
        at         append time of the last batch, ns since 1970
        routes     object: route → its last sequence; 0: none yet
        open       object: route → sequence of the record that has begun and not ended
        producers  how many producers follow
        previous   [salt, position] of the segment before: the salt as 8 hexadecimal digits, so that the length does not
                   depend on it, and the position at which the last batch ended; absent if not known
    for each producer, the least recently active first:
        u64  producer id
        u64  n, at most 16
        n times, the oldest batch first:
            u64  producer sequence
            u64  sequence of the first record
            u32  count of records
            u32  fingerprint
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

_OWNED = struct.Struct("<IQ")


@lru_cache(maxsize=1024)
def stored_producer_id(user_id: int, producer_id: int) -> int:
    """The producer id that the log has for a user's ``producer_id`` (0: none).

    Every reader of segments can see it. It does not reveal what it was made of, and another user cannot make it.
    """
    if not producer_id:
        return 0
    return int.from_bytes(blake2b(_OWNED.pack(user_id, producer_id), digest_size=8).digest()) or 1


UNKNOWN_PEER, FIFO_PEER, STDIN_PEER = 0, 1, 2
PEER_POSITION_MAX = (1 << 35) - 8  # its number has 32 bits


class BadPeer(ValueError):
    """The payload introduces no peer."""


class Peer(NamedTuple):
    """A process that has sent batches. A tuple, because one is looked up for every batch that is written.

    Attributes:
        user: the id of its user.
        pid: its number, as in the daemon's own /proc.
        process: the name of its command when it first sent a record on the connection; "": not known.
    """

    user: int
    pid: int
    process: str


@lru_cache(maxsize=256)  # for the length, and again for the batch
def encode_peer(peer: Peer) -> bytes:
    """Return the payload that introduces ``peer``."""
    line = {"user": peer.user, "pid": peer.pid, "process": peer.process}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def decode_peer(payload: bytes | memoryview) -> Peer:
    """The peer that a payload introduces.

    Raises:
        BadPeer: it introduces none.
    """
    try:
        line = json.loads(bytes(payload))
        return Peer(int(line["user"]), int(line["pid"]), str(line["process"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadPeer(f"no peer: {error}") from error


def peer_number(position: int) -> int:
    """The number of the peer that is introduced at ``position``, which is not above POSITION_MAX."""
    return position >> 3


def peer_position(number: int) -> int:
    """Where in the raw segment the peer is introduced that has this number."""
    return number << 3


VERSION = 1
PRODUCERS_MAX = 1024  # the least recently active is forgotten first; bounds the control batch to 400 KiB
PRODUCER_WINDOW = 16  # batches remembered per producer: a client may have so many in flight and retry all of them
_CONTINUED, _CONTROL, _DROPPED = int(Flag.CONTINUED), int(Flag.CONTROL), int(Flag.DROPPED)  # enums are slow
_PAIR = struct.Struct("<QQ")
_ENTRY = struct.Struct("<QQII")
_PRINTED = struct.Struct("<IBH")
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, struct.error)


class BadControl(ValueError):
    """The payload is not the state of a log, or a newer version wrote it."""


class PreviousEnd(NamedTuple):
    """The end of a complete segment: its salt, and the position at which its last batch ends."""

    salt: int
    position: int


class DedupEntry(NamedTuple):
    """One batch of a producer: its number, its sequences, and its :func:`fingerprint`."""

    producer_sequence: int
    first: int
    count: int  # type: ignore[assignment]  # tuples have a method of that name
    fingerprint: int

    @classmethod
    def of(cls, header: BatchHeader) -> Self:
        digest = fingerprint(
            body_checksum=header.body_checksum,
            payload_bytes=header.payload_bytes,
            encoding=header.encoding,
            route_bytes=header.route_bytes,
        )
        return cls(header.producer_sequence, header.base_sequence, header.count, digest)

    @property
    def last(self) -> int:
        return self.first + self.count - 1


def fingerprint(*, body_checksum: int, payload_bytes: int, encoding: int, route_bytes: int) -> int:
    """32 bits that distinguish batches with different routes, encodings or payloads, computed from the header.

    The checksum of the body covers route and payload, but not where the one ends and the other begins.
    """
    return crc32c(_PRINTED.pack(payload_bytes, encoding, route_bytes), body_checksum)


@dataclass(slots=True)
class Producers:
    """The last batches of each producer, by which a retry is recognised. The least recently active one is first."""

    table: dict[int, deque[DedupEntry]] = field(default_factory=dict)

    def find(self, producer_id: int, producer_sequence: int) -> DedupEntry | None:
        """The batch if it is already in the log and still remembered."""
        for written in reversed(self.table.get(producer_id, ())):
            if written.producer_sequence == producer_sequence:
                return written
        return None

    def expected(self, producer_id: int) -> int | None:
        """The next number of a known producer; None for one that may start anywhere."""
        window = self.table.get(producer_id)
        return window[-1].producer_sequence + 1 if window else None

    def forgotten_upto(self) -> int:
        """The last sequence that a batch of a forgotten producer may have; 0: none is forgotten.

        All that are forgotten were active before the one that would be forgotten next.
        """
        return next(iter(self.table.values()))[-1].first - 1 if len(self.table) >= PRODUCERS_MAX else 0

    def add(self, producer_id: int, written: DedupEntry) -> None:
        """Remember a batch that is durable."""
        window = self.table.pop(producer_id, None) or deque(maxlen=PRODUCER_WINDOW)
        window.append(written)
        self.table[producer_id] = window
        while len(self.table) > PRODUCERS_MAX:
            del self.table[next(iter(self.table))]


@dataclass(slots=True)
class LogState:
    """The state that the batches of a log build up. Each segment begins with the state at the end of the one before.

    Attributes:
        next_sequence: the number the next record gets.
        append_time_ns: of the last batch. That of the next one is not below it.
        routes: route → its last sequence (0: none yet).
        open_records: route → sequence of the record that has begun and not ended. If the next batch of the route does
            not continue it, its end is lost.
        previous: the end of the segment before the one that begins with this state; None if it is not known. It is
            about files and not about records, so equal states may differ in it.
    """

    next_sequence: int = 1
    append_time_ns: int = 0
    routes: dict[str, int] = field(default_factory=dict)
    open_records: dict[str, int] = field(default_factory=dict)
    producers: Producers = field(default_factory=Producers)
    previous: PreviousEnd | None = field(default=None, compare=False)

    def apply(self, header: BatchHeader, route: str, dropped: Mapping[str, int] | None = None) -> None:
        """Add the next batch of the log. A control batch adds only its append time: its payload is a state.

        One in the place of dropped batches adds their sequences, and ends the records that may have ended in them.

        Args:
            dropped: as of :func:`still_open`.
        """
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
            self.producers.add(producer_id, DedupEntry.of(header))


def still_open(open_records: Mapping[str, int], dropped: Mapping[str, int] | None) -> dict[str, int]:
    """Return the open records that have no piece among the batches that relief has dropped of a segment.

    Args:
        dropped: the last dropped sequence of each route; None: unknown, so any record may have a piece there.
    """
    if dropped is None:
        return {}
    return {route: at for route, at in open_records.items() if at > dropped.get(route, 0)}


def encode_state(state: LogState) -> bytes:
    """The payload that carries ``state``."""
    line = {
        "version": VERSION,
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
        parts.append(_PAIR.pack(producer_id, len(window)))
        parts += [_ENTRY.pack(w.producer_sequence, w.first, w.count, w.fingerprint) for w in window]
    return b"".join(parts)


def decode_state(payload: bytes | memoryview) -> LogState:
    """The state in ``payload``.

    Raises:
        BadControl: this version cannot read it.
    """
    data = bytes(payload)
    text, newline, rest = data.partition(b"\n")
    try:
        line = json.loads(text)
        if line["version"] != VERSION or not newline:
            raise BadControl(f"control state of version {line['version']}")
        state = LogState(int(line["next"]), int(line["at"]), _numbers(line["routes"]), _numbers(line["open"]))
        state.previous = _ending(line)
        position = 0
        for _ in range(int(line["producers"])):
            producer_id, count = _PAIR.unpack_from(rest, position)
            position += _PAIR.size
            if count > PRODUCER_WINDOW:
                raise BadControl(f"{count} batches of one producer")
            entries = (_ENTRY.unpack_from(rest, position + i * _ENTRY.size) for i in range(count))
            state.producers.table[producer_id] = deque(
                (DedupEntry(*entry) for entry in entries), maxlen=PRODUCER_WINDOW
            )
            position += count * _ENTRY.size
        if position != len(rest):
            raise BadControl(f"{len(rest) - position} bytes follow the last producer")
    except _UNREADABLE as error:
        raise BadControl(str(error)) from error
    return state


def decode_previous(payload: bytes | memoryview) -> PreviousEnd | None:
    """Return the end of the segment before, without the rest of the state; None if it is not known."""
    try:
        line = json.loads(bytes(payload).partition(b"\n")[0])
        return _ending(line) if line["version"] == VERSION else None
    except _UNREADABLE:
        return None


def _ending(line: Mapping[str, Any]) -> PreviousEnd | None:
    if line.get("previous") is None:
        return None
    salt, position = line["previous"]
    return PreviousEnd(int(salt, 16), int(position))


def _numbers(numbers: dict[str, int]) -> dict[str, int]:
    return {str(name): int(number) for name, number in numbers.items()}
