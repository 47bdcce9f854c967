"""Lookup of one record. Every number from 1 has an answer other than "not found"."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field, replace

from wald.errors import Damaged, InvalidInput
from wald.files.listing import Segment
from wald.files.safe_open import open_file
from wald.format.batch import StoredBatch
from wald.format.ledger_lines import Entry
from wald.format.names import WORK_SUFFIX, Kind, segment_name
from wald.format.times import utc_or_unknown
from wald.format.work import JournalStart, is_done
from wald.hints import hint_for
from wald.retention.cursors import Cursor, CursorState, read_cursors
from wald.retention.history import History, ShrunkRecord, bundle_member, candidate_routes
from wald.segments.durable_end import lost_head
from wald.segments.raw_scan import DamagedBytes
from wald.segments.reader import DroppedBatches, Misplaced, OpenSegment
from wald.segments.view import SegmentGone, State, View


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Location or fate of a record.

    Attributes:
        segment: file name of the segment that contains, or last contained, the record.
        position: offset of the batch in the raw segment, in bytes.
        processed: True for each group that has processed the record, by its cursor or its workers' journal.
        bundle, member: the archive bundle (path or address), and the file in that tar, even if the record is still in
            the log.
        bundle_entry: the ledger's line about the bundle.
        reclaimed: the ledger's line about the deletion, with time, rule and cursors.
        message: the answer as a sentence.
    """

    sequence: int
    state: State
    message: str
    durable: bool = False
    segment: str | None = None
    route: str | None = None
    append_time_ns: int | None = None
    position: int | None = None
    processed: dict[str, bool] = field(default_factory=dict)
    bundle: str | None = None
    member: str | None = None
    reclaimed: Entry | None = None
    bundle_entry: Entry | None = None


def locate_record(view: View, sequence: int) -> Whereabouts:
    if sequence < 1:
        raise InvalidInput(f"{sequence} is not a sequence", case="sequence-below-one")
    history = History(view.root)
    answer = _find_record(view, sequence, history)
    if answer.state is State.NEVER_ISSUED:
        return answer
    try:
        bundled, deletions = history.newest_bundle(sequence), _deletions(history, sequence)
    except Damaged as error:  # the location is known without the ledger
        return replace(answer, message=f"{answer.message}; {error.message}")
    if answer.state is State.LOST or (answer.durable and answer.state is not State.RELEASED):
        deletions = []  # not deleted, or not yet
    if bundled is not None:
        answer = replace(answer, bundle=_bundle(bundled), member=bundle_member(bundled, sequence), bundle_entry=bundled)
    return replace(answer, reclaimed=deletions[0] if deletions else None)


def _find_record(view: View, sequence: int, history: History) -> Whereabouts:
    """Find the record in the segments, or its fate in the ledgers."""
    bound = view.bound
    segments = [*view.listing.released, *view.segments]
    newest_base = view.listing.newest_base()
    if bound.head_lost and sequence > (bound.sequence or 0):
        return Whereabouts(sequence, State.UNKNOWN, lost_head(view.root, bound).message)
    if bound.sequence is not None and sequence > bound.sequence:
        return _never_issued(sequence, bound.sequence)
    candidates = [segment for segment in segments if segment.base_sequence <= sequence]
    reason, dropped_from = "", ""
    # Newest segment first; its released form last.
    candidates.sort(key=lambda segment: (segment.base_sequence, not segment.kind.is_reclaimed))
    for segment in reversed(candidates):
        try:
            opened = view.open(segment)
        except Misplaced as error:  # the previous segment may contain it
            reason = reason or error.message
            continue
        except SegmentGone:
            break  # the ledger has the reason
        except Damaged as error:
            reason = error.message
            break
        with closing(opened):
            result = _find_in(view, sequence, segment, opened)
        if isinstance(result, Whereabouts):
            return result
        if isinstance(result, DroppedBatches):
            dropped_from = segment.path.name
        else:
            reason = result or reason
        break
    if bound.sequence is None and (not candidates or candidates[-1].base_sequence == newest_base):
        return _never_issued(sequence, None)
    return _fate(view, sequence, reason, history, dropped_from=dropped_from)


