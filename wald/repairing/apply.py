"""Application of a repair plan, in steps that can be repeated.

A file first gets a second name in ``quarantine/``, then a ledger line; only then one rename replaces it, or one unlink
removes it. A killed repair leaves the old or the new file, and the next repair finishes. The parts of a split segment
are named newest first, so only parts before an existing one can be missing.

A broken ledger, or a damaged sealed part with all later parts, is kept in ``quarantine/`` and begun again with its
intact lines.
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
from wald.repairing.plan import Act, ActionKind, Plan, records_lost, routes_lost
from wald.repairing.rescue import intact_batches
from wald.repairing.rewrite import NewSegment, Rewriter
from wald.repairing.survey import LogSurvey, SegmentFacts, last_dropped, lost_identity
from wald.retention.history import History
from wald.segments.index_builder import remove_index
from wald.segments.sealed_file import SealedFile
from wald.writing.daemon_lock import require_own_files
from wald.writing.recovery import copy_durably, state_after, state_before
from wald.writing.sealing import sealed_entry

_BEGUN = "begun-again"


def rebuild_ledger(root: Root, disk: Disk, path: Path, *, now_ns: int) -> None:
    """Replace a broken ledger by one with an intact chain. A killed call can be repeated."""
    data, obsolete = _rebuilt(root, path, now_ns)
    if data is not None:
        for file in (*obsolete, path):
            kept, _, old = _kept(root, file)
            if not kept.exists():
                disk.replace(kept, old)
        disk.replace(path, data)
    for part in obsolete:
        disk.unlink(part)
    disk.sync_directory(root.ledger)


def _rebuilt(root: Root, path: Path, now_ns: int) -> tuple[bytes | None, list[Path]]:
    """Return the new contents of a broken ledger (None if already written) and the parts to remove."""
    files = list(read_files(path))
    line_of = {part.path: part.line for part in parts_of(path)}
    opening = next(iter(files[-1][1].entries), {})
    if opening.get("event") == _BEGUN and "from" in opening:
        obsolete = [part for part, line in line_of.items() if line >= opening["from"]]
        if obsolete:
            return None, obsolete
    bad = next((number for number, (_, decoded) in enumerate(files) if decoded.broken_lines), len(files) - 1)
    obsolete = [file for file, _ in files[bad:-1]]
    carried = [entry for _, decoded in files[bad:] for entry in decoded.entries]
    damaged = sum(len(decoded.broken_lines) for _, decoded in files[bad:])
    kept, sha256, _ = _kept(root, path)
    opening = {"event": _BEGUN, "kept": os.fspath(kept.relative_to(root.path)), "sha256": sha256}
    opening |= {"whole": len(carried), "damaged": damaged}
    if obsolete:
        opening["from"] = line_of[obsolete[0]]
    entries = [opening | {"at": now_ns}]
    deleted: dict[int, bool] = {}
    for number, entry in enumerate(carried, start=1):
        entries.append({key: entry[key] for key in entry if key != "prev"} | {"carried": number})
        if entry.get("event") in ("reclaimed", "kept") and isinstance(entry.get("base"), int):
            deleted[entry["base"]] = entry["event"] == "reclaimed"
    # A damaged line may have revoked a deletion. Without a line "kept", an existing segment would count as deleted if
    # it were lost later.
    there = [each.base_sequence for each in list_segments(root).segments if deleted.get(each.base_sequence)]
    entries += [{"event": "kept", "base": base, "why": "it is there", "at": now_ns} for base in there]
    lines, prev = [], files[bad - 1][1].tip if bad else GENESIS
    for entry in entries:
        lines.append(encode_entry(entry, prev))
        prev = digest(lines[-1])
    return b"".join(lines), obsolete


def _kept(root: Root, path: Path) -> tuple[Path, str, bytes]:
    """Return a ledger file's path in ``quarantine/``, digest and contents."""
    data = read_regular(path) if path.exists() else b""
    sha256 = hashlib.sha256(data).hexdigest()
    return root.quarantine / f"{path.name}.{sha256[:16]}", sha256, data


