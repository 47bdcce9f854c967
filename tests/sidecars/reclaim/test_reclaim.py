"""RECLAIM deletes exactly what everybody has read, tells the ledger first, and can be interrupted anywhere."""

import errno
import gc
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from contents import errors, records
from damage import flipped
from faults import FailingDisk, TracingDisk, after_each_death, until_it_survives
from golden.samples import ledger_of
from logs import SECOND_NS, Built
from reclaiming import EXPIRE, Reclaimer, archived, bases, four_segments, ledger, reclaim, rulings

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.routes import retire_route
from wald.format.names import Kind
from wald.hints import command_line
from wald.retention.audit import audit_deletion
from wald.retention.blockers import CursorSnapshot
from wald.retention.history import History
from wald.segments.view import State
from wald_reclaim.evidence import LISTED_MAX
from wald_reclaim.policy import Limits
from wald_reclaim.survey import CURSORS_SECONDS, Decision, Survey

YEARS_NS = 10 * 365 * 86400 * SECOND_NS


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Sealed segments 1, 3, 5 and 7, each a record of route a and one of route b; then an active one."""
    return four_segments(tmp_path / "root")


def read_all(built: Built, *, a: int = 8, b: int = 8) -> None:
    built.log.set_cursor("a", a, rewind=True)
    built.log.set_cursor("b", b, rewind=True)


def test_what_everybody_has_read_goes_and_nothing_else(built: Built) -> None:
    read_all(built, a=5, b=4)
    reclaim(built)

    assert bases(built.root) == [5, 7]
    assert [record.sequence for record in records(built.root.path)] == [5, 6, 7, 8]
    assert errors(built.root.path) == []


def test_the_ledger_says_by_which_rule_and_under_which_cursors(built: Built) -> None:
    read_all(built, a=2)
    built.log.set_cursor("b", 7, "audit")
    reclaim(built)
    (entry,) = ledger(built.root.path)

    assert (entry["event"], entry["base"], entry["last"], entry["rule"]) == ("reclaimed", 1, 2, "read")
    assert entry["routes"] == [
        {"route": "a", "count": 1, "first": 1, "last": 1, "cursors": {"processed": 2}},
        {"route": "b", "count": 1, "first": 2, "last": 2, "cursors": {"audit": 7, "processed": 8}},
    ]
    assert built.log.where(2).state is State.RECLAIMED
    assert "'read'" in built.log.where(2).message
    assert "b/audit at 7" in built.log.where(2).message


def test_a_retired_route_is_reported_as_such(built: Built) -> None:
    built.log.set_cursor("b", 8)
    retire_route(built.root, built.disk, "a", now="")
    reclaim(built)

    assert bases(built.root) == []
    assert ledger(built.root.path)[0]["routes"][0] == {"route": "a", "count": 1, "first": 1, "last": 1, "retired": True}


def test_the_newest_segment_stays_even_if_it_is_sealed_and_read(built: Built) -> None:
    """The next start continues there; without it, sequences would be assigned twice."""
    read_all(built)
    built.path(9, Kind.RAW).unlink()
    reclaim(built)

    assert bases(built.root) == [7]


def test_a_segment_whose_raw_form_is_still_there_waits_for_the_sealer(built: Built) -> None:
    read_all(built)
    built.path(3, Kind.RAW).write_bytes(b"")
    reclaim(built)

    assert bases(built.root, Kind.SEALED) == [3]


def test_a_segment_that_is_damaged_between_two_looks_or_cannot_be_opened_stops_nothing(built: Built) -> None:
    """It stays, and the others are deleted; a directory in place of a segment stands for any error of the disk."""
    read_all(built, b=0)
    reclaimer = Reclaimer(built.root, built.disk)
    reclaimer.look(now_ns=built.now_ns)
    path = built.path(3, Kind.SEALED)
    path.write_bytes(bytes(path.stat().st_size))
    built.path(5, Kind.SEALED).unlink()
    built.path(5, Kind.SEALED).mkdir()
    read_all(built)
    reclaimer.look(now_ns=built.now_ns)

    assert bases(built.root) == [3, 5]
    reclaimer.look(now_ns=built.now_ns)
    assert bases(built.root) == [3, 5]


def test_a_dry_run_beside_a_reclaim_at_work_passes_over_what_is_gone_meanwhile(built: Built) -> None:
    read_all(built)
    looking = Survey(built.root, Limits(), log_id=built.log_id)
    decisions = looking.decisions(now_ns=built.now_ns)
    seen = [next(decisions).segment.base_sequence]
    reclaim(built)
    seen += [decision.segment.base_sequence for decision in decisions]

    assert seen == [1]


@pytest.mark.parametrize("ahead_ns", [0, YEARS_NS, -YEARS_NS])
def test_a_released_segment_waits_out_its_grace_period_whatever_the_wall_clock_says(
    built: Built, ahead_ns: int
) -> None:
    read_all(built)
    reclaim(built, grace_ns=3600 * SECOND_NS)
    assert bases(built.root, Kind.RELEASED) == [1, 3, 5, 7]
    assert built.log.where(1).state is State.RELEASED

    built.now_ns, built.ahead_ns = built.now_ns + 3599 * SECOND_NS + ahead_ns, ahead_ns
    reclaim(built, grace_ns=3600 * SECOND_NS)
    assert bases(built.root, Kind.RELEASED) == [1, 3, 5, 7]

    built.now_ns += 2 * SECOND_NS
    reclaim(built, grace_ns=3600 * SECOND_NS)
    assert bases(built.root, Kind.RELEASED) == []
    assert built.log.where(1).state is State.RECLAIMED


def test_a_reader_that_holds_a_segment_reads_on_when_it_is_deleted(built: Built) -> None:
    reading = built.log.records()
    first = [next(reading), next(reading), next(reading)]  # it holds segment 3 by now
    read_all(built)
    reclaim(built)

    assert bases(built.root) == []
    assert [record.sequence for record in first] == [1, 2, 3]
    assert [record.sequence for record in reading] == [4]


def test_reading_from_a_cursor_passes_over_what_was_reclaimed_again_and_again(built: Built) -> None:
    """A reader that follows meets holes that came after the first one it asked the ledger about."""
    for base in (3, 5, 7):
        built.lines("idle", [b"i"])  # so that every second segment stays
        built.lines("a", [b"x"])
        built.cut()
        built.seal()
        read_all(built, a=built.last, b=8)
        reclaim(built)
        assert [record.value for record in built.log.records("idle", "cursor")] == [b"i"] * ((base - 1) // 2)
    assert errors(built.root.path) == []


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (Limits(min_age_ns=6 * SECOND_NS), [5, 7]),
        (Limits(keep_bytes=1), [7]),
        (Limits(keep_bytes=1 << 30, max_age_ns=6 * SECOND_NS - 1), [5, 7]),
        (Limits(require_archived=True, max_bytes=0), [1, 3, 5, 7]),
    ],
)
def test_limits_hold_back_and_let_go_what_was_read(built: Built, limits: Limits, left: list[int]) -> None:
    """Records were appended a second apart, the last of them two seconds ago."""
    read_all(built)
    built.now_ns += 2 * SECOND_NS
    reclaim(built, limits)

    assert bases(built.root) == left


def test_unread_data_that_expires_is_counted_and_recorded_as_loss(built: Built) -> None:
    read_all(built, a=4, b=8)
    built.log.set_cursor("b", 2, "slow")
    reclaim(built, Limits(max_records=2, others=EXPIRE))

    assert bases(built.root) == [7]
    assert [(entry["base"], entry["rule"], entry.get("lost")) for entry in ledger(built.root.path)] == [
        (1, "max_records", None),
        (3, "max_records", {"b": 1}),
        (5, "max_records", {"a": 1, "b": 1}),
    ]


def test_archived_means_every_record_of_every_route_that_gates(built: Built) -> None:
    read_all(built)
    archived(built, "a", 5)
    archived(built, "b", 2)
    reclaimer = Reclaimer(built.root, built.disk, Limits(require_archived=True))
    reclaimer.look(now_ns=built.now_ns)
    assert bases(built.root) == [3, 5, 7]

    archived(built, "b", 8, first=4, after=2)
    reclaimer.look(now_ns=built.now_ns)
    assert bases(built.root) == [7]

    retire_route(built.root, built.disk, "a", now="")
    reclaimer.look(now_ns=built.now_ns)
    assert bases(built.root) == []


def test_with_any_bit_of_the_archive_s_ledger_flipped_nothing_is_deleted_on_its_word(built: Built) -> None:
    read_all(built)
    path = built.root.ledger / "archive.jsonl"
    archived(built, "a", 5)
    archived(built, "b", 2)
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 23):
        path.write_bytes(flipped(whole, bit))
        with pytest.raises(Damaged, match=r"archive\.jsonl: line [123]: ") as refused:
            reclaim(built, Limits(require_archived=True))
        assert command_line(built.root.path, "repair") in refused.value.hint
        assert bases(built.root) == [1, 3, 5, 7]
    path.write_bytes(whole)
    reclaim(built, Limits(require_archived=True))

    assert bases(built.root) == [3, 5, 7]


def test_with_its_own_ledger_damaged_it_deletes_nothing_and_says_what_to_do(built: Built) -> None:
    """A line that is lost may be the one that took a deletion back."""
    read_all(built, a=2, b=2)
    reclaim(built)
    read_all(built)
    path = built.root.ledger / "reclaim.jsonl"
    path.write_bytes(flipped(path.read_bytes(), 99))
    with pytest.raises(Damaged, match=r"reclaim\.jsonl: line 1: checksum mismatch") as refused:
        reclaim(built)

    assert command_line(built.root.path, "repair") in refused.value.hint
    assert bases(built.root) == [3, 5, 7]


def test_what_has_once_held_a_segment_back_is_asked_first_and_then_the_others(built: Built) -> None:
    """In many passes of one process, cached facts never free too much and never pin forever."""
    reclaimer = Reclaimer(built.root, built.disk)
    for a, b, left in [(0, 0, [1, 3, 5, 7]), (8, 2, [3, 5, 7]), (2, 8, [3, 5, 7]), (4, 8, [5, 7]), (8, 8, [])]:
        read_all(built, a=a, b=b)
        reclaimer.look(now_ns=built.now_ns)
        assert bases(built.root) == left


def test_the_ledger_is_durable_before_a_name_changes_and_the_name_before_a_file_goes(built: Built) -> None:
    read_all(built, b=2)
    disk = TracingDisk()
    reclaim(built, disk=disk)

    assert [step for step in disk.steps if step[1] != "ledger"] == [
        ("write", "reclaim.jsonl"),
        ("sync", "reclaim.jsonl"),
        ("rename", "00000000000000000001.wal.zst.released"),
        ("sync_directory", "segments"),
        ("rename", "00000000000000000001.wal.zst.deleting"),
        ("unlink", "00000000000000000001.wal.zst.deleting"),
        ("sync_directory", "segments"),
    ]


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_crash_at_any_step_is_finished_by_the_next_run(tmp_path: Path, part: float) -> None:
    logs = []

    def die(number: int, disk: Disk) -> None:
        logs.append(four_segments(tmp_path / str(number)))
        read_all(logs[-1], b=6)
        reclaim(logs[-1], disk=disk)

    for _ in after_each_death(die, part=part, least=8):
        built = logs[-1]
        assert errors(built.root.path) == []
        reclaim(built)
        assert bases(built.root) == [7]
        assert bases(built.root, Kind.RELEASED) == []
        assert [entry["base"] for entry in ledger(built.root.path)] == [1, 3, 5]
        assert errors(built.root.path) == []


def test_a_decision_that_was_not_carried_out_is_taken_back_if_somebody_needs_the_segment_by_now(built: Built) -> None:
    """The crash came after the ledger's line; then a group was rewound. What can still be kept is kept."""
    read_all(built)
    disk = FailingDisk(3, more=99, number=errno.EIO)  # the third change after the ledger is there: the first rename
    with pytest.raises(OSError, match="error"):
        reclaim(built, disk=disk)
    assert bases(built.root) == [1, 3, 5, 7]
    read_all(built, a=2)
    reclaim(built)

    assert bases(built.root) == [3, 5, 7]
    events = [(entry["event"], entry["base"]) for entry in ledger(built.root.path)]
    assert events == [*(("reclaimed", base) for base in (1, 3, 5, 7)), *(("kept", base) for base in (3, 5, 7))]
    assert built.log.where(3).state is State.SEALED
    assert built.log.where(3).reclaimed is None

    read_all(built)
    reclaim(built)
    assert [(entry["event"], entry["base"]) for entry in ledger(built.root.path)][7:] == [
        ("reclaimed", base) for base in (3, 5, 7)
    ]