def _find_in(view: View, sequence: int, segment: Segment, opened: OpenSegment) -> Whereabouts | DroppedBatches | str:
    """Return the record's location, the dropped batches that contained it, the damage found, or ""."""
    limit = view.limit(segment)
    damage: DamagedBytes | None = None
    for item in opened.batches(opened.position_of_sequence(sequence, limit), limit):
        if isinstance(item, DamagedBytes):
            damage = item
        elif isinstance(item, StoredBatch) and item.header.count and item.header.base_sequence <= sequence:
            damage = None
            if sequence < item.header.end_sequence:
                return _location(view, sequence, segment, item)
        elif isinstance(item, DroppedBatches) and item.first_sequence <= sequence < item.next_sequence:
            return item
        elif isinstance(item, StoredBatch) and item.header.base_sequence > sequence:
            break
    tail = opened.tail
    if damage is not None:
        return f"{segment.path}: offset {opened.file_offset(damage.offset)}: damaged ({damage.reason})"
    if tail is not None and tail.garbage_bytes:
        return f"{segment.path}: offset {tail.offset}: damaged ({tail.reason})"
    return ""


def _location(view: View, sequence: int, segment: Segment, item: StoredBatch) -> Whereabouts:
    state = view.state(segment)
    place = f"in {segment.path.name} at position {item.position}, route {item.route}"
    if state is State.RELEASED:
        place = f"reclaimed, but still {place}"
    head_sequence = view.bound.sequence if view.bound.sequence is not None else item.header.end_sequence - 1
    processed = {}
    if (view.root.routes / item.route).is_dir():
        cursors = read_cursors(view.root, item.route, log_id=view.log_id, head_sequence=head_sequence)
        processed = {cursor.group: _has_processed(cursor, sequence, view.log_id) for cursor in cursors}
    return Whereabouts(
        sequence,
        state,
        place,
        durable=True,
        segment=segment.path.name,
        route=item.route,
        append_time_ns=item.header.append_time_ns,
        position=item.position,
        processed=processed,
    )


def _has_processed(cursor: Cursor, sequence: int, log_id: bytes) -> bool:
    if cursor.effective >= sequence:
        return True
    if cursor.state is not CursorState.VALID or not cursor.of_work_group:
        return False
    try:
        with open_file(cursor.path.with_suffix(WORK_SUFFIX)) as journal:
            return is_done(journal, JournalStart(log_id, cursor.route, cursor.group, 0, 0), sequence)
    except (OSError, Damaged):  # the group has no workers, or an unreadable journal
        return False


def _never_issued(sequence: int, last: int | None) -> Whereabouts:
    reason = f"the last durable record is {last}" if last is not None else "there is no head and no such record"
    return Whereabouts(sequence, State.NEVER_ISSUED, f"never issued: {reason}")


