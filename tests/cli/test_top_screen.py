"""The screen of ``wald top``: it fits terminals of any size and counts the rows it omits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wald.cli.top_screen import cells, lines, plain
from wald.retention.backlog import Condition
from wald.retention.cursors import CursorState
from wald.setting_types import GIB, MIB
from wald.status.rates import Activity, Amount, Inventory, Row, Snapshot

ROW = Row(
    route="access",
    last_sequence=1_234_567,
    received_per_second=1500.0,
    group="processed",
    cursor=1_200_000,
    state=CursorState.VALID,
    retired=False,
    lag_records=34_567,
    oldest_seconds=93_784.0,
    processed_per_second=2.5,
    held_bytes=0,
)
ACTIVITY = Activity(1_234_567, 0.4, 1500.0, 1.5 * MIB, 2, 14, None, "pid 42 on host")
INVENTORY = Inventory(
    age_seconds=0.2,
    states={
        Condition.FREE: Amount(20, GIB),
        Condition.PINNED: Amount(80, 4 * GIB),
        Condition.ACTIVE: Amount(1, 64 * MIB),
    },
    rows=(ROW,),
    free_bytes=120 * GIB,
    total_bytes=400 * GIB,
    growth_bytes_per_second=GIB / 86400,
    seconds_until_full=120 * 86400.0,
)
SNAPSHOT = Snapshot("logs/one", ACTIVITY, INVENTORY)
HEADINGS = ["ROUTE", "LAST", "IN/S", "GROUP", "CURSOR", "LAG", "OLDEST", "OUT/S", "PINS"]


def with_rows(*rows: Row) -> Snapshot:
    return replace(SNAPSHOT, inventory=replace(INVENTORY, rows=rows))


def table(snapshot: Snapshot, *, width: int, height: int) -> list[str]:
    """Return the headings and the lines below them."""
    shown = [line.plain for line in lines(snapshot, width=width, height=height)]
    return shown[next(number for number, line in enumerate(shown) if line.startswith("ROUTE")) :]


def test_everything_is_reported() -> None:
    assert plain(SNAPSHOT, width=120).splitlines() == [
        "daemon    pid 42 on host",
        "head      1,234,567   1,500 records/s   1.5 MiB/s   last commit 0.4 s ago",
        "segments  101 segments, 5.1 GiB",
        "          " + "░" * 12 + "█" * 46 + "▓" * 2,
        "          ░ free 20, 1.0 GiB   █ pinned 80, 4.0 GiB   ▓ active 1, 64.0 MiB",
        "sealing   2 waiting   14 sealed since this began   - B/s",
        "disk      " + "█" * 42 + "░" * 18,
        "          120.0 GiB free of 400.0 GiB   grows 1.0 GiB a day   full in 120 d if nothing is reclaimed",
        "",
        "ROUTE        LAST   IN/S  GROUP         CURSOR     LAG   OLDEST  OUT/S  PINS",
        "access  1,234,567  1,500  processed  1,200,000  34,567  1 d 2 h    2.5   0 B",
    ]


@pytest.mark.parametrize(("state", "word"), [(s, s.value) for s in CursorState if s is not CursorState.VALID])
def test_a_cursor_that_counts_as_nothing_processed_is_a_word(state: CursorState, word: str) -> None:
    shown = plain(with_rows(replace(ROW, state=state)), width=120)

    assert ("no cursor" if state is CursorState.ABSENT else word) in shown
    assert "1,200,000" not in shown


def test_a_retired_route_holds_nothing_back() -> None:
    assert plain(with_rows(replace(ROW, retired=True)), width=120).endswith("retired")


def test_what_is_not_known_is_not_zero() -> None:
    nothing = plain(Snapshot("logs/one", None, None, ("it is gone",)), width=120)
    unknown = replace(ROW, last_sequence=None, received_per_second=None, processed_per_second=None)

    assert nothing.splitlines() == ["it is gone", "head      -", "segments  -"]
    assert plain(with_rows(unknown), width=120).splitlines()[-1].split()[:4] == ["access", "?", "-", "processed"]


def test_without_a_daemon_before_the_first_record_the_screen_says_so() -> None:
    empty = replace(INVENTORY, states={}, rows=(), growth_bytes_per_second=None, seconds_until_full=None)
    fresh = Snapshot("logs/one", replace(ACTIVITY, sequence=0, durable_seconds=None, daemon=""), empty)
    shown = plain(fresh, width=120)

    assert all(words in shown for words in ("none runs", "nothing is durable yet", "no routes yet", "not known yet"))


def test_what_does_not_fit_is_summed_up() -> None:
    rows = [replace(ROW, route="big", held_bytes=GIB), *(replace(ROW, route=f"r{n:03}") for n in range(999))]
    shown = table(with_rows(*rows), width=80, height=22)

    assert [line.split()[0] for line in shown[:3]] == ["ROUTE", "big", "r000"]
    assert shown[-1] == f"and {1000 - (len(shown) - 2)} more routes, pinning nothing"


def test_hidden_rows_report_the_most_that_one_of_them_pins() -> None:
    """Two groups may pin the same segment, so their pinned bytes cannot be added."""
    rows = [replace(ROW, group=group, held_bytes=GIB) for group in "abcdefghijklm"]
    shown = table(with_rows(*rows), width=80, height=16)

    assert shown[-1] == f"and {13 - (len(shown) - 2)} more groups of 1 route, pinning 1.0 GiB or less each"


def test_narrow_screens_keep_the_columns_about_pins() -> None:
    headings = [table(SNAPSHOT, width=width, height=40)[0].split() for width in (120, 60, 34)]

    assert headings[0] == HEADINGS
    assert headings[2] == ["ROUTE", "GROUP", "LAG", "PINS"]
    assert set(headings[2]) < set(headings[1]) < set(headings[0])


def test_long_names_are_shortened_before_columns_go() -> None:
    snapshot = with_rows(replace(ROW, route="r" * 127, group="g" * 127))
    heading, row = table(snapshot, width=100, height=40)

    assert heading.split() == HEADINGS
    assert "…" in row
    assert len(row) <= 100


@given(
    width=st.integers(1, 200),
    height=st.integers(0, 60),
    rows=st.integers(0, 40),
    held=st.integers(0, GIB),
    route=st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=127),
)
def test_the_screen_fits_every_terminal(width: int, height: int, rows: int, held: int, route: str) -> None:
    row = replace(ROW, route=route, held_bytes=held)
    snapshot = replace(with_rows(*[row] * rows), problems=("a problem in many words " * 5,))

    assert len(lines(snapshot, width=width, height=height)) <= height
    assert all(len(line) <= width for line in plain(snapshot, width=width).splitlines())


def test_names_cannot_move_the_cursor() -> None:
    """A file in a route's directory may have any name, including control characters."""
    snapshot = replace(with_rows(replace(ROW, group="\x1b[2J\n\udcff")), root="\x1b[31m", problems=("\x1b]0;x\x07",))
    shown = plain(snapshot, width=120)

    assert "\x1b" not in shown
    assert "?[2J??" in shown


@given(amounts=st.lists(st.integers(0, 1 << 50), max_size=6), width=st.integers(6, 200))
def test_a_bar_is_full_and_shows_all_there_is(amounts: list[int], width: int) -> None:
    counts = cells(amounts, width)

    assert sum(counts) == (width if any(amounts) else 0)
    assert [count > 0 for count in counts] == [amount > 0 for amount in amounts]