def test_a_full_disk_at_any_step_loses_nothing_and_the_same_process_goes_on(tmp_path: Path) -> None:
    for number, disk in enumerate(until_it_survives(lambda bad: FailingDisk(bad, part=0.5))):
        built = four_segments(tmp_path / str(number))
        read_all(built)
        try:
            reclaimer = Reclaimer(built.root, disk)
        except OSError:
            continue
        try:
            reclaimer.look(now_ns=built.now_ns)
            survived = True
        except OSError:
            survived = False
        reclaimer.look(now_ns=built.now_ns)
        reclaimer.ledger.close()
        assert bases(built.root) == []
        assert bases(built.root, Kind.RELEASED) == []
        assert [entry["base"] for entry in ledger(built.root.path)] == [1, 3, 5, 7]
        if survived:
            break
    assert number > 8


def test_a_segment_that_was_renamed_by_hand_comes_back_if_needed_and_is_reported_before_it_goes(built: Built) -> None:
    os.rename(built.path(1, Kind.SEALED), built.path(1, Kind.RELEASED))
    reclaim(built)

    assert bases(built.root) == [1, 3, 5, 7]
    assert ledger(built.root.path) == []

    read_all(built, a=2, b=2)
    os.rename(built.path(1, Kind.SEALED), built.path(1, Kind.RELEASED))
    reclaim(built)

    assert bases(built.root, Kind.RELEASED) == []
    assert [(entry["base"], entry["last"]) for entry in ledger(built.root.path)] == [(1, 2)]
    assert built.log.where(2).state is State.RECLAIMED


