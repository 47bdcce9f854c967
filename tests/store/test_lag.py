"""Lag is the number of records that a reader at the cursor would get: counted by reading, asked of every command."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from logs import Built
from running import output_of

from wald.files.listing import list_segments
from wald.retention.backlog import Backlog
from wald.retention.cursors import read_cursors
from wald.retention.progress import measure_lags
from wald.segments.view import read_view


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Routes a, b and c mixed over sealed, cut and active segments, a long record of b among them."""
    built = Built(tmp_path / "root")
    chance = random.Random(1)
    for number in range(8):
        for _ in range(6):
            built.lines(chance.choice("aab"), [b"x"] * chance.randrange(1, 5))
        if number == 2:
            built.columns("c", [b"1", b"2"])
        built.cut()
        if number == 4:
            built.seal()
    built.piece("b", b"long", begins=True, ends=False)
    built.cut()
    built.piece("b", b"er\n", begins=False, ends=True)
    built.lines("a", [b"y"])
    return built


def counted(built: Built, route: str, cursor: int) -> int:
    """The records behind a cursor, read one by one."""
    return sum(record.sequence > cursor for record in built.log.records(route))


def asked(built: Built, route: str) -> set[int]:
    """The lag of a route's one group, from everybody who tells it."""
    root, log_id = built.root, built.log_id
    cursors = [
        cursor
        for name in root.route_names()
        for cursor in read_cursors(root, name, log_id=log_id, head_sequence=built.last)
    ]
    backlog = Backlog(read_view(root, log_id))
    list(backlog.segments())
    return {
        measure_lags(read_view(root, log_id), cursors)[route, "processed"].records,
        backlog.groups[route, "processed"].lag.records,
    }


def test_lag_is_what_a_reader_would_get(built: Built) -> None:
    """With a damaged index too: the lag counts the salvaged records; a cursor that is not trusted counts as none."""
    for route in "abc":
        for cursor in range(0, built.last + 1, 7):
            built.log.set_cursor(route, cursor)
            assert asked(built, route) == {counted(built, route, cursor)}
    (built.root.cursor("a", "processed")).write_text("99999999\n")
    assert asked(built, "a") == {counted(built, "a", 0)}
    path = next(path for path in sorted(built.root.segments.iterdir()) if path.name.endswith(".zst"))
    path.write_bytes(path.read_bytes()[:-1])
    assert asked(built, "a") == {counted(built, "a", 0)}


def test_what_was_reclaimed_is_not_counted(built: Built) -> None:
    for route in "abc":
        built.log.set_cursor(route, built.last)
    second = list_segments(built.root).segments[1].base_sequence
    built.reclaim(1)
    built.log.set_cursor("a", 0, rewind=True)

    assert asked(built, "a") == {counted(built, "a", second - 1)}
    assert asked(built, "b") == {0}


def test_a_cursor_moved_back_into_what_is_released_counts_it(built: Built) -> None:
    """Readers still get it during the grace period."""
    before = counted(built, "a", 0)
    for route in "abc":
        built.log.set_cursor(route, built.last)
    built.reclaim(1, keep=True)
    built.log.set_cursor("a", 0, rewind=True)

    assert asked(built, "a") == {before}


def test_every_command_tells_the_same_lag(built: Built) -> None:
    """Not the sequences between cursor and head, which are other routes' too."""
    built.log.set_cursor("a", 5)
    built.log.set_cursor("b", 9)
    built.log.set_cursor("c", 0)
    expected = {"a": counted(built, "a", 5), "b": counted(built, "b", 9), "c": 2}
    reported = json.loads(output_of("route", "list", "--json", "--root", built.root.path))["routes"]
    routes = {route["route"]: route["groups"][0]["lag_records"] for route in reported}
    lines = map(json.loads, output_of("explain", "--json", "--root", built.root.path).splitlines())
    explained = {line["route"]: line["lag_records"] for line in lines if line["kind"] == "group"}
    table = [line.split() for line in output_of("route", "list", "--root", built.root.path).decode().splitlines()]

    assert routes == explained == expected
    assert {row[0]: int(row[4]) for row in table[1:]} == expected
    shown = [line.split() for line in output_of("top", "--once", "--root", built.root.path).decode().splitlines()]
    heading = next(row for row in shown if "LAG" in row)
    lag = heading.index("LAG")
    assert {row[0]: int(row[lag]) for row in shown if row and row[0] in expected} == expected
