"""Backlog of a log and lag of its groups, compared with numbers counted by hand or by reading."""

import json
import os
import random
from pathlib import Path

import pytest
from logs import SECOND_NS, START_NS, Built
from running import output_of

from wald.files.listing import list_segments
from wald.files.routes import retire_route
from wald.format.names import Kind
from wald.retention.backlog import RECENT_SEGMENTS, Backlog, GroupBacklog, GrowthMeter
from wald.retention.cursors import read_cursors
from wald.retention.progress import measure_lags
from wald.segments.view import read_view


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Released 1; sealed 2 (a: 2–4, b: 5), sealed 6 (a: 6), cut 7 (b: 7–8), active (a: 9–10)."""
    built = Built(tmp_path / "root")
    built.lines("b", [b"0"], cut=True)
    built.lines("a", [b"1", b"2", b"3"])
    built.lines("b", [b"4"], cut=True)
    built.lines("a", [b"5"])
    built.cut(seal=True)
    built.reclaim(1, keep=True)
    built.lines("b", [b"6", b"7"], cut=True)
    built.lines("a", [b"8", b"9"])
    return built


def look(built: Built) -> tuple[Backlog, list[tuple[str, int, list[str]]]]:
    """The backlog, and of each segment its form, its base and who holds it back."""
    backlog = Backlog(built.view)
    return backlog, [
        (status.state.value, status.segment.base_sequence, [f"{pin.route}/{pin.group}" for pin in status.pins])
        for status in backlog.segments()
    ]


def group(built: Built, route: str, group: str = "processed") -> GroupBacklog:
    return look(built)[0].groups[route, group]


def size(built: Built, *bases: int) -> int:
    return sum(built.path(base, Kind.SEALED).stat().st_size for base in bases)


def raw_bytes(built: Built) -> int:
    return built.path(7, Kind.RAW).stat().st_blocks * 512


def test_every_segment_is_reported_with_its_state_and_who_holds_it_back(built: Built) -> None:
    built.log.set_cursor("b", 8)
    assert look(built)[1] == [
        ("released", 1, []),
        ("sealed", 2, ["a/processed"]),
        ("sealed", 6, ["a/processed"]),
        ("cut", 7, []),
        ("active", 9, []),
    ]
    built.log.set_cursor("a", 10)
    built.log.set_cursor("b", 7, rewind=True)
    backlog, reported = look(built)
    assert reported[3:] == [("cut", 7, ["b/processed"]), ("active", 9, [])]
    assert backlog.groups["b", "processed"].pinned_bytes == raw_bytes(built)


def test_the_lag_counts_records_of_the_route_and_the_oldest_tells_how_long(built: Built) -> None:
    """``oldest`` is the append of the first record after the cursor. A retired route has a lag and pins nothing."""
    cases = [(0, 6, 2), (2, 5, 2), (3, 4, 2), (4, 3, 4), (5, 3, 4), (6, 2, 6), (9, 1, 6), (10, 0, 0)]
    for cursor, lag, oldest in cases:
        built.log.set_cursor("a", cursor)
        found = group(built, "a")

        assert found.lag.records == lag
        assert found.lag.oldest_ns == (START_NS + oldest * SECOND_NS if lag else None)
        assert found.lag.seconds(START_NS + 10 * SECOND_NS) == (10 - oldest if lag else 0)
    built.log.set_cursor("a", 0, rewind=True)
    retire_route(built.root, built.disk, "a", now="")
    found = group(built, "a")
    assert (found.retired, found.pinned_bytes, found.lag.records) == (True, 0, 6)


def test_bytes_are_those_held_back_and_those_that_would_go_if_this_one_moved(built: Built) -> None:
    """What several groups of one route pin is exclusive to the route, though no single cursor frees it."""
    built.log.set_cursor("a", 0)
    a, b, raw = group(built, "a"), group(built, "b"), raw_bytes(built)
    assert (a.pinned_segments, a.pinned_bytes) == (2, size(built, 2, 6))
    assert a.exclusive_bytes == size(built, 6)  # the other one is pinned by b too
    assert (b.pinned_bytes, b.exclusive_bytes) == (size(built, 2) + raw, raw)

    built.log.set_cursor("b", 8)
    assert group(built, "a").exclusive_bytes == size(built, 2, 6)
    assert group(built, "b").pinned_bytes == 0
    built.log.set_cursor("a", 0, "audit")
    backlog, _ = look(built)
    assert backlog.exclusive_bytes == {"a": size(built, 2, 6)}
    assert group(built, "a").exclusive_bytes == 0


def test_growth_is_what_came_on_disk_since_the_oldest_of_the_newest_segments(built: Built) -> None:
    backlog, _ = look(built)
    growth = backlog.growth_meter.growth(now_ns=START_NS + 1002 * SECOND_NS)

    assert growth is not None
    payloads = 4 + 4  # of the two raw segments
    assert growth.bytes_per_second == pytest.approx((size(built, 2, 6) + payloads) / 1000)
    assert sum(growth.routes.values()) == pytest.approx(growth.bytes_per_second)
    assert growth.routes["b"] == pytest.approx((size(built, 2) * 2 / 8 + 4) / 1000)
    assert growth.seconds_until_full(1000) == pytest.approx(1000 / growth.bytes_per_second)


def test_growth_is_not_told_from_a_few_minutes_of_an_empty_log_or_with_a_clock_that_was_set_back(
    built: Built, tmp_path: Path
) -> None:
    """Whoever has sent a megabyte in a second does not send 86 GB a day."""
    backlog, _ = look(built)

    for seconds, is_told in ((0, False), (600, False), (603, True)):
        assert (backlog.growth_meter.growth(now_ns=START_NS + seconds * SECOND_NS) is not None) == is_told
    assert look(Built(tmp_path / "empty"))[0].growth_meter.growth(now_ns=START_NS) is None


@pytest.mark.parametrize("apart_seconds", [1, 3600])
def test_growth_is_that_of_many_segments_where_each_is_of_a_short_time(apart_seconds: int) -> None:
    """Over at least ten minutes, over at most the existing segments, and never over all of a long log."""
    gauge, count = GrowthMeter(), 5000
    for number in range(count):
        gauge.add(START_NS + number * apart_seconds * SECOND_NS, 100, ("a", "b"), (3, 1))
    growth = gauge.growth(now_ns=START_NS + count * apart_seconds * SECOND_NS)

    assert growth is not None
    assert growth.bytes_per_second == pytest.approx(100 / apart_seconds)
    assert growth.routes["b"] == pytest.approx(25 / apart_seconds)
    assert len(gauge._recent) <= 2 * RECENT_SEGMENTS


def test_a_segment_that_cannot_be_read_is_reported_and_the_rest_is_counted(built: Built) -> None:
    path = built.path(2, Kind.SEALED)
    path.write_bytes(bytes(path.stat().st_size))
    backlog = Backlog(built.view)
    statuses = list(backlog.segments())

    assert [bool(status.problem) for status in statuses] == [False, True, False, False, False]
    assert str(path) in statuses[1].problem
    assert backlog.groups["a", "processed"].lag.records == 3


def test_a_segment_that_is_sealed_or_reclaimed_meanwhile_is_told_once(built: Built) -> None:
    backlog = Backlog(built.view)
    seen = []
    for status in backlog.segments():
        seen.append(status.segment.base_sequence)
        if status.segment.base_sequence == 2:
            built.seal()  # 7 has another name by now
            os.unlink(built.path(6, Kind.SEALED))

    assert seen == [1, 2, 7, 9]
    assert backlog.groups["b", "processed"].lag.records == 4


@pytest.fixture
def mixed_log(tmp_path: Path) -> Built:
    """Routes a, b and c mixed over sealed, cut and active segments, a long record of b among them."""
    mixed_log = Built(tmp_path / "root")
    chance = random.Random(1)
    for number in range(8):
        for _ in range(6):
            mixed_log.lines(chance.choice("aab"), [b"x"] * chance.randrange(1, 5))
        if number == 2:
            mixed_log.columns("c", [b"1", b"2"])
        mixed_log.cut()
        if number == 4:
            mixed_log.seal()
    mixed_log.piece("b", b"long", begins=True, ends=False)
    mixed_log.cut()
    mixed_log.piece("b", b"er\n", begins=False, ends=True)
    mixed_log.lines("a", [b"y"])
    return mixed_log


def counted(mixed_log: Built, route: str, cursor: int) -> int:
    """The records behind a cursor, read one by one."""
    return sum(record.sequence > cursor for record in mixed_log.log.records(route))


def asked(mixed_log: Built, route: str) -> set[int]:
    """The lag of a route's one group, from everybody who tells it."""
    root, log_id = mixed_log.root, mixed_log.log_id
    cursors = [
        cursor
        for name in root.route_names()
        for cursor in read_cursors(root, name, log_id=log_id, head_sequence=mixed_log.last)
    ]
    backlog = Backlog(read_view(root, log_id))
    list(backlog.segments())
    return {
        measure_lags(read_view(root, log_id), cursors)[route, "processed"].records,
        backlog.groups[route, "processed"].lag.records,
    }