def test_a_stop_ends_where_the_next_run_goes_on(built: Built) -> None:
    read_all(built)
    reclaimer = Reclaimer(built.root, built.disk)
    reclaimer.stop.set()
    reclaimer.look(now_ns=built.now_ns)
    reclaimer.ledger.close()
    assert bases(built.root) == [1, 3, 5, 7]

    reclaim(built)
    assert bases(built.root) == []


def test_a_pass_keeps_one_reading_of_the_cursors_however_many_it_makes(built: Built) -> None:
    """A reading may have thousands of cursors, and a long pass makes hundreds."""
    read_all(built)
    clock = (10.0**exponent for exponent in count())  # so that the cursors are read again before each decision
    survey = Survey(built.root, Limits(), log_id=built.log_id, clock=clock.__next__)
    gone = [decision for decision in survey.decisions(now_ns=built.now_ns) if decision.verdict.is_deletion]
    gc.collect()

    assert len(gone) == 4
    assert sum(type(each) is CursorSnapshot for each in gc.get_objects()) == 1


MANY = [f"r{number:02}" for number in range(LISTED_MAX + 1)]
HALF = len(MANY)


def make(path: Path) -> Built:
    """Sealed segments of many routes, of one, of many, and of one more."""
    many_routes = Built(path)
    for routes in (MANY, MANY[:1], MANY, [*MANY, "z"]):
        for route in routes:
            many_routes.lines(route, [b"x", b"y"])
        many_routes.cut()
    many_routes.seal()
    for route in [*MANY, "z"]:
        many_routes.log.set_cursor(route, many_routes.last)
    return many_routes


