"""Application of a repair plan, in steps that can be repeated.

A file first gets a second name in ``quarantine/``, then a ledger line; only then one rename replaces it, or one unlink
removes it. A killed repair leaves the old or the new file, and the next repair finishes. The parts of a split segment
are named newest first, so only parts before an existing one can be missing.

A broken ledger, or a damaged sealed part with all later parts, is saved in ``quarantine/`` and rebuilt from its intact
lines.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.identity import Identity, encode_identity, read_identity
from wald.files.layout import Root
from wald.files.ledger_read import parts_of, read_files
from wald.files.ledger_write import Ledger
from wald.files.listing import Segment, list_segments
from wald.files.locks import remove_abandoned
from wald.files.safe_open import open_file, read_regular
from wald.files.uptime import Moment
from wald.format.head import Head, encode_head
from wald.format.ledger_lines import GENESIS, Entry, digest, encode_entry
from wald.format.names import LEDGERS, SEQUENCE_MAX, Kind
from wald.format.sealed_index import RouteEntry, SealedIndex
from wald.format.spans import Spans
from wald.repairing.plan import Action, ActionKind, Plan, count_lost_records, find_lost_routes
from wald.repairing.rescue import intact_batches
from wald.repairing.rewrite import NewSegment, Rewriter
from wald.repairing.survey import LogSurvey, SegmentFacts, last_dropped, recover_identity
from wald.retention.history import History
from wald.segments.index_builder import remove_index
from wald.segments.sealed_file import SealedFile
from wald.writing.daemon_lock import require_own_files
from wald.writing.recovery import copy_durably, state_after, state_before
from wald.writing.sealing import sealed_entry

_REBUILT_EVENT = "begun-again"


def rebuild_ledger(root: Root, disk: Disk, path: Path, *, now_ns: int) -> None:
    """Rebuild a broken ledger with an intact chain. A killed call can be repeated."""
    data, obsolete = _rebuild(root, path, now_ns)
    if data is not None:
        for file in (*obsolete, path):
            copy, _, old_data = _quarantine_copy(root, file)
            if not copy.exists():
                disk.replace(copy, old_data)
        disk.replace(path, data)
    for part in obsolete:
        disk.unlink(part)
    disk.sync_directory(root.ledger)


def _rebuild(root: Root, path: Path, now_ns: int) -> tuple[bytes | None, list[Path]]:
    """Return the new contents of a broken ledger (None if already written) and the parts to remove."""
    files = list(read_files(path))
    line_of = {part.path: part.line for part in parts_of(path)}
    opening = next(iter(files[-1][1].entries), {})
    if opening.get("event") == _REBUILT_EVENT and "from" in opening:
        obsolete = [part for part, line in line_of.items() if line >= opening["from"]]
        if obsolete:
            return None, obsolete
    first = next((number for number, (_, decoded) in enumerate(files) if decoded.broken_lines), len(files) - 1)
    obsolete = [file for file, _ in files[first:-1]]
    carried = [entry for _, decoded in files[first:] for entry in decoded.entries]
    damaged = sum(len(decoded.broken_lines) for _, decoded in files[first:])
    copy, sha256, _ = _quarantine_copy(root, path)
    opening = {"event": _REBUILT_EVENT, "kept": os.fspath(copy.relative_to(root.path)), "sha256": sha256}
    opening |= {"whole": len(carried), "damaged": damaged}
    if obsolete:
        opening["from"] = line_of[obsolete[0]]
    entries = [opening | {"at": now_ns}]
    deleted: dict[int, bool] = {}
    for number, entry in enumerate(carried, start=1):
        entries.append({key: entry[key] for key in entry if key != "prev"} | {"carried": number})
        if entry.get("event") in ("reclaimed", "kept") and isinstance(entry.get("base"), int):
            deleted[entry["base"]] = entry["event"] == "reclaimed"
    # A damaged line may have withdrawn a deletion. Without a "kept" line, an existing segment would count as deleted if
    # it were lost later.
    existing = [each.base_sequence for each in list_segments(root).segments if deleted.get(each.base_sequence)]
    entries += [{"event": "kept", "base": base, "why": "it exists", "at": now_ns} for base in existing]
    lines, prev = [], files[first - 1][1].tip if first else GENESIS
    for entry in entries:
        lines.append(encode_entry(entry, prev))
        prev = digest(lines[-1])
    return b"".join(lines), obsolete


def _quarantine_copy(root: Root, path: Path) -> tuple[Path, str, bytes]:
    """Return a ledger file's path in ``quarantine/``, digest and contents."""
    data = read_regular(path) if path.exists() else b""
    sha256 = hashlib.sha256(data).hexdigest()
    return root.quarantine / f"{path.name}.{sha256[:16]}", sha256, data


