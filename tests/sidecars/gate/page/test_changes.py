"""Updates of a live part contain only the changes."""

from __future__ import annotations

from wald_gate.page.frame import Sent, changes


def table(**rows: int) -> str:
    return "<table>" + "".join(f'<tr id="{name}"><td>{value}</td></tr>' for name, value in rows.items()) + "</table>"


def test_a_part_is_sent_whole_first_and_then_row_by_row() -> None:
    sent: Sent = {}

    assert changes("live_x", table(a=1, b=2), sent) == [("live_x", table(a=1, b=2))]
    assert changes("live_x", table(a=1, b=2), sent) == []
    assert changes("live_x", table(a=1, b=3), sent) == [("b", '<tr id="b"><td>3</td></tr>')]
    assert changes("live_x", table(a=1, b=3), sent) == []


def test_a_part_is_sent_whole_when_rows_come_go_or_change_places() -> None:
    sent: Sent = {}
    for html in (table(a=1, b=2), table(a=1), table(b=2, a=1), table(a=1, b=2), table(a=1, b=2, c=3), "<p>", "<q>"):
        assert changes("live_x", html, sent) == [("live_x", html)]


def test_of_rows_that_have_gone_nothing_is_kept() -> None:
    """Otherwise a page that follows records for days would keep every row ever sent."""
    sent: Sent = {}
    for number in range(3):
        changes("live_x", table(**{f"r{number}": number}), sent)

    _, rows = sent["live_x"]
    assert list(rows) == ["r2"]


def test_parts_of_a_picture_are_rows_too() -> None:
    sent: Sent = {}
    changes("live_x", '<svg><g id="s-1" class="x"><rect/></g></svg>', sent)

    assert changes("live_x", '<svg><g id="s-1" class="y"><rect/></g></svg>', sent) == [
        ("s-1", '<g id="s-1" class="y"><rect/></g>')
    ]