@pytest.fixture
def many_routes(tmp_path: Path) -> Built:
    return make(tmp_path / "root")


def held(root: Root) -> dict[int, list[list[Any]]]:
    """Return the routes of each segment from the lines of the sealer."""
    lines = History(root).ledgers["segments.jsonl"].oldest_first()
    return {line.low: line.entry["routes"] for line in lines if line.entry["event"] == "sealed"}


def rewrite(root: Root, entries: list[dict[str, Any]]) -> None:
    """Make a ledger of deletions of these lines."""
    (root.ledger / "reclaim.jsonl").write_bytes(ledger_of(entries))


def test_many_routes_are_listed_once_for_all_segments_recorded_together(many_routes: Built) -> None:
    """Each deletion has the routes that its segment held."""
    before = held(many_routes.root)
    reclaim(many_routes)
    shared, *lines = ledger(many_routes.root.path)

    assert bases(many_routes.root) == []
    assert [line["event"] for line in (shared, *lines)] == ["evidence", *["reclaimed"] * 4]
    assert [line.get("evidence") for line in lines] == [1, None, 1, 1]
    assert ["routes" in line for line in lines] == [False, True, False, False]
    assert (shared["base"], shared["last"]) == (1, many_routes.last)
    last, end = {name: final for routes in before.values() for name, _, _, final, _ in routes}, many_routes.last
    every = [(name, 6, 1 + 2 * n, last[name]) for n, name in enumerate(MANY)]
    assert shared["routes"] == [listed(each, end) for each in [*every, ("z", 2, end - 1, end)]]
    history = History(many_routes.root)
    for base, routes in before.items():
        assert (history.deletion_of(base) or {})["routes"] == [listed(each, end) for each in routes]
    reclaimed = history.reclaimed_segments(1, end)
    assert {each.first: len(each.routes or ()) for each in reclaimed} == {base: len(before[base]) for base in before}
    assert f"cursors: r01/processed at {end}" in many_routes.log.where(3).message
    assert rulings(many_routes.root) == dict.fromkeys(before, ())
    assert errors(many_routes.root.path) == []