def test_lag_is_what_a_reader_would_get(mixed_log: Built) -> None:
    """With a damaged index too: the lag counts the salvaged records; a cursor that is not trusted counts as none."""
    for route in "abc":
        for cursor in range(0, mixed_log.last + 1, 7):
            mixed_log.log.set_cursor(route, cursor)
            assert asked(mixed_log, route) == {counted(mixed_log, route, cursor)}
    (mixed_log.root.cursor("a", "processed")).write_text("99999999\n")
    assert asked(mixed_log, "a") == {counted(mixed_log, "a", 0)}
    path = next(path for path in sorted(mixed_log.root.segments.iterdir()) if path.name.endswith(".zst"))
    path.write_bytes(path.read_bytes()[:-1])
    assert asked(mixed_log, "a") == {counted(mixed_log, "a", 0)}


def test_released_records_count_for_a_cursor_moved_back_and_reclaimed_ones_do_not(mixed_log: Built) -> None:
    """Readers still get released records during the grace period."""
    before = counted(mixed_log, "a", 0)
    for route in "abc":
        mixed_log.log.set_cursor(route, mixed_log.last)
    second = list_segments(mixed_log.root).segments[1].base_sequence
    mixed_log.reclaim(1, keep=True)
    mixed_log.log.set_cursor("a", 0, rewind=True)
    assert asked(mixed_log, "a") == {before}
    mixed_log.path(1, Kind.RELEASED).unlink()
    assert asked(mixed_log, "a") == {counted(mixed_log, "a", second - 1)}
    assert asked(mixed_log, "b") == {0}


