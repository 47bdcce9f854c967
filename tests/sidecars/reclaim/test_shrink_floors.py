"""Records that a shrink drops, at every cursor and with every bundle, and the order of its steps."""

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from damage import flip_bit
from faults import Died, TracingDisk
from logs import Built
from reclaiming import DyingAfterShrink, Reclaimer, archived, ledger, reclaim
from running import wald
from shrinking import shrink_file

from wald.checking.checker import Level
from wald.checking.verifier import verify
from wald.files.disk import Disk
from wald.files.listing import list_segments
from wald.files.routes import retire_route
from wald.format.names import WHOLE_SUFFIX, Kind
from wald.format.sealed_index import RouteTable, SealedIndex
from wald.retention.audit import audit_shrink
from wald.retention.blockers import read_cursor_snapshot, sealed_index
from wald.retention.history import History
from wald.segments.view import State
from wald_reclaim.apply import Shrinker, ShrunkSegment
from wald_reclaim.policy import Floors

BYTES = random.Random(0).randbytes(1 << 20).replace(b"\n", b"-")
BATCHES = [("web", 1), ("web", 2), ("stuck", 1), ("web", 1), ("other", 2), ("web", 2)]


@pytest.fixture
def floored(tmp_path: Path) -> Iterator[Built]:
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


def index(floored: Built) -> SealedIndex:
    (segment, _) = list_segments(floored.root).segments
    return sealed_index(segment, floored.log_id)


def left(floored: Built, floors: Floors, tmp_path: Path) -> set[int]:
    """The records that a shrink leaves."""
    made = tmp_path / "made"
    shrinking = shrink_file(floored.path(1, Kind.SEALED), made, floors.keeps)
    made.unlink()
    dropped = {sequence for first, last in shrinking.index.shrunk.ranges for sequence in range(first, last + 1)}  # type: ignore[union-attr]
    return set(range(1, 10)) - dropped


def bundled(floored: Built, through: int) -> Callable[[str, int, int], bool]:
    """Archive web up to a record; return the look-up of archived ranges."""
    (floored.root.ledger / "archive.jsonl").unlink(missing_ok=True)
    if through:
        archived(floored, "web", through)
    return History(floored.root).all_archived


def test_a_batch_goes_when_its_last_record_is_read(floored: Built, tmp_path: Path) -> None:
    for cursor in range(11):
        floored.log.set_cursor("web", cursor, rewind=True)
        floors = Floors.of(index(floored), read_cursor_snapshot(floored.root, log_id=floored.log_id), None)
        web = [(1, 1), (2, 3), (5, 5), (8, 9)]
        stays = {4} | {sequence for first, last in web if last > cursor for sequence in range(first, last + 1)}

        assert left(floored, floors, tmp_path) == stays


def test_of_a_route_nothing_goes_before_all_of_it_is_archived(floored: Built, tmp_path: Path) -> None:
    for cursor in [0, 1, 3, 5, 9, 10]:
        floored.log.set_cursor("web", cursor, rewind=True)
        claims, held = read_cursor_snapshot(floored.root, log_id=floored.log_id), index(floored)
        everything = left(floored, Floors.of(held, claims, None), tmp_path) | {6, 7}
        for through in range(11):
            floors = Floors.of(held, claims, bundled(floored, through))
            goes = through >= min(cursor, 9)
            assert left(floored, floors, tmp_path) == (everything if goes else set(range(1, 10))), through


def test_a_retired_route_needs_no_bundle(floored: Built, tmp_path: Path) -> None:
    retire_route(floored.root, floored.disk, "web", now="")
    floors = Floors.of(index(floored), read_cursor_snapshot(floored.root, log_id=floored.log_id), bundled(floored, 1))
    assert left(floored, floors, tmp_path) == {4, 6, 7}


def test_half_of_the_file_and_16_kib_are_enough(tmp_path: Path) -> None:
    floored = Built(tmp_path / "log")
    floored.lines("web", [b"x" * 100])
    floored.lines("stuck", [b"y" * 100])
    floored.cut()
    floored.seal()
    held, read = index(floored), Floors({"web": 1, "stuck": 0})

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

    def __init__(self, floored: Built, route: str, sequence: int) -> None:
        self._moved = floored, route, sequence

    def rename(self, source: Path, target: Path) -> None:
        floored, route, sequence = self._moved
        if source.name.endswith(".shrunk.tmp"):
            floored.log.set_cursor(route, sequence, rewind=True)
        super().rename(source, target)


@pytest.mark.parametrize(
    ("route", "sequence", "stays"),
    [("web", 9, False), ("web", 8, True), ("other", 7, False), ("other", 6, True)],
)
def test_the_old_form_stays_if_one_dropped_record_is_needed_meanwhile(
    floored: Built, route: str, sequence: int, *, stays: bool
) -> None:
    before = floored.path(1, Kind.SEALED).read_bytes()
    reclaim(floored, disk=Meanwhile(floored, route, sequence), shrink_pinned=True)
    assert (floored.path(1, Kind.SEALED).read_bytes() == before) is stays