def listed(entry: Sequence[Any], cursor: int) -> dict[str, object]:
    route, count, first, last, *_ = entry
    return {"route": route, "count": count, "first": first, "last": last, "cursors": {"processed": cursor}}


def test_without_the_sealers_ledger_the_shared_line_still_proves_each_deletion(many_routes: Built) -> None:
    reclaim(many_routes)
    (many_routes.root.ledger / "segments.jsonl").unlink()
    history = History(many_routes.root)

    for entry in history.deletions():
        ruling = audit_deletion(entry, None)
        assert ruling.errors == ()
        assert all(entry["base"] <= each["first"] <= each["last"] <= entry["last"] for each in entry["routes"])
    routes = next(history.reclaimed_segments(1, 1)).routes
    assert routes is not None
    assert {each.route: (each.count > 0, each.last) for each in routes}["r00"] == (False, 2 * HALF)


def test_a_deletion_whose_shared_line_is_lost_is_not_proven(many_routes: Built) -> None:
    reclaim(many_routes)
    rewrite(many_routes.root, ledger(many_routes.root.path)[1:])

    found = rulings(many_routes.root)
    assert [base for base, objections in found.items() if not objections] == [1 + 2 * HALF]
    assert found[1] == ("its 'evidence' line is missing (read), so nothing proves that the deletion was allowed",)
    assert History(many_routes.root).deletion_of(1) is not None


def test_a_cursor_that_had_not_reached_a_segments_last_record_makes_that_deletion_illegal(many_routes: Built) -> None:
    """The line speaks for all segments that share it, and the sealer's line says which of them needed more."""
    reclaim(many_routes)
    shared, *lines = ledger(many_routes.root.path)
    shared["routes"][0]["cursors"] = {"processed": 2}
    del shared["routes"][1]
    rewrite(many_routes.root, [shared, *lines])

    found = rulings(many_routes.root)
    assert found[1] == ("record 4 of route r01 was deleted, but no cursor of the route is recorded",)
    assert len(found[1 + 2 * HALF]) == 0
    assert any("of route r00 was deleted before it was read by processed at 2" in each for each in found[3 + 2 * HALF])


def test_a_segment_that_came_back_and_went_again_is_judged_by_the_newer_shared_line(many_routes: Built) -> None:
    """Without it, the shared line of the earlier time proves nothing."""
    reclaimer = Reclaimer(many_routes.root, many_routes.disk, grace_ns=10**18)
    reclaimer.look(now_ns=many_routes.now_ns)
    many_routes.log.set_cursor("r05", 0, rewind=True)
    reclaimer.look(now_ns=many_routes.now_ns + 1)
    assert bases(many_routes.root) == [1, 3 + 2 * HALF, 3 + 4 * HALF]
    many_routes.log.set_cursor("r05", many_routes.last)
    many_routes.log.set_cursor("r06", many_routes.last - 1, "audit")
    reclaimer.look(now_ns=many_routes.now_ns + 2)
    reclaimer.ledger.close()

    lines = ledger(many_routes.root.path)
    first, second = [number for number, line in enumerate(lines) if line["event"] == "evidence"]
    assert lines[first]["base"] == lines[second]["base"]
    entry = History(many_routes.root).deletion_of(1) or {}
    assert [each["route"] for each in entry["routes"] if "audit" in each["cursors"]] == ["r06"]
    assert not any(rulings(many_routes.root).values())

    rewrite(many_routes.root, [*lines[:second], *lines[second + 1 :]])
    found = rulings(many_routes.root)
    assert found[1] == ("its 'evidence' line is missing (read), so nothing proves that the deletion was allowed",)
    assert found[1 + 2 * HALF] == ()


