"""Application of a repair plan, in steps that can be repeated.

A file that is replaced or removed first gets a second name in ``quarantine/``, then a line in the ledger; only then one
rename replaces it, or one unlink removes it. After a killed repair, the next one finds the old or the new file and
finishes. The parts of a segment are named newest first: only parts before an existing one are still to be named.

A broken ledger, or a damaged sealed part with all later parts, is kept in ``quarantine/`` and begun again with its
intact lines, numbered; ``from`` is the first line number of the replaced parts:

    {"event": "begun-again", "kept": "quarantine/…", "sha256": …, "whole": 12, "damaged": 1, "at": …}
    {"event": "sealed", "base": 1, …, "carried": 1}
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.identity import Identity, encode_identity, read_identity
from wald.files.layout import TEMPORARY, Root
from wald.files.ledger_read import parts_of, read_files
from wald.files.ledger_write import Ledger
from wald.files.listing import Listing, Segment, list_segments
from wald.files.locks import remove_abandoned
from wald.files.safe_open import open_file, read_regular
from wald.files.uptime import Moment
from wald.format.head import Head, encode_head
from wald.format.ledger_lines import GENESIS, Entry, digest, encode_entry
from wald.format.names import LEDGERS, SEQUENCE_MAX, Kind
from wald.format.sealed_index import RouteEntry, SealedIndex
from wald.format.spans import Spans
from wald.repairing.plan import Act, ActionKind, Plan, Planner, records_lost, routes_lost
from wald.repairing.rewrite import NewSegment, Rewriter
from wald.repairing.survey import LogSurvey, SegmentFacts, examine, last_dropped, lost_identity
from wald.retention.history import History
from wald.segments.index_builder import remove_index
from wald.segments.raw_scan import RawFile, SegmentEnd
from wald.segments.sealed_file import SealedFile
from wald.writing.daemon_lock import require_own_files
from wald.writing.recovery import state_after, state_before
from wald.writing.sealing import sealed_entry

_BEGUN = "begun-again"


@dataclass(frozen=True, slots=True)
class RebuiltLedger:
    """Replacement of a broken ledger."""

    entries: list[Entry] | None  # lines to carry over; None keeps the active file
    damaged: int
    prev: str  # of the first line
    obsolete: tuple[Path, ...]  # sealed parts to remove
    first_line: int = 0  # number of their first line
    # Existing segments whose last line reports a deletion. The line that revoked it may be damaged, so each gets a line
    # "kept": otherwise the deletion would be believed if the segment were lost later.
    there: tuple[int, ...] = ()

    def lines(self, *, kept: str, sha256: str, now_ns: int) -> bytes:
        carried = self.entries or []
        opening = {"event": _BEGUN, "kept": kept, "sha256": sha256, "whole": len(carried), "damaged": self.damaged}
        origin = {"from": self.first_line} if self.obsolete else {}
        entries = [opening | origin | {"at": now_ns}]
        entries += [entry | {"carried": number} for number, entry in enumerate(carried, start=1)]
        entries += [{"event": "kept", "base": base, "why": "it is there", "at": now_ns} for base in self.there]
        lines, prev = [], self.prev
        for entry in entries:
            lines.append(encode_entry(entry, prev))
            prev = digest(lines[-1])
        return b"".join(lines)


def _rebuilt(root: Root, path: Path) -> RebuiltLedger:
    files = list(read_files(path))
    line_of = {part.path: part.line for part in parts_of(path)}
    opening = next(iter(files[-1][1].entries), {})
    if opening.get("event") == _BEGUN and "from" in opening:  # a repair was killed before it removed all parts
        obsolete = tuple(each for each, line in line_of.items() if line >= opening["from"])
        if obsolete:
            return RebuiltLedger(None, 0, "", obsolete)
    bad = next((number for number, (_, decoded) in enumerate(files) if decoded.broken), len(files) - 1)
    obsolete = tuple(file for file, _ in files[bad:-1])
    decoded_lines = [entry for _, decoded in files[bad:] for entry in decoded.entries]
    last_events = {
        entry["base"]: entry["event"]
        for entry in decoded_lines
        if entry.get("event") in ("reclaimed", "kept") and isinstance(entry.get("base"), int)
    }
    reclaimed = {base for base, event in last_events.items() if event == "reclaimed"}
    return RebuiltLedger(
        entries=[{key: entry[key] for key in entry if key != "prev"} for entry in decoded_lines],
        damaged=sum(len(decoded.broken) for _, decoded in files[bad:]),
        prev=files[bad - 1][1].tip if bad else GENESIS,
        obsolete=obsolete,
        first_line=line_of[obsolete[0]] if obsolete else 0,
        there=tuple(sorted(reclaimed.intersection(each.base_sequence for each in list_segments(root).segments))),
    )


def rebuild_ledger(root: Root, disk: Disk, path: Path, *, now_ns: int) -> None:
    """Replace a ledger by one with an intact chain; repeatable after a kill."""
    found = _rebuilt(root, path)
    if found.entries is not None:
        for part in found.obsolete:
            _keep(root, disk, part)
        kept, sha256 = _keep(root, disk, path)
        disk.replace(path, found.lines(kept=kept, sha256=sha256, now_ns=now_ns))
    for part in found.obsolete:
        disk.unlink(part)
    disk.sync_directory(root.ledger)


def _keep(root: Root, disk: Disk, path: Path) -> tuple[str, str]:
    old = read_regular(path) if path.exists() else b""
    sha256 = hashlib.sha256(old).hexdigest()
    kept = root.quarantine / f"{path.name}.{sha256[:16]}"
    if not kept.exists():
        temporary = kept.with_name(f"{kept.name}.{secrets.token_hex(8)}{TEMPORARY}")
        disk.replace(temporary, old)
        disk.rename(temporary, kept)
        disk.sync_directory(root.quarantine)
    return str(kept.relative_to(root.path)), sha256


_PREFIX = "wald-repair-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def proposed(root: Root) -> Iterator[tuple[Plan, LogSurvey]]:
    """Yield the plan, and the facts, which are valid within the block; may raise NotFound or Damaged.

    The facts are read with the replacement of a broken ledger or identity: ledgers decide which records are lost, and
    the identity which files are foreign.
    """
    _remove_abandoned()
    broken = dict(_broken(root))
    acts = tuple(Act(ActionKind.LEDGER, path, reason) for path, reason in broken.items())
    lost = lost_identity(root)
    if lost is not None:
        identity, reason = lost
        acts += (Act(ActionKind.IDENTITY, root.identity, reason, identity=identity),)
    if not acts:
        facts = examine(root)
        yield Planner(facts).plan(), facts
        return
    with _scratch() as made:
        facts = examine(_rehearsed(root, broken, lost[0] if lost else read_identity(root), made))
        found = Planner(facts).plan()
        yield replace(found, acts=acts + found.acts), facts


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make a locked directory; an unlocked one is a leftover."""
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
            broken = [(each.name, *line) for each, decoded in read_files(path) for line in decoded.broken]
        except (Damaged, OSError):
            continue  # unusable
        if broken:
            file, number, reason = broken[0]
            more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
            yield path, f"{file}: line {number}: {reason}{more}"


