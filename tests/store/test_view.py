"""Views of a log, their number of listings and their cost, and the backlog and lags that they give."""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from effort import steps
from logs import SECOND_NS, START_NS, Built
from running import output_of

from wald.checking.verifier import verify
from wald.errors import Damaged
from wald.files.listing import Segment, list_segments
from wald.files.routes import retire_route
from wald.format.batch import StoredBatch
from wald.format.names import Kind
from wald.retention.backlog import RECENT_SEGMENTS, Backlog, GroupBacklog, GrowthMeter
from wald.retention.cursor_moves import reclaimed_above
from wald.retention.cursors import read_cursors
from wald.retention.progress import measure_lags
from wald.segments.raw_scan import FIRST_BATCH
from wald.segments.view import SegmentGone, View, read_view


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Records 1 and 2 in a cut segment each, record 3 in the active one."""
    built = Built(tmp_path / "root")
    for value in (b"1", b"2"):
        built.lines("a", [value], cut=True)
    built.lines("a", [b"3"])
    return built


def payload(view: View, segment: Segment) -> bytes:
    """The payload of the first batch of records in a segment."""
    with closing(view.open(segment)) as opened:
        met = opened.batches(FIRST_BATCH, view.limit(segment))
        return next(bytes(found.payload) for found in met if isinstance(found, StoredBatch) and found.header.count)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.INDEX])
def test_a_segment_is_opened_under_every_name_that_it_may_have_by_now(built: Built, kind: Kind) -> None:
    view = built.view
    if kind.form is Kind.SEALED:
        built.seal()
    built.path(1, kind.form).rename(built.path(1, kind))

    assert payload(view, view.segments[0]) == b"1\n"


def test_a_name_that_is_changed_back_in_between_is_found(built: Built) -> None:
    built.seal()
    view = built.view
    sealed = built.path(1, Kind.SEALED)
    sealed.rename(built.path(1, Kind.DELETING))
    tried = []

    def action(segment: Segment) -> Kind:
        tried.append(segment.kind)
        if segment.kind is Kind.DELETING and tried.count(Kind.DELETING) == 1:
            segment.path.rename(sealed)  # taken back between two tries
        segment.path.stat()
        return segment.kind

    assert view.follow(view.segments[0], action) is Kind.SEALED


def test_a_segment_that_is_listed_and_has_no_file_is_damage(built: Built) -> None:
    """Some file systems have damaged directories."""
    view = built.view

    with pytest.raises(Damaged, match="the directory lists the segment, but the file does not exist"):
        view.without(SegmentGone("gone", hint=""), view.segments[0])


def test_a_view_is_renewed_with_the_head_and_the_segments_of_now(built: Built) -> None:
    before = time.time() - 10
    os.utime(built.root.segments, (before, before))
    view = built.view.including_released()
    built.lines("a", [b"4"])
    later = view.renewed()
    assert (later.bound.sequence, later.listing) == (4, view.listing)
    built.seal()
    built.reclaim(1, keep=True)
    later = later.renewed()
    assert [segment.kind for segment in later.segments] == [Kind.RELEASED, Kind.SEALED, Kind.RAW]


def test_changes_are_listed_though_the_time_of_the_directory_is_coarse_or_old(built: Built) -> None:
    """ext4 with inodes of 128 bytes has whole seconds; a network file system may return a cached time."""
    second = int(time.time()) - 1
    os.utime(built.root.segments, (second, second))
    view = built.view.renewed()
    built.seal()
    os.utime(built.root.segments, (second, second))
    assert [segment.kind for segment in view.renewed().segments] == [Kind.SEALED, Kind.SEALED, Kind.RAW]

    before = time.time() - 10
    os.utime(built.root.segments, (before, before))
    view = built.view.renewed()
    built.cut()
    built.lines("a", [b"4"])
    os.utime(built.root.segments, (before, before))
    assert [segment.base_sequence for segment in view.renewed().segments] == [1, 2, 3, 4]  # the head's is there


_counted: list[tuple[str, list[str]]] = []


"""Directories of which listings are counted now, each with the listings."""


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("os.scandir", "os.listdir") and _counted:
        for directory, listings in _counted:
            if os.fspath(arguments[0]) == directory:  # type: ignore[call-overload]
                listings.append(event)


sys.addaudithook(_hook)


@contextmanager
def listings_of(directory: Path) -> Iterator[list[str]]:
    """Record the listings of a directory by this process."""
    entry: tuple[str, list[str]] = (str(directory), [])
    _counted.append(entry)
    try:
        yield entry[1]
    finally:
        _counted.remove(entry)


@pytest.fixture
def listed(tmp_path: Path) -> Built:
    """Three sealed segments and the active one, whose directory has not changed for a while."""
    built = Built(tmp_path / "root")
    for value in (b"1", b"2", b"3"):
        built.lines("a", [value], cut=True)
    built.seal()
    built.log.set_cursor("a", 1)
    built.lines("a", [b"4"])
    before = time.time() - 10
    os.utime(built.root.segments, (before, before))
    return built


def test_a_log_lists_the_segments_again_only_when_their_directory_has_changed(listed: Built) -> None:
    """What changed this moment is listed each time: the next change may get the same time stamp."""
    with listings_of(listed.root.segments) as listings:
        assert [record.value for record in listed.log.records("a", "cursor")] == [b"2", b"3", b"4"]
        assert len(listings) == 1
        log = listed.log
        for _ in range(3):
            assert len(list(log.records("a"))) == 4
        assert len(listings) == 2
        listed.cut()
        listed.lines("a", [b"5"])
        os.utime(listed.root.segments, (time.time() - 5, time.time() - 5))
        assert len(list(log.records("a"))) == 5
        assert len(listings) == 3
        listed.cut()
        for times in range(4, 7):
            assert len(list(log.records("a"))) == 5
            assert len(listings) >= times


def test_a_follower_lists_nothing_while_the_active_segment_grows(listed: Built) -> None:
    following = listed.log.records("a", follow=True)
    assert [next(following).value for _ in range(4)] == [b"1", b"2", b"3", b"4"]
    with listings_of(listed.root.segments) as listings:
        for number in range(20):
            listed.lines("a", [b"%d" % number])
            assert next(following).value == b"%d" % number
    assert listings == []


def many(path: Path, segments: int) -> Built:
    log = Built(path)
    for number in range(segments):
        log.lines("a", [b"%d" % number])
        log.lines("b", [b"other"], cut=True)
    return log


def test_the_way_through_them_is_linear(tmp_path: Path) -> None:
    costs = []
    for segments in (10, 60):
        log = many(tmp_path / str(segments), segments)
        log.seal()
        costs.append(steps(lambda log=log: list(log.log.records("a"))))  # type: ignore[misc]

    assert costs[1] < 6 * costs[0]


def passing_by(log: Built) -> object:
    return list(log.log.records("b", on_missing="skip"))


def verifying(log: Built) -> object:
    return list(verify(log.root))


@pytest.mark.parametrize("work", [passing_by, verifying])
def test_the_way_past_as_many_holes_is_linear(tmp_path: Path, work: Callable[[Built], object]) -> None:
    costs = []
    for segments in (10, 60):
        log = many(tmp_path / str(segments), segments)
        log.seal()
        for segment in list_segments(log.root).segments[:-1:2]:
            log.reclaim(segment.base_sequence)
        costs.append(steps(partial(work, log)))

    assert costs[1] < 7.5 * costs[0]


def test_cuts_between_all_looks_keep_nobody_from_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are cut and sealed faster than the directory is read."""
    log = many(tmp_path / "log", 2)
    log.log.set_cursor("a", 1)
    looks, scandir = 0, os.scandir

    def look(path: Path) -> Iterator[os.DirEntry[str]]:
        nonlocal looks
        looks += 1
        assert looks < 10
        with monkeypatch.context() as patched:
            patched.setattr(os, "scandir", scandir)
            log.lines("a", [b"one more"])
            log.cut(seal=True)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", look)

    assert reclaimed_above(log.root, log.log.cursor("a"), log_id=log.log_id) == ""