_PREFIX = "wald-repair-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def planned_repair(root: Root) -> Iterator[tuple[Plan, LogSurvey]]:
    """Yield a repair plan and its survey, which are valid only within the block.

    If ledgers or the identity are broken, both use repaired copies, which determine the lost records and the foreign
    files.
    """
    _remove_abandoned()
    broken = dict(_broken_ledgers(root))
    actions = [Action(ActionKind.REBUILD_LEDGER, path, reason) for path, reason in broken.items()]
    recovered = recover_identity(root)
    if recovered is not None:
        actions.append(Action(ActionKind.REWRITE_IDENTITY, root.identity, recovered[1], identity=recovered[0]))
    if not actions:
        survey = LogSurvey(root)
        yield Plan(survey, actions), survey
        return
    with _scratch_directory() as directory:
        identity = recovered[0] if recovered else read_identity(root)
        survey = LogSurvey(_dry_run_root(root, broken, identity, directory))
        yield Plan(survey, actions), survey


@contextmanager
def _scratch_directory() -> Iterator[Path]:
    """Make a directory, locked while in use."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with suppress(FileNotFoundError):  # removed before it was locked
            descriptor = os.open(path, _DIRECTORY)
            if Disk().lock(descriptor) and os.fstat(descriptor).st_nlink:
                break
            os.close(descriptor)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned() -> None:
    """Remove the unlocked directories that this user's killed repairs left."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if directory.stat(follow_symlinks=False).st_uid == os.geteuid():
                descriptor = os.open(directory, _DIRECTORY)
                try:
                    if Disk().lock(descriptor):
                        shutil.rmtree(directory)
                finally:
                    os.close(descriptor)


def _broken_ledgers(root: Root) -> Iterator[tuple[Path, str]]:
    """Yield each ledger with a damaged or unchained line, and the problem."""
    for name in LEDGERS:
        path = root.ledger / name
        try:
            broken = [(each.name, *line) for each, decoded in read_files(path) for line in decoded.broken_lines]
        except (Damaged, OSError):
            continue  # unreadable
        if broken:
            file, number, reason = broken[0]
            more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
            yield path, f"{file}: line {number}: {reason}{more}"


@dataclass(frozen=True)
class _DryRunRoot(Root):
    """Root with its repaired identity, and repaired ledgers, in ``directory``."""

    directory: Path
    has_ledgers: bool

    @property
    def ledger(self) -> Path:
        return self.directory / "ledger" if self.has_ledgers else super().ledger

    @property
    def identity(self) -> Path:
        return self.directory / "log.json"


def _dry_run_root(root: Root, broken: dict[Path, str], identity: Identity, directory: Path) -> Root:
    dry_run = _DryRunRoot(root.path, directory, has_ledgers=bool(broken))
    dry_run.identity.write_bytes(encode_identity(uuid.UUID(bytes=identity.log_id), now=identity.created))
    if broken:
        dry_run.ledger.mkdir()
        for path in root.ledger.iterdir():
            if path.is_file():
                shutil.copyfile(path, dry_run.ledger / path.name)
    for path in broken:
        data, obsolete = _rebuild(root, path, now_ns=0)
        if data is not None:
            (dry_run.ledger / path.name).write_bytes(data)
        for part in obsolete:
            (dry_run.ledger / part.name).unlink()
    return dry_run