@dataclass(frozen=True)
class _Rehearsed(Root):
    """Root with the identity, and if ``has_ledgers`` the ledgers, that a repair would write, in ``made``."""

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
        found = _rebuilt(root, path)
        if found.entries is not None:
            (rehearsed.ledger / path.name).write_bytes(found.lines(kept="", sha256="", now_ns=0))
        for part in found.obsolete:
            (rehearsed.ledger / part.name).unlink()
    return rehearsed


@dataclass(frozen=True, slots=True)
class Repair:
    """Executor of acts, under the caller's locks, whose epoch is ``epoch``."""

    root: Root
    disk: Disk
    epoch: int
    now: Callable[[], int]
    moment: Callable[[], Moment]

    def apply(self, act: Act, facts: LogSurvey) -> None:
        """Raise Damaged if a new file does not read back, OSError if a step fails; the next repair finishes it."""
        match act.kind:
            case ActionKind.LEDGER:
                rebuild_ledger(self.root, self.disk, act.path, now_ns=self.now())
            case ActionKind.IDENTITY:
                self._identify(act)
            case ActionKind.REMOVE:
                self._remove_temporary(act.path)
            case ActionKind.RENAME:
                assert act.target is not None
                self._rename(act.path, act.target)
            case ActionKind.PUT_BACK:
                self._put_back(act.path, facts.put_back[act.path])
            case ActionKind.CLEAR:
                self._keep(act.path)
                self._remove(act.path)
            case ActionKind.SET_ASIDE:
                assert act.facts is not None
                kept = self._keep(act.path)
                self._record(*self._losses(act, kept), self._repaired(act, act.facts, kept))
                self._remove(act.path)
            case ActionKind.REMAKE:
                assert act.facts is not None
                self._remake(act, act.facts, facts)
            case ActionKind.GIVE_UP:
                self._record(*self._losses(act, ""))
            case ActionKind.RECORD:
                with SealedFile(act.path) as sealed:
                    entry = self._sealed(sealed.index, act.path)
                self._record(entry)
            case ActionKind.HEAD:
                self._write_head(facts)

    def _identify(self, act: Act) -> None:
        assert act.identity is not None
        log_id = uuid.UUID(bytes=act.identity.log_id)
        kept = {"kept": self._keep(act.path)} if os.path.lexists(act.path) else {}
        self._record({"event": "identified", "log": log_id.hex, "why": act.reason} | kept | self._when())
        self.disk.replace(act.path, encode_identity(log_id, now=act.identity.created))

    def _remove_temporary(self, path: Path) -> None:
        if path.parent in (self.root.segments, self.root.quarantine, self.root.recovery):
            self.disk.unlink(path)  # the locks keep others from making files there
        else:
            with suppress(FileNotFoundError):
                remove_abandoned(path, self.disk)
        self.disk.sync_directory(path.parent)

    def _rename(self, path: Path, target: Path) -> None:
        """Rename to a free name; the sparse indexes at both names belong to another segment."""
        self._remove_sparse_index(path)
        self._remove_sparse_index(target)
        self.disk.rename_to_free(path, target)
        self.disk.sync_directory(path.parent)

    def _put_back(self, path: Path, original: Path) -> None:
        if path.exists():
            self._keep(path)
        self.disk.rename(original, path)
        self.disk.sync_directory(path.parent)

    def _remake(self, act: Act, found: SegmentFacts, facts: LogSurvey) -> None:
        kept = self._keep(act.path)
        if found.twin is not None:
            self._keep(found.twin)
        segments = list_segments(self.root).segments
        older = Listing(tuple(each for each in segments if each.base_sequence < found.base))
        before = state_before(self.root, found.segment, older, facts.log_id, [], facts.history.last_dropped)
        made = self._rewriter(act, found, facts).rewrite(before)
        self._record(
            *self._losses(act, kept),
            self._repaired(act, found, kept),
            *(self._sealed(each.index, each.path) for each in made if each.index is not None),
        )
        self._put_in_place(found.segment, made)
        if found.twin is not None:
            self._remove(found.twin)
        losses = () if act.loses else History(self.root).losses(found.base, SEQUENCE_MAX)
        if not act.loses and all(loss.saved_file != kept for loss in losses):
            with suppress(FileNotFoundError):  # no line names the old file
                self.disk.unlink(self.root.path / kept)
                self.disk.sync_directory(self.root.quarantine)

    def _rewriter(self, act: Act, found: SegmentFacts, facts: LogSurvey) -> Rewriter:
        intact, history = Spans(span for each in facts.segments for span in each.spans), History(self.root)

        def is_broken(sequence: int) -> bool:
            # A killed or earlier repair may have omitted its beginning.
            return sequence in act.broken or (sequence not in intact and history.is_given_up(sequence))

        own = Spans(found.spans)
        following = [each.base for each in facts.segments if each.base > found.base and not each.problem]
        return Rewriter(
            self.root,
            self.disk,
            found.segment,
            facts.log_id,
            durable=found.durable,
            end=min(following, default=1 << 64),
            cut=found.cut,
            is_broken=is_broken,
            dropped=last_dropped(found.segment, history),
            complete=found.rescued is not None
            and not found.rescued.reason
            and not any(sequence in own for sequence in act.broken),
        )

    def _put_in_place(self, old: Segment, made: list[NewSegment]) -> None:
        for each in reversed(made):
            self.disk.rename(each.path, self.root.segment(each.base_sequence, old.kind.form))
            # After the rename: the old segment may have lost its header, and the index has the salt.
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
                self._copy(path, target)
            self.disk.sync_directory(self.root.quarantine)
        return os.fspath(target.relative_to(self.root.path))

    def _copy(self, path: Path, target: Path) -> None:
        temporary = target.with_name(target.name + TEMPORARY)
        temporary.unlink(missing_ok=True)
        descriptor = self.disk.create(temporary)
        try:
            with open_file(path) as file:
                self.disk.copy(descriptor, file.fileno(), os.fstat(file.fileno()).st_size, 0)
            self.disk.sync(descriptor)
        finally:
            self.disk.close(descriptor)
        self.disk.rename(temporary, target)

    def _record(self, *entries: Entry) -> None:
        with closing(Ledger(self.root.ledger / "segments.jsonl", self.disk)) as ledger:
            ledger.append(*entries)

    def _losses(self, act: Act, kept: str) -> Iterator[Entry]:
        """Yield a line for each span that no killed repair has recorded."""
        history, left = History(self.root), act.lost_records
        for first, last in act.lost:
            if not any(history.unexplained(first, last)):
                continue
            broken = act.broken.get(first) if first == last else None  # other pieces stay
            reason = act.reason if broken is None else "a piece of it is lost"
            entry: Entry = {"event": "lost", "base": first, "last": last, "why": reason}
            records = min(left, records_lost([(first, last)], act.facts, history))
            left -= records  # by the ledger alone, each span counts all lost records
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

    def _repaired(self, act: Act, found: SegmentFacts, kept: str) -> Entry:
        last = max((last for _, last in found.spans), default=found.base - 1)
        entry = {"event": "repaired", "base": found.base, "last": last, "why": act.reason, "deed": act.kind.value}
        return entry | {"kept": kept, "lossless": not act.loses, "epoch": self.epoch} | self._when()

    def _sealed(self, index: SealedIndex, path: Path) -> Entry:
        return {"event": "sealed"} | sealed_entry(index, path.stat().st_size, self.moment(), self.now())

    def _when(self) -> Entry:
        return {"at": self.now()} | self.moment().as_entry()

    def _write_head(self, facts: LogSurvey) -> None:
        """Write the head at the end of the log; its sequence never decreases."""
        segments = list_segments(self.root).segments
        if not segments:
            return  # its sequence is right, and no segment exists
        newest = segments[-1]
        state = state_after(Listing((newest,)), facts.log_id, [])
        last = max(facts.last, state.next_sequence - 1)
        require_own_files(self.root)
        head = Head(last, newest.base_sequence, self._end(newest), self.epoch, state.append_time_ns)
        self.disk.replace(self.root.head, encode_head(head))

    def _end(self, segment: Segment) -> int:
        """Return the end of the batches; sync intact ones first, since readers now see them."""
        if segment.kind.form is Kind.SEALED:
            with SealedFile(segment.path) as sealed:
                return sealed.index.raw_bytes
        descriptor = self.disk.open(segment.path)
        try:
            self.disk.sync(descriptor)
            return next(found.offset for found in RawFile(descriptor).scan() if isinstance(found, SegmentEnd))
        finally:
            self.disk.close(descriptor)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open_file(path) as file:
            while part := file.read(1 << 20):
                digest.update(part)
    except (OSError, Damaged):  # the name only has to be the same each time
        digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()
