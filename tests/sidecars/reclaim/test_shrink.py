"""Shrinking: a stuck route costs its own bytes; at every cursor and step, one form holds all that is needed."""

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import full_disk
import pytest
from archives import archive
from contents import errors
from damage import flip_bit
from faults import Died, TracingDisk, after_each_death
from logs import Built
from reclaiming import DyingAfterShrink, Reclaimer, archived, ledger, reclaim
from repairing import repair
from running import run, sidecar, wald
from shrinking import shrink, shrink_file
from tracing import strace

from wald.checking.audit_report import DeletionAudit
from wald.errors import DiskFailure
from wald.files.disk import Disk
from wald.files.layout import SHRUNK_SUFFIX
from wald.files.ledger_read import read_ledger
from wald.files.listing import list_segments
from wald.files.routes import retire_route
from wald.format.batch import Buffer
from wald.format.names import WHOLE_SUFFIX, Kind
from wald.format.sealed_index import RouteTable, SealedIndex
from wald.retention.audit import audit_deletion, audit_shrink
from wald.retention.blockers import read_cursor_snapshot, sealed_index
from wald.retention.history import History
from wald.segments.view import State
from wald_reclaim.apply import Shrinker, ShrunkSegment
from wald_reclaim.policy import Floors, Limits

BYTES = random.Random(0).randbytes(1 << 20).replace(b"\n", b"-")


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Built]:
    """Two sealed segments of ten batches each and an active one; the second batch of each is of the route stuck."""
    made = Built(tmp_path / "log")
    fill(made, 2)
    made.log.set_cursor("web", made.last)
    yield made
    made.crash()


def fill(built: Built, segments: int) -> None:
    for number in range(segments):
        for i in range(10):
            begin = 6000 * (10 * number + i)
            built.lines("stuck" if i == 1 else "web", [BYTES[begin : begin + 6000]])
        built.cut()
    built.lines("web", [b"newest"])
    built.seal()


def unread(built: Built) -> list[bytes]:
    return [record.value for batch in built.log.batches("stuck", "cursor") for record in batch.records()]


def shrunk_lines(built: Built) -> list[dict[str, Any]]:
    return [line for line in ledger(built.root.path) if line["event"] == "shrunk"]


def illegal(built: Built) -> list[str]:
    """Return the deletions and shrinks that the ledger does not prove allowed."""
    history = History(built.root)
    rulings = [
        audit_shrink(line, history.line_for_digest(line["base"], line["was_sha256"])) for line in history.all_shrinks()
    ]
    rulings += [
        audit_deletion(line, history.line_for_digest(line["base"], line.get("sha256"))) for line in history.deletions()
    ]
    return [each for ruling in rulings for each in ruling.errors]


def assert_one_form(built: Built, records: list[bytes]) -> None:
    """Check that the shrunk form is alone, whole and allowed."""
    assert (unread(built), errors(built.root.path), illegal(built)) == (records, [], [])
    assert not [each.name for each in built.root.segments.iterdir() if each.name.endswith((WHOLE_SUFFIX, ".tmp"))]
    assert sizes(built)[0] < 8000


def sizes(built: Built) -> list[int]:
    return [path.stat().st_size for path in sorted(built.root.segments.glob("*.wal.zst"))]