@dataclass(frozen=True, slots=True)
class Repair:
    """Executor of a plan's actions. The caller holds the locks."""

    root: Root
    disk: Disk
    epoch: int
    now: Callable[[], int]
    moment: Callable[[], Moment]

    def apply(self, action: Action, survey: LogSurvey) -> None:
        """Run an action. Raise Damaged if a new file is not intact, OSError if a step fails."""
        disk, path = self.disk, action.path
        match action.kind:
            case ActionKind.REBUILD_LEDGER:
                rebuild_ledger(self.root, disk, path, now_ns=self.now())
            case ActionKind.REWRITE_IDENTITY:
                assert action.identity is not None
                log_id = uuid.UUID(bytes=action.identity.log_id)
                saved = {"kept": self._save(path)} if os.path.lexists(path) else {}
                self._append({"event": "identified", "log": log_id.hex, "why": action.reason} | saved | self._times())
                disk.replace(path, encode_identity(log_id, now=action.identity.created))
            case ActionKind.REMOVE:
                if path.parent in (self.root.segments, self.root.quarantine, self.root.recovery):
                    disk.unlink(path)  # the locks prevent others from creating files there
                else:
                    with suppress(FileNotFoundError):
                        remove_abandoned(path, disk)
                disk.sync_directory(path.parent)
            case ActionKind.RENAME:
                assert action.target is not None
                for each in (path, action.target):  # both sparse indexes belong to other segments
                    self._remove_sparse_index(each)
                disk.rename_to_free(path, action.target)
                disk.sync_directory(path.parent)
            case ActionKind.RESTORE:
                if path.exists():
                    self._save(path)
                disk.rename(survey.originals[path], path)
                disk.sync_directory(path.parent)
            case ActionKind.QUARANTINE_ORIGINAL:
                self._save(path)
                self._remove(path)
            case ActionKind.QUARANTINE:
                saved_file = self._save(path)
                self._append(*self._loss_lines(action, saved_file), self._repair_line(action, saved_file))
                self._remove(path)
            case ActionKind.REBUILD:
                self._rebuild_segment(action, survey)
            case ActionKind.GIVE_UP:
                self._append(*self._loss_lines(action, ""))
            case ActionKind.RECORD_SEALING:
                with SealedFile(path) as sealed:
                    entry = self._sealing_line(sealed.index, path)
                self._append(entry)
            case ActionKind.MOVE_HEAD:
                self._write_head(survey)

    def _rebuild_segment(self, action: Action, survey: LogSurvey) -> None:
        facts = action.facts
        assert facts is not None
        saved_file = self._save(action.path)
        if facts.twin is not None:
            self._save(facts.twin)
        older = [each for each in list_segments(self.root).segments if each.base_sequence < facts.base]
        newest = older[-1] if older else None
        before = state_before(self.root, facts.segment, newest, survey.log_id, [], survey.history.last_dropped)
        new_segments = self._rewriter(action, facts, survey).rewrite(before)
        self._append(
            *self._loss_lines(action, saved_file),
            self._repair_line(action, saved_file),
            *(self._sealing_line(each.index, each.path) for each in new_segments if each.index is not None),
        )
        self._put_in_place(facts.segment, new_segments)
        if facts.twin is not None:
            self._remove(facts.twin)
        losses = History(self.root).losses(facts.base, SEQUENCE_MAX)
        if not action.loses_data and all(loss.saved_file != saved_file for loss in losses):
            with suppress(FileNotFoundError):  # no ledger line names this file
                self.disk.unlink(self.root.path / saved_file)
                self.disk.sync_directory(self.root.quarantine)

    def _rewriter(self, action: Action, facts: SegmentFacts, survey: LogSurvey) -> Rewriter:
        intact, history = Spans(span for each in survey.segments for span in each.spans), History(self.root)

        def is_broken(sequence: int) -> bool:
            # An earlier repair may have omitted the record's beginning.
            return sequence in action.broken or (sequence not in intact and history.is_given_up(sequence))

        spans = Spans(facts.spans)
        following = [each.base for each in survey.segments if each.base > facts.base and not each.problem]
        end = min(following, default=1 << 64)
        batches = partial(intact_batches, facts.segment, survey.log_id, durable=facts.durable, end=end, cut=facts.cut)
        return Rewriter(
            self.root,
            self.disk,
            facts.segment,
            survey.log_id,
            batches,
            is_broken=is_broken,
            dropped=last_dropped(facts.segment, history),
            is_intact=facts.remains is not None
            and not facts.remains.damage
            and not any(sequence in spans for sequence in action.broken),
        )

    def _put_in_place(self, old: Segment, new_segments: list[NewSegment]) -> None:
        for each in reversed(new_segments):
            self.disk.rename(each.path, self.root.segment(each.base_sequence, old.kind.form))
            # Only after the rename: if the old segment lost its header, only the index has its salt.
            remove_index(self.root.segment(each.base_sequence, Kind.INDEX), self.disk)
            self.disk.sync_directory(self.root.segments)
        if not any(each.base_sequence == old.base_sequence for each in new_segments):
            self._remove(old.path)

    def _remove(self, path: Path) -> None:
        self._remove_sparse_index(path)
        self.disk.unlink(path)
        self.disk.sync_directory(path.parent)

    def _remove_sparse_index(self, path: Path) -> None:
        if path.name.endswith(Kind.RAW.value):
            remove_index(path.with_name(path.name + ".idx"), self.disk)

    def _save(self, path: Path) -> str:
        """Save a file in ``quarantine/``; return its path relative to the root."""
        target = self.root.quarantine / f"{path.name}.{_file_digest(path)[:16]}"
        if not target.exists():
            try:
                self.disk.link(path, target)
            except OSError:  # the file system does not support links
                copy_durably(self.disk, path, target, 0, path.stat().st_size)
            self.disk.sync_directory(self.root.quarantine)
        return os.fspath(target.relative_to(self.root.path))

    def _append(self, *entries: Entry) -> None:
        with closing(Ledger(self.root.ledger / "segments.jsonl", self.disk)) as ledger:
            ledger.append(*entries)

    def _loss_lines(self, action: Action, saved_file: str) -> Iterator[Entry]:
        """Yield a ledger line for each lost span that no killed repair has recorded."""
        history, remaining, facts = History(self.root), action.lost_records, action.facts
        for first, last in action.lost_spans:
            if not any(history.unexplained_spans(first, last)):
                continue
            broken = action.broken.get(first) if first == last else None  # its other pieces remain
            reason = action.reason if broken is None else "a piece of it is lost"
            entry: Entry = {"event": "lost", "base": first, "last": last, "why": reason}
            records = min(remaining, count_lost_records([(first, last)], facts, history))
            remaining -= records  # from the ledger alone, each span counts all lost records
            if records < last - first + 1:
                entry["records"] = records
            if saved_file:
                entry["kept"] = saved_file
            if broken is not None:
                routes: list[RouteEntry] | None = [RouteEntry(broken, 1, first, last)]
            else:
                routes = find_lost_routes((first, last), None if facts is None else facts.segment, history)
            if routes is not None:
                entry["routes"] = [list(route) for route in routes]
            yield entry | self._times()

    def _repair_line(self, action: Action, saved_file: str) -> Entry:
        facts = action.facts
        assert facts is not None
        last = max((last for _, last in facts.spans), default=facts.base - 1)
        entry = {"event": "repaired", "base": facts.base, "last": last, "why": action.reason}
        entry |= {"action": action.kind.value, "kept": saved_file, "lossless": not action.loses_data}
        return entry | {"epoch": self.epoch} | self._times()

    def _sealing_line(self, index: SealedIndex, path: Path) -> Entry:
        return {"event": "sealed"} | sealed_entry(index, path.stat().st_size, self.moment(), self.now())

    def _times(self) -> Entry:
        return {"at": self.now()} | self.moment().as_entry()

    def _write_head(self, survey: LogSurvey) -> None:
        """Move the head to the end of the log. Its sequence never decreases."""
        segments = list_segments(self.root).segments
        if not segments:
            return  # the sequence of the head is still right
        newest, errors = segments[-1], list[str]()
        if newest.kind is Kind.RAW:  # sync it before the head exposes its batches to readers
            descriptor = self.disk.open(newest.path)
            try:
                self.disk.sync(descriptor)
            finally:
                self.disk.close(descriptor)
        state = state_after(newest, survey.log_id, errors)
        if state.previous is None:
            raise Damaged(errors[0], case="sealed-segment-damaged", path=newest.path)
        last = max(survey.last, state.next_sequence - 1)
        require_own_files(self.root)
        head = Head(last, newest.base_sequence, state.previous.position, self.epoch, state.append_time_ns)
        self.disk.replace(self.root.head, encode_head(head))


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open_file(path) as file:
            while part := file.read(1 << 20):
                digest.update(part)
    except (OSError, Damaged):  # the name only has to be the same each time
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()