@pytest.fixture
def forms(tmp_path: Path) -> Built:
    """Released 1; sealed 2 (a: 2–4, b: 5), sealed 6 (a: 6), cut 7 (b: 7–8), active (a: 9–10)."""
    forms = Built(tmp_path / "root")
    forms.lines("b", [b"0"], cut=True)
    forms.lines("a", [b"1", b"2", b"3"])
    forms.lines("b", [b"4"], cut=True)
    forms.lines("a", [b"5"])
    forms.cut(seal=True)
    forms.reclaim(1, keep=True)
    forms.lines("b", [b"6", b"7"], cut=True)
    forms.lines("a", [b"8", b"9"])
    return forms


def look(forms: Built) -> tuple[Backlog, list[tuple[str, int, list[str]]]]:
    """The backlog, and of each segment its form, its base and who holds it back."""
    backlog = Backlog(forms.view)
    return backlog, [
        (status.state.value, status.segment.base_sequence, [f"{pin.route}/{pin.group}" for pin in status.pins])
        for status in backlog.segments()
    ]


def group(forms: Built, route: str, group: str = "processed") -> GroupBacklog:
    return look(forms)[0].groups[route, group]


def size(forms: Built, *bases: int) -> int:
    return sum(forms.path(base, Kind.SEALED).stat().st_size for base in bases)


