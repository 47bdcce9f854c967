"""Lines of ``ledger/reclaim.jsonl``: the removed records of each deletion and shrink, and the cursors that allow it.

{"event": "reclaimed", "base", "last", "at", "rule", "bytes", "sha256" or "form", "routes" or "evidence", "lost",
 "lost_bytes", "damaged"}
{"event": "evidence", "base", "last", "at", "routes"}      shared by the lines after it with "evidence": base
{"event": "shrunk", "base", "last", "at", "bytes", "sha256", "was_bytes", "was_sha256", "routes", "dropped",
 "runs"}
{"event": "kept", "base", "why", "at"}      withdraws an earlier line about the segment
{"event": "seen", "through", "at"}          every complete segment up to this one existed

Most also have the time since boot. Segments with many routes that every group has read share one list of routes with
the totals.

The times since boot in this ledger and in segments.jsonl ("sealed": this segment existed) give minimum ages of
segments; the wall clock is not used. For each ledger, the times between its lines are added up. The longer of the two
sums counts, because both are lower bounds. Time that no line covers (before the first pass of a boot, after the last
line of the previous boot, around damaged lines) does not count: an age may be underestimated, and is never
overestimated.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path

from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.ledger_read import LedgerLines
from wald.files.listing import Segment
from wald.files.uptime import Elapsed, Moment, parse_moment
from wald.format.ledger_lines import Entry, RawJson, parse_raw_json
from wald.format.names import Kind
from wald.format.sealed_index import RouteEntry, RouteTable, SealedIndex, merge_routes
from wald.format.spans import Span, pack, run_lengths
from wald.retention.blockers import CursorSnapshot
from wald.segments.sealed_file import SealedFile
from wald.segments.shrinking import Shrinkage
from wald_reclaim.policy import Verdict, share_of_bytes

LISTED_MAX = 32  # routes that a segment's own line lists: about 3 KB
UNEXPLAINED = "found released, reason unknown"
COUNTED_AGAIN = "a cursor has moved, so lost records are counted again"
SEALED_SINCE = "it was sealed before it could be deleted raw"
_RULES = {verdict.value: verdict for verdict in Verdict if verdict.is_deletion}


@dataclass(frozen=True, slots=True)
class DeletionEvidence:
    """Contents of a segment and the cursors that allow its deletion, for a line shared by several deletions."""

    routes: RouteTable
    cursors: CursorSnapshot


def _permission(route: str, cursors: CursorSnapshot) -> Entry:
    return {"retired": True} if route in cursors.retired else {"cursors": cursors.positions(route)}


def route_fields(entry: RouteEntry, cursors: CursorSnapshot) -> Entry:
    """Return one route of a line, with the cursors that allow the deletion of its records."""
    held = {"route": entry.route, "count": entry.count, "first": entry.first, "last": entry.last}
    return held | _permission(entry.route, cursors)


def routes_json(table: RouteTable, cursors: CursorSnapshot, rules: Mapping[str, Verdict]) -> RawJson:
    """Return the JSON list of a segment's routes, with the rule of each unless one applies to all."""
    held = (route_fields(entry, cursors) for entry in table)
    listed = [each | {"rule": rules[each["route"]].value} for each in held] if rules else list(held)
    return RawJson(json.dumps(listed, separators=(",", ":"), ensure_ascii=False))


def merge_tables(tables: Sequence[RouteTable]) -> RouteTable:
    """Return the sums over consecutive segments, oldest first."""
    by_names: dict[tuple[str, ...], list[RouteTable]] = {}
    for table in tables:
        by_names.setdefault(table.names, []).append(table)
    sums = [
        RouteTable(
            names,
            tuple(map(sum, zip(*(table.counts for table in same), strict=True))),
            same[0].firsts,
            same[-1].lasts,
            tuple(map(sum, zip(*(table.payload_bytes for table in same), strict=True))),
        )
        for names, same in by_names.items()
    ]
    return sums[0] if len(sums) == 1 else RouteTable.from_entries(merge_routes((), chain.from_iterable(sums)))


