"""Detection of a replaced or rolled-back log at a path.

If another log, or an older copy, is moved to the path, positions in memory are invalid, even if id, epoch and head look
right. So each daemon start writes a random ``life`` and its first sequence into ``recovery/<epoch>.json``.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from wald.errors import Damaged, Gone, NotFound, Replaced, RolledBack
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.safe_open import read_object
from wald.format.head import Head
from wald.format.names import Kind, segment_name
from wald.segments.durable_end import readable_head

_REPORTS = 64  # more than the daemon keeps
_FileStamp = tuple[int, int, int] | None  # device, inode, mtime


class LastSeen(NamedTuple):
    """Last record and end of the bytes that a process has seen. Unknown fields are 0 or ""."""

    sequence: int
    epoch: int
    life: str
    segment: int = 0
    position: int = 0


def last_seen_at(root: Root, head: Head) -> LastSeen:
    return LastSeen(head.sequence, head.epoch, _life(root, head.epoch), head.segment, head.position)


class Continuity:
    """Thread-safe check that a path still has the log seen by this process, or in ``last_seen``."""

    def __init__(self, root: Root, log_id: bytes, last_seen: LastSeen | None = None, *, hint: str = "") -> None:
        self._root = root
        self._log_id = log_id
        self._hint = hint
        self._lock = threading.Lock()
        self.last_seen = last_seen
        self._stamps: tuple[_FileStamp, _FileStamp] = (None, None)
        self._stamped_epoch = -1
        self._stamped = "", ""  # the paths of the stamps, since it takes 20 µs to make them
        self._replaced: Replaced | None = None

    def require(self) -> None:
        """Check the current head."""
        self.check(readable_head(self._root))

    def check(self, head: Head | None) -> None:
        """Accept ``head`` if it continues the log; otherwise raise Gone or Replaced. Later calls repeat Replaced."""
        with self._lock:
            if self._replaced is None:
                try:
                    self._accept(head)
                except Gone:
                    raise
                except Replaced as error:
                    self._replaced = error
            if self._replaced is not None:  # a new exception, because each raise adds traceback entries
                raise type(self._replaced)(self._replaced.message, hint=self._replaced.hint)

    def _accept(self, head: Head | None) -> None:
        seen = self.last_seen
        stamps = self._current_stamps(seen.epoch if seen else 0)
        is_later = seen is None or head is None or (head.epoch == seen.epoch and head.sequence >= seen.sequence)
        if is_later and stamps == self._stamps and stamps[0] is not None:
            if head is not None and seen is not None:
                self.last_seen = LastSeen(head.sequence, head.epoch, seen.life, head.segment, head.position)
            return
        self._require_same_log()
        if head is not None and not is_later:
            head = readable_head(self._root)  # another thread may have seen a newer head
        if head is not None:
            if seen is not None and (reason := self._rollback_reason(seen, head)):
                evidence = f"record {seen.sequence}{f' of epoch {seen.epoch}' if seen.epoch else ''} was read before"
                raise RolledBack(
                    f"{self._root.path}: an older copy of the log was restored here: {evidence}, and {reason}",
                    case="older-copy",
                    instead=self._hint,
                )
            self.last_seen = last_seen_at(self._root, head)
            if seen is None or head.epoch != seen.epoch:
                stamps = self._current_stamps(head.epoch)  # a report is complete before its epoch has a head
        self._stamps = stamps

    def _require_same_log(self) -> None:
        path = self._root.path
        try:
            log_id = read_identity(self._root).log_id
        except NotFound:
            raise Gone(
                f"{path}: the log is gone: it was moved, removed or unmounted", case="log-gone", root=path
            ) from None
        if log_id != self._log_id:
            raise Replaced(
                f"{path}: this is not the log that the process opened: "
                f"{uuid.UUID(bytes=log_id)} instead of {uuid.UUID(bytes=self._log_id)}",
                case="other-log",
            )

    def _rollback_reason(self, seen: LastSeen, head: Head) -> str:
        """Return the evidence that the log is an older copy, or ""."""
        if (head.epoch, head.sequence) < (seen.epoch, seen.sequence) or head.sequence < seen.sequence:
            return f"the log ends at record {head.sequence} of epoch {head.epoch}"
        if not seen.epoch:
            return ""
        life = _life(self._root, seen.epoch)
        if life and seen.life and life != seen.life:
            return f"epoch {seen.epoch} belongs to another start of the daemon"
        for epoch in range(max(seen.epoch + 1, head.epoch - _REPORTS), head.epoch + 1):
            report = read_object(self._root.report(epoch))
            if report is not None and _begins_before(report, seen, self._root):
                return f"epoch {epoch} began with record {report.get('next_sequence')}"
        return ""

    def _current_stamps(self, epoch: int) -> tuple[_FileStamp, _FileStamp]:
        if epoch != self._stamped_epoch:
            self._stamped_epoch = epoch
            self._stamped = os.fspath(self._root.identity), os.fspath(self._root.report(epoch))
        identity, report = self._stamped
        return _stamp(identity), _stamp(report)


def _stamp(path: str) -> _FileStamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _life(root: Root, epoch: int) -> str:
    report = read_object(root.report(epoch))
    return "" if report is None else str(report.get("life") or "")


def _begins_before(report: Mapping[str, Any], seen: LastSeen, root: Root) -> bool:
    """Return True if the reported start found fewer records, or pieces of records, than ``seen``."""
    first_sequence, scanned_bytes = report.get("next_sequence"), report.get("scanned_bytes")
    if isinstance(first_sequence, int) and first_sequence <= seen.sequence:
        return True
    is_same_segment = report.get("segment") == segment_name(seen.segment, Kind.RAW)
    is_damaged = report.get("errors") or report.get("given_up")  # damage, not an older copy
    is_shorter = isinstance(scanned_bytes, int) and scanned_bytes < seen.position
    return is_shorter and is_same_segment and not is_damaged and not _is_repaired(root, seen)


def _is_repaired(root: Root, seen: LastSeen) -> bool:
    """Return True if a repair has since rewritten, and perhaps shortened, the segment."""
    from wald.files.ledger_read import LedgerLines

    with suppress(Damaged):
        # "last" is base - 1 if no whole record exists
        for line in LedgerLines(root.ledger / "segments.jsonl").about(seen.segment - 1, seen.segment):
            entry = line.entry
            if entry.get("event") == "repaired" and line.low == seen.segment:
                epoch = entry.get("epoch")
                return isinstance(epoch, int) and epoch > seen.epoch
    return False
