"""Idempotency keys, and the table of the parts stored under each.

A client names a request with the header ``Idempotency-Key`` (draft-ietf-httpapi-idempotency-key-header-07). A key
belongs to a client and a route. The first record of each part that is stored under a key has a mark in the log, a
header that only batches of the gates' own producer ids (:func:`slot_ids`) may have:

    wald.idempotency    KEY/PART, the key in hexadecimal; KEY/PART/last for the last part of a body

The table is in memory, and in ``gate/keys.log``, from which the next gate reads it. Keys missing from the file, for
example after a kill, are restored from the marks in the log. The file also keeps keys whose records were reclaimed. It
has a header and entries of 72 bytes, which are only appended; once it is twice as long as needed, it is replaced. Only
one gate on a log writes the file. A key is kept for a day after its last part, if that is one of the last million
parts.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from hashlib import blake2b
from itertools import islice
from threading import Event, Lock
from typing import NamedTuple
from zlib import crc32

from wald.client.payloads import encode_headers
from wald.errors import Damaged, InvalidInput, Unavailable
from wald.files.disk import Disk
from wald.files.layout import require_no_link
from wald.format.batch import StoredBatch
from wald.format.log_state import BadControl, decode_state, stored_producer_id
from wald.format.records import BadColumns, first_headers, with_first_headers
from wald.log import Log
from wald.reading.assembler import Batch
from wald.reading.reader import read_selection
from wald.reading.selection import Selection
from wald.segments.durable_end import lost_head
from wald.segments.raw_scan import FIRST_BATCH
from wald.segments.seek import sequence_since
from wald.segments.view import View

HEADER = "idempotency-key"
REPLAYED = "Idempotency-Replayed"
SLOTS = 256  # producer ids, of the 1,024 that the daemon remembers; each has one request in flight
KEPT = timedelta(days=1)
KEPT_PARTS = 1_000_000
_PORTION = 256  # batches read and saved at a time, in some ten milliseconds
_KEPT_NS = int(KEPT.total_seconds()) * 10**9
_MAX_LENGTH = 255
_STRING = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')  # RFC 8941, section 3.3.3
_PLAIN = re.compile(r"[\x21\x23-\x7e]+")
_SPACED = re.compile(r"[\x20\x21\x23-\x7e]+")
_HINT = 'Idempotency-Key: "8e03978e-40d5-43e8-bc93-6894a57f9324", as uuidgen prints it'
_MARK_HEADER = "wald.idempotency"
_MARK = re.compile(r"([0-9a-f]{32})/([1-9][0-9]{0,8})(?:/last)?")
_log = logging.getLogger("wald_gate")


def key_of(fields: Sequence[str], client: str, route: str) -> bytes | None:
    """Return the key of a request as 16 bytes, or None without an ``Idempotency-Key``.

    ``fields`` are the values of that header: quoted strings, as in the draft, or plain, as most clients send them.
    """
    if not fields:
        return None
    if len(fields) > 1:
        raise InvalidInput("duplicate Idempotency-Key header", hint=_HINT)
    field = fields[0].strip()
    quoted = _STRING.fullmatch(field)
    text = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else field
    if not text or len(text) > _MAX_LENGTH:
        raise InvalidInput(f"Idempotency-Key has {len(text)} characters; 1 to {_MAX_LENGTH} are allowed", hint=_HINT)
    if not (quoted or _PLAIN.fullmatch(field)):
        shown = field[:40].encode("latin-1").decode(errors="replace")
        wrong = "has a space, and no quotes around it" if _SPACED.fullmatch(field) else "has non-ASCII characters"
        raise InvalidInput(f"Idempotency-Key {shown!r} {wrong}", hint=_HINT)
    digest = blake2b(digest_size=16)
    for part in (client, route, text):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


class Part(NamedTuple):
    """Stored part of a body: sequences, number, a digest of the records, and a flag for the last part."""

    first: int
    last: int
    digest: bytes


def marked(payload: bytes, key: bytes, number: int, *, is_last: bool) -> bytes:
    """Add the mark of part ``number`` (from 1) to a payload of columns."""
    headers = first_headers(payload)
    fields = json.loads(headers) if headers else {}
    fields[_MARK_HEADER] = f"{key.hex()}/{number}{'/last' if is_last else ''}"
    return with_first_headers(payload, encode_headers(fields))


def digest_of(payload: bytes | memoryview) -> bytes:
    return blake2b(payload, digest_size=16).digest()


def _read_mark(batch: Batch) -> tuple[bytes, int, Part] | None:
    """Return the key, the number and the part of a batch; None without a mark."""
    if not batch.is_columns or batch.skipped:
        return None
    try:
        headers = first_headers(batch.payload)
        found = _MARK.fullmatch(json.loads(headers)[_MARK_HEADER]) if headers else None
    except (BadColumns, ValueError, LookupError, TypeError, RecursionError):
        return None
    if found is None:
        return None
    part = Part(batch.first_sequence, batch.last_sequence, digest_of(batch.payload))
    return bytes.fromhex(found[1]), int(found[2]), part


def slot_ids(log_id: bytes) -> list[int]:
    """Return the producer ids, one per slot, under which the gates of this user store requests with a key.

    They are few, so that the daemon does not forget other producers. The slot of a key is its first byte.
    """
    return [int.from_bytes(blake2b(b"%d" % slot, key=log_id, digest_size=8).digest()) or 1 for slot in range(SLOTS)]


class Entry(NamedTuple):
    """Entry of the table and its file: a part or, with number 0, the position up to which the log was read.

    ``serial`` counts the parts. The position of a batch is its last sequence, and its checksum in ``last``.
    """

    key: bytes
    number: int
    first: int
    last: int
    digest: bytes
    time_ns: int
    serial: int


_ENTRY = struct.Struct("<16sIQQ16sQQ")
_CHECKSUM = struct.Struct("<I")
_ENTRY_BYTES = _ENTRY.size + _CHECKSUM.size
_CHUNK_ENTRIES = 1024
_SPARE_ENTRIES = 100_000  # 7 MB; a file is not replaced to free less
_NOTHING = bytes(16)


class KeyFile:
    """Append-only file of entries; stores nothing if it is locked or cannot be opened."""

    def __init__(self, log: Log) -> None:
        self._disk = Disk()
        self._directory = log.root.gate
        self._path = self._directory / "keys.log"
        self._header = (b"wald keys, version 1\n" + log.identity.log_id).ljust(_ENTRY_BYTES, b"\0")
        self._lock: int | None = None
        self._descriptor: int | None = None
        self._end = 0
        self._has_failed = False
        try:
            require_no_link(self._directory)
            self._disk.make_directory(self._directory)
            self._lock = self._disk.open_lock(self._directory / "keys.lock")
            if self._disk.lock(self._lock):
                self._descriptor = self._disk.open_or_create(self._path)
                return
            reason = "another gate has locked it"
        except (OSError, Damaged) as error:
            reason = str(error)
        _log.warning("%s: %s; this gate knows only the keys whose records are in the log", self._directory, reason)

    @property
    def entries(self) -> int:
        return self._end // _ENTRY_BYTES

    def read(self) -> Iterator[Entry | None]:
        """Yield the entries, with None for each damaged one. Empty the file if it belongs to another log or version."""
        if self._descriptor is None:
            return
        try:
            with open(self._descriptor, "rb", closefd=False) as file:
                if file.read(_ENTRY_BYTES) != self._header:
                    self.clear()
                    return
                self._end = _ENTRY_BYTES
                while chunk := file.read(_CHUNK_ENTRIES * _ENTRY_BYTES):
                    for start in range(0, len(chunk) - _ENTRY_BYTES + 1, _ENTRY_BYTES):
                        data = chunk[start : start + _ENTRY.size]
                        (checksum,) = _CHECKSUM.unpack_from(chunk, start + _ENTRY.size)
                        yield Entry(*_ENTRY.unpack(data)) if crc32(data) == checksum else None
                        self._end += _ENTRY_BYTES
        except OSError as error:
            _log.warning("%s: %s; the keys are read from the log", self._path, error)
            yield None

    def append(self, entries: Iterable[Entry]) -> bool:
        """Write entries; return False if they must be written again later."""
        if self._descriptor is None:
            return True
        with self._reporting():
            header = b"" if self._end else self._header
            self._end += self._disk.write(self._descriptor, [header + _encode(entries)], self._end)
            self._has_failed = False
        return not self._has_failed

    def sync(self) -> None:
        """Make the entries survive a power cut. Lost entries are read from the log, if it still has them."""
        if self._descriptor is not None:
            with self._reporting():
                self._disk.sync(self._descriptor)

    def clear(self) -> None:
        if self._descriptor is not None:
            self._end = 0
            try:
                self._disk.truncate(self._descriptor, 0)
            except OSError as error:
                self._warn(error)
                os.close(self._descriptor)
                self._descriptor = None

    def replace(self, entries: Iterable[Entry]) -> None:
        """Replace the file with one that has these entries; keep the current one if the disk is full."""
        if self._descriptor is None:
            return
        data = self._header + _encode(entries)
        with self._reporting():  # an error before the rename, or in the directory sync after it
            self._disk.replace(self._path, data)
        with self._reporting():
            descriptor = self._disk.open(self._path)
            if os.path.sameopenfile(descriptor, self._descriptor):
                os.close(descriptor)
            else:
                os.close(self._descriptor)
                self._descriptor, self._end = descriptor, len(data)

    def close(self) -> None:
        for descriptor in (self._descriptor, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._descriptor = self._lock = None

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Log disk errors instead of raising them."""
        try:
            yield
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_failed:
            _log.warning("%s: %s; new keys are in memory until it can be written", self._path, error)
        self._has_failed = True


