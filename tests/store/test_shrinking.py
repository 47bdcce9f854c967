"""Shrunk segments: kept batches keep their bytes and positions, and dropped records are reported as reclaimed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import START_NS, Built
from repairing import repair
from shrinking import behind, shrink, shrink_file

from wald.checking.checker import Level
from wald.checking.dump import dump
from wald.checking.verifier import verify
from wald.errors import Damaged, NotFound
from wald.files.disk import Disk
from wald.files.listing import Segment
from wald.format.names import Kind
from wald.format.sealed_index import RouteEntry
from wald.retention.missing import Missing
from wald.segments.salvage import index_salvaged
from wald.segments.sealed_file import SealedFile
from wald.segments.seek import sequence_at, sequence_since
from wald.segments.shrinking import check_shrunk, shrink_segment
from wald.segments.view import State

BIG = b"x" * 700


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Built]:
    """Records 1 to 40: web has 1, 2, 4, 5, 7, …; stuck has 3, 6, 9, …; a second segment begins at 41."""
    made = Built(tmp_path / "log")
    for number in range(1, 41):
        made.lines("stuck" if number % 3 == 0 else "web", [b"%d" % number + BIG])
    made.cut()
    made.lines("web", [b"41"])
    made.seal()
    yield made
    made.crash()


def read(built: Built, route: str | None = None, start: int | str = 1, stop: int | None = None) -> list[int]:
    batches = built.log.batches(route, start, stop, on_missing="skip")  # type: ignore[arg-type]  # a test's start
    return [record.sequence for batch in batches for record in batch.records()]


def missing(built: Built, route: str | None = None, start: int | str = 1, stop: int | None = None) -> list[Missing]:
    found: list[Missing] = []
    for _ in built.log.batches(route, start, stop, on_missing=found.append):  # type: ignore[arg-type]
        pass
    return found


def wrong(built: Built) -> list[str]:
    return [str(found) for found in verify(built.root) if found.level is Level.ERROR]


STUCK = list(range(3, 40, 3))


def test_what_was_dropped_is_missing_like_what_was_reclaimed_and_the_stuck_route_has_no_gap(built: Built) -> None:
    shrink(built, 1, web=40)

    assert read(built, "stuck") == STUCK
    assert missing(built, "stuck") == []
    assert read(built) == [*STUCK, 41]
    (of_route,) = missing(built, "web")
    assert (of_route.first, of_route.last, of_route.records, of_route.exact) == (1, 40, 27, True)
    assert of_route.routes == {"web"}
    spans = [(each.first, each.last, each.records, each.exact) for each in missing(built)]
    assert spans[:2] == [(1, 2, 2, True), (4, 5, 2, True)]
    assert sum(each.records for each in missing(built)) == 27
    with pytest.raises(NotFound, match="RECLAIM has removed records 1 to 2"):
        list(built.log.batches(None, 1))
    message = missing(built, "web", 30, 35)[0].message()
    assert message.endswith("RECLAIM has removed records 30 to 35: up to 6 records of route web are missing")
    assert missing(built, "web", 41) == missing(built, None, 39, 39) == []

    states = [built.log.where(number).state for number in range(1, 42)]
    assert states == [*([State.RECLAIMED, State.RECLAIMED, State.SEALED] * 13), State.RECLAIMED, State.ACTIVE]
    at_ns = START_NS + 10 * 10**9
    assert (sequence_at(built.view, at_ns), sequence_since(built.view, at_ns)) == (12, 10)
    at_ns += 2 * 10**9
    assert sequence_at(built.view, at_ns) == sequence_since(built.view, at_ns) == 12

    assert wrong(built) == []
    found = "".join(found.message for found in verify(built.root))
    assert "13 records; 27 records were dropped" in found
    before = built.path(1, Kind.SEALED).read_bytes()
    (built.root.ledger / "reclaim.jsonl").unlink()
    assert built.log.where(4).state is State.RECLAIMED
    assert "by shrinking, and no ledger says when" in built.log.where(4).message
    assert wrong(built) == []
    assert "the ledger has no line about its shrinking" in [found.message for found in verify(built.root)]
    assert not repair(built.root.path).actions
    assert built.path(1, Kind.SEALED).read_bytes() == before
    assert missing(built, "web") == [of_route]


def test_a_record_that_a_shrink_kept_is_lost_with_its_segment(built: Built) -> None:
    shrink(built, 1, web=40, stuck=12)
    shrink(built, 1, web=40, stuck=36)  # 39 is left
    assert built.log.where(39).state is State.SEALED
    built.path(1, Kind.SEALED).unlink()

    gone = built.log.where(39)
    assert (gone.state, gone.reclaimed) == (State.LOST, None)
    assert gone.message == f"lost after shrinking had kept it: {gone.segment} is missing, and no ledger explains why"
    assert built.log.where(10).state is built.log.where(9).state is State.RECLAIMED


def test_a_record_between_dropped_ones_is_lost_with_its_segment(built: Built) -> None:
    shrink(built, 1, web=20)  # stuck is left, 3 to 39, and web, 22 to 40
    built.path(1, Kind.SEALED).unlink()

    assert built.log.where(2).state is built.log.where(10).state is State.RECLAIMED
    for sequence in (9, 23):
        found = built.log.where(sequence)
        assert (found.state, found.message.partition(":")[0]) == (State.LOST, "lost after shrinking had kept it")
    repair(built.root.path)
    assert built.log.where(23).state is State.LOST
    assert "given up by a repair" in built.log.where(23).message


def test_a_segment_is_shrunk_again(built: Built) -> None:
    shrink(built, 1, web=20)
    assert read(built, "web") == [number for number in range(21, 42) if number % 3]
    shrinking = shrink(built, 1, web=40, stuck=20)

    assert shrinking.index.shrunk is not None
    assert shrinking.index.shrunk.ranges[0] == (1, 20)
    assert shrinking.index.shrunk.routes == [
        RouteEntry("web", 27, 1, 40, 18975),
        RouteEntry("stuck", 6, 3, 18, 4215),
    ]
    assert {entry.route: (entry.first, entry.last) for entry in shrinking.dropped} == {
        "web": (22, 40),
        "stuck": (3, 18),
    }
    assert read(built) == [21, 24, 27, 30, 33, 36, 39, 41]
    assert wrong(built) == []
    with SealedFile(built.path(1, Kind.SEALED)) as sealed:
        assert sealed.index.next_sequence == 41
    shrink(built, 1, web=40, stuck=40)
    assert read(built) == [41]
    assert wrong(built) == []


def test_the_frames_are_a_raw_segment(built: Built, tmp_path: Path) -> None:
    path = built.path(1, Kind.SEALED)
    with SealedFile(path) as sealed:
        raw_bytes = sealed.index.raw_bytes
    shrink(built, 1, web=40)
    raw = tmp_path / path.with_suffix("").name
    raw.write_bytes(subprocess.run(["zstd", "-dc", path], capture_output=True, check=True).stdout)

    items = list(dump(raw, records=True))
    assert raw.stat().st_size == raw_bytes
    assert not [item for item in items if "damage" in item]
    assert [item["sequence"] for item in items if item["kind"] == "record"] == STUCK
    assert [item["base_sequence"] for item in items if item["kind"] == "dropped"][:3] == [1, 4, 7]
    assert [item["kind"] for item in items[:3]] == ["header", "control", "dropped"]


def test_without_its_index_the_frames_say_what_was_dropped_and_a_repair_rebuilds_it(built: Built) -> None:
    shrinking = shrink(built, 1, web=40)
    path = built.path(1, Kind.SEALED)
    data = path.read_bytes()
    path.write_bytes(data[:-4] + bytes(4))

    assert read(built, "stuck") == STUCK
    (found,) = missing(built, "web")
    assert (found.first, found.last, found.records) == (1, 40, 27)
    index = index_salvaged(Segment(1, Kind.SEALED, path), built.log_id, Damaged("lost"))
    assert index.shrunk is not None
    assert (index.shrunk.ranges, index.damage, index.sha256) == (
        shrinking.index.shrunk and shrinking.index.shrunk.ranges,
        [],
        shrinking.index.sha256,
    )
    assert index.routes == shrinking.index.routes
    assert built.log.where(4).state is State.RECLAIMED
    assert wrong(built) != []

    repair(built.root.path)
    assert wrong(built) == []
    assert read(built, "stuck") == STUCK
    (found,) = missing(built, "web")
    assert (found.first, found.last, found.records) == (1, 40, 27)


def test_a_shrunk_segment_of_which_only_dropped_records_are_whole_is_repaired_once(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    noise = Random(0).randbytes(300_000).replace(b"\n", b"-")
    built.lines("web", [noise])
    built.lines("stuck", [noise])
    built.cut()
    built.lines("web", [b"newest"])
    built.seal()
    shrink(built, 1, web=3)
    path = built.path(1, Kind.SEALED)
    data = bytearray(path.read_bytes())
    data[250_000] ^= 0xFF
    path.write_bytes(bytes(data))

    assert [act.lost_spans for act in repair(built.root.path).actions] == [((2, 2),)]
    assert not repair(built.root.path).actions
    assert wrong(built) == []
    built.crash()


def test_a_record_whose_pieces_were_dropped_later_is_not_put_together_wrongly(tmp_path: Path) -> None:
    """Its beginning was kept when its segment was shrunk, and its middle was not needed any more later."""
    built = Built(tmp_path / "log")
    built.lines("web", [BIG])
    built.piece("long", b"begin", begins=True, ends=False)
    built.cut()
    built.piece("long", b"middle", begins=False, ends=False)
    built.piece("long", b"end\nnext\n", begins=False, ends=True)
    built.cut()
    built.lines("web", [b"last"])
    built.seal()
    shrink(built, 1, web=1)
    shrink(built, 3, long=2)

    assert read(built, "long") == [3]
    assert read(built) == [3, 4]
    assert wrong(built) == []
    built.crash()


def test_what_does_not_read_back_is_refused(built: Built, tmp_path: Path) -> None:
    path, made = built.path(1, Kind.SEALED), tmp_path / "made"
    shrinking = shrink_file(path, made, behind(web=40))
    with SealedFile(path) as old, SealedFile(made) as new:
        with pytest.raises(Damaged, match="is missing or differs") as refused:
            check_shrunk(old, new, shrinking, behind(web=30))
        assert refused.value.case == "sealed-segment-damaged"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(bytes(data))
    disk = Disk()
    target = disk.create(tmp_path / "other")
    with SealedFile(path) as old, pytest.raises(Damaged):
        shrink_segment(old, target, disk, behind(web=40))
    disk.close(target)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.booleans()), min_size=1, max_size=25),
    st.lists(st.fixed_dictionaries({route: st.integers(0, 60) for route in "abc"}), min_size=1, max_size=3),
)
def test_what_is_behind_the_cursors_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    appends: list[tuple[str, int, bool]],
    moves: list[dict[str, int]],
) -> None:
    built = Built(tmp_path_factory.mktemp("log") / "log")
    for route, count, cuts in appends:
        built.lines(route, [b"%d" % number + BIG for number in range(count)])
        if cuts:
            built.cut()
    if built.writer.has_advanced:
        built.cut()
    built.lines("a", [b"last"])
    built.seal()
    floors = dict.fromkeys("abc", 0)
    before = {route: unread(built, route, 0) for route in "abc" if (built.root.routes / route).is_dir()}
    for move in moves:
        floors = {route: max(floors[route], move[route]) for route in floors}
        for segment in built.view.segments[:-1]:
            shrink(built, segment.base_sequence, **floors)
        for route, records in before.items():
            assert unread(built, route, floors[route]) == [each for each in records if each[0] > floors[route]]
        assert wrong(built) == []
    built.crash()


def unread(built: Built, route: str, at: int) -> list[tuple[int, bytes]]:
    """Return the unread records of a group at ``at``; none may be missing."""
    batches = built.log.batches(route, at + 1, on_missing="error") if at < built.last else iter(())
    return [(record.sequence, record.value) for batch in batches for record in batch.records()]
