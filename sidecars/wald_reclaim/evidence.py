"""Lines of ``ledger/reclaim.jsonl``: the removed records of each deletion and shrink, and the cursors that allow it.

{"event": "reclaimed", "base", "last", "at", "rule", "bytes", "sha256" or "form", "routes" or "evidence", "lost",
 "lost_bytes", "damaged"}
{"event": "evidence", "base", "last", "at", "routes"}      shared by the lines after it with "evidence": base
{"event": "shrunk", "base", "last", "at", "bytes", "sha256", "was_bytes", "was_sha256", "routes", "dropped",
 "runs"}
{"event": "kept", "base", "why", "at"}      withdraws an earlier line about the segment
{"event": "seen", "through", "at"}          every complete segment up to this one existed (wald_reclaim.ages)

Most also have the moment of the boot. Segments with many routes that every group has read share one list of routes
with the sums over all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from wald.errors import Damaged
from wald.files.listing import Segment
from wald.files.uptime import Moment, parse_moment
from wald.format.ledger_lines import Entry, RawJson, parse_raw_json
from wald.format.names import Kind
from wald.format.sealed_index import RouteEntry, RouteTable, SealedIndex, merge_routes
from wald.format.spans import pack, run_lengths
from wald.retention.blockers import CursorSnapshot
from wald.segments.sealed_file import SealedFile
from wald.segments.shrinking import Shrinkage
from wald_reclaim.policy import Verdict, share_of_bytes

LISTED_MAX = 32  # routes that a segment's own line lists: about 3 KB
UNEXPLAINED = "found released, reason unknown"
COUNTED_AGAIN = "a cursor has moved, so what is lost is counted again"
SEALED_SINCE = "it was sealed before it could be deleted raw"
_RULES = {verdict.value: verdict for verdict in Verdict if verdict.is_deletion}


@dataclass(frozen=True, slots=True)
class DeletionEvidence:
    """Contents of a segment and the cursors that allow its deletion, for a line that several deletions share."""

    routes: RouteTable
    cursors: CursorSnapshot


class RouteLists:
    """JSON lists of routes for the lines of one process.

    Consecutive segments have the same routes, and while no cursor moves, only the numbers in their lines differ. So
    the rest of the text is made once.
    """

    def __init__(self) -> None:
        self._made_of: tuple[tuple[str, ...], CursorSnapshot, Mapping[str, Verdict]] | None = None
        self._template = ""

    def text(self, table: RouteTable, cursors: CursorSnapshot, rules: Mapping[str, Verdict]) -> RawJson:
        """Return the list of a segment's routes, with the rule of each unless one applies to all."""
        made_of = self._made_of
        if made_of is None or made_of[0] != table.names or made_of[1] is not cursors or made_of[2] != rules:
            self._template = f"[{','.join(_template(name, cursors, rules) for name in table.names)}]"
            self._made_of = table.names, cursors, rules
        numbers = chain.from_iterable(zip(table.counts, table.firsts, table.lasts, strict=True))
        return RawJson(self._template % tuple(numbers))


def _template(route: str, cursors: CursorSnapshot, rules: Mapping[str, Verdict]) -> str:
    rule = {"rule": rules[route].value} if rules else {}
    name, rest = (
        json.dumps(fields, separators=(",", ":"), ensure_ascii=False).replace("%", "%%")
        for fields in ({"route": route}, rule | _permission(route, cursors))
    )
    return f'{name[:-1]},"count":%d,"first":%d,"last":%d,{rest[1:]}'


def _permission(route: str, cursors: CursorSnapshot) -> Entry:
    return {"retired": True} if route in cursors.retired else {"cursors": cursors.positions(route)}


def route_fields(entry: RouteEntry, cursors: CursorSnapshot) -> Entry:
    """Return one route of a line, with the cursors that allow the deletion of its records."""
    held = {"route": entry.route, "count": entry.count, "first": entry.first, "last": entry.last}
    return held | _permission(entry.route, cursors)


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


def kept_entry(base: int, why: str, now_ns: int) -> Entry:
    return {"event": "kept", "base": base, "why": why, "at": now_ns}


def unexplained_entry(base: int, last: int, now_ns: int) -> Entry:
    return {"event": "reclaimed", "base": base, "last": last, "rule": UNEXPLAINED, "at": now_ns}


def reclaimed_entry(
    segment: Segment,
    index: SealedIndex,
    verdict: Verdict,
    routes: RawJson | None,
    lost: Mapping[str, int],
    stored_bytes: int,
    now_ns: int,
) -> Entry:
    """Return the line about a deletion, with unread records by route in ``lost``; a shared line may have ``routes``."""
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
    """Return True if the line of a read segment may leave its many routes to a shared line.

    Its ``sealed`` line must have the same digest, so that the line lists the contents of the deleted file.
    """
    is_whole = index.sha256 and not index.damage and index.shrunk is None
    return bool(is_whole and segment.kind.form is Kind.SEALED and len(index.routes) > LISTED_MAX)


def shared_entry(lines: Sequence[Entry], evidence: Sequence[DeletionEvidence], lists: RouteLists) -> Entry:
    """Return the ``evidence`` line that these lines share; all of them rest on the same cursors."""
    base, last = min(line["base"] for line in lines), max(line["last"] for line in lines)
    routes = lists.text(merge_tables([each.routes for each in evidence]), evidence[0].cursors, {})
    return {"event": "evidence", "base": base, "last": last, "at": lines[0]["at"], "routes": routes}


def shrunk_entry(
    segment: Segment, shrinkage: Shrinkage, was: SealedIndex, was_bytes: int, cursors: CursorSnapshot, now_ns: int
) -> Entry:
    """Return the line about a shrink: remaining and dropped records, and the cursors that allow it."""
    gapped = [entry for entry in shrinkage.dropped if entry.count and entry.count <= entry.last - entry.first]
    runs = {entry.route: pack(run_lengths(shrinkage.spans[entry.route], entry.first)) for entry in gapped}
    line: Entry = {"event": "shrunk", "base": segment.base_sequence, "last": was.next_sequence - 1, "at": now_ns}
    line |= {"rule": "shrink_pinned", "bytes": shrinkage.stored_bytes, "sha256": shrinkage.index.sha256.hex()}
    line |= {"was_bytes": was_bytes, "was_sha256": was.sha256.hex()}
    line["routes"] = [list(entry) for entry in shrinkage.index.routes]
    line["dropped"] = [route_fields(entry, cursors) for entry in shrinkage.dropped]
    return line | ({"runs": runs} if runs else {})


def with_damaged_frames(segment: Segment, index: SealedIndex) -> tuple[SealedIndex, str]:
    """Read every frame; return the index with those damaged since sealing, and a message ("" if intact)."""
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
    more = f", and {len(found) - 1} frames more" if len(found) > 1 else ""
    message = f"{error.message}: records {first.first_sequence} to {first.next_sequence - 1}{more}"
    return replace(index, damage=sorted([*index.damage, *damage])), message


@dataclass(frozen=True, slots=True)
class RecordedDeletion:
    """A ``reclaimed`` line whose file still exists, without the routes, of which there may be a thousand."""

    verdict: Verdict  # its rule; READ for a rule that this version does not know
    lost: Mapping[str, int]
    rules: Mapping[str, Verdict]  # rules of the routes in ``lost``, if they differ
    since: Moment | None  # moment of the line; None if it has none
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
