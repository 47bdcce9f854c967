"""Segments with many routes share one line of the ledger with the cursors, and each deletion is proven by it."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from contents import errors
from faults import after_each_death
from golden.samples import ledger_of
from logs import Built
from reclaiming import EXPIRE, Reclaimer, bases, ledger, reclaim, rulings

from wald.files.disk import Disk
from wald.files.layout import Root
from wald.format.names import Kind
from wald.retention.audit import audit_deletion
from wald.retention.history import History
from wald_reclaim.evidence import LISTED_MAX
from wald_reclaim.policy import Limits
from wald_reclaim.survey import CURSORS_SECONDS, Decision

MANY = [f"r{number:02}" for number in range(LISTED_MAX + 1)]
HALF = len(MANY)


def make(path: Path) -> Built:
    """Sealed segments of many routes, of one, of many, and of one more."""
    built = Built(path)
    for routes in (MANY, MANY[:1], MANY, [*MANY, "z"]):
        for route in routes:
            built.lines(route, [b"x", b"y"])
        built.cut()
    built.seal()
    for route in [*MANY, "z"]:
        built.log.set_cursor(route, built.last)
    return built


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return make(tmp_path / "root")


def held(root: Root) -> dict[int, list[list[Any]]]:
    """Return the routes of each segment from the lines of the sealer."""
    lines = History(root).ledgers["segments.jsonl"].oldest_first()
    return {line.low: line.entry["routes"] for line in lines if line.entry["event"] == "sealed"}


def rewrite(root: Root, entries: list[dict[str, Any]]) -> None:
    """Make a ledger of deletions of these lines."""
    (root.ledger / "reclaim.jsonl").write_bytes(ledger_of(entries))


def test_many_routes_are_listed_once_for_all_segments_recorded_together(built: Built) -> None:
    """Each deletion has the routes that its segment held."""
    before = held(built.root)
    reclaim(built)
    shared, *lines = ledger(built.root.path)

    assert bases(built.root) == []
    assert [line["event"] for line in (shared, *lines)] == ["evidence", *["reclaimed"] * 4]
    assert [line.get("evidence") for line in lines] == [1, None, 1, 1]
    assert ["routes" in line for line in lines] == [False, True, False, False]
    assert (shared["base"], shared["last"]) == (1, built.last)
    last, end = {name: final for routes in before.values() for name, _, _, final, _ in routes}, built.last
    every = [(name, 6, 1 + 2 * n, last[name]) for n, name in enumerate(MANY)]
    assert shared["routes"] == [listed(each, end) for each in [*every, ("z", 2, end - 1, end)]]
    history = History(built.root)
    for base, routes in before.items():
        assert (history.deletion_of(base) or {})["routes"] == [listed(each, end) for each in routes]
    reclaimed = history.reclaimed_segments(1, end)
    assert {each.first: len(each.routes or ()) for each in reclaimed} == {base: len(before[base]) for base in before}
    assert f"cursors: r01/processed at {end}" in built.log.where(3).message
    assert rulings(built.root) == dict.fromkeys(before, ())
    assert errors(built.root.path) == []


def listed(entry: Sequence[Any], cursor: int) -> dict[str, object]:
    route, count, first, last, *_ = entry
    return {"route": route, "count": count, "first": first, "last": last, "cursors": {"processed": cursor}}


def test_without_the_sealers_ledger_the_shared_line_still_proves_each_deletion(built: Built) -> None:
    reclaim(built)
    (built.root.ledger / "segments.jsonl").unlink()
    history = History(built.root)

    for entry in history.deletions():
        ruling = audit_deletion(entry, None)
        assert ruling.errors == ()
        assert all(entry["base"] <= each["first"] <= each["last"] <= entry["last"] for each in entry["routes"])
    routes = next(history.reclaimed_segments(1, 1)).routes
    assert routes is not None
    assert {each.route: (each.count > 0, each.last) for each in routes}["r00"] == (False, 2 * HALF)


def test_a_deletion_whose_shared_line_is_lost_is_not_proven(built: Built) -> None:
    reclaim(built)
    rewrite(built.root, ledger(built.root.path)[1:])

    found = rulings(built.root)
    assert [base for base, objections in found.items() if not objections] == [1 + 2 * HALF]
    assert found[1] == ("its 'evidence' line is missing (read), so nothing proves that the deletion was allowed",)
    assert History(built.root).deletion_of(1) is not None


def test_a_cursor_that_had_not_reached_a_segments_last_record_makes_that_deletion_illegal(built: Built) -> None:
    """The line speaks for all segments that share it, and the sealer's line says which of them needed more."""
    reclaim(built)
    shared, *lines = ledger(built.root.path)
    shared["routes"][0]["cursors"] = {"processed": 2}
    del shared["routes"][1]
    rewrite(built.root, [shared, *lines])

    found = rulings(built.root)
    assert found[1] == ("record 4 of route r01 was deleted, but no cursor of the route is recorded",)
    assert len(found[1 + 2 * HALF]) == 0
    assert any("of route r00 was deleted before it was read by processed at 2" in each for each in found[3 + 2 * HALF])