def _fate(view: View, sequence: int, damage: str, history: History, *, dropped_from: str) -> Whereabouts:
    """Return the fate of an issued record that no readable segment contains.

    ``damage``, and ``dropped_from``, the shrunk segment that contained the record, may be "".
    """
    sealed = history.sealing_of(sequence)
    segment = segment_name(int(sealed["base"]), Kind.SEALED) if sealed else None
    archived, deletions = history.newest_bundle(sequence), _deletions(history, sequence)
    shrunk = history.shrunk_record(sequence)
    if damage:
        return Whereabouts(sequence, State.QUARANTINED, damage, segment=segment)
    if archived is not None:
        message = f"in bundle {_bundle(archived)}, member {bundle_member(archived, sequence) or 'unknown'}"
        return Whereabouts(sequence, State.ARCHIVED, message, segment=segment, route=archived.get("route"))
    dropped = dropped_from or (shrunk is not None and shrunk.is_dropped)
    if deletions and (dropped or history.deletion_of(sequence) is not None):
        return Whereabouts(sequence, State.RECLAIMED, _describe_deletions(deletions, sequence), segment=segment)
    losses = history.losses(sequence, sequence)
    if losses and losses[0].is_unrestored:
        return Whereabouts(sequence, State.NOT_RESTORED, losses[0].reason)
    if dropped_from:
        message = f"dropped from {dropped_from} by shrinking, and no ledger says when"
        return Whereabouts(sequence, State.RECLAIMED, message, segment=dropped_from)
    skipped = history.skip_of(sequence)
    if skipped is not None:
        skipped_range = f"the daemon skipped sequences {skipped['base']} to {skipped['last']}"
        message = f"{skipped_range}, so no such record exists in this log: {skipped.get('why')}"
        return Whereabouts(sequence, State.SKIPPED, message)
    if losses:
        return Whereabouts(sequence, State.LOST, f"{_describe_loss(shrunk)}: {losses[0].reason}", segment=segment)
    if shrunk is not None:
        name = segment_name(shrunk.entry["base"], Kind.SEALED)
        message = f"{_describe_loss(shrunk)}: {name} is missing, and no ledger explains why"
        return Whereabouts(sequence, State.LOST, message, segment=name)
    message = "the record was issued, but no segment contains it, and no ledger explains why"
    if not view.segments and not view.listing.released:
        hint = hint_for("segments-directory-empty", segments=view.root.segments)
        message = f"the record was issued, but there are no segments; {hint}"
    return Whereabouts(sequence, State.UNKNOWN, message, segment=segment)


def _bundle(entry: Entry) -> str:
    return "/".join(str(part).rstrip("/") for part in (entry.get("dest"), entry.get("path", "unnamed")) if part)


def _describe_loss(shrunk: ShrunkRecord | None) -> str:
    if shrunk is None:
        return "lost"
    return "lost after shrinking had kept it" if shrunk.is_dropped is False else "lost, or already dropped by shrinking"


def _deletions(history: History, sequence: int) -> list[Entry]:
    """Return the ledger lines about a record's deletion, by reclaim or shrinking.

    Several lines may include the record, because some give only one range per route.
    """
    deletion = history.deletion_of(sequence)
    if deletion is None:
        shrunk = history.shrunk_record(sequence)
        return [] if shrunk is None else [shrunk.entry]
    shrinks = [each for each in history.shrinks_before(deletion) if _deleted_routes(each, sequence)]
    certain = [each for each in shrinks if any(is_certain for _, is_certain in candidate_routes(each, sequence))]
    if certain:
        return certain[:1]
    return [deletion, *shrinks] if _deleted_routes(deletion, sequence) or not shrinks else shrinks


def _deleted_routes(entry: Entry, sequence: int) -> list[Entry]:
    """Return a line's routes whose deleted records may include ``sequence``."""
    return [route for route, _ in candidate_routes(entry, sequence)]


def _describe_deletions(deletions: list[Entry], sequence: int) -> str:
    message = f"reclaimed {_describe_deletion(deletions[0], sequence)}"
    for entry in deletions[1:]:
        routes = " or ".join(str(route.get("route")) for route in _deleted_routes(entry, sequence))
        message += f"; or, if it belonged to route {routes}, {_describe_deletion(entry, sequence)}"
    return message


def _describe_deletion(entry: Entry, sequence: int) -> str:
    routes = _deleted_routes(entry, sequence)
    rules = repr(str(entry.get("rule", "unknown")))
    if entry.get("rule") == "each_route" and routes:
        rules = " or ".join(f"{str(route.get('rule'))!r} of route {route.get('route')}" for route in routes)
    message = f"at {utc_or_unknown(entry.get('at'))} by the rule {rules}"
    cursors = [
        (f"{route.get('route')}/{group}", at)
        for route in routes
        if isinstance(route.get("cursors"), dict)
        for group, at in route["cursors"].items()
    ]
    if unread := [name for name, at in cursors if isinstance(at, int) and at < sequence]:
        message += f", though {', '.join(unread)} {'had not' if len(routes) == 1 else 'may not have'} read it"
    elif entry.get("lost") and not routes:
        message += ", though not every group had read all of its segment"
    return f"{message}; cursors: {', '.join(f'{name} at {at}' for name, at in cursors)}" if cursors else message