def test_cursors_that_were_read_again_get_a_shared_line_of_their_own(many_routes: Built) -> None:
    """They let go more than those before, so a line with the earlier ones would not prove the later deletions."""
    for route in [*MANY, "z"]:
        many_routes.log.set_cursor(route, 2 * HALF, rewind=True)
    times = [0.0]
    reclaimer = Reclaimer(many_routes.root, many_routes.disk, clock=lambda: times[-1])

    def decisions() -> Iterator[Decision]:
        for decision in reclaimer.survey.decisions(now_ns=many_routes.now_ns):
            yield decision
            if len(times) == 1:
                times.append(2 * CURSORS_SECONDS)
                for route in [*MANY, "z"]:
                    many_routes.log.set_cursor(route, many_routes.last)

    released = list(reclaimer.deleter().release(decisions(), now_ns=many_routes.now_ns))
    reclaimer.ledger.close()

    assert [decision.verdict.is_deletion for decision in released] == [True] * 4
    lines = ledger(many_routes.root.path)
    assert [line["routes"][0]["cursors"] for line in lines if line["event"] == "evidence"] == [
        {"processed": 2 * HALF},
        {"processed": many_routes.last},
    ]
    assert rulings(many_routes.root) == dict.fromkeys(
        (line["base"] for line in lines if line["event"] == "reclaimed"), ()
    )


@pytest.mark.parametrize("many", [LISTED_MAX, LISTED_MAX + 1])
def test_a_deletion_that_is_counted_again_lists_its_routes_itself(tmp_path: Path, many: int) -> None:
    """Its segment expired with losses, and by the end of the grace period everything in it is read."""
    many_routes = Built(tmp_path / "root")
    for _ in range(2):
        for route in MANY[:many]:
            many_routes.lines(route, [b"x", b"y"])
        many_routes.cut()
    many_routes.seal()
    for route in MANY[:many]:
        many_routes.log.set_cursor(route, 0)
    reclaimer = Reclaimer(many_routes.root, many_routes.disk, Limits(max_age_ns=5, others=EXPIRE), grace_ns=10)
    reclaimer.look(now_ns=many_routes.now_ns)
    reclaimer.look(now_ns=many_routes.now_ns + 10**12)
    for route in MANY[:many]:
        many_routes.log.set_cursor(route, many_routes.last)
    reclaimer.look(now_ns=many_routes.now_ns + 10**12 + 10)
    reclaimer.ledger.close()

    lines = [line for line in ledger(many_routes.root.path) if line["event"] == "reclaimed"]
    assert bases(many_routes.root) == bases(many_routes.root, Kind.DELETING) == []
    assert [(line["base"], "lost" in line, len(line["routes"])) for line in lines] == [
        (base, lost, many) for lost in (True, False) for base in (1, 1 + 2 * many)
    ]
    assert rulings(many_routes.root) == {1: (), 1 + 2 * many: ()}


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_crash_with_shared_lines_is_finished_by_the_next_run(tmp_path: Path, part: float) -> None:
    made = make(tmp_path / "made")

    def copy(number: int) -> Root:
        return Root(tmp_path / str(number))

    def die(number: int, disk: Disk) -> None:
        shutil.copytree(made.root.path, copy(number).path)
        reclaim(made, root=copy(number), disk=disk)

    for number in after_each_death(die, part=part, least=8):
        root = copy(number)
        assert errors(root.path) == []
        reclaim(made, root=root)
        assert bases(root) == bases(root, Kind.RELEASED) == bases(root, Kind.DELETING) == []
        deleted = [entry["base"] for entry in ledger(root.path) if entry["event"] == "reclaimed"]
        assert sorted(deleted) == sorted(held(root))
        assert rulings(root) == dict.fromkeys(held(root), ())
        assert errors(root.path) == []
        shutil.rmtree(root.path)