def test_a_segment_that_came_back_and_went_again_is_judged_by_the_newer_shared_line(built: Built) -> None:
    """Without it, the shared line of the earlier time proves nothing."""
    reclaimer = Reclaimer(built.root, built.disk, grace_ns=10**18)
    reclaimer.look(now_ns=built.now_ns)
    built.log.set_cursor("r05", 0, rewind=True)
    reclaimer.look(now_ns=built.now_ns + 1)
    assert bases(built.root) == [1, 3 + 2 * HALF, 3 + 4 * HALF]
    built.log.set_cursor("r05", built.last)
    built.log.set_cursor("r06", built.last - 1, "audit")
    reclaimer.look(now_ns=built.now_ns + 2)
    reclaimer.ledger.close()

    lines = ledger(built.root.path)
    first, second = [number for number, line in enumerate(lines) if line["event"] == "evidence"]
    assert lines[first]["base"] == lines[second]["base"]
    entry = History(built.root).deletion_of(1) or {}
    assert [each["route"] for each in entry["routes"] if "audit" in each["cursors"]] == ["r06"]
    assert not any(rulings(built.root).values())

    rewrite(built.root, [*lines[:second], *lines[second + 1 :]])
    found = rulings(built.root)
    assert found[1] == ("its 'evidence' line is missing (read), so nothing proves that the deletion was allowed",)
    assert found[1 + 2 * HALF] == ()


def test_cursors_that_were_read_again_get_a_shared_line_of_their_own(built: Built) -> None:
    """They let go more than those before, so a line with the earlier ones would not prove the later deletions."""
    for route in [*MANY, "z"]:
        built.log.set_cursor(route, 2 * HALF, rewind=True)
    times = [0.0]
    reclaimer = Reclaimer(built.root, built.disk, clock=lambda: times[-1])

    def decisions() -> Iterator[Decision]:
        for decision in reclaimer.survey.decisions(now_ns=built.now_ns):
            yield decision
            if len(times) == 1:
                times.append(2 * CURSORS_SECONDS)
                for route in [*MANY, "z"]:
                    built.log.set_cursor(route, built.last)

    released = list(reclaimer.deleter().release(decisions(), now_ns=built.now_ns))
    reclaimer.ledger.close()

    assert [decision.verdict.is_deletion for decision in released] == [True] * 4
    lines = ledger(built.root.path)
    assert [line["routes"][0]["cursors"] for line in lines if line["event"] == "evidence"] == [
        {"processed": 2 * HALF},
        {"processed": built.last},
    ]
    assert rulings(built.root) == dict.fromkeys((line["base"] for line in lines if line["event"] == "reclaimed"), ())


@pytest.mark.parametrize("many", [LISTED_MAX, LISTED_MAX + 1])
def test_a_deletion_that_is_counted_again_lists_its_routes_itself(tmp_path: Path, many: int) -> None:
    """Its segment expired with losses, and by the end of the grace period everything in it is read."""
    built = Built(tmp_path / "root")
    for _ in range(2):
        for route in MANY[:many]:
            built.lines(route, [b"x", b"y"])
        built.cut()
    built.seal()
    for route in MANY[:many]:
        built.log.set_cursor(route, 0)
    reclaimer = Reclaimer(built.root, built.disk, Limits(max_age_ns=5, others=EXPIRE), grace_ns=10)
    reclaimer.look(now_ns=built.now_ns)
    reclaimer.look(now_ns=built.now_ns + 10**12)
    for route in MANY[:many]:
        built.log.set_cursor(route, built.last)
    reclaimer.look(now_ns=built.now_ns + 10**12 + 10)
    reclaimer.ledger.close()

    lines = [line for line in ledger(built.root.path) if line["event"] == "reclaimed"]
    assert bases(built.root) == bases(built.root, Kind.DELETING) == []
    assert [(line["base"], "lost" in line, len(line["routes"])) for line in lines] == [
        (base, lost, many) for lost in (True, False) for base in (1, 1 + 2 * many)
    ]
    assert rulings(built.root) == {1: (), 1 + 2 * many: ()}


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_crash_at_any_step_is_finished_by_the_next_run(tmp_path: Path, part: float) -> None:
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