def test_every_command_tells_the_same_lag(mixed_log: Built) -> None:
    """Not the sequences between cursor and head, which are other routes' too."""
    mixed_log.log.set_cursor("a", 5)
    mixed_log.log.set_cursor("b", 9)
    mixed_log.log.set_cursor("c", 0)
    expected = {"a": counted(mixed_log, "a", 5), "b": counted(mixed_log, "b", 9), "c": 2}
    reported = json.loads(output_of("route", "list", "--json", "--root", mixed_log.root.path))["routes"]
    routes = {route["route"]: route["groups"][0]["lag_records"] for route in reported}
    lines = map(json.loads, output_of("explain", "--json", "--root", mixed_log.root.path).splitlines())
    explained = {line["route"]: line["lag_records"] for line in lines if line["kind"] == "group"}
    table = [line.split() for line in output_of("route", "list", "--root", mixed_log.root.path).decode().splitlines()]

    assert routes == explained == expected
    assert {row[0]: int(row[4]) for row in table[1:]} == expected
    shown = [line.split() for line in output_of("top", "--once", "--root", mixed_log.root.path).decode().splitlines()]
    heading = next(row for row in shown if "LAG" in row)
    lag = heading.index("LAG")
    assert {row[0]: int(row[lag]) for row in shown if row and row[0] in expected} == expected
