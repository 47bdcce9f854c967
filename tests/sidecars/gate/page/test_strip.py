"""The strip draws a log from left to right: no pieces overlap or vanish, and cursors keep their order."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from wald_gate.page.strip import PIECES_MAX, Look, Piece, strip

KINDS = [look for look in Look if look not in (Look.ACTIVE, Look.RECLAIMED)]


@st.composite
def logs(draw: st.DrawFn) -> list[Piece]:
    """Generate segments, some with gaps between them; the last may be active."""
    count = draw(st.integers(0, 12) | st.integers(150, 240))
    random = draw(st.randoms(use_true_random=False))
    base, found = 1, []
    for _ in range(count):
        base += random.choice((0, 0, 0, 7))
        last = base + random.choice((0, 3, 1000))
        records = last - base + 1
        archived, partly = random.choice(((0, 0), (0, 0), (records, 0), (0, records)))
        look, held, size = random.choice(KINDS), random.randrange(2), random.randrange(99)
        found.append(Piece(base, last, look, held, stored_bytes=size, archived=archived, partly=partly))
        base = last + 1
    if draw(st.booleans()):
        found.append(Piece(base, base + draw(st.integers(-1, 50)), Look.ACTIVE, fill=draw(st.floats(0.02, 1))))
    return found


@given(logs())
def test_the_pieces_fill_the_width_and_leave_nothing_out(pieces: list[Piece]) -> None:
    drawn = strip(pieces, None, []).drawn

    assert all(abs(one.x + one.width - other.x) < 1e-6 for one, other in pairwise(drawn))
    assert all(each.width > 0 for each in drawn)
    assert not drawn or (drawn[0].x == 0 and abs(drawn[-1].x + drawn[-1].width - 100) < 1e-6)
    assert sum(each.piece.segments for each in drawn) == len(pieces)
    assert sum(each.piece.stored_bytes for each in drawn) == sum(piece.stored_bytes for piece in pieces)
    assert sum(each.piece.held for each in drawn) == sum(piece.held for piece in pieces)
    assert sum(each.piece.archived for each in drawn) == sum(piece.archived for piece in pieces)
    assert len(drawn) <= PIECES_MAX + 1


@given(logs())
def test_what_is_damaged_or_held_back_is_never_drawn_as_if_it_were_not(pieces: list[Piece]) -> None:
    drawn = strip(pieces, None, []).drawn

    for piece in pieces:
        found = [each.piece for each in drawn if each.piece.first <= piece.first][-1]
        assert found.look is Look.DAMAGED or piece.look is not Look.DAMAGED
        assert found.held or not piece.held


@given(logs(), st.booleans())
def test_only_what_is_archived_with_all_its_records_is_drawn_so(pieces: list[Piece], are_gone_archived: bool) -> None:
    drawn = strip(pieces, None, [], lambda first, last: ((last - first + 1) * are_gone_archived, 0)).drawn

    for piece in pieces:
        found = [each.piece for each in drawn if each.piece.first <= piece.first][-1]
        assert piece.is_archived or not found.is_archived or not piece.records
        assert found.is_archived or found.is_partly_archived or not (piece.is_archived or piece.is_partly_archived)
    gone = [each.piece for each in drawn if each.piece.look is Look.RECLAIMED]
    assert all(piece.is_archived == are_gone_archived and not piece.is_partly_archived for piece in gone)


@given(logs(), st.lists(st.integers(0, 1 << 20), max_size=60))
def test_cursors_are_marked_in_their_order_and_each_once(pieces: list[Piece], cursors: list[int]) -> None:
    named = [(f"group{number}", at) for number, at in enumerate(cursors)]
    found = strip(pieces, None, named)

    assert sorted(name for mark in found.marks for name in mark.names) == sorted(name for name, _ in named)
    assert [mark.number for mark in found.marks] == list(range(1, len(found.marks) + 1))
    assert all(one.x < other.x and one.last <= other.first for one, other in pairwise(found.marks))
    assert all(0 <= mark.x <= 100 + 1e-6 for mark in found.marks)
    for one, other in combinations(found.marks, 2):
        assert one.row != other.row or abs(one.x - other.x) >= 4 * 1.6 - 1e-6


@given(logs(), st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_a_later_record_is_never_further_to_the_left(pieces: list[Piece], one: int, other: int) -> None:
    found = strip(pieces, None, [])

    assert found.at(min(one, other)) <= found.at(max(one, other))


def test_the_head_is_where_the_active_segment_is_written_up_to() -> None:
    sealed, active = Piece(1, 100, Look.SEALED), Piece(101, 110, Look.ACTIVE, fill=0.25)
    found = strip([sealed, active], 110, [("all", 100)])
    where = found.drawn[1]

    assert found.head_x == where.x + where.width * 0.25
    assert found.marks[0].x == where.x


def test_what_is_gone_is_drawn_as_gone() -> None:
    found = strip([Piece(51, 60, Look.SEALED), Piece(71, 80, Look.SEALED)], 80, [])

    assert [(each.piece.first, each.piece.last, each.piece.look) for each in found.drawn] == [
        (1, 50, Look.RECLAIMED),
        (51, 60, Look.SEALED),
        (61, 70, Look.RECLAIMED),
        (71, 80, Look.SEALED),
    ]
