"""Commit rounds: collect, write, sync, publish, reply.

A payload too large for memory, gathered in an unnamed file beside the segments.

The file has no name, so nothing of it is left if the daemon dies; its bytes go to the segment inside the kernel.

One turn: the drafts of the sources, the memory they lie in, and their places in the log after the commit.

Records of one route and one peer without a producer id become one batch; a batch with a producer id stays one, because
it may have to be recognised again. A :class:`Ticket` is a claim on the sequences that the records will have once they
are durable.

The step that makes a turn durable: place, prepare the sources, write, sync, move the head, release the sources.

Failures are handled here too. After a failed write or sync the descriptor is not used again; the log continues in a
new segment, and the same batch is committed there. A full disk raises :class:`Full`, and committing the same turn again
continues where it stopped. Any other failure of the disk ends the daemon and leaves everything as it is.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from stringzilla import count as count_bytes
from structlog.typing import FilteringBoundLogger

from wald.daemon.metrics import Metrics
from wald.errors import DISK_FULL, DiskFailure
from wald.files.disk import Disk, free_bytes
from wald.files.layout import Root
from wald.files.safe_open import InPlaceFile
from wald.files.uptime import ClockStep, add_step
from wald.format.batch import Buffer, Encoding, Flag, padding
from wald.format.checksum import crc32c
from wald.format.head import LINE_BYTES, Head, encode_head
from wald.format.log_state import DedupEntry, Producers
from wald.format.protocol import Code, ProtocolError, Publish
from wald.format.records import decode as decode_columns
from wald.format.times import utc
from wald.hints import hint_for
from wald.settings import Config
from wald.writing.daemon_lock import Lock, root_gone
from wald.writing.disk_budget import Cause, DiskBudget, Sizes
from wald.writing.writer import Draft, Route, Sender, Writer


class Spooling:
    """One request's payload on its way into the file.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, request: Publish, route: Route, directory: Path) -> None:
        self.request = request
        self.route = route
        self.missing_bytes = request.payload_bytes
        self.newlines = 0
        self.ends_in_newline = False
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  (closed after the turn)
        self._checksum = crc32c(route.prefix)

    def feed(self, part: memoryview) -> None:
        """Add the next part of the payload.

        Raises:
            OSError: there is no room for it, and the payload cannot become whole.
        """
        if part:
            self._checksum = crc32c(part, self._checksum)
            self.newlines += int(count_bytes(part, b"\n"))
            self.ends_in_newline = part[-1] == ord("\n")
            self.missing_bytes -= len(part)
        while part:
            part = part[self._file.write(part) :]

    @property
    def descriptor(self) -> int:
        """The descriptor of the file."""
        return self._file.fileno()

    @property
    def promised_bytes(self) -> int:
        """What it may still take on the disk: the rest of the file, and a copy of it in the log."""
        return self.missing_bytes + self.request.payload_bytes

    @property
    def body_checksum(self) -> int:
        """The checksum of the batch that the whole payload makes."""
        return crc32c(padding(self.request.payload_bytes), self._checksum)

    def columns_count(self) -> int:
        """How many records the payload has as columns.

        Raises:
            BadColumns: it is not well-formed.
        """
        mapped = mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ)  # unmapped with the last view of it
        return decode_columns(memoryview(mapped)).count

    def close(self) -> None:
        self._file.close()


ARENA_BYTES = 4 << 20  # several pipe chunks; at a millisecond a turn more would not be faster


class Arena:
    """The memory of one turn: every byte that arrives lies in it until it is durable, so the daemon's size is fixed.

    It is handed out from the front, and emptied when a turn begins.
    """

    def __init__(self, length: int = ARENA_BYTES) -> None:
        self.buffer = bytearray(length)
        self.view = memoryview(self.buffer)
        self.used = 0

    @property
    def free(self) -> int:
        """Bytes that can still be handed out in this turn."""
        return len(self.buffer) - self.used

    def reset(self) -> None:
        """Begin a turn: what was handed out is no longer needed."""
        self.used = 0


class Ticket(NamedTuple):
    """A claim on ``records`` records of ``draft``, the first of which is number ``offset``."""

    draft: Draft
    offset: int
    records: int

    def sequences(self) -> tuple[int, int]:
        """Return the first and the last sequence, after the commit."""
        first = self.draft.base_sequence + self.offset
        return first, first + self.records - 1


