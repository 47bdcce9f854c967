"""Records that a shrink drops, at every cursor and with every bundle, and the order of its steps."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from faults import TracingDisk
from logs import Built
from reclaiming import Reclaimer, reclaim
from shrinking import shrink_file

from wald.files.disk import Disk
from wald.files.ledger_write import Ledger
from wald.files.listing import list_segments
from wald.files.routes import retire_route
from wald.format.names import WHOLE_SUFFIX, Kind
from wald.format.sealed_index import RouteTable, SealedIndex
from wald.retention.blockers import read_cursor_snapshot, sealed_index
from wald.retention.history import History
from wald_reclaim.apply import Shrinker, ShrunkSegment
from wald_reclaim.policy import Floors

BYTES = random.Random(0).randbytes(1 << 20).replace(b"\n", b"-")
BATCHES = [("web", 1), ("web", 2), ("stuck", 1), ("web", 1), ("other", 2), ("web", 2)]


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Built]:
    """A sealed segment: web has 1, 2 to 3, 5 and 8 to 9; stuck has 4; other has 6 to 7. Record 10 is active."""
    made = Built(tmp_path / "log")
    for number, (route, count) in enumerate(BATCHES):
        made.lines(route, [BYTES[9000 * number + i : 9000 * number + i + 8000] for i in range(count)])
    made.cut()
    made.seal()
    made.lines("web", [b"newest"])
    for route in ("web", "other"):
        made.log.set_cursor(route, made.last)
    yield made
    made.crash()


def index(built: Built) -> SealedIndex:
    (segment, _) = list_segments(built.root).segments
    return sealed_index(segment, built.log_id)


def left(built: Built, floors: Floors, tmp_path: Path) -> set[int]:
    """The records that a shrink leaves."""
    made = tmp_path / "made"
    shrinking = shrink_file(built.path(1, Kind.SEALED), made, floors.keeps)
    made.unlink()
    dropped = {sequence for first, last in shrinking.index.shrunk.ranges for sequence in range(first, last + 1)}  # type: ignore[union-attr]
    return set(range(1, 10)) - dropped


def bundled(built: Built, through: int) -> Callable[[str, int, int], bool]:
    """Archive web up to a record; return the look-up of archived ranges."""
    path = built.root.ledger / "archive.jsonl"
    path.unlink(missing_ok=True)
    archive = Ledger(path, built.disk)
    if through:
        archive.append({"event": "archived", "route": "web", "first": 1, "last": through, "after": 0, "bundle": "b"})
    archive.close()
    return History(built.root).all_archived


@pytest.mark.parametrize("cursor", range(11))
def test_a_batch_goes_when_its_last_record_is_read(built: Built, tmp_path: Path, cursor: int) -> None:
    built.log.set_cursor("web", cursor, rewind=True)
    floors = Floors.of(index(built), read_cursor_snapshot(built.root, log_id=built.log_id), None)
    web = [(1, 1), (2, 3), (5, 5), (8, 9)]
    stays = {4} | {sequence for first, last in web if last > cursor for sequence in range(first, last + 1)}

    assert left(built, floors, tmp_path) == stays


@pytest.mark.parametrize("cursor", [0, 1, 3, 5, 9, 10])
def test_of_a_route_nothing_goes_before_all_of_it_is_archived(built: Built, tmp_path: Path, cursor: int) -> None:
    built.log.set_cursor("web", cursor, rewind=True)
    claims, held = read_cursor_snapshot(built.root, log_id=built.log_id), index(built)
    everything = left(built, Floors.of(held, claims, None), tmp_path) | {6, 7}
    for through in range(11):
        floors = Floors.of(held, claims, bundled(built, through))
        goes = through >= min(cursor, 9)
        assert left(built, floors, tmp_path) == (everything if goes else set(range(1, 10))), through


def test_a_retired_route_needs_no_bundle(built: Built, tmp_path: Path) -> None:
    retire_route(built.root, built.disk, "web", now="")
    floors = Floors.of(index(built), read_cursor_snapshot(built.root, log_id=built.log_id), bundled(built, 1))
    assert left(built, floors, tmp_path) == {4, 6, 7}


def test_half_of_the_file_and_16_kib_are_enough(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    built.lines("web", [b"x" * 100])
    built.lines("stuck", [b"y" * 100])
    built.cut()
    built.seal()
    held, read = index(built), Floors({"web": 1, "stuck": 0})

    assert read.freed_bytes(held, 32 << 10) == 16 << 10
    assert read.freed_bytes(held, (32 << 10) - 1) == 0
    more = replace(
        held,
        routes=RouteTable.from_entries(
            [each._replace(payload_bytes=101 + (each.route == "stuck")) for each in held.routes]
        ),
    )
    assert read.freed_bytes(more, 1 << 20) == 0
    assert Floors({"web": 0, "stuck": 0}).freed_bytes(held, 1 << 20) == 0


class Meanwhile(Disk):
    """A cursor is moved back just before the new form gets its name."""

    def __init__(self, built: Built, route: str, sequence: int) -> None:
        self._moved = built, route, sequence

    def rename(self, source: Path, target: Path) -> None:
        built, route, sequence = self._moved
        if source.name.endswith(".shrunk.tmp"):
            built.log.set_cursor(route, sequence, rewind=True)
        super().rename(source, target)


@pytest.mark.parametrize(
    ("route", "sequence", "stays"),
    [("web", 9, False), ("web", 8, True), ("other", 7, False), ("other", 6, True)],
)
def test_the_old_form_stays_if_one_dropped_record_is_needed_meanwhile(
    built: Built, route: str, sequence: int, *, stays: bool
) -> None:
    before = built.path(1, Kind.SEALED).read_bytes()
    reclaim(built, disk=Meanwhile(built, route, sequence), shrink_pinned=True)
    assert (built.path(1, Kind.SEALED).read_bytes() == before) is stays


def test_the_old_form_goes_after_all_else_is_durable(built: Built) -> None:
    disk = TracingDisk()
    reclaim(built, disk=disk, shrink_pinned=True)
    name = built.path(1, Kind.SEALED).name
    steps = [step for step in disk.steps if step[0] in ("sync", "link", "rename", "sync_directory", "unlink")]
    at = steps.index(("link", name + WHOLE_SUFFIX))

    assert steps[at - 2 :] == [
        ("sync", f"{name}.shrunk.tmp"),
        ("sync", "reclaim.jsonl"),
        ("link", name + WHOLE_SUFFIX),
        ("rename", name),
        ("sync_directory", "segments"),
        ("unlink", name + WHOLE_SUFFIX),
        ("unlink", f"{name}.shrunk.tmp"),  # which is gone
    ]


def test_what_is_left_of_a_segment_that_is_deleted_does_not_bring_it_back(built: Built) -> None:
    whole = built.path(1, Kind.SEALED).with_name(built.path(1, Kind.SEALED).name + WHOLE_SUFFIX)
    shutil.copyfile(built.path(1, Kind.SEALED), whole)
    built.reclaim(1)
    reclaim(built)
    assert not whole.exists()
    assert not built.path(1, Kind.SEALED).exists()


def test_a_segment_is_looked_at_again_after_ten_minutes(built: Built) -> None:
    now = 0.0
    reclaimer = Reclaimer(built.root, built.disk, clock=lambda: now)
    shrinker = Shrinker(reclaimer.deleter())

    def shrink() -> ShrunkSegment | None:
        return shrinker.shrink(list_segments(built.root).segments[0], now_ns=built.now_ns)

    built.log.set_cursor("web", 0, rewind=True)
    assert shrink() is None
    built.log.set_cursor("web", 10)
    now = 599.0
    assert shrink() is None
    now = 600.0
    assert shrink() is not None
    reclaimer.ledger.close()
