"""The lines that reclaim writes into ``ledger/reclaim.jsonl``, without the moment of the boot that each gets.

{"event": "reclaimed", "base", "last", "at", "rule", "bytes", "sha256" or "form", "routes" or "evidence", "lost",
 "lost_bytes", "damaged"}
{"event": "evidence", "base", "last", "at", "routes"}      of the segments whose lines follow and say "evidence": base
{"event": "shrunk", "base", "last", "at", "bytes", "sha256", "was_bytes", "was_sha256", "routes", "dropped",
 "runs"}
{"event": "kept", "base", "why", "at"}      an earlier line about the segment does not hold any more
{"event": "seen", "through", "at"}          every complete segment up to this one existed (wald_reclaim.ages)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from wald.errors import Damaged
from wald.files.listing import Segment
from wald.format.ledger_lines import Entry, RawJson
from wald.format.names import Kind
from wald.format.sealed_index import SealedIndex
from wald.format.spans import pack, run_lengths
from wald.retention.blockers import CursorSnapshot
from wald.segments.sealed_file import SealedFile
from wald.segments.shrinking import Shrinkage
from wald_reclaim.excuses import LISTED_MAX, excused
from wald_reclaim.policy import Verdict
from wald_reclaim.routes import share_of_bytes

UNEXPLAINED = "found released, reason unknown"
COUNTED_AGAIN = "a cursor has moved, so what is lost is counted again"
SEALED_SINCE = "it was sealed before it could be deleted raw"


def kept_entry(base: int, why: str, now_ns: int) -> Entry:
    """The segment stays, whatever the ledger said before."""
    return {"event": "kept", "base": base, "why": why, "at": now_ns}


def unexplained_entry(base: int, last: int, now_ns: int) -> Entry:
    """The file has the name of a released segment, and no line of the ledger says why."""
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
    """The segment is deleted: by which rule, and where the cursors of its routes were.

    Args:
        routes: as :mod:`wald_reclaim.excuses` lists them; None: a line ``evidence`` does.
        lost: of each route, how many of its records are unread, if any are.
    """
    line: Entry = {
        "event": "reclaimed",
        "base": index.base_sequence,
        "last": index.next_sequence - 1,
        "at": now_ns,
        "rule": verdict.value,
        "bytes": stored_bytes,
        **_form(segment, index),
    }
    if routes is not None:
        line["routes"] = routes
    if lost:
        line["lost"] = dict(lost)
        line["lost_bytes"] = {
            entry.route: share_of_bytes(entry, lost[entry.route]) for entry in index.routes if entry.route in lost
        }
    if index.damage:
        line["damaged"] = True
        line["damaged_bytes"] = sum(length for _, length in index.damage)
    return line


def may_share(segment: Segment, index: SealedIndex) -> bool:
    """Whether the line of a read segment may leave its routes to one that several share.

    They are many, and the line about the sealing has them: with the digest, that is what the segment holds.
    """
    whole = index.sha256 and not index.damage and index.shrunk is None
    return bool(whole and segment.kind.form is Kind.SEALED and len(index.routes) > LISTED_MAX)


def excused_entry(lines: Sequence[Entry], routes: RawJson) -> Entry:
    """What the segments of these lines held together, and where the cursors of their routes were."""
    base, last = min(line["base"] for line in lines), max(line["last"] for line in lines)
    return {"event": "evidence", "base": base, "last": last, "at": lines[0]["at"], "routes": routes}


def shrunk_entry(
    segment: Segment, shrinking: Shrinkage, was: SealedIndex, was_bytes: int, claims: CursorSnapshot, now_ns: int
) -> Entry:
    """The segment is written again with what is unread: what stays, and what goes and where its cursors were."""
    gapped = [entry for entry in shrinking.dropped if entry.count and entry.count <= entry.last - entry.first]
    runs = {entry.route: pack(run_lengths(shrinking.spans[entry.route], entry.first)) for entry in gapped}
    return {
        "event": "shrunk",
        "base": segment.base_sequence,
        "last": was.next_sequence - 1,
        "at": now_ns,
        "rule": "shrink_pinned",
        "bytes": shrinking.stored_bytes,
        "sha256": shrinking.index.sha256.hex(),
        "was_bytes": was_bytes,
        "was_sha256": was.sha256.hex(),
        "routes": [list(entry) for entry in shrinking.index.routes],
        "dropped": [excused(entry, claims) for entry in shrinking.dropped],
        **({"runs": runs} if runs else {}),
    }


def _form(segment: Segment, index: SealedIndex) -> Entry:
    """For a sealed segment its digest, if known; for a raw one its times, which no line of the sealer has."""
    if segment.kind.form is Kind.SEALED:
        return {"sha256": index.sha256.hex()} if index.sha256 else {}
    (frame,) = index.frames
    return {"form": "raw", "earliest": frame.earliest_ns, "latest": frame.latest_ns}


def damaged_frames(segment: Segment, index: SealedIndex) -> tuple[SealedIndex, str]:
    """The index with the frames that have changed since the segment was sealed, and a message; "" if none has."""
    try:
        sealed = SealedFile(segment.path)
    except Damaged:
        return index, ""  # this index was made from the frames
    with sealed:
        found = sealed.damage()
    if not found:
        return index, ""
    changed = [(frame.raw_offset, frame.raw_bytes) for frame, _ in found if not index.was_damaged(frame)]
    first, error = found[0]
    more = f", and {len(found) - 1} frames more" if len(found) > 1 else ""
    message = f"{error.message}: records {first.first_sequence} to {first.next_sequence - 1}{more}"
    return replace(index, damage=sorted([*index.damage, *changed])), message


def unread_records(index: SealedIndex, claims: CursorSnapshot) -> dict[str, int]:
    """For each route the number of records that its slowest group has not read."""
    pins = list(claims.pins(index.routes))
    if not pins:
        return {}
    slowest: dict[int, int] = {}
    numbers = {route: number for number, route in enumerate(index.routes.names)}
    for pin in pins:
        number = numbers[pin.route]
        slowest[number] = min(pin.at, slowest.get(number, pin.at))
    read = dict.fromkeys(slowest, 0)
    table = index.batch_table()
    for route, base, count in zip(table.routes, table.bases, table.counts, strict=True):
        if route in slowest:
            read[route] += max(0, min(count, slowest[route] + 1 - base))
    # A damaged segment has fewer batches than records: a record that cannot be found counts as unread.
    held = {number: index.routes[number] for number in slowest}
    return {entry.route: min(entry.count - read[n], entry.last - slowest[n]) for n, entry in held.items()}