@dataclass(slots=True)
class CommitRound:
    """The drafts of one round of the loop.

    Attributes:
        committed: how many of ``drafts`` are durable.
    """

    producers: Producers
    drafts: list[Draft] = field(default_factory=list)
    committed: int = 0
    payload_bytes: int = 0
    _merging: dict[tuple[str, Sender], Draft] = field(default_factory=dict)
    _published: dict[int, dict[int, Ticket]] = field(default_factory=dict)

    @property
    def open_routes(self) -> frozenset[str]:
        """The routes on which a record is left open."""
        return frozenset(draft.route.name for draft in self.drafts if draft.flags & Flag.CONTINUED)

    def add(self, draft: Draft) -> None:
        """Add a source's own batch."""
        self.drafts.append(draft)
        self.payload_bytes += draft.payload_bytes

    def publish_lines(self, route: Route, payload: Buffer, count: int, peer: Sender) -> Ticket:
        """Take lines without a producer; they join the peer's batch of this turn on the route."""
        draft = self._merging.get((route.name, peer))
        length = len(payload)
        if draft is None:
            draft = self._merging[route.name, peer] = Draft(route, [payload], length, count, peer=peer)
            self.add(draft)
            return Ticket(draft, 0, count)
        ticket = Ticket(draft, draft.count, count)
        draft.payload.append(payload)
        draft.payload_bytes += length
        draft.count += count
        self.payload_bytes += length
        return ticket

    def publish(
        self,
        request: Publish,
        producer_id: int,
        route: Route,
        payload: Buffer | None,
        count: int,
        peer: Sender,
        spooling: Spooling | None = None,
    ) -> Ticket | DedupEntry:
        """Take a batch that stays one; what is in the log already is answered instead of taken.

        Args:
            producer_id: as it will be in the log; 0: none.
            payload: None if ``spooling`` has it.

        Raises:
            ProtocolError: under this number the producer sent something else, its batches are not consecutive, it
                asks for one too old to be remembered, or it may be forgotten with batches that it has not seen.
        """
        number = request.producer_sequence
        draft = Draft(
            route,
            [] if payload is None else [payload],
            request.payload_bytes,
            count,
            encoding=Encoding.COLUMNS if request.columns else Encoding.LINES,
            producer_id=producer_id,
            producer_sequence=number,
            peer=peer,
        )
        if spooling is not None:
            draft.spool, draft.body_checksum = spooling.descriptor, spooling.body_checksum
        ticket = Ticket(draft, 0, count)
        if not producer_id:
            self.add(draft)
            return ticket
        if known := self._known(draft):
            return known
        self._check_order(producer_id, number, request.seen)
        self.add(draft)
        self._published.setdefault(producer_id, {})[number] = ticket
        return ticket

    def _known(self, draft: Draft) -> Ticket | DedupEntry | None:
        """Return the result of the batch that this one repeats; None if it is new."""
        producer_id, number = draft.producer_id, draft.producer_sequence
        here = self._published.get(producer_id, {}).get(number)
        known = here or self.producers.find(producer_id, number)
        if known is None:
            return None
        before = known.fingerprint if isinstance(known, DedupEntry) else known.draft.fingerprint
        if before != draft.fingerprint:
            raise ProtocolError(Code.CONFLICT, f"batch {number} of this producer is already another one")
        return known

    def _check_order(self, producer_id: int, number: int, seen: int | None) -> None:
        here = self._published.get(producer_id)
        expected = max(here) + 1 if here else self.producers.expected(producer_id)
        if expected is None and seen is not None and seen < (upto := self.producers.forgotten_upto()):
            raise ProtocolError(Code.FORGOTTEN, f"this producer may be forgotten; its batches may go up to {upto}")
        if expected is None or number == expected:
            return
        if number < expected:
            raise ProtocolError(Code.FORGOTTEN, f"batch {number} of this producer is too old to be remembered")
        raise ProtocolError(Code.GAP, f"batch {expected} of this producer is missing before {number}")