def _encode(entries: Iterable[Entry]) -> bytes:
    packed = (_ENTRY.pack(*entry) for entry in entries)
    return b"".join(data + _CHECKSUM.pack(crc32(data)) for data in packed)


_HEAD = struct.Struct("<QQ")  # serial and time of the last part of a key
_PART = struct.Struct("<IQQ16s")


def _place(packed: bytes, number: int) -> tuple[int, int]:
    """Return the start and end of a part in a key's sorted parts; both are the insertion point if it is missing."""
    size = _PART.size
    end = min(len(packed), _HEAD.size + number * size)  # usually all earlier parts are present
    while end > _HEAD.size:
        (found,) = struct.unpack_from("<I", packed, end - size)
        if found == number:
            return end - size, end
        if found < number:
            break
        end -= size
    return end, end


class KeyStore:
    """Table of the parts stored under keys, and the slots' numbers, kept current with the log.

    One thread uses it, except for :meth:`parts` and :meth:`add`. Once ``stopping`` is set, reading the log, which may
    take minutes, raises Unavailable. A key is one string of bytes, because there may be a million; the one whose last
    part is oldest comes first.
    """

    def __init__(self, log: Log, stopping: Event) -> None:
        self._log = log
        ids = slot_ids(log.identity.log_id)
        self._slots = {stored_producer_id(os.geteuid(), producer_id): slot for slot, producer_id in enumerate(ids)}
        self._stopping = stopping
        self._keys: dict[bytes, bytes] = {}
        self.count = 0  # of parts
        self._serial = 0
        self._unsaved: deque[Entry] = deque()
        self._lock = Lock()  # a part in the table is in _unsaved too, before a position after it is saved
        self._saved_position: Entry | None = None
        self._position: Entry | None = None
        self._slot_ends: dict[int, tuple[int, int]] = {}  # by slot: sequence and number of its last batch
        self._has_gap = False  # the last batch of a slot may be among those that were not read
        self._seen = 0
        with ExitStack() as failing:
            self._file = KeyFile(log)
            failing.callback(self._file.close)  # the next attempt needs the lock
            self._load()
            self.follow()
            while self.read_portion():
                pass
            failing.pop_all()

    def parts(self, key: bytes) -> dict[int, Part]:
        packed = self._keys.get(key, b"")[_HEAD.size :]
        return {number: Part(*part) for number, *part in _PART.iter_unpack(packed)}

    def add(self, key: bytes, parts: Mapping[int, Part]) -> None:
        """Add stored parts; :meth:`save` writes them to the file."""
        now_ns = time.time_ns()
        for number, part in parts.items():
            self._add(key, number, part, now_ns)

    def save(self) -> None:
        """Write new entries to the file. Without space on the disk, they stay in memory until there is some."""
        with self._lock:
            entries = list(self._unsaved)
            self._unsaved.clear()
        has_moved = self._position is not None and self._position != self._saved_position
        if has_moved and self._position is not None:
            self._expire(self._position.time_ns - _KEPT_NS)
            entries.append(self._position)
        if not entries:
            return
        if not self._file.append(entries):
            self._unsaved.extendleft(entry for entry in reversed(entries) if entry.number)
            return
        self._saved_position = self._position
        if self._file.entries > 2 * self.count + _SPARE_ENTRIES:
            self._replace_file()

    def sync(self) -> None:
        self._file.sync()

    def follow(self) -> None:
        """Forget everything if another log, or an older copy of this one, is at the path."""
        if not self._is_continued():
            self._forget()

    def slot(self, number: int) -> tuple[int, int]:
        """Return the number of a slot's last batch, and the sequence up to which the log is read."""
        return self._slot_ends.get(number, (0, 0))[1], self._seen

    def read_portion(self) -> bool:
        """Read some of the records since the last call; return True if there are more."""
        if self._stopping.is_set():
            raise Unavailable("the gate is stopping", hint="send it again")
        view = self._log.view()
        if view.bound.head_lost:
            raise lost_head(self._log.root, view.bound)
        first = self._next_sequence(view)
        last = (1 << 64) - 1 if view.bound.sequence is None else view.bound.sequence
        self._see(first, first - 1)
        read = 0
        for batch in islice(_batches(view, first, last), _PORTION) if first <= last else ():
            read += 1
            header, time_ns = batch.header, batch.append_time_ns
            is_ours = self._count(header.producer_id, header.base_sequence, header.producer_sequence)
            if is_ours and (mark := _read_mark(batch)) is not None:
                self._add(*mark, time_ns)
            self._position = Entry(_NOTHING, 0, batch.last_sequence, header.body_checksum, _NOTHING, time_ns, 0)
            self._see(header.base_sequence, batch.last_sequence)
        if read:
            self.save()
        if read == _PORTION:
            return True
        if view.bound.sequence is not None:
            self._see(last + 1, last)  # a loss before it cannot be seen
        if self._has_gap:
            self._read_slot_ends(view)
            self._has_gap = False
        return False

    def has_part(self, key: bytes, number: int, part: Part) -> bool:
        """Return True if the log has this part at its position, or no longer has that position."""
        found = self._batches_at(part.first, part.last)
        return found is not None and (not found or _read_mark(found[0]) == (key, number, part))

    def rebuild(self) -> None:
        self._forget()
        while self.read_portion():
            pass

    def close(self) -> None:
        self._file.close()

    def _add(self, key: bytes, number: int, part: Part, time_ns: int, serial: int = 0) -> None:
        """Add or replace a part, unless the table has it; one without a serial number has to be saved."""
        encoded = _PART.pack(number, *part)
        with self._lock:
            packed = self._keys.get(key, _HEAD.pack(0, 0))
            start, end = _place(packed, number)
            if packed[start:end] == encoded:
                return
            self._keys.pop(key, None)
            self._serial = max(self._serial, serial or self._serial + 1)
            self.count += start == end
            head = _HEAD.pack(serial or self._serial, time_ns)
            self._keys[key] = head + packed[_HEAD.size : start] + encoded + packed[end:]
            if not serial:
                self._unsaved.append(Entry(key, number, *part, time_ns, self._serial))

    def _expire(self, oldest_ns: int) -> None:
        """Remove the keys whose last part is older, or not one of the last million."""
        with self._lock:
            expired = []
            for key, packed in self._keys.items():
                serial, time_ns = _HEAD.unpack_from(packed)
                if time_ns >= oldest_ns and serial > self._serial - KEPT_PARTS:
                    break
                expired.append(key)
            for key in expired:
                self.count -= (len(self._keys.pop(key)) - _HEAD.size) // _PART.size

    def _entries(self) -> Iterator[Entry]:
        with self._lock:
            keys = dict(self._keys)
        for key, packed in keys.items():
            serial, time_ns = _HEAD.unpack_from(packed)
            for number, first, last, digest in _PART.iter_unpack(packed[_HEAD.size :]):
                yield Entry(key, number, first, last, digest, time_ns, serial)

    def _load(self) -> None:
        is_intact = True
        for entry in self._file.read():
            if entry is None:
                is_intact = False  # the log is read again from the preceding position
            elif entry.number:
                self._add(entry.key, entry.number, Part(*entry[2:5]), entry.time_ns, entry.serial)
            elif is_intact:
                self._position = self._saved_position = entry
        if self._position is not None:
            self._expire(self._position.time_ns - _KEPT_NS)
        if not is_intact:
            _log.warning("%s: damaged entries; their keys are read from the log", self._log.root.gate / "keys.log")
            self._replace_file()

    def _replace_file(self) -> None:
        self._file.replace([*self._entries(), *filter(None, [self._position])])

    def _forget(self) -> None:
        with self._lock:
            self._keys.clear()
            self.count = 0
            self._unsaved.clear()
        self._slot_ends.clear()
        self._seen = 0
        self._position = self._saved_position = None
        self._file.clear()

    def _is_continued(self) -> bool:
        """Return True if the last batch read is still at its position."""
        if self._position is None:
            return True
        sequence, same = self._position.first, (self._position.time_ns, self._position.last)
        found = self._batches_at(sequence, sequence)
        return found is not None and (not found or (found[0].append_time_ns, found[0].header.body_checksum) == same)

    def _batches_at(self, first: int, last: int) -> list[Batch] | None:
        """Return the batches with these sequences; None if the log ends before them."""
        view = self._log.view()
        if view.bound.sequence is not None and last > view.bound.sequence:
            return None
        return list(_batches(view, first, last))

    def _next_sequence(self, view: View) -> int:
        """Return the next sequence to read; records older than a day are skipped."""
        oldest_ns = time.time_ns() - _KEPT_NS
        if self._position is not None and self._position.time_ns >= oldest_ns:
            return self._position.first + 1
        return max(self._position.first + 1 if self._position else 1, sequence_since(view, oldest_ns))

    def _see(self, first: int, last: int) -> None:
        """Record that ``first`` to ``last`` have been read; any gap before them was skipped."""
        self._has_gap |= first > self._seen + 1
        self._seen = max(self._seen, last)

    def _read_slot_ends(self, view: View) -> None:
        """Read the slots' numbers from the state at the start of the newest segment and from its batches."""
        readable = [s for s in view.segments if s.base_sequence <= view.bound.segment and view.limit(s) != 0]
        if not readable:
            return
        with closing(view.open(readable[-1])) as segment:
            for found in segment.batches(FIRST_BATCH, view.limit(readable[-1])):
                if not isinstance(found, StoredBatch):
                    continue
                if found.header.is_state:
                    with suppress(BadControl):
                        for producer_id, written in decode_state(found.payload).producers.table.items():
                            self._count(producer_id, written[-1].first, written[-1].producer_sequence)
                elif not found.header.is_control:
                    self._count(found.header.producer_id, found.header.base_sequence, found.header.producer_sequence)

    def _count(self, producer_id: int, sequence: int, number: int) -> bool:
        """Update the last batch of a slot; return False for other producers. A forgotten id may restart its numbers."""
        slot = self._slots.get(producer_id)
        if slot is None:
            return False
        self._slot_ends[slot] = max((sequence, number), self._slot_ends.get(slot, (0, 0)))
        return True


def _batches(view: View, first: int, last: int) -> Iterator[Batch]:
    return read_selection(view, Selection(None, first, last=last), on_missing="skip", on_damage=lambda _: None)
