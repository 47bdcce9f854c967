"""New complete records of a log, from its oldest record to the first open one, once each."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from archives import archive
from damage import flip_bit, flipped
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import SECOND_NS, START_NS, Built
from running import refused, sidecar
from spark_jobs import run_job

from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.layout import Root
from wald.files.ledger_write import Ledger
from wald.files.listing import Listing
from wald.format.names import Kind
from wald.segments.durable_end import Bound
from wald.segments.view import View
from wald_spark.locations import LogLocation, Shipped
from wald_spark.options import STREAM_OPTIONS, STRICT, Limits, Tolerance, parse_options, parse_stream_options
from wald_spark.plan import LogPiece, Range, first_record, pieces_of
from wald_spark.progress import LogEndTracker, NewRecords, Progress, Run, find_logs, new_records, permissive_hint
from wald_spark.query import plan_query
from wald_spark.session import session
from wald_spark.stream import Triggers


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


Reader = Callable[..., list[LogPiece]]


def query(path: Path, **given: str) -> list[LogPiece]:
    return [piece for piece in plan_query(parse_options({"path": str(path)} | given)) if isinstance(piece, LogPiece)]


def since_the_first(path: Path, **given: str) -> list[LogPiece]:
    """Query from the timestamp of a missing record."""
    return query(path, startingTimestamp=str((START_NS + SECOND_NS) // 1_000_000), **given)


def stream(path: Path, **given: str) -> list[LogPiece]:
    options = parse_options({"path": str(path)} | given, also=STREAM_OPTIONS)
    triggers = Triggers(options, parse_stream_options(options.given))
    start = triggers.start()
    return triggers.pieces(start, triggers.end(start, Limits()))


def job(path: Path, *, mode: str = "FAILFAST", damagePath: str = "", partial: str = "false") -> list[LogPiece]:  # noqa: N803 - the option
    permissive = mode == "PERMISSIVE"
    tolerance = Tolerance(permissive, permissive, damagePath, partial=partial == "true")
    return new_records(find_logs([str(path)], None)[0], None, None, tolerance).pieces


READERS = pytest.mark.parametrize("read", [query, since_the_first, stream, job])


def sequences(pieces: list[LogPiece]) -> list[int]:
    return sorted(record.sequence for piece in pieces for batch in piece.batches() for record in batch.records())


@pytest.fixture
def missing_front(tmp_path: Path) -> Built:
    """Three sealed segments of two records each, and two records in the active one."""
    missing_front = Built(tmp_path / "root")
    for number in range(4):
        missing_front.lines("ab"[number % 2], [b"x", b"y"])
        if number < 3:
            missing_front.cut()
    missing_front.seal()
    return missing_front


@READERS
def test_a_missing_oldest_segment_is_damage_unless_the_copy_is_partial(
    missing_front: Built, read: Reader, tmp_path: Path
) -> None:
    """Damage may be passed over, and is reported then; a partial copy begins with its oldest record."""
    missing_front.path(1, Kind.SEALED).unlink()
    with pytest.raises(Damaged, match="records 1 to 2 are missing, and no ledger explains why") as damaged:
        read(missing_front.root.path)
    assert '.option("partial", "true")' in damaged.value.hint

    report = tmp_path / "report"
    assert sequences(read(missing_front.root.path, mode="PERMISSIVE", damagePath=str(report))) == [3, 4, 5, 6, 7, 8]
    (written,) = (report / name for name in os.listdir(report))
    assert [json.loads(line)["message"] for line in written.read_text().splitlines()] == [
        f"{missing_front.root.segments}: records 1 to 2 are missing, and no ledger explains why"
    ]

    assert sequences(read(missing_front.root.path, partial="true")) == [3, 4, 5, 6, 7, 8]
    missing_front.path(5, Kind.SEALED).unlink()
    with pytest.raises(Damaged, match="records 5 to 6 are missing"):
        read(missing_front.root.path, partial="true")


@READERS
def test_shipped_segments_have_no_ledger_that_explains_a_gap(
    missing_front: Built, read: Reader, tmp_path: Path
) -> None:
    shipped = tmp_path / "shipped"
    shutil.copytree(missing_front.root.segments, shipped)
    (shipped / missing_front.path(1, Kind.SEALED).name).unlink()
    with pytest.raises(Damaged, match="records 1 to 2 are missing"):
        read(shipped)
    assert sequences(read(shipped, partial="true")) == [3, 4, 5, 6, 7, 8]


@READERS
def test_a_beginning_that_was_reclaimed_is_passed_over(missing_front: Built, read: Reader) -> None:
    missing_front.reclaim(1)
    assert sequences(read(missing_front.root.path)) == [3, 4, 5, 6, 7, 8]
    missing_front.path(3, Kind.SEALED).unlink()
    with pytest.raises(Damaged, match="records 3 to 4 are missing"):
        read(missing_front.root.path)


@READERS
def test_a_damaged_ledger_explains_nothing(missing_front: Built, read: Reader) -> None:
    missing_front.reclaim(1)
    ledger = missing_front.root.ledger / "reclaim.jsonl"
    ledger.write_bytes(flipped(ledger.read_bytes(), 30))
    with pytest.raises(Damaged, match=r"reclaim\.jsonl"):
        read(missing_front.root.path)
    assert sequences(read(missing_front.root.path, mode="PERMISSIVE")) == [3, 4, 5, 6, 7, 8]


def test_a_start_that_is_named_needs_nothing_in_front_of_it(missing_front: Built) -> None:
    missing_front.path(1, Kind.SEALED).unlink()
    assert sequences(query(missing_front.root.path, startingSequence="4")) == [4, 5, 6, 7, 8]
    first = json.dumps({missing_front.log_id.hex(): 4})
    assert sequences(stream(missing_front.root.path, startingOffsets=first)) == [4, 5, 6, 7, 8]
    assert sequences(stream(missing_front.root.path, startingOffsets="latest")) == []


def test_a_stream_that_is_refused_leaves_no_offsets_behind(missing_front: Built) -> None:
    """Spark stores the end offset before it plans the trigger; a stored one would outlive ``partial``."""
    missing_front.path(1, Kind.SEALED).unlink()
    options = parse_options({"path": str(missing_front.root.path)}, also=STREAM_OPTIONS)
    triggers = Triggers(options, parse_stream_options(options.given))
    with pytest.raises(Damaged, match="records 1 to 2"):
        triggers.end(triggers.start(), Limits())


@pytest.mark.parametrize("base", [1, 3, 5])
def test_a_deletion_that_was_taken_back_while_the_query_was_planned_misses_nothing(
    missing_front: Built, base: int
) -> None:
    missing_front.reclaim(base, keep=True)
    view = missing_front.view
    missing_front.path(base, Kind.RELEASED).rename(missing_front.path(base, Kind.SEALED))
    ledger = Ledger(missing_front.root.ledger / "reclaim.jsonl", missing_front.disk)
    ledger.append({"event": "kept", "base": base, "at": missing_front.now_ns})
    ledger.close()
    wanted = Range(None, first_record(view, partial=False), missing_front.last)
    assert sequences(pieces_of(view, wanted, limit_bytes=1)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_commands_name_their_own_options(missing_front: Built) -> None:
    missing_front.path(1, Kind.SEALED).unlink()
    with pytest.raises(Damaged, match="nothing was done") as damaged, permissive_hint("nothing was done"):
        job(missing_front.root.path)
    assert damaged.value.hint == (
        "put the segments back; if this is a copy without them, --partial begins with the oldest record present; "
        "--permissive skips unreadable records"
    )


@pytest.mark.spark
@pytest.mark.parametrize("program", ["spark.export", "spark.compact"])
def test_the_commands_end_with_the_code_of_damage(missing_front: Built, tmp_path: Path, program: str) -> None:
    """The commands fail before they start Spark."""
    missing_front.path(1, Kind.SEALED).unlink()
    line = sidecar(program, "--root", missing_front.root.path, "--out", tmp_path / "out")
    code, message, hint = refused(run_job(line, tmp_path))
    assert (code, "records 1 to 2 are missing" in message, "--partial" in hint) == (4, True, True)


def found_place(built: Built) -> LogLocation:
    return find_logs([str(built.root.path)], None)[0]


def numbers(portion: NewRecords) -> list[int]:
    batches = [batch for piece in portion.pieces for batch in piece.batches()]
    return sorted(record.sequence for batch in batches for record in batch.records())


def test_an_open_record_holds_back_its_route_and_no_other(tmp_path: Path) -> None:
    """The next run reads the later records of that route, exactly once."""
    built = Built(tmp_path / "root")
    built.lines("a", [b"1", b"2"])
    built.piece("b", b"long ", begins=True, ends=False)
    built.lines("a", [b"4", b"5"])
    first = new_records(found_place(built), None, None, STRICT)
    assert (first.after, numbers(first)) == (Progress(5, {"b": 2}), [1, 2, 4, 5])
    again = new_records(found_place(built), first.after, None, STRICT)
    assert (again.due, again.after) == (False, first.after)

    built.lines("a", [b"6"])
    second = new_records(found_place(built), first.after, None, STRICT)
    assert (second.after, numbers(second)) == (Progress(6, {"b": 2}), [6])
    built.piece("b", b"record\n", begins=False, ends=True)
    built.lines("b", [b"7"])
    third = new_records(found_place(built), second.after, None, STRICT)
    assert (third.after, numbers(third)) == (Progress(7), [3, 7])


@settings(deadline=None, max_examples=80)
@given(
    st.lists(
        st.sampled_from(["line a", "line b", "piece a", "piece b", "end a", "end b", "cut", "seal", "run"]), max_size=24
    )
)
def test_every_record_is_in_one_run(steps: list[str]) -> None:
    """In the end only open records are pending, regardless of the order of steps."""
    with tempfile.TemporaryDirectory() as path:
        built = Built(Path(path, "root"), segment_max_bytes=4096)
        reached, found = None, []
        for step in [*steps, "run"]:
            verb, _, route = step.partition(" ")
            begins = route not in built.writer.state.open_records
            if verb == "line" and begins:
                built.lines(route, [b"x", b"y"])
            elif verb == "piece":
                built.piece(route, b"p", begins=begins, ends=False)
            elif verb == "end" and not begins:
                built.piece(route, b"e\n", begins=False, ends=True)
            elif verb == "cut" and built.writer.has_advanced:
                built.cut()
            elif verb == "seal":
                built.seal()
            elif verb == "run":
                portion = new_records(found_place(built), reached, None, STRICT)
                found += numbers(portion)
                reached = portion.after
        assert sorted(found) == sorted(record.sequence for record in built.log.records())
        built.crash()


def test_records_that_are_not_wanted_are_passed_by(tmp_path: Path) -> None:
    """The run reads nothing, and the next run skips those records."""
    built = Built(tmp_path / "root")
    built.lines("a", [b"1"])
    built.lines("b", [b"2"])
    built.piece("b", b"3 is open", begins=True, ends=False)
    found = new_records(found_place(built), Progress(1), ["a"], STRICT)

    assert (found.after, found.pieces) == (Progress(3), [])


def test_what_was_reclaimed_before_the_first_run_is_no_loss_and_later_it_is(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    for _ in range(3):
        built.lines("a", [b"x", b"y"])
        built.cut()
    built.seal()
    built.reclaim(1)
    assert numbers(new_records(found_place(built), None, None, STRICT)) == [3, 4, 5, 6]
    with pytest.raises(NotFound, match="RECLAIM has removed record 2"):
        new_records(found_place(built), Progress(1), None, STRICT)

    tolerance = Tolerance(True, True, str(tmp_path / "notes"))
    found = new_records(found_place(built), Progress(1), None, tolerance)
    built.reclaim(3)  # between planning and reading
    assert numbers(found) == [5, 6]
    assert Run(tolerance, "", partial(session, "unused")).passed_over(found) == [
        f"{built.root.segments}: RECLAIM has removed records 3 to 4: 2 records are missing",
        f"{built.root.segments}: RECLAIM has removed record 2",
    ]


def test_a_missing_segment_is_reported(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    for _ in range(3):
        built.lines("a", [b"x"])
        built.cut()
    built.seal()
    built.path(2, Kind.SEALED).unlink()

    with pytest.raises(Damaged, match="record 2 is missing"):
        new_records(found_place(built), None, None, STRICT)


def test_logs_are_found_and_others_are_refused(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    built.lines("a", [b"x"])
    archive(built.root.path, tmp_path / "archive", route="a")
    root = str(built.root.path)

    assert [place.root.path for place in find_logs([root], ["a"])] == [built.root.path]
    with pytest.raises(NotFound, match="no log has route 'b'"):
        find_logs([root], ["b"])
    with pytest.raises(InvalidInput, match="archive: an archive; jobs read logs"):
        find_logs([root, str(tmp_path / "archive")], None)