def test_the_old_form_goes_after_all_else_is_durable(floored: Built) -> None:
    disk = TracingDisk()
    reclaim(floored, disk=disk, shrink_pinned=True)
    name = floored.path(1, Kind.SEALED).name
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


def test_what_is_left_of_a_segment_that_is_deleted_does_not_bring_it_back(floored: Built) -> None:
    whole = floored.path(1, Kind.SEALED).with_name(floored.path(1, Kind.SEALED).name + WHOLE_SUFFIX)
    shutil.copyfile(floored.path(1, Kind.SEALED), whole)
    floored.reclaim(1)
    reclaim(floored)
    assert not whole.exists()
    assert not floored.path(1, Kind.SEALED).exists()


def test_a_segment_is_looked_at_again_after_ten_minutes(floored: Built) -> None:
    now = 0.0
    reclaimer = Reclaimer(floored.root, floored.disk, clock=lambda: now)
    shrinker = Shrinker(reclaimer.deleter())

    def shrink() -> ShrunkSegment | None:
        return shrinker.shrink(list_segments(floored.root).segments[0], now_ns=floored.now_ns)

    floored.log.set_cursor("web", 0, rewind=True)
    assert shrink() is None
    floored.log.set_cursor("web", 10)
    now = 599.0
    assert shrink() is None
    now = 600.0
    assert shrink() is not None
    reclaimer.ledger.close()


@pytest.fixture
def interrupted(tmp_path: Path) -> Built:
    """A sealed segment in both forms: ten batches, of which the second and the last but one are of the route stuck."""
    made = Built(tmp_path / "log")
    for i in range(10):
        made.lines("stuck" if i in (1, 8) else "web", [BYTES[6000 * i : 6000 * (i + 1)]])
    made.cut()
    made.lines("web", [b"newest"])
    made.seal()
    made.log.set_cursor("web", made.last)
    with pytest.raises(Died):
        reclaim(made, disk=DyingAfterShrink(), shrink_pinned=True)
    assert whole(made).exists()
    made.crash()
    return made


def whole(interrupted: Built) -> Path:
    path = interrupted.path(1, Kind.SEALED)
    return path.with_name(path.name + WHOLE_SUFFIX)


def values(interrupted: Built, route: str, *, unread: bool = False) -> list[bytes]:
    batches = interrupted.log.batches(route, "cursor" if unread else 1)
    return [record.value for batch in batches for record in batch.records()]


def findings(interrupted: Built) -> list[str]:
    return [str(found) for found in verify(interrupted.root) if found.level is Level.ERROR]


def index_offset(path: Path) -> int:
    return path.read_bytes().rindex(b"\x57\x2a\x4d\x18") + 30


@pytest.mark.parametrize("rewound", [False, True])
@pytest.mark.parametrize("in_index", [False, True])
def test_repair_puts_the_whole_form_back(interrupted: Built, *, in_index: bool, rewound: bool) -> None:
    path = interrupted.path(1, Kind.SEALED)
    flip_bit(path, index_offset(path) if in_index else 3000)
    if rewound:
        interrupted.log.set_cursor("web", 0, rewind=True)
    done = wald("repair", "--root", interrupted.root.path)

    assert (done.returncode, done.stderr) == (0, b""), done.stdout
    assert not whole(interrupted).exists()
    assert len(values(interrupted, "web")) == 9
    assert len(values(interrupted, "stuck")) == 2
    reclaim(interrupted, shrink_pinned=True)
    assert len(values(interrupted, "stuck")) == 2
    assert len(values(interrupted, "web", unread=True)) == (9 if rewound else 0)
    assert findings(interrupted) == []


def test_reclaim_does_not_trust_a_form_that_was_damaged_meanwhile(interrupted: Built) -> None:
    flip_bit(interrupted.path(1, Kind.SEALED), 3000)
    reclaim(interrupted, shrink_pinned=True)

    assert not whole(interrupted).exists()
    assert len(values(interrupted, "stuck")) == 2
    assert findings(interrupted) == []


def test_reclaim_keeps_the_good_form_beside_a_damaged_old_one(interrupted: Built) -> None:
    """And repair clears the damaged one away."""
    flip_bit(whole(interrupted), 3000)
    reclaim(interrupted, shrink_pinned=True)
    assert whole(interrupted).exists()
    assert len(values(interrupted, "stuck")) == 2

    done = wald("repair", "--root", interrupted.root.path)
    assert done.returncode == 0, done.stdout
    assert not whole(interrupted).exists()
    assert len(values(interrupted, "stuck")) == 2
    reclaim(interrupted, shrink_pinned=True)
    assert findings(interrupted) == []