def reclaimed_entry(
    segment: Segment,
    index: SealedIndex,
    verdict: Verdict,
    routes: RawJson | None,
    lost: Mapping[str, int],
    stored_bytes: int,
    now_ns: int,
) -> Entry:
    """Return the line about a deletion, with unread records by route in ``lost``; ``routes`` may be shared."""
    line: Entry = {"event": "reclaimed", "base": index.base_sequence, "last": index.next_sequence - 1}
    line |= {"at": now_ns, "rule": verdict.value, "bytes": stored_bytes}
    if segment.kind.form is Kind.RAW:  # no line of the sealer has its times
        (frame,) = index.frames
        line |= {"form": "raw", "earliest": frame.earliest_ns, "latest": frame.latest_ns}
    elif index.sha256:
        line["sha256"] = index.sha256.hex()
    if routes is not None:
        line["routes"] = routes
    if lost:
        line["lost"] = dict(lost)
        losing = (entry for entry in index.routes if entry.route in lost)
        line["lost_bytes"] = {entry.route: share_of_bytes(entry, lost[entry.route]) for entry in losing}
    if index.damage:
        line["damaged"] = True
        line["damaged_bytes"] = sum(length for _, length in index.damage)
    return line


def can_share(segment: Segment, index: SealedIndex) -> bool:
    """Return True if the line of a segment that was read may leave its many routes to a shared line.

    Its ``sealed`` line must have the same digest, so that the line lists the contents of the deleted file.
    """
    is_whole = index.sha256 and not index.damage and index.shrunk is None
    return bool(is_whole and segment.kind.form is Kind.SEALED and len(index.routes) > LISTED_MAX)


def shared_entry(lines: Sequence[Entry], evidence: Sequence[DeletionEvidence]) -> Entry:
    """Return the ``evidence`` line that these lines share; all of them rest on the same cursors."""
    base, last = min(line["base"] for line in lines), max(line["last"] for line in lines)
    routes = routes_json(merge_tables([each.routes for each in evidence]), evidence[0].cursors, {})
    return {"event": "evidence", "base": base, "last": last, "at": lines[0]["at"], "routes": routes}


def shrunk_entry(
    segment: Segment, shrinkage: Shrinkage, was: SealedIndex, was_bytes: int, cursors: CursorSnapshot, now_ns: int
) -> Entry:
    """Return the line about a shrink: remaining and dropped records, and the cursors that allowed it."""
    gapped = [entry for entry in shrinkage.dropped if entry.count and entry.count <= entry.last - entry.first]
    runs = {entry.route: pack(run_lengths(shrinkage.spans[entry.route], entry.first)) for entry in gapped}
    line: Entry = {"event": "shrunk", "base": segment.base_sequence, "last": was.next_sequence - 1, "at": now_ns}
    line |= {"rule": "shrink_pinned", "bytes": shrinkage.stored_bytes, "sha256": shrinkage.index.sha256.hex()}
    line |= {"was_bytes": was_bytes, "was_sha256": was.sha256.hex()}
    line["routes"] = [list(entry) for entry in shrinkage.index.routes]
    line["dropped"] = [route_fields(entry, cursors) for entry in shrinkage.dropped]
    return line | ({"runs": runs} if runs else {})


def with_damaged_frames(segment: Segment, index: SealedIndex) -> tuple[SealedIndex, str]:
    """Read every frame; return the index with the frames damaged since sealing, and a message ("" if intact)."""
    try:
        sealed = SealedFile(segment.path)
    except Damaged:
        return index, ""  # this index was rebuilt from the frames
    with sealed:
        found = sealed.damage()
    if not found:
        return index, ""
    damage = [(frame.raw_offset, frame.raw_bytes) for frame, _ in found if not index.was_damaged(frame)]
    first, error = found[0]
    more = f", and {len(found) - 1} more frames" if len(found) > 1 else ""
    message = f"{error.message}: records {first.first_sequence} to {first.next_sequence - 1}{more}"
    return replace(index, damage=sorted([*index.damage, *damage])), message