def test_a_stuck_route_costs_its_own_bytes_until_it_is_read(built: Built) -> None:
    """Shrunk, audited, with a cursor that is set back and learns what was dropped, and deleted."""
    before, records = sizes(built), unread(built)
    reclaim(built, shrink_pinned=True)

    assert all(after < old // 8 for old, after in zip(before, sizes(built), strict=True))
    assert unread(built) == records
    assert errors(built.root.path) == illegal(built) == []
    (line, _) = shrunk_lines(built)
    assert (line["base"], line["last"], line["was_bytes"], line["bytes"]) == (1, 10, before[0], sizes(built)[0])
    assert line["dropped"] == [{"route": "web", "count": 9, "first": 1, "last": 10, "cursors": {"processed": 21}}]
    assert line["routes"] == [["stuck", 1, 2, 2, 6001]]
    assert line["runs"] == {"web": [0, 1, 1, 8]}

    sealed = History(built.root).line_for_digest(1, line["was_sha256"])

    behind = line | {"dropped": [line["dropped"][0] | {"cursors": {"processed": 9}}]}
    assert audit_shrink(line, sealed).errors == ()
    assert "before it was read by processed at 9" in audit_shrink(behind, sealed).errors[0]
    assert "of route web, the line lists nothing" in audit_shrink(line | {"dropped": []}, sealed).errors[0]

    cursor = built.log.set_cursor("web", 3, rewind=True)

    assert "records 4 to 20 of web are deleted" in cursor.message
    assert built.log.set_cursor("stuck", 0, rewind=True).message == ""
    where = built.log.where(4)
    assert where.state is State.RECLAIMED
    assert "web/processed at 21" in where.message

    built.log.set_cursor("web", built.last)
    built.log.set_cursor("stuck", 12)
    reclaim(built, shrink_pinned=True)

    assert sizes(built) == []
    assert errors(built.root.path) == illegal(built) == []
    missing: list[Any] = []
    list(built.log.batches(None, 1, on_missing=missing.append))
    assert (missing[0].first, missing[0].last, missing[0].records) == (1, 20, 20)
    assert missing[0].routes == {"web", "stuck"}
    assert built.log.where(1).state is State.RECLAIMED


@pytest.mark.parametrize(
    ("limits", "web", "shrink_pinned"),
    [
        pytest.param(Limits(), 21, False, id="not asked for"),
        pytest.param(Limits(keep_bytes=1 << 30), 21, True, id="newest bytes"),
        pytest.param(Limits(min_age_ns=10**18), 21, True, id="young"),
        pytest.param(Limits(require_archived=True), 21, True, id="not archived"),
        pytest.param(Limits(), 4, True, id="needed for the greater part"),
    ],
)
def test_a_segment_stays_whole(built: Built, limits: Limits, web: int, shrink_pinned: bool) -> None:
    before = sizes(built)
    built.log.set_cursor("web", web, rewind=True)
    reclaim(built, limits, shrink_pinned=shrink_pinned)
    assert sizes(built) == before


def test_a_damaged_segment_is_not_touched(built: Built) -> None:
    path = built.path(1, Kind.SEALED)
    flip_bit(path, 4000)
    data = path.read_bytes()
    reclaim(built, shrink_pinned=True)

    assert path.read_bytes() == data
    assert [line["base"] for line in shrunk_lines(built)] == [11]


def test_a_disk_that_does_not_hold_what_it_was_given_keeps_the_old_form(built: Built) -> None:
    """The frames of the shrunk file are read back before it replaces the old one."""

    class LyingDisk(Disk):
        def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
            data = bytearray(b"".join(buffers))
            if offset == 0 and os.readlink(f"/proc/self/fd/{descriptor}").endswith(SHRUNK_SUFFIX):
                data[len(data) // 2] ^= 1
            return super().write(descriptor, [data], offset)

    before = [path.read_bytes() for path in sorted(built.root.segments.glob("*.wal.zst*"))]
    reclaim(built, disk=LyingDisk(), shrink_pinned=True)

    assert [path.read_bytes() for path in sorted(built.root.segments.glob("*.wal.zst*"))] == before
    assert (shrunk_lines(built), errors(built.root.path)) == ([], [])


def test_a_reader_that_follows_loses_nothing(built: Built) -> None:
    batches = built.log.batches("web", 1, follow=True)
    first = [next(batches).first_sequence for _ in range(3)]
    reclaim(built, shrink_pinned=True)

    rest = [next(batches).first_sequence for _ in range(6)]
    assert first + rest == [1, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["link", "rename", "unlink", "fsync", "fdatasync", "write", "pwritev2", "fallocate"])
def test_a_process_that_is_killed_in_any_system_call_leaves_one_whole_form(tmp_path: Path, call: str) -> None:
    """SIGKILL in the first, the second, … such call, until there are no more; then an undisturbed pass."""
    origin = Built(tmp_path / "origin")
    fill(origin, 1)
    origin.log.set_cursor("web", origin.last)
    records = unread(origin)
    origin.crash()

    for number in itertools.count(1):
        path = shutil.copytree(origin.root.path, tmp_path / f"log{number}")
        options = ["-f", "-qq", "-o", str(tmp_path / "trace"), f"-etrace={call}"]
        line = sidecar("reclaim", "--root", path, "--shrink-pinned")
        killed = run([strace(), *options, f"-einject={call}:signal=KILL:when={number}", *line]).returncode
        built = Built(path)
        assert (unread(built), errors(built.root.path)) == (records, [])
        reclaim(built, shrink_pinned=True)
        assert_one_form(built, records)
        built.crash()
        if not killed:
            break
    assert number > 1


@pytest.mark.parametrize("again", [False, True])
def test_after_death_at_any_step_a_later_pass_converges(tmp_path: Path, *, again: bool) -> None:
    origin = Built(tmp_path / "origin")
    fill(origin, 1)
    origin.log.set_cursor("web", origin.last)
    if again:
        origin.lines("third", [b"x"])
        origin.lines("web", [b"x"])
        origin.log.set_cursor("web", 5, rewind=True)
        reclaim(origin, shrink_pinned=True)
        origin.log.set_cursor("web", origin.last)
    records = unread(origin)
    origin.crash()
    logs, ends = [], set()

    def die(number: int, disk: Disk) -> None:
        logs.append(Built(shutil.copytree(tmp_path / "origin", tmp_path / f"log{number}")))
        reclaim(logs[-1], disk=disk, shrink_pinned=True)

    for _ in after_each_death(die, least=10):
        built = logs[-1]
        assert (unread(built), errors(built.root.path)) == (records, [])
        reclaim(built, shrink_pinned=True)
        assert_one_form(built, records)
        ends.add(sizes(built)[0])
        built.crash()
    assert len(ends) == 1


@pytest.mark.slow
def test_hundreds_of_segments_come_down_to_the_bytes_of_a_stuck_route(tmp_path: Path) -> None:
    """Each is pinned by one record."""
    built = Built(tmp_path / "log")
    for number in range(300):
        begin = 1000 * (number % 1000)
        built.lines("web", [BYTES[begin : begin + 40_000]])
        built.lines("stuck", [b"%d" % number])
        built.cut()
        built.seal()
    built.lines("web", [b"newest"])
    built.log.set_cursor("web", built.last)
    before = sum(sizes(built))

    reclaim(built, shrink_pinned=True)

    assert before > 9_000_000
    assert sum(sizes(built)) < 300 * 1500
    assert unread(built) == [b"%d" % number for number in range(300)]
    assert errors(built.root.path) == illegal(built) == []
    assert {built.log.where(number).state for number in (1, 299, 599)} == {State.RECLAIMED}
    assert {built.log.where(number).state for number in (2, 300, 600)} == {State.SEALED}
    built.crash()


def test_the_command_shrinks_and_reports(built: Built) -> None:
    def run_reclaim(*options: str) -> list[str]:
        return run(sidecar("reclaim", "--root", built.root.path, *options)).stdout.decode().splitlines()

    before = sizes(built)
    assert "would shrink 00000000000000000001.wal.zst: about 54" in run_reclaim("--shrink-pinned", "--dry-run")[0]
    assert sizes(built) == before
    (shrunk, _, end) = map(json.loads, run_reclaim("--shrink-pinned", "--json"))
    assert (shrunk["event"], shrunk["segment"], shrunk["was_bytes"]) == ("shrunk", 1, before[0])
    assert shrunk["bytes"] == sizes(built)[0]
    assert (end["shrunk_segments"], end["pinned_alone"]) == (2, {"stuck": sum(sizes(built))})
    assert "shrunk" not in "".join(run_reclaim("--shrink-pinned"))
    (again,) = map(json.loads, run_reclaim("--json"))
    assert (end["kept_bytes"], end["pinned_alone"]) == (again["kept_bytes"], again["pinned_alone"])


def test_an_archive_goes_on_behind_shrinking_and_reports_what_it_cannot_have(built: Built, tmp_path: Path) -> None:
    """As behind a deletion: its cursor keeps unpacked records, and a new group starts at the oldest existing record."""
    built.log.set_cursor("stuck", 0, group="archive")
    built.log.set_cursor("web", 5, group="archive", rewind=True)
    reclaim(built, shrink_pinned=True)

    archive(built, tmp_path / "archive", route="web", group="archive")
    assert next(line["first"] for line in read_ledger(built.root.ledger / "archive.jsonl").entries) == 6


def test_a_shrink_after_a_repair_is_legal_and_hides_nothing_of_the_one_before(built: Built) -> None:
    """A repair rebuilds the index from the frames, which do not show the routes of dropped records."""
    built.log.set_cursor("web", 6, rewind=True)
    reclaim(built, shrink_pinned=True)
    path = built.path(1, Kind.SEALED)
    path.write_bytes(path.read_bytes()[:-40])
    repair(built.root.path, accept_loss=False)
    assert errors(built.root.path) == illegal(built) == []
    story = DeletionAudit(built.root)
    assert [event.ruling.errors for event in story.events() if event.ruling] == [()]

    built.log.set_cursor("stuck", 12)
    shrink(built, 1, web=8, stuck=2)
    assert "records 1 to 8 of web are deleted" in built.log.set_cursor("web", 0, rewind=True).message
    missing: list[Any] = []
    list(built.log.batches("web", 1, on_missing=missing.append))
    assert missing
    assert missing[0].first == 1


def test_a_shrink_without_space_for_the_new_file_exits_with_7_and_succeeds_later(tmp_path: Path) -> None:
    with full_disk.small_file_system(tmp_path / "disk", 4 << 20) as disk:
        built = Built(disk / "log")
        fill(built, 2)
        built.log.set_cursor("web", built.last)
        before = sizes(built)[0]
        full_disk.fill(disk / "filler")
        line = sidecar("reclaim", "--root", built.root.path, "--shrink-pinned")
        refused = run(line)

        assert refused.returncode == DiskFailure.exit_code
        assert b"No space left on device; nothing is lost, and the next pass continues" in refused.stderr
        assert b"hint: df -h" in refused.stderr

        (disk / "filler").unlink()
        assert run(line).returncode == 0
        assert sizes(built)[0] < before / 2


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
    """A retired route needs no bundle."""
    for cursor in [0, 1, 3, 5, 9, 10]:
        floored.log.set_cursor("web", cursor, rewind=True)
        claims, held = read_cursor_snapshot(floored.root, log_id=floored.log_id), index(floored)
        everything = left(floored, Floors.of(held, claims, None), tmp_path) | {6, 7}
        for through in range(11):
            floors = Floors.of(held, claims, bundled(floored, through))
            goes = through >= min(cursor, 9)
            assert left(floored, floors, tmp_path) == (everything if goes else set(range(1, 10))), through

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
    shutil.copyfile(floored.path(1, Kind.SEALED), whole(floored))
    floored.reclaim(1)
    reclaim(floored)
    assert not whole(floored).exists()
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


def whole(built: Built) -> Path:
    path = built.path(1, Kind.SEALED)
    return path.with_name(path.name + WHOLE_SUFFIX)


def values(interrupted: Built, route: str, *, unread: bool = False) -> list[bytes]:
    batches = interrupted.log.batches(route, "cursor" if unread else 1)
    return [record.value for batch in batches for record in batch.records()]


@pytest.mark.parametrize("rewound", [False, True])
@pytest.mark.parametrize("in_index", [False, True])
def test_repair_puts_the_whole_form_back(interrupted: Built, *, in_index: bool, rewound: bool) -> None:
    path = interrupted.path(1, Kind.SEALED)
    index = path.read_bytes().rindex(b"\x57\x2a\x4d\x18") + 30
    flip_bit(path, index if in_index else 3000)
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
    assert errors(interrupted.root.path) == []


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
    assert errors(interrupted.root.path) == []


def test_a_form_may_not_be_deleted_by_hand_and_reclaim_does_not_trust_one_that_was_damaged_meanwhile(
    interrupted: Built,
) -> None:
    done = wald("inspect", whole(interrupted))
    assert b"delete it?  no" in done.stdout.replace(b"    ", b"  "), done.stdout
    assert (
        f"{whole(interrupted).name}: left by an interrupted shrinking"
        in wald("verify", "--root", interrupted.root.path).stdout.decode()
    )

    flip_bit(interrupted.path(1, Kind.SEALED), 3000)
    reclaim(interrupted, shrink_pinned=True)

    assert not whole(interrupted).exists()
    assert len(values(interrupted, "stuck")) == 2
    assert errors(interrupted.root.path) == []


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
            cursors = {each["route"]: each["cursors"]["processed"] for each in line["dropped"]}
            assert found.message.endswith(f"cursors: {route}/processed at {cursors[route]}")
    assert (illegal(built), errors(built.root.path)) == ([], [])


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
