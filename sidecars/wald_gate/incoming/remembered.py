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
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

from wald.errors import Damaged
from wald.format.parsing import StoredBatch
from wald.format.state import BadControl, decode_state
from wald.log import Log
from wald.store.files.directory import require_no_link
from wald.store.files.disk import Disk
from wald.store.reading.batches import Batch
from wald.store.reading.reader import read_span
from wald.store.segments.head import lost_head
from wald.store.segments.raw import FIRST_BATCH
from wald.store.segments.seeking import sequence_since
from wald.store.segments.view import View
from wald_gate.incoming.marks import Part, Slots, mark_in

KEPT = timedelta(days=1)
KEPT_PARTS = 1_000_000
_PORTION = 256
_VERSION = 1
_TABLES = """
create table parts (
    key blob, number integer, first integer, last integer, digest blob, time_ns integer, primary key (key, number)
) without rowid;
create index parts_by_time on parts (time_ns);
create table origin (log_id blob);
create table upto (sequence integer, time_ns integer, checksum integer);
"""
_Row = tuple[bytes, int, int, int, bytes, int]
_log = logging.getLogger("wald_gate")


class Remembered:
    """The parts that are stored under keys, and the numbers of the slots.

    Attributes:
        numbers: of each slot that the log has a batch of, the number of its last one.
    """

    def __init__(self, log: Log, slots: Slots) -> None:
        self._log = log
        self._slots = slots
        self._lock: int | None = None
        self._path = self._own_file()
        self._unsaved: dict[tuple[bytes, int], Part] = {}
        self.numbers: dict[int, int] = {}
        self._table = self._opened()
        if not self._follows():
            self._begin_again()
        self._read_numbers()
        self.read_on()

    def parts(self, key: bytes) -> dict[int, Part]:
        """The parts that are stored under a key, by their numbers."""
        rows = self._table.execute("select number, first, last, digest from parts where key = ?", (key,))
        found = {number: Part(first, last, digest) for number, first, last, digest in rows}
        return found | {number: part for (of, number), part in self._unsaved.items() if of == key}

    def add(self, key: bytes, parts: Mapping[int, Part]) -> None:
        """Remember parts that are stored; what the disk has no room for is kept here until it has."""
        self._unsaved |= {(key, number): part for number, part in parts.items()}
        with suppress(sqlite3.OperationalError):
            self._save([], time.time_ns(), None)

    def read_on(self) -> None:
        """Take in what the log has got since.

        Raises:
            Damaged: the head of the log is lost.
        """
        if not self._follows():
            self._begin_again()
        view = self._log.view()
        self._read(view, self._upto() + 1 or self._beginning(view))

    def is_true(self, key: bytes, number: int, part: Part) -> bool:
        """Whether the log has this part where it is remembered, or does not have that place any more."""
        view = self._log.view()
        if view.bound.sequence is not None and part.last > view.bound.sequence:
            return False
        found = list(_span(view, part.first, part.last))
        return not found or mark_in(found[0]) == (key, number, part)

    def begin_again(self) -> None:
        """Forget everything, and read what the log has."""
        self._begin_again()
        self._read_numbers()
        self.read_on()

    def close(self) -> None:
        """Save how far the log is read."""
        with closing(self._table), suppress(Damaged, OSError, sqlite3.Error):
            self.read_on()
        if self._lock is not None:
            os.close(self._lock)

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

    def _begin_again(self) -> None:
        self._table.close()
        self._unsaved.clear()
        self.numbers.clear()
        self._table = self._new(":memory:") if self._path is None else self._made_again()

    def _upto(self) -> int:
        """Up to which record the log is read; -1: none of it."""
        row = self._table.execute("select sequence from upto").fetchone()
        return -1 if row is None else int(row[0])

    def _follows(self) -> bool:
        """Whether the batch that was read last is still the one at its place."""
        row = self._table.execute("select sequence, time_ns, checksum from upto").fetchone()
        if row is None or not row[0]:
            return True
        sequence, *before = row
        view = self._log.view()
        if view.bound.sequence is not None and sequence > view.bound.sequence:
            return False
        found = list(_span(view, sequence, sequence))
        return not found or [found[0].append_time_ns, found[0].header.body_checksum] == before

    def _beginning(self, view: View) -> int:
        return sequence_since(view, int((datetime.now(UTC) - KEPT).timestamp() * 1e9))

    def _read_numbers(self) -> None:
        """Take the numbers of the slots from the state that the newest segment begins with, and from its batches."""
        view = self._log.view()
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
                            self._number(producer_id, written[-1].producer_sequence)
                elif not met.header.is_control:
                    self._number(met.header.producer_id, met.header.producer_sequence)

    def _number(self, producer_id: int, number: int) -> int | None:
        slot = self._slots.of_producer(producer_id)
        if slot is not None:
            self.numbers[slot] = number
        return slot

    def _read(self, view: View, first: int) -> None:
        if view.bound.lost:
            raise lost_head(self._log.root, view.bound)
        if view.bound.sequence is not None and first > view.bound.sequence:
            return
        last = (1 << 64) - 1 if view.bound.sequence is None else view.bound.sequence
        with suppress(sqlite3.OperationalError):  # a full disk: it is read again
            for batches in _portions(_span(view, first, last)):
                rows = []
                for batch in batches:
                    header = batch.header
                    is_ours = self._number(header.producer_id, header.producer_sequence) is not None
                    if is_ours and (mark := mark_in(batch)) is not None:
                        rows.append((mark.key, mark.number, *mark.part, batch.append_time_ns))
                self._save(rows, batches[-1].append_time_ns, batches[-1])

    def _save(self, rows: list[_Row], now_ns: int, newest: Batch | None) -> None:
        """Save rows, what was not saved before, and with ``newest`` up to which batch the log is read."""
        unsaved = [(key, number, *part, now_ns) for (key, number), part in self._unsaved.items()]
        with self._table:
            self._table.executemany("insert or replace into parts values (?, ?, ?, ?, ?, ?)", unsaved + rows)
            if newest is not None:
                end = newest.last_sequence, newest.append_time_ns, newest.header.body_checksum
                self._table.execute("delete from upto")
                self._table.execute("insert into upto values (?, ?, ?)", end)
                self._forget(now_ns)
        self._unsaved.clear()

    def _forget(self, now_ns: int) -> None:
        """Forget the keys of which the last part is old, or not among the last million."""
        limit_ns = now_ns - int(KEPT.total_seconds() * 1e9)
        row = self._table.execute(
            "select time_ns from parts order by time_ns desc limit 1 offset ?", (KEPT_PARTS,)
        ).fetchone()
        limit_ns = max(limit_ns, row[0] if row else limit_ns)
        self._table.execute(
            "delete from parts where time_ns < ?1 and key not in (select key from parts where time_ns >= ?1)",
            (limit_ns,),
        )


def _connected(path: Path | str) -> sqlite3.Connection:
    """In WAL with ``synchronous = normal``: a kill loses nothing, a power cut at most what the log still has."""
    table = sqlite3.connect(path, check_same_thread=False)
    table.execute("pragma journal_mode = wal")
    table.execute("pragma synchronous = normal")
    return table


def _portions(batches: Iterator[Batch]) -> Iterator[list[Batch]]:
    """As many batches as are saved at once; they hold on to their bytes, so not too many."""
    while portion := list(islice(batches, _PORTION)):
        yield portion


def _span(view: View, first: int, last: int) -> Iterator[Batch]:
    return read_span(view, routes=None, first=first, last=last, loss=True, on_damage=lambda _: None)