@dataclass(frozen=True, slots=True)
class RecordedDeletion:
    """A ``reclaimed`` line whose file still exists, without the routes, of which there may be a thousand."""

    verdict: Verdict  # its rule; READ for a rule that this version does not know
    lost: Mapping[str, int]
    rules: Mapping[str, Verdict]  # rules of the routes in ``lost``, if they differ
    since: Moment | None  # time since boot of the line; None if it has none
    form: Kind  # form of the file, RAW or SEALED

    @classmethod
    def parse(cls, entry: Entry) -> RecordedDeletion:
        lost = entry.get("lost", {})
        verdict = _RULES.get(str(entry.get("rule")), Verdict.READ)
        rules = {}
        if verdict is Verdict.EACH_ROUTE:
            routes = (each for each in parse_raw_json(entry)["routes"] if each["route"] in lost)
            rules = {each["route"]: _RULES.get(str(each.get("rule")), Verdict.READ) for each in routes}
        return cls(verdict, lost, rules, parse_moment(entry), Kind.RAW if entry.get("form") == "raw" else Kind.SEALED)


_SEEN_INTERVAL_NS = 3600 * 10**9  # between two lines "seen" of a boot; at most this is lost at the end of a boot


class _LedgerTimes:
    """Times of one kind of event in a ledger."""

    def __init__(self, path: Path, event: str, key: str) -> None:
        self._lines = LedgerLines(path)
        self._event, self._key = event, key
        self._generation = 0
        self._reset()

    def _reset(self) -> None:
        self._read = 0
        self.elapsed = Elapsed()  # up to the last line
        self.at_ns: dict[int, int] = {}  # for each value of ``key``, the time up to the first line with it
        self.last: Moment | None = None  # of the event
        self.damage: list[tuple[str, Span]] = []  # unreadable lines, with the sequences that they may be about

    def update(self) -> None:
        """Read the lines appended since the last call; raise Damaged if the current file is damaged."""
        lines = self._lines.oldest_first(
            after=self._read, with_routes=False, on_damage=lambda error, span: self.damage.append((error.message, span))
        )
        for line in lines:
            if self._lines.generation != self._generation:
                break
            self._read = line.number
            if (moment := parse_moment(line.entry)) is None:
                continue
            elapsed_ns, value = self.elapsed.advance(moment), line.entry.get(self._key)
            if line.entry.get("event") == self._event and isinstance(value, int):
                self.last = moment
                self.at_ns.setdefault(value, elapsed_ns)
        if self._lines.generation != self._generation:  # the lines read earlier no longer exist
            self._generation = self._lines.generation
            self._reset()
            self.update()


class Ages:
    """Ages of the segments of ``root``."""

    def __init__(self, root: Root, moment: Callable[[], Moment]) -> None:
        self._moment = moment
        self._sealed = _LedgerTimes(root.ledger / "segments.jsonl", "sealed", "base")
        self._own = _LedgerTimes(root.ledger / "reclaim.jsonl", "seen", "through")
        self._seen: list[tuple[int, int]] = []  # (highest segment of a "seen" line, time up to it), both increasing
        self.problem = ""  # reason why the ledger of the segments cannot be used

    def seen_entry(self, through: int, *, now_ns: int) -> Entry | None:
        self._own.update()
        now, last = self._moment(), self._own.last
        if last is not None and now.boot == last.boot and now.boottime_ns - last.boottime_ns < _SEEN_INTERVAL_NS:
            return None
        return {"event": "seen", "through": through, "at": now_ns} | now.as_entry()

    def update(self, bases: Collection[int]) -> None:
        """Read the new lines of both ledgers, for the ages of the segments ``bases``."""
        self._own.update()
        self._seen = []
        for through, elapsed_ns in self._own.at_ns.items():
            if not self._seen or through > self._seen[-1][0]:
                self._seen.append((through, elapsed_ns))
        messages = []
        try:
            self._sealed.update()
        except Damaged as error:
            self._sealed.at_ns.clear()
            messages.append(error.message)
        unknown = sorted(set(bases) - self._sealed.at_ns.keys())
        for message, (low, high) in self._sealed.damage:
            if bisect_left(unknown, low) < bisect_left(unknown, high + 1):
                messages.append(message)
        suffix = "ages are counted from when wald-reclaim first saw a segment"
        self.problem = f"{messages[-1]}; {suffix}" if messages else ""

    def at_least_ns(self, base: int) -> int:
        now = self._moment()
        number = bisect_left(self._seen, base, key=itemgetter(0))
        own_ns = self._own.elapsed.until(now) - self._seen[number][1] if number < len(self._seen) else 0
        at_ns = self._sealed.at_ns.get(base)
        return own_ns if at_ns is None else max(own_ns, self._sealed.elapsed.until(now) - at_ns)