def raw_bytes(forms: Built) -> int:
    return forms.path(7, Kind.RAW).stat().st_blocks * 512


def test_every_segment_is_reported_with_its_state_and_who_holds_it_back(forms: Built) -> None:
    forms.log.set_cursor("b", 8)
    assert look(forms)[1] == [
        ("released", 1, []),
        ("sealed", 2, ["a/processed"]),
        ("sealed", 6, ["a/processed"]),
        ("cut", 7, []),
        ("active", 9, []),
    ]
    forms.log.set_cursor("a", 10)
    forms.log.set_cursor("b", 7, rewind=True)
    backlog, reported = look(forms)
    assert reported[3:] == [("cut", 7, ["b/processed"]), ("active", 9, [])]
    assert backlog.groups["b", "processed"].pinned_bytes == raw_bytes(forms)


def test_the_lag_counts_records_of_the_route_and_the_oldest_tells_how_long(forms: Built) -> None:
    """``oldest`` is the append of the first record after the cursor. A retired route has a lag and pins nothing."""
    cases = [(0, 6, 2), (2, 5, 2), (3, 4, 2), (4, 3, 4), (5, 3, 4), (6, 2, 6), (9, 1, 6), (10, 0, 0)]
    for cursor, lag, oldest in cases:
        forms.log.set_cursor("a", cursor)
        found = group(forms, "a")

        assert found.lag.records == lag
        assert found.lag.oldest_ns == (START_NS + oldest * SECOND_NS if lag else None)
        assert found.lag.seconds(START_NS + 10 * SECOND_NS) == (10 - oldest if lag else 0)
    forms.log.set_cursor("a", 0, rewind=True)
    retire_route(forms.root, forms.disk, "a", now="")
    found = group(forms, "a")
    assert (found.retired, found.pinned_bytes, found.lag.records) == (True, 0, 6)


def test_bytes_are_those_held_back_and_those_that_would_go_if_this_one_moved(forms: Built) -> None:
    """What several groups of one route pin is exclusive to the route, though no single cursor frees it."""
    forms.log.set_cursor("a", 0)
    a, b, raw = group(forms, "a"), group(forms, "b"), raw_bytes(forms)
    assert (a.pinned_segments, a.pinned_bytes) == (2, size(forms, 2, 6))
    assert a.exclusive_bytes == size(forms, 6)  # the other one is pinned by b too
    assert (b.pinned_bytes, b.exclusive_bytes) == (size(forms, 2) + raw, raw)

    forms.log.set_cursor("b", 8)
    assert group(forms, "a").exclusive_bytes == size(forms, 2, 6)
    assert group(forms, "b").pinned_bytes == 0
    forms.log.set_cursor("a", 0, "audit")
    backlog, _ = look(forms)
    assert backlog.exclusive_bytes == {"a": size(forms, 2, 6)}
    assert group(forms, "a").exclusive_bytes == 0


def test_growth_is_what_came_on_disk_and_is_not_told_from_a_few_minutes_or_an_empty_log(
    forms: Built, tmp_path: Path
) -> None:
    """Whoever has sent a megabyte in a second does not send 86 GB a day."""
    backlog, _ = look(forms)
    growth = backlog.growth_meter.growth(now_ns=START_NS + 1002 * SECOND_NS)

    assert growth is not None
    payloads = 4 + 4  # of the two raw segments
    assert growth.bytes_per_second == pytest.approx((size(forms, 2, 6) + payloads) / 1000)
    assert sum(growth.routes.values()) == pytest.approx(growth.bytes_per_second)
    assert growth.routes["b"] == pytest.approx((size(forms, 2) * 2 / 8 + 4) / 1000)
    assert growth.seconds_until_full(1000) == pytest.approx(1000 / growth.bytes_per_second)

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


def test_a_segment_that_cannot_be_read_is_reported_and_the_rest_is_counted(forms: Built) -> None:
    path = forms.path(2, Kind.SEALED)
    path.write_bytes(bytes(path.stat().st_size))
    backlog = Backlog(forms.view)
    statuses = list(backlog.segments())

    assert [bool(status.problem) for status in statuses] == [False, True, False, False, False]
    assert str(path) in statuses[1].problem
    assert backlog.groups["a", "processed"].lag.records == 3


def test_a_segment_that_is_sealed_or_reclaimed_meanwhile_is_told_once(forms: Built) -> None:
    backlog = Backlog(forms.view)
    seen = []
    for status in backlog.segments():
        seen.append(status.segment.base_sequence)
        if status.segment.base_sequence == 2:
            forms.seal()  # 7 has another name by now
            os.unlink(forms.path(6, Kind.SEALED))

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