_FULL_SECONDS = 0.25  # how long a disk that was full is taken to be
_CAUSE_SECONDS = 5.0  # between checks of what fills the disk
_NAME_SECONDS = 1.0  # between checks of the active segment's name, if nothing is written
_NAME_PATIENCE_SECONDS = 2.0  # how long the active segment may stay without its name if the disk is not full
_CUT_RETRY_SECONDS = 1.0  # between attempts to cut if the disk has no room for the next segment


class Full(DiskFailure):
    """The disk cannot take the turn now, usually because it is full; the turn can be committed later."""


class Sources(Protocol):
    """The sources that act when their bytes go to disk and when they are there."""

    def before_write(self, drafts: Sequence[Draft], segment: int) -> None:
        """The bytes are about to be written."""

    def after_sync(self, drafts: Sequence[Draft]) -> list[str]:
        """The bytes are durable; returns messages about what went wrong with them since."""


class Committer:
    """Writes, syncs and publishes turns, and reacts when the disk fails.

    Attributes:
        degraded: whether input waits for a disk that is full, or was a moment ago.
        left_bytes: how much could be taken when the free space was last read.
    """

    def __init__(
        self,
        root: Root,
        disk: Disk,
        writer: Writer,
        lock: Lock,
        room: DiskBudget,
        sources: Sources,
        config: Config,
        metrics: Metrics,
        journal: FilteringBoundLogger,
    ) -> None:
        self.writer = writer
        self.degraded = False
        self.left_bytes = self._free_bytes = self._needed_bytes = 0
        self._config = config
        self._root = root
        self._disk = disk
        self._lock = lock
        self._room = room
        self._sources = sources
        self._metrics = metrics
        self._journal = journal
        self._head = InPlaceFile(root.head, LINE_BYTES, disk)
        self._filled_at: float | None = None  # when the active segment got its first record
        self._age_share = 1.0  # of segment_max_age, at which the active segment is cut
        self._cut_again_at = self._full_until = self._cause_again_at = self._name_again_at = 0.0
        self._unnamed_at: float | None = None  # since when it is known that the active segment has no name
        self._refused = False  # the disk did not take the last turn
        self._degraded_by: Cause | None = None  # as it was last reported
        self._request_held = False  # a request waits for more room than there is
        self._synced_at = time.monotonic()
        self._publish()
        self._head.sync()  # before any input is taken: a power cut must leave a head, and everything above it a name

    def take_over(self, config: Config, sizes: Sizes) -> None:
        """Go on with other settings."""
        self._config = config
        self._room.resize(sizes)
        self.writer.resize_segments(sizes.segment_bytes)

    @property
    def head(self) -> Head:
        """What the head file says."""
        writer = self.writer
        return Head(
            writer.state.next_sequence - 1,
            writer.base_sequence,
            writer.position,
            writer.epoch,
            writer.state.append_time_ns,
        )

    def commit(self, turn: CommitRound) -> None:
        """Make every draft of ``turn`` durable; ``turn.committed`` grows as they are.

        Raises:
            Full: not all of them; commit the same turn again when there is room.
            DiskFailure: not all of them, and there will be no later.
            Locked: another daemon has taken the root over.
        """
        while turn.committed < len(turn.drafts):
            drafts = turn.drafts[turn.committed :] if turn.committed else turn.drafts
            turn.committed += self._commit(drafts)

    def cut(self) -> bool:
        """Cut the active segment if it holds a record; False if it does not, or if there is no room for the next.

        Raises:
            Locked: another daemon has taken the root over.
        """
        now = time.monotonic()
        if not self.writer.advanced or self.writer.failed or now < self._cut_again_at:
            return False
        self._require_lock()
        try:
            self.keep_name()
            if not self.leave_truncated():
                self.writer.cut(now_ns=time.time_ns())
        except (OSError, Full) as error:
            self._cut_again_at = now + _CUT_RETRY_SECONDS
            self._journal.error("cut failed", reason=str(error), next="the segment grows until there is room")
            return False
        self._filled_at = None
        self._metrics.cuts += 1
        self._publish()
        return True

    def step_clock(self, step: ClockStep) -> bool:
        """Record a clock step and begin a segment after it; return False if that is not possible now.

        Raises:
            Locked: another daemon has taken the root over.
        """
        writer = self.writer
        if writer.failed or not writer.may_step_clock:
            return False
        self._require_lock()
        try:
            self.keep_name()
            if self.leave_truncated():  # the step names the sequence from before
                return False
            add_step(self._root, self._disk, step)  # before any segment has earlier times
            writer.step_clock(now_ns=step.at_ns)
        except (OSError, Full) as error:
            self._journal.error("clock step failed", reason=str(error), next="append times go on as before")
            return False
        self._filled_at = None
        self._metrics.cuts += 1
        self._publish()
        self._journal.warning("clock step", base=step.base, before=utc(step.before_ns), now=utc(step.at_ns))
        return True

    def tend(self, now: float) -> bool:
        """Cut by age and sync by interval, where they are due; whether a segment was cut.

        Raises:
            Locked: another daemon has taken over. A daemon that has nothing to write would not notice otherwise.
        """
        if self._name_again_at <= now:
            self._name_again_at = now + _NAME_SECONDS
            self._require_lock()
            with contextlib.suppress(Full):  # it was reported, and is tried again
                self.keep_name()
                self.leave_truncated()
        if self.writer.unsynced and self._config.sync == "interval" and self._sync_at() <= now:
            self._synced_at = now
            self._sync()
        # On a full disk there is no next batch that would cut a full segment; once it is cut it can be reclaimed.
        full = (self.degraded or self._request_held) and self.writer.overshoots(1)
        return (full or self._cut_at() <= now) and self.cut()

    def keep_name(self) -> None:
        """Make sure that the active segment has its name: what is in a file without one is lost with this process.

        Raises:
            Full: it has none now; this can be tried again.
            DiskFailure: it cannot be given back.
        """
        path = str(self.writer.path)
        if self.writer.is_named():
            if self._unnamed_at is None:
                return
            self._journal.info("active segment has its name again", path=path)
        elif not self._lock.is_ours():  # it may be another daemon's, and sealed by now
            return
        else:
            try:
                found = self.writer.name_again()
            except OSError as error:
                raise self._unnamed(error) from error
            details = {"quarantined": str(found)} if found else {}
            next_ = "it is put back as it was"
            self._journal.error("active segment removed or replaced", path=path, **details, next=next_)
        self._unnamed_at, self._refused = None, False

    def leave_truncated(self) -> bool:
        """Report that another program truncated the active segment, and continue in a new one; False if it did not.

        Raises:
            Full: no new segment could be made; a retry is possible.
            DiskFailure: no new segment can be made.
        """
        writer = self.writer
        if writer.failed or not writer.is_truncated():
            return False
        path, base, last = writer.path, writer.base_sequence, self._metrics.head_sequence
        lost = [f"records {base} to {last} were acknowledged, and the last of them are lost"] if base <= last else []
        if pieces := ", ".join(str(sequence) for sequence in writer.state.open_records.values()):
            lost.append(f"of the unfinished record {pieces} pieces are lost, so it cannot be read")
        try:
            writer.leave(now_ns=time.time_ns())
        except OSError as error:
            raise self._failure(self._root.segments, error) from error
        self._publish()
        self._journal.error(
            "active segment truncated by another program",
            path=str(path),
            what="; ".join(lost) or "the end of a long record may be lost",
            next="the log continues in a new segment",
            hint=hint_for("records-of-truncated-segment", root=self._root.path),
        )
        return True

    def due(self) -> float:
        """When :meth:`tend` has something to do next, on the monotonic clock."""
        due = self._name_again_at
        if not self.writer.failed:
            due = min(due, max(self._cut_at(), self._cut_again_at))
        if self.writer.unsynced and self._config.sync == "interval":
            due = min(due, self._sync_at())
        return due

    def _read_free_bytes(self) -> int:
        try:
            return free_bytes(self._root.segments)
        except FileNotFoundError:
            if self._root.path.exists():  # keep_name waits for the directory, and reports it
                return self._free_bytes
            raise root_gone(self._root) from None
        except OSError as error:
            raise DiskFailure(
                f"{self._root.segments}: {error.strerror}: the free space cannot be read; nothing unacknowledged was "
                "kept, nothing acknowledged is lost",
                case="disk-failed",
                root=self._root.path,
                segments=self._root.segments,
                error=error,
            ) from error

    def has_room(self, *, wanted_bytes: int | None) -> bool:
        """Whether there is as much room as is needed, and the disk took the last turn; reports when that changes.

        Args:
            wanted_bytes: the room that a request waits for beyond that, while others are taken; None: none waits.
        """
        free = self._free_bytes = self._metrics.free_bytes = self._read_free_bytes()
        left = self.left_bytes = self._room.left_bytes(free)
        self._needed_bytes = self._metrics.needed_bytes = free - left
        full = left < 0 or time.monotonic() < self._full_until
        degraded = full or self._refused
        # What waited for a full disk is tried again in this turn; what still waits then is reported in the next.
        tried = not (degraded or self.degraded)
        self._report_room(degraded=degraded)
        self._report_held(wanted_bytes if tried else None)
        return not full

    def close(self) -> None:
        self._head.close()

    def _commit(self, drafts: Sequence[Draft]) -> int:
        """Commit the drafts that fit the active segment, which is cut if the first does not fit; return how many."""
        writer = self.writer
        if writer.overshoots(writer.needed_bytes(drafts[0])):
            self.cut()
        started = time.monotonic()
        self._metrics.waiting_since = self._metrics.waiting_since or started
        # Before the write too: an old writer must not append to a segment that is complete for the new one.
        self._require_lock()
        self.keep_name()
        self.leave_truncated()
        placed = self._write(drafts)
        self._require_lock()
        self._refused = False
        self._publish()
        for message in self._sources.after_sync(placed):
            self._journal.error("pipe", what=message)
        now = time.monotonic()
        return self._count(placed, now, now - started)

    def _write(self, drafts: Sequence[Draft]) -> list[Draft]:
        placed = self.writer.place(drafts, limited=True)
        try:
            if not self.writer.failed:
                return self._attempt(placed)
        except OSError as error:
            if not self.writer.failed:  # nothing was written: another segment would change nothing
                raise self._failure(self._root.transfers, error) from error
            self._metrics.write_failures += 1
            self._journal.error("write failed", reason=str(error), next="the same batch goes to a new segment")
        try:
            self.writer.replace(now_ns=time.time_ns())
            self._publish()
            return self._attempt(self.writer.place([draft for draft in placed if not draft.introduces]))
        except OSError as error:
            raise self._failure(self._root.segments, error) from error

    def _failure(self, path: Path, error: OSError) -> DiskFailure:
        """Return the error for a turn that the disk refused: :class:`Full` if the turn is retried."""
        where = error.filename or path
        if error.errno in DISK_FULL:
            self._wait_for_room()
            return Full(
                f"{where}: {error.strerror}",
                case="disk-failed",
                root=self._root.path,
                segments=self._root.segments,
                error=error,
            )
        return DiskFailure(
            f"{where}: {error.strerror}; nothing unacknowledged was kept, nothing acknowledged is lost",
            case="disk-failed",
            root=self._root.path,
            segments=self._root.segments,
            error=error,
        )

    def _wait_for_room(self) -> None:
        self._refused, self._full_until = True, time.monotonic() + _FULL_SECONDS
        self._report_room(degraded=True)

    def _unnamed(self, error: OSError) -> DiskFailure:
        """The active segment could not be named again: :class:`Full` where that is tried again."""
        writer, now = self.writer, time.monotonic()
        first, self._unnamed_at = self._unnamed_at is None, self._unnamed_at or now
        records = writer.state.next_sequence - writer.base_sequence
        is_full = error.errno in DISK_FULL
        kind = Full if is_full or now - self._unnamed_at < _NAME_PATIENCE_SECONDS else DiskFailure
        if error.errno == errno.ESTALE:
            failure = kind(
                f"{self._root.segments}: the directory was unmounted or replaced; acknowledged records are still in "
                "the original directory; the daemon accepts no more",
                case="segments-unmounted",
                segments=self._root.segments,
            )
        else:
            failure = kind(
                f"{writer.path}: the active segment was removed or replaced and cannot be restored ({error}); its "
                f"{records} records starting at sequence {writer.base_sequence} are lost when the daemon exits",
                case="active-segment-gone",
                root=self._root.path,
                segments=self._root.segments,
            )
        if first:
            self._journal.error(
                "active segment removed or replaced", what=failure.message, next="tried again", hint=failure.hint
            )
        if is_full:
            self._wait_for_room()
        if kind is DiskFailure:
            writer.abandon()
        return failure

    def _attempt(self, placed: list[Draft]) -> list[Draft]:
        self._sources.before_write(placed, self.writer.base_sequence)
        self.writer.commit(placed, now_ns=time.time_ns())
        return placed

    def _require_lock(self) -> None:
        if not self._lock.is_ours():
            self.writer.abandon()
            raise self._lock.loss(self._root)

    def _count(self, placed: Sequence[Draft], now: float, seconds: float) -> int:
        """Count what was committed; return how many drafts, introductions excluded."""
        metrics = self._metrics
        count = records = payload_bytes = 0
        for draft in placed:
            if not draft.introduces:
                count += 1
                records += draft.count
                payload_bytes += draft.payload_bytes
        written_bytes = self.writer.position - placed[0].position
        metrics.turns += 1
        metrics.records += records
        metrics.payload_bytes += payload_bytes
        metrics.written_bytes += written_bytes
        metrics.turn_records.observe(records)
        metrics.turn_bytes.observe(written_bytes)
        metrics.commit_seconds.observe(seconds)
        if self.writer.sync_commits:
            metrics.sync_seconds.observe(self.writer.sync_seconds)
        metrics.waiting_since = 0.0
        if self._filled_at is None and self.writer.advanced:
            # Jitter only shortens: many logs started together do not cut together, and none is cut late.
            self._filled_at, self._age_share = now, 1 - random.random() * self._config.segment_age_jitter  # noqa: S311
        return count

    def _cut_at(self) -> float:
        """When the active segment is due by its age, on the monotonic clock."""
        age = self._config.segment_max_age
        return float("inf") if self._filled_at is None or not age else self._filled_at + age * self._age_share

    def _report_room(self, *, degraded: bool) -> None:
        metrics, now = self._metrics, time.monotonic()
        was_degraded = self.degraded
        self.degraded = metrics.degraded = degraded
        numbers = {"free": self._free_bytes, "needed": self._needed_bytes}
        if not degraded:
            if was_degraded:
                self._degraded_by, metrics.degraded_by = None, ""
                self._journal.info("disk has room again", **numbers)
            return
        if was_degraded and now < self._cause_again_at:
            return
        self._cause_again_at = now + _CAUSE_SECONDS
        cause = Cause.REFUSED if self._refused else self._room.cause(self._free_bytes)
        if cause != self._degraded_by:
            self._degraded_by = metrics.degraded_by = cause
            self._journal.error(
                "disk full: input waits", degraded_by=cause, **numbers, hint=cause.hint(self._root.path)
            )

    def _report_held(self, wanted_bytes: int | None) -> None:
        """Report once that a request waits for room while there is room for others."""
        reported, self._request_held = self._request_held, wanted_bytes is not None
        if wanted_bytes is None or reported:
            return
        cause = self._room.cause(self._free_bytes - wanted_bytes)
        numbers = {"wanted": wanted_bytes, "free": self._free_bytes, "needed": self._needed_bytes}
        self._journal.warning("request waits for room", because=cause, **numbers, hint=cause.hint(self._root.path))

    def _publish(self) -> None:
        head = self.head
        try:
            self._head.restore()  # readers do not find a file that was removed
            self._head.write(encode_head(head))
        except OSError as error:
            raise DiskFailure(
                f"{self._root.head}: {error.strerror}: the head cannot be written",
                case="head-cannot-be-written",
                root=self._root.path,
                head=self._root.head,
                error=error,
            ) from error
        self._metrics.head_sequence = head.sequence

    def _sync_at(self) -> float:
        return self._synced_at + self._config.sync_interval

    def _sync(self) -> None:
        try:
            self.writer.sync()
        except OSError as error:
            self._metrics.write_failures += 1
            self._journal.error("sync failed", reason=str(error), next="the log goes on in a new segment")
        else:
            self._metrics.sync_seconds.observe(self.writer.sync_seconds)