def test_it_may_not_be_deleted_by_hand(interrupted: Built) -> None:
    done = wald("inspect", whole(interrupted))
    assert b"delete it?  no" in done.stdout.replace(b"    ", b"  "), done.stdout
    assert (
        f"{whole(interrupted).name}: left by an interrupted shrinking"
        in wald("verify", "--root", interrupted.root.path).stdout.decode()
    )


SEEDS = [0, pytest.param(range(2, 14), marks=pytest.mark.slow)]


def interleaved(path: Path, seed: int) -> tuple[Built, dict[int, str]]:
    """A sealed segment of batches of a and b with one of c among them, and the route of each record in it."""
    built, rng = Built(path), random.Random(seed)
    routes: dict[int, str] = {}
    batches = rng.choices("ab", k=90 if seed % 2 else 20 if seed else 12)
    batches.insert(rng.randrange(len(batches)), "c")
    for route in batches:
        count = rng.randint(1, 3)
        at = rng.randrange(1 << 19)
        first = built.lines(route, [BYTES[at + 2000 * i : at + 2000 * (i + 1)] for i in range(count)])
        routes |= dict.fromkeys(range(first, first + count), route)
    built.cut()
    built.lines("a", [b"newest"])
    built.seal()
    for route in "abc":
        built.log.set_cursor(route, 0)
    return built, routes


def readable(built: Built, routes: dict[int, str]) -> set[int]:
    return {record.sequence for record in built.log.records()} & routes.keys()


@pytest.mark.parametrize("seeds", SEEDS)
def test_each_record_has_one_answer(tmp_path: Path, seeds: int | range) -> None:
    """Compare two shrinks, and the deletion of the rest, with the records of a reader before and after."""
    for seed in [seeds] if isinstance(seeds, int) else seeds:
        built, routes = interleaved(tmp_path / str(seed), seed)
        rng, removed = random.Random(seed), dict[int, int]()
        for cursor in (rng.choice(list(routes)), max(routes)):
            for route in "ab":
                built.log.set_cursor(route, max(cursor, built.log.cursor(route).effective))
            before = readable(built, routes)
            reclaim(built, shrink_pinned=True)
            removed |= dict.fromkeys(before - readable(built, routes), len(ledger(built.root.path)) - 1)
            hold(built, routes, removed)
        for route in "abc":
            built.log.set_cursor(route, built.last)
        before = readable(built, routes)
        reclaim(built)
        removed |= dict.fromkeys(before, len(ledger(built.root.path)) - 1)
        hold(built, routes, removed)
        assert {line["event"] for line in ledger(built.root.path)} == {"shrunk", "reclaimed"}
        built.crash()


def hold(built: Built, routes: dict[int, str], removed: dict[int, int]) -> None:
    """Ask about every record."""
    lines = ledger(built.root.path)
    for sequence, route in routes.items():
        found = built.log.where(sequence)
        if sequence not in removed:
            assert (found.state, found.route) == (State.SEALED, route)
            continue
        line = lines[removed[sequence]]
        assert found.state is State.RECLAIMED
        assert found.reclaimed is not None
        assert (found.reclaimed["event"], found.reclaimed.get("sha256")) == (line["event"], line["sha256"])
        assert "; or" not in found.message
        if line["event"] == "shrunk":
            assert found.message.endswith(f"cursors: {route}/processed at {_cursor(line, route)}")
    history = History(built.root)
    rulings = [
        audit_shrink(line, history.line_for_digest(line["base"], line["was_sha256"])) for line in history.all_shrinks()
    ]
    assert [ruling.errors for ruling in rulings if ruling.errors] == []
    assert [found.message for found in verify(built.root) if found.level is Level.ERROR] == []


def _cursor(line: dict[str, object], route: str) -> object:
    dropped = line["dropped"]
    assert isinstance(dropped, list)
    return next(each["cursors"]["processed"] for each in dropped if each["route"] == route)


def test_runs_that_are_not_what_was_dropped_are_an_error() -> None:
    cases: list[dict[str, object]] = [{}, {"a": [0, 1]}, {"a": [0, 1, 1, 2]}, {"a": "x"}, {"a": [0]}, {"a": [0, 2]}]
    for runs in cases:
        line = {
            "base": 1,
            "last": 3,
            "routes": [["b", 1, 2, 2, 1]],
            "dropped": [{"route": "a", "count": 2, "first": 1, "last": 3, "cursors": {"processed": 3}}],
        }
        assert audit_shrink({**line, "runs": {"a": [0, 1, 1, 1]}}, None).errors == ()
        assert audit_shrink({**line, "runs": runs}, None).errors != ()
