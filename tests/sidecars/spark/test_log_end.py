"""For a reader of complete records, a log ends before the first open record."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import flip_bit
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Built

from wald.files.layout import Root
from wald.files.listing import Listing
from wald.format.names import Kind
from wald.segments.durable_end import Bound
from wald.segments.view import View
from wald_spark.locations import LogLocation, Shipped
from wald_spark.progress import LogEndTracker


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Records 1 and 2 of route a, complete."""
    built = Built(tmp_path / "root")
    built.lines("a", [b"1", b"2"])
    return built


def place_of(built: Built) -> LogLocation:
    return LogLocation(built.root, built.log_id)


def complete(place: LogLocation, *routes: str) -> int:
    return LogEndTracker(frozenset(routes) or None).end(place.view()).complete


def begin(built: Built) -> None:
    """Append an open record 3 to route a and a complete record 4 to route b."""
    built.piece("a", b"3 ", begins=True, ends=False)
    built.lines("b", [b"4"])


def finish(built: Built) -> None:
    built.piece("a", b"goes on\n", begins=False, ends=True)


def seal(built: Built) -> None:
    built.cut()
    built.seal()


def test_a_record_whose_end_will_not_come_holds_back_nothing(built: Built) -> None:
    """Its route continues with another record, even in the next segment."""
    begin(built)
    built.lines("a", [b"5"])
    assert complete(place_of(built)) == 5
    built.cut()
    assert complete(place_of(built)) == 5


def test_a_lost_head_ends_it_in_front_of_the_newest_segment(built: Built) -> None:
    begin(built)
    built.cut()
    finish(built)
    built.root.head.unlink()
    assert complete(place_of(built)) == 2
    assert complete(place_of(built), "b") == 4


def shipped(built: Built, to: Path) -> LogLocation:
    """Copy the current segments to a separate directory; the newest one ends with zeros."""
    shutil.copytree(built.root.segments, to)
    return LogLocation(Shipped(to), built.log_id)


