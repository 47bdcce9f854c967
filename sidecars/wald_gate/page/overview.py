"""The log at a glance: the strip of its segments, what goes in and out, what is left of the disk, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import Response

from wald.retention.backlog import GroupBacklog
from wald.retention.cursors import CursorState
from wald_gate.call import Call
from wald_gate.page.archived import Archived
from wald_gate.page.frame import Facts, live_page
from wald_gate.page.picture import Picture
from wald_gate.page.strip import Look, Mark, Piece, strip

_LINES = 20  # of the table of cursors, which has one for each mark at least


@dataclass(frozen=True, slots=True)
class Kind:
    """Segments that are drawn alike."""

    look: Look
    segments: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """A group in the table of cursors, and the number of its mark on the strip."""

    mark: int
    name: str
    processed: int
    lag: int


async def overview(call: Call) -> Response:
    """The view at ``/``; who may not administer the log sees how far it is, and nothing of others' routes."""
    return await live_page(call, "overview.html", lambda picture: _facts(call, picture))


def _facts(call: Call, picture: Picture) -> Facts:
    trouble = call.words(picture.trouble)
    if not call.client.admin:
        return {"may_see": False, "picture": picture, "trouble": trouble}
    walk = picture.walk
    named = [each for each in walk.by_name.values() if not each.retired] if walk else []
    counting = [each for each in named if each.cursor.state is not CursorState.ABSENT]
    cursors = [(_name(each), each.cursor.effective) for each in counting]
    seen = picture.activity
    archived = walk.archived if walk else Archived()
    drawn = strip(picture.pieces, seen.sequence if seen else None, cursors, archived.of_gone)
    rows = walk.inventory.rows if walk and walk.inventory else ()
    out = [row.processed_per_second for row in rows if row.processed_per_second is not None]
    return {
        "may_see": True,
        "picture": picture,
        "trouble": trouble,
        "strip": drawn,
        "kinds": _kinds(picture.pieces),
        "held": Kind(Look.SEALED, *_sums([piece for piece in picture.pieces if piece.held])),
        "archived": Kind(Look.SEALED, *_sums([piece for piece in picture.pieces if piece.is_archived])),
        "partly_archived": Kind(Look.SEALED, *_sums([each for each in picture.pieces if each.is_partly_archived])),
        "archived_gone": sum(last - first + 1 for first, last in archived.gone),
        "lines": _lines(drawn.marks, counting),
        "groups": len(counting),
        "without": len(named) - len(counting),
        "out": sum(out) if out else None,
        "spark": _spark(picture.rates),
    }


def _name(group: GroupBacklog) -> str:
    return f"{group.cursor.route}/{group.cursor.group}"


def _lines(marks: Sequence[Mark], groups: Sequence[GroupBacklog]) -> list[Line]:
    """Those that are the most behind, of each mark and then of all; the most behind first."""
    of_name = {_name(each): each for each in groups}
    lines = [
        Line(mark.number, name, of_name[name].cursor.effective, of_name[name].lag.records)
        for mark in marks
        for name in mark.names
    ]
    lines.sort(key=lambda line: (-line.lag, line.name))
    firsts = {line.mark: line for line in reversed(lines)}
    lines.sort(key=lambda line: line is not firsts[line.mark])
    return sorted(lines[:_LINES], key=lambda line: (-line.lag, line.name))


def _kinds(pieces: Sequence[Piece]) -> list[Kind]:
    counts: Counter[Look] = Counter()
    sizes: Counter[Look] = Counter()
    for piece in pieces:
        counts[piece.look] += piece.segments
        sizes[piece.look] += piece.stored_bytes
    return [Kind(look, counts[look], sizes[look]) for look in Look if counts[look]]


def _sums(pieces: Sequence[Piece]) -> tuple[int, int]:
    return sum(piece.segments for piece in pieces), sum(piece.stored_bytes for piece in pieces)


def _spark(rates: Sequence[float | None]) -> str:
    """The points of a line in a box of 120 × 24, the newest at its right."""
    most = max((rate for rate in rates if rate), default=0.0) or 1.0
    shift = 120 - len(rates)
    return " ".join(f"{shift + at},{23 - 21 * (rate or 0.0) / most:.1f}" for at, rate in enumerate(rates))