_PREFIX = "wald-repair-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def proposed(root: Root) -> Iterator[tuple[Plan, LogSurvey]]:
    """Yield a repair plan and its facts, which are valid only within the block.

    If ledgers or the identity are broken, both use repaired copies, which decide which records are lost and which
    files are foreign.
    """
    _remove_abandoned()
    broken = dict(_broken(root))
    acts = [Act(ActionKind.LEDGER, path, reason) for path, reason in broken.items()]
    lost = lost_identity(root)
    if lost is not None:
        identity, reason = lost
        acts.append(Act(ActionKind.IDENTITY, root.identity, reason, identity=identity))
    if not acts:
        facts = LogSurvey(root)
        yield Plan(facts, acts), facts
        return
    with _scratch() as made:
        facts = LogSurvey(_rehearsed(root, broken, lost[0] if lost else read_identity(root), made))
        yield Plan(facts, acts), facts


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make a directory, locked to show that it is in use."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with suppress(FileNotFoundError):  # removed just before it was locked
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
    """Remove copies of killed repairs: unlocked directories of this user."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if directory.stat(follow_symlinks=False).st_uid == os.geteuid():
                descriptor = os.open(directory, _DIRECTORY)
                try:
                    if Disk().lock(descriptor):
                        shutil.rmtree(directory)
                finally:
                    os.close(descriptor)


def _broken(root: Root) -> Iterator[tuple[Path, str]]:
    """Yield each ledger with a damaged or unchained line, and the problem."""
    for name in LEDGERS:
        path = root.ledger / name
        try:
            broken = [(each.name, *line) for each, decoded in read_files(path) for line in decoded.broken_lines]
        except (Damaged, OSError):
            continue  # unusable
        if broken:
            file, number, reason = broken[0]
            more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
            yield path, f"{file}: line {number}: {reason}{more}"


@dataclass(frozen=True)
class _Rehearsed(Root):
    """Root with a repaired identity, and perhaps repaired ledgers, in ``made``."""

    made: Path
    has_ledgers: bool

    @property
    def ledger(self) -> Path:
        return self.made / "ledger" if self.has_ledgers else super().ledger

    @property
    def identity(self) -> Path:
        return self.made / "log.json"


def _rehearsed(root: Root, broken: dict[Path, str], identity: Identity, made: Path) -> Root:
    rehearsed = _Rehearsed(root.path, made, has_ledgers=bool(broken))
    rehearsed.identity.write_bytes(encode_identity(uuid.UUID(bytes=identity.log_id), now=identity.created))
    if broken:
        rehearsed.ledger.mkdir()
        for path in root.ledger.iterdir():
            if path.is_file():
                shutil.copyfile(path, rehearsed.ledger / path.name)
    for path in broken:
        data, obsolete = _rebuilt(root, path, now_ns=0)
        if data is not None:
            (rehearsed.ledger / path.name).write_bytes(data)
        for part in obsolete:
            (rehearsed.ledger / part.name).unlink()
    return rehearsed


@dataclass(frozen=True, slots=True)
class Repair:
    """Executor of a plan's acts. The caller holds the locks."""

    root: Root
    disk: Disk
    epoch: int
    now: Callable[[], int]
    moment: Callable[[], Moment]

    def apply(self, act: Act, facts: LogSurvey) -> None:
        """Run an act. Raise Damaged if a new file does not read back, OSError if a step fails."""
        disk, path = self.disk, act.path
        match act.kind:
            case ActionKind.LEDGER:
                rebuild_ledger(self.root, disk, path, now_ns=self.now())
            case ActionKind.IDENTITY:
                assert act.identity is not None
                log_id = uuid.UUID(bytes=act.identity.log_id)
                saved = {"kept": self._keep(path)} if os.path.lexists(path) else {}
                self._record({"event": "identified", "log": log_id.hex, "why": act.reason} | saved | self._when())
                disk.replace(path, encode_identity(log_id, now=act.identity.created))
            case ActionKind.REMOVE:
                if path.parent in (self.root.segments, self.root.quarantine, self.root.recovery):
                    disk.unlink(path)  # the locks keep others from making files there
                else:
                    with suppress(FileNotFoundError):
                        remove_abandoned(path, disk)
                disk.sync_directory(path.parent)
            case ActionKind.RENAME:
                assert act.target is not None
                for each in (path, act.target):  # both sparse indexes belong to other segments
                    self._remove_sparse_index(each)
                disk.rename_to_free(path, act.target)
                disk.sync_directory(path.parent)
            case ActionKind.PUT_BACK:
                if path.exists():
                    self._keep(path)
                disk.rename(facts.put_back[path], path)
                disk.sync_directory(path.parent)
            case ActionKind.CLEAR:
                self._keep(path)
                self._remove(path)
            case ActionKind.SET_ASIDE:
                kept = self._keep(path)
                self._record(*self._losses(act, kept), self._repaired(act, kept))
                self._remove(path)
            case ActionKind.REMAKE:
                self._remake(act, facts)
            case ActionKind.GIVE_UP:
                self._record(*self._losses(act, ""))
            case ActionKind.RECORD:
                with SealedFile(path) as sealed:
                    entry = self._sealed(sealed.index, path)
                self._record(entry)
            case ActionKind.HEAD:
                self._write_head(facts)

    def _remake(self, act: Act, facts: LogSurvey) -> None:
        found = act.facts
        assert found is not None
        kept = self._keep(act.path)
        if found.twin is not None:
            self._keep(found.twin)
        older = [each for each in list_segments(self.root).segments if each.base_sequence < found.base]
        newest = older[-1] if older else None
        before = state_before(self.root, found.segment, newest, facts.log_id, [], facts.history.last_dropped)
        made = self._rewriter(act, found, facts).rewrite(before)
        self._record(
            *self._losses(act, kept),
            self._repaired(act, kept),
            *(self._sealed(each.index, each.path) for each in made if each.index is not None),
        )
        self._put_in_place(found.segment, made)
        if found.twin is not None:
            self._remove(found.twin)
        losses = History(self.root).losses(found.base, SEQUENCE_MAX)
        if not act.loses and all(loss.saved_file != kept for loss in losses):
            with suppress(FileNotFoundError):  # no ledger line names this file
                self.disk.unlink(self.root.path / kept)
                self.disk.sync_directory(self.root.quarantine)

    def _rewriter(self, act: Act, found: SegmentFacts, facts: LogSurvey) -> Rewriter:
        intact, history = Spans(span for each in facts.segments for span in each.spans), History(self.root)

        def is_broken(sequence: int) -> bool:
            # An earlier repair may have omitted the record's beginning.
            return sequence in act.broken or (sequence not in intact and history.is_given_up(sequence))

        own = Spans(found.spans)
        following = [each.base for each in facts.segments if each.base > found.base and not each.problem]
        end = min(following, default=1 << 64)
        batches = partial(intact_batches, found.segment, facts.log_id, durable=found.durable, end=end, cut=found.cut)
        return Rewriter(
            self.root,
            self.disk,
            found.segment,
            facts.log_id,
            batches,
            is_broken=is_broken,
            dropped=last_dropped(found.segment, history),
            complete=found.rescued is not None
            and not found.rescued.reason
            and not any(sequence in own for sequence in act.broken),
        )

    def _put_in_place(self, old: Segment, made: list[NewSegment]) -> None:
        for each in reversed(made):
            self.disk.rename(each.path, self.root.segment(each.base_sequence, old.kind.form))
            # Only after the rename: if the old segment lost its header, only the index still has its salt.
            remove_index(self.root.segment(each.base_sequence, Kind.INDEX), self.disk)
            self.disk.sync_directory(self.root.segments)
        if not any(each.base_sequence == old.base_sequence for each in made):
            self._remove(old.path)

    def _remove(self, path: Path) -> None:
        self._remove_sparse_index(path)
        self.disk.unlink(path)
        self.disk.sync_directory(path.parent)

    def _remove_sparse_index(self, path: Path) -> None:
        if path.name.endswith(Kind.RAW.value):
            remove_index(path.with_name(path.name + ".idx"), self.disk)

    def _keep(self, path: Path) -> str:
        target = self.root.quarantine / f"{path.name}.{_digest(path)[:16]}"
        if not target.exists():
            try:
                self.disk.link(path, target)
            except OSError:  # the file system has no links
                copy_durably(self.disk, path, target, 0, path.stat().st_size)
            self.disk.sync_directory(self.root.quarantine)
        return os.fspath(target.relative_to(self.root.path))

    def _record(self, *entries: Entry) -> None:
        with closing(Ledger(self.root.ledger / "segments.jsonl", self.disk)) as ledger:
            ledger.append(*entries)

    def _losses(self, act: Act, kept: str) -> Iterator[Entry]:
        """Yield a ledger line for each lost span that no killed repair has recorded."""
        history, left = History(self.root), act.lost_records
        for first, last in act.lost:
            if not any(history.unexplained_spans(first, last)):
                continue
            broken = act.broken.get(first) if first == last else None  # its other pieces stay
            reason = act.reason if broken is None else "a piece of it is lost"
            entry: Entry = {"event": "lost", "base": first, "last": last, "why": reason}
            records = min(left, records_lost([(first, last)], act.facts, history))
            left -= records  # from the ledger alone, each span counts all lost records
            if records < last - first + 1:
                entry["records"] = records
            if kept:
                entry["kept"] = kept
            if broken is not None:
                routes: list[RouteEntry] | None = [RouteEntry(broken, 1, first, last)]
            else:
                routes = routes_lost((first, last), act.facts.segment if act.facts is not None else None, history)
            if routes is not None:
                entry["routes"] = [list(route) for route in routes]
            yield entry | self._when()

    def _repaired(self, act: Act, kept: str) -> Entry:
        found = act.facts
        assert found is not None
        last = max((last for _, last in found.spans), default=found.base - 1)
        entry = {"event": "repaired", "base": found.base, "last": last, "why": act.reason, "action": act.kind.value}
        return entry | {"kept": kept, "lossless": not act.loses, "epoch": self.epoch} | self._when()

    def _sealed(self, index: SealedIndex, path: Path) -> Entry:
        return {"event": "sealed"} | sealed_entry(index, path.stat().st_size, self.moment(), self.now())

    def _when(self) -> Entry:
        return {"at": self.now()} | self.moment().as_entry()

    def _write_head(self, facts: LogSurvey) -> None:
        """Move the head to the end of the log. Its sequence never decreases."""
        segments = list_segments(self.root).segments
        if not segments:
            return  # no segment exists, and the head's sequence is right
        newest, errors = segments[-1], list[str]()
        if newest.kind is Kind.RAW:  # sync it before the head lets readers see its batches
            descriptor = self.disk.open(newest.path)
            try:
                self.disk.sync(descriptor)
            finally:
                self.disk.close(descriptor)
        state = state_after(newest, facts.log_id, errors)
        if state.previous is None:
            raise Damaged(errors[0], case="sealed-segment-damaged", path=newest.path)
        last = max(facts.last, state.next_sequence - 1)
        require_own_files(self.root)
        head = Head(last, newest.base_sequence, state.previous.position, self.epoch, state.append_time_ns)
        self.disk.replace(self.root.head, encode_head(head))


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open_file(path) as file:
            while part := file.read(1 << 20):
                digest.update(part)
    except (OSError, Damaged):  # the name only has to be the same each time
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()