def test_shipped_segments_end_with_the_last_of_them(built: Built, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    assert complete(LogLocation(Shipped(tmp_path / "nothing"), built.log_id)) == 0
    begin(built)
    assert complete(shipped(built, tmp_path / "raw")) == 2
    assert complete(shipped(built, tmp_path / "b"), "b") == 4
    seal(built)
    place = shipped(built, tmp_path / "sealed")
    place.root.segments.joinpath(built.path(5, Kind.RAW).name).unlink()
    assert (complete(place), complete(place, "b"), complete(place, "c")) == (2, 4, 4)
    finish(built)
    assert complete(shipped(built, tmp_path / "finished")) == 4


def test_shipped_segments_may_become_more(built: Built, tmp_path: Path) -> None:
    seal(built)
    place = LogLocation(Shipped(tmp_path / "ship"), built.log_id)
    place.root.segments.mkdir()
    ends = LogEndTracker(None)
    shutil.copy(built.path(1, Kind.SEALED), place.root.segments)
    assert ends.end(place.view()).complete == 2
    built.lines("a", [b"3"])
    seal(built)
    shutil.copy(built.path(3, Kind.SEALED), place.root.segments)
    assert ends.end(place.view()).complete == 3


@pytest.mark.parametrize("what", [b"3 ", b"4\n", b'"open"'])
def test_damage_leaves_nothing_open(built: Built, what: bytes) -> None:
    """Damage in the record, after it, or in the control state: a reader stops waiting for the open record."""
    begin(built)
    in_state = what == b'"open"'
    if in_state:
        built.cut()
        built.lines("b", [b"5"])
    flip_bit(built.path(5 if in_state else 1, Kind.RAW), what)
    assert complete(place_of(built)) == (5 if in_state else 4)


def test_a_segment_that_cannot_be_opened_leaves_nothing_open(built: Built, tmp_path: Path) -> None:
    begin(built)
    seal(built)
    place = shipped(built, tmp_path / "ship")
    place.root.segments.joinpath(built.path(5, Kind.RAW).name).unlink()
    path = place.root.segments / built.path(1, Kind.SEALED).name
    path.write_bytes(path.read_bytes()[:10])
    assert complete(place) == 0


@pytest.mark.parametrize("link", [False, True])
def test_a_segment_that_is_gone_and_a_link_in_its_place_leave_nothing_open(built: Built, link: bool) -> None:
    begin(built)
    built.cut()
    path = built.path(5, Kind.RAW)
    path.unlink()
    if link:
        path.symlink_to("nowhere")
    assert complete(place_of(built)) == 4


def test_a_segment_that_is_sealed_meanwhile_is_found(built: Built) -> None:
    begin(built)
    place = place_of(built)
    view = place.view()
    seal(built)
    assert LogEndTracker(None).end(view).complete == 2


def test_a_bound_that_has_not_moved_is_not_looked_behind(built: Built, tmp_path: Path) -> None:
    """No file is read."""
    begin(built)
    place = place_of(built)
    ends = LogEndTracker(None)
    view = place.view()
    assert ends.end(view).complete == 2
    built.root.segments.rename(tmp_path / "away")
    assert ends.end(view).complete == 2


def test_only_what_has_come_since_is_read(built: Built) -> None:
    """Damage in records that were read before goes unnoticed."""
    begin(built)
    place = place_of(built)
    ends = LogEndTracker(None)
    assert ends.end(place.view()).complete == 2
    flip_bit(built.path(1, Kind.RAW), b"3 ")
    built.lines("b", [b"5"])
    assert ends.end(place.view()).complete == 2
    finish(built)
    assert ends.end(place.view()).complete == 5


def test_an_earlier_bound_is_answered_too(built: Built) -> None:
    place = place_of(built)
    before = place.view()
    begin(built)
    ends = LogEndTracker(None)
    assert ends.end(place.view()).complete == 2
    finish(built)
    assert ends.end(place.view()).complete == 4
    assert ends.end(before).complete == 2


Step = Callable[[Built], Built]


def line(route: str) -> Step:
    def step(built: Built) -> Built:
        if route not in built.writer.state.open_records:
            built.lines(route, [b"x", b"y"])
        return built

    return step


def piece(route: str, payload: bytes) -> Step:
    def step(built: Built) -> Built:
        begins = route not in built.writer.state.open_records
        built.piece(route, payload, begins=begins, ends=payload.endswith(b"\n"))
        return built

    return step


def end_segment(*, sealed: bool) -> Step:
    def step(built: Built) -> Built:
        if built.writer.has_advanced:
            built.cut()
        if sealed:
            built.seal()
        return built

    return step


def restart(built: Built) -> Built:
    built.crash()
    return Built(built.root.path, epoch=built.writer.epoch + 1)


ROUTES = ("a", "b")
STEPS = st.lists(
    st.sampled_from(
        [line(route) for route in ROUTES]
        + [piece(route, payload) for route in ROUTES for payload in (b"p", b"e\n", b"e\nf\ng")]
        + [end_segment(sealed=False), end_segment(sealed=True), restart]
    ),
    max_size=14,
)


def expected(built: Built, routes: frozenset[str] | None) -> int:
    """Return the end computed by reading all records: any other sequence is open, or belongs to another route."""
    complete = {record.sequence for record in built.log.records()}
    state = built.writer.state
    missing = set(range(1, built.last + 1)) - complete
    assert missing <= set(state.open_records.values())
    of_routes = {sequence for route, sequence in state.open_records.items() if routes is None or route in routes}
    return min(missing & of_routes, default=built.last + 1) - 1


@pytest.mark.parametrize("examples", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_it_is_the_largest_end_up_to_which_every_record_comes_out(examples: int) -> None:
    """One tracker is asked after each step, and a fresh one gives the same answer."""
    settings(deadline=None, max_examples=examples)(given(STEPS)(assert_largest))()


def assert_largest(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as path:
        built = Built(Path(path, "root"), segment_max_bytes=4096)
        place = LogLocation(Root(built.root.path), built.log_id)
        choices = (None, frozenset(["a"]), frozenset(["b"]))
        patient = [LogEndTracker(routes) for routes in choices]
        for step in steps:
            built = step(built)
            view = place.view()
            for routes, ends in zip(choices, patient, strict=True):
                assert ends.end(view).complete == expected(built, routes) == LogEndTracker(routes).end(view).complete
        built.crash()


def test_a_bound_without_any_segment_is_believed(built: Built) -> None:
    place = place_of(built)
    assert LogEndTracker(None).end(View(place.root, place.log_id, Bound(9, 64, 8), Listing(()))).complete == 8
