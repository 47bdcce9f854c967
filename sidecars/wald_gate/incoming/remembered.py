"""What is remembered of keys: a table in SQLite, made from the marks in the log and read on from where it ends.

The log is the truth, the table is not: it is needed to find a part quickly, and to know of those that RECLAIM has
removed. If it is lost, damaged, of another log, or of another past of this log (which was copied back), it is made
again from the log. A key is remembered for a day after the last part that was stored under it, among the last million
parts.

One thread uses it. One gate at a time has the file; another gate of the same log has a table in memory, and reads the
same log. So each of them is right, and the file has one writer.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path
from threading import Event

from wald.errors import Damaged, Unavailable
from wald.files.disk import Disk
from wald.files.layout import require_no_link
from wald.format.batch import StoredBatch
from wald.format.log_state import BadControl, decode_state
from wald.log import Log
from wald.reading.assembler import Batch
from wald.reading.reader import read_selection
from wald.reading.selection import Selection
from wald.segments.durable_end import lost_head
from wald.segments.raw_scan import FIRST_BATCH
from wald.segments.seek import sequence_since
from wald.segments.view import View
from wald_gate.incoming.marks import Part, Slots, mark_in

KEPT = timedelta(days=1)
KEPT_PARTS = 1_000_000
_PORTION = 256  # batches, which are read and saved at a time; some ten milliseconds
_VERSION = 1
_TABLES = """
create table parts (
    key blob, number integer, first integer, last integer, digest blob, time_ns integer, primary key (key, number)
) without rowid;
create index parts_by_time on parts (time_ns);
create table origin (log_id blob);
create table upto (sequence integer, time_ns integer, checksum integer);
"""
_FORGET = """
with old as (select distinct key from parts where time_ns < ?1) delete from parts where key in (
    select key from old where not exists (select 1 from parts where parts.key = old.key and parts.time_ns >= ?1)
)
"""  # each key is looked at once, as one may have thousands of parts
_KEPT_NS = int(KEPT.total_seconds()) * 10**9
_Upto = tuple[int, int, int]  # the sequence of the last record that was read, and what is known of its batch
_log = logging.getLogger("wald_gate")


class Remembered:
    """The parts that are stored under keys, and the numbers of the slots.

    Args:
        ends: set when the gate ends. What reads the log then raises Unavailable, as it may have to read for minutes.

    Attributes:
        seen: the sequence up to which the log is read.
    """

    def __init__(self, log: Log, slots: Slots, ends: Event) -> None:
        self._log = log
        self._slots = slots
        self._ends = ends
        self._lock: int | None = None
        self._path = self._own_file()
        self._unsaved: dict[tuple[bytes, int], tuple[Part, int]] = {}
        self._failed = False
        self._last: dict[int, tuple[int, int]] = {}  # of a slot: the sequence of its last batch, and the number of it
        self._has_gap = False  # the last batch of a slot may be among what was passed over
        self.seen = 0
        self._table = self._opened()
        with ExitStack() as failing:
            failing.callback(self.close)  # the next try needs the lock
            self._upto: _Upto | None = self._table.execute("select sequence, time_ns, checksum from upto").fetchone()
            self._saved_upto = self._upto
            self.follow()
            self._read_on()
            failing.pop_all()

    def parts(self, key: bytes) -> dict[int, Part]:
        """The parts that are stored under a key, by their numbers.

        Raises:
            Damaged: the table was damaged, and the head of the log is lost.
        """
        try:
            rows = self._table.execute("select number, first, last, digest from parts where key = ?", (key,)).fetchall()
        except sqlite3.DatabaseError as error:
            _log.warning("%s: %s; it is made again from the log", self._path, error)
            self.begin_again()
            return self.parts(key)
        found = {number: Part(first, last, digest) for number, first, last, digest in rows}
        return found | {number: part for (of, number), (part, _) in self._unsaved.items() if of == key}

    def add(self, key: bytes, parts: Mapping[int, Part]) -> None:
        """Remember parts that are stored; they are in the file after :meth:`save`."""
        now_ns = time.time_ns()
        self._unsaved |= {(key, number): (part, now_ns) for number, part in parts.items()}

    def save(self) -> None:
        """Save what is not saved yet; what a full disk has no room for is kept until it has."""
        if self._unsaved:
            self._save()

    def follow(self) -> None:
        """Forget everything if the log is not the one that is remembered; then it is to be read from its beginning."""
        if not self._follows():
            self._forget_all()

    def slot(self, number: int) -> tuple[int, int]:
        """The number of the last batch of a slot, and the sequence up to which the log is read."""
        return self._last.get(number, (0, 0))[1], self.seen

    def read_portion(self) -> bool:
        """Take in some of what the log has got since; whether there is more.

        Raises:
            Damaged: the head of the log is lost.
            Unavailable: the gate ends.
        """
        if self._ends.is_set():
            raise Unavailable("the gate is stopping", hint="send it again")
        view = self._log.view()
        if view.bound.head_lost:
            raise lost_head(self._log.root, view.bound)
        first = self._next(view)
        last = (1 << 64) - 1 if view.bound.sequence is None else view.bound.sequence
        self._see(first, first - 1)
        read = 0
        for batch in islice(_span(view, first, last), _PORTION) if first <= last else ():
            read += 1
            header = batch.header
            is_ours = self._take(header.producer_id, header.base_sequence, header.producer_sequence)
            if is_ours and (mark := mark_in(batch)) is not None:
                self._unsaved[mark.key, mark.number] = mark.part, batch.append_time_ns
            self._upto = batch.last_sequence, batch.append_time_ns, header.body_checksum
            self._see(header.base_sequence, batch.last_sequence)
        if read:
            self._save()
        if read == _PORTION:
            return True
        if view.bound.sequence is not None:
            self._see(last + 1, last)  # what is lost in front of it cannot be seen
        if self._has_gap:
            self._read_numbers(view)
            self._has_gap = False
        return False

    def is_true(self, key: bytes, number: int, part: Part) -> bool:
        """Whether the log has this part where it is remembered, or does not have that place any more."""
        view = self._log.view()
        if view.bound.sequence is not None and part.last > view.bound.sequence:
            return False
        found = list(_span(view, part.first, part.last))
        return not found or mark_in(found[0]) == (key, number, part)

    def begin_again(self) -> None:
        """Forget everything, and read what the log has."""
        self._forget_all()
        self._read_on()

    def close(self) -> None:
        """Give the table to the next gate."""
        self._table.close()
        if self._lock is not None:
            os.close(self._lock)

    def _read_on(self) -> None:
        while self.read_portion():
            pass

    def _own_file(self) -> Path | None:
        """The file, which is then locked; None if another gate has it, or this user may not make it."""
        disk = Disk()
        directory = self._log.root.gate
        try:
            require_no_link(directory)
            disk.make_directory(directory)
            self._lock = disk.open_lock(directory / "keys.lock")
            if disk.lock(self._lock):
                return directory / "keys.db"
            reason = "another gate has it"
        except (OSError, Damaged) as error:
            reason = str(error)
        _log.warning("%s: %s; this gate remembers keys as far as the log has them", directory, reason)
        return None

    def _opened(self) -> sqlite3.Connection:
        if self._path is None:
            return self._new(":memory:")
        table = None
        try:
            os.close(Disk().open_or_create(self._path))
            table = _connected(self._path)
            if self._is_of_this_log(table):
                return table
        except (sqlite3.Error, OSError) as error:
            _log.warning("%s: %s; it is made again from the log", self._path, error)
        if table is not None:
            table.close()
        return self._made_again()

    def _is_of_this_log(self, table: sqlite3.Connection) -> bool:
        expected = {
            "pragma user_version": _VERSION,
            "pragma quick_check(1)": "ok",
            "select log_id from origin": self._log.identity.log_id,
        }
        return all(table.execute(question).fetchone() == (answer,) for question, answer in expected.items())

    def _made_again(self) -> sqlite3.Connection:
        assert self._path is not None
        try:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
            os.close(Disk().create(self._path))
            return self._new(self._path)
        except (sqlite3.Error, OSError) as error:
            _log.warning("%s: %s; keys are remembered in memory", self._path, error)
            return self._new(":memory:")

    def _new(self, path: Path | str) -> sqlite3.Connection:
        table = _connected(path)
        table.executescript(f"begin; {_TABLES} pragma user_version = {_VERSION}; commit;")
        with table:
            table.execute("insert into origin values (?)", (self._log.identity.log_id,))
        return table

    def _forget_all(self) -> None:
        self._table.close()
        self._unsaved.clear()
        self._last.clear()
        self.seen = 0
        self._upto = self._saved_upto = None
        self._table = self._new(":memory:") if self._path is None else self._made_again()

    def _follows(self) -> bool:
        """Whether the batch that was read last is still the one at its place."""
        if self._upto is None:
            return True
        sequence, time_ns, checksum = self._upto
        view = self._log.view()
        if view.bound.sequence is not None and sequence > view.bound.sequence:
            return False
        found = list(_span(view, sequence, sequence))
        return not found or (found[0].append_time_ns, found[0].header.body_checksum) == (time_ns, checksum)

    def _next(self, view: View) -> int:
        """Where to read on; what is older than a day is passed over."""
        oldest_ns = time.time_ns() - _KEPT_NS
        following, read_ns = (self._upto[0] + 1, self._upto[1]) if self._upto else (1, 0)
        return following if read_ns >= oldest_ns else max(following, sequence_since(view, oldest_ns))

    def _see(self, first: int, last: int) -> None:
        """Have read from ``first`` to ``last``; what is before that and has not been read is passed over."""
        self._has_gap |= first > self.seen + 1
        self.seen = max(self.seen, last)

    def _read_numbers(self, view: View) -> None:
        """Take the numbers of the slots from the state that the newest segment begins with, and from its batches."""
        readable = [s for s in view.segments if s.base_sequence <= view.bound.segment and view.limit(s) != 0]
        if not readable:
            return
        with closing(view.open(readable[-1])) as segment:
            for met in segment.batches(FIRST_BATCH, view.limit(readable[-1])):
                if not isinstance(met, StoredBatch):
                    continue
                if met.header.is_state:
                    with suppress(BadControl):
                        for producer_id, written in decode_state(met.payload).producers.table.items():
                            self._take(producer_id, written[-1].first, written[-1].producer_sequence)
                elif not met.header.is_control:
                    self._take(met.header.producer_id, met.header.base_sequence, met.header.producer_sequence)

    def _take(self, producer_id: int, sequence: int, number: int) -> bool:
        """Take in a batch; whether it is of a slot. The last one counts: an id that was forgotten may begin anew."""
        slot = self._slots.of_producer(producer_id)
        if slot is None:
            return False
        self._last[slot] = max((sequence, number), self._last.get(slot, (0, 0)))
        return True

    def _save(self) -> None:
        """The same, and up to where the log is read."""
        rows = [(key, number, *part, time_ns) for (key, number), (part, time_ns) in self._unsaved.items()]
        try:
            with self._table:
                self._table.executemany("insert or replace into parts values (?, ?, ?, ?, ?, ?)", rows)
                if self._upto is not None and self._upto != self._saved_upto:
                    self._table.execute("delete from upto")
                    self._table.execute("insert into upto values (?, ?, ?)", self._upto)
                    self._forget_old(self._upto[1])
        except sqlite3.DatabaseError as error:
            if not self._failed:
                _log.warning("%s: %s; what is stored is remembered in memory meanwhile", self._path, error)
            self._failed = True
        else:
            self._unsaved.clear()
            self._saved_upto = self._upto
            self._failed = False

    def _forget_old(self, now_ns: int) -> None:
        """Forget the keys of which the last part is old, or not among the last million."""
        behind = self._table.execute(
            "select time_ns from parts order by time_ns desc limit 1 offset ?", (KEPT_PARTS,)
        ).fetchone()
        limit_ns = max(now_ns - _KEPT_NS, *behind) if behind else now_ns - _KEPT_NS
        self._table.execute(_FORGET, (limit_ns,))


def _connected(path: Path | str) -> sqlite3.Connection:
    """In WAL with ``synchronous = normal``: a kill loses nothing, a power cut at most what the log still has."""
    table = sqlite3.connect(path, check_same_thread=False)
    table.execute("pragma journal_mode = wal")
    table.execute("pragma synchronous = normal")
    return table


def _span(view: View, first: int, last: int) -> Iterator[Batch]:
    return read_selection(view, Selection(None, first, last=last), on_missing="skip", on_damage=lambda _: None)
