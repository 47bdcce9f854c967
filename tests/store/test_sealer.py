"""Sealing and shrinking: whatever step a crash hits, one whole form is there; kept batches keep bytes and positions."""

import hashlib
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from contents import errors
from damage import flip_bit
from faults import DyingDisk, FailingDisk, TracingDisk, until_it_survives
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import START_NS, Built
from repairing import repair
from sample_segments import LOG_ID, TIME_NS, batch, segment, segment_header
from shrinking import behind, shrink, shrink_file

import wald
from wald.checking.dump import dump
from wald.checking.verifier import verify
from wald.errors import Damaged, NotFound, UnsupportedFormat
from wald.files.disk import Disk
from wald.files.identity import create_root
from wald.files.layout import Root
from wald.files.ledger_read import read_ledger
from wald.files.ledger_write import Ledger
from wald.files.listing import Segment
from wald.files.uptime import Moment
from wald.format.batch import Buffer
from wald.format.names import Kind
from wald.format.segment import SegmentHeader
from wald.repairing.apply import planned_repair
from wald.repairing.plan import Plan
from wald.retention.missing import Missing
from wald.segments import shrinking
from wald.segments.index_builder import SparseIndexWriter
from wald.segments.sealed_file import CompressedSegment, SealedFile, compress_segment
from wald.segments.seek import sequence_at, sequence_since
from wald.segments.shrinking import check_shrunk, shrink_segment
from wald.segments.view import State
from wald.writing import sealing
from wald.writing.sealing import remove_temporaries, seal, segments_to_seal

LINE = b"2024-05-01T12:00:00Z web-3 GET /index.html 200\n"
NOW_NS = TIME_NS + 10**9


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return create_root(tmp_path / "log", Disk(), now="2024-01-01T00:00:00Z")


def put(root: Root, data: bytes, base: int = 1) -> Segment:
    """A cut raw segment with its sparse index."""
    path = root.segment(base, Kind.RAW)
    path.write_bytes(data)
    SparseIndexWriter(root.segment(base, Kind.INDEX), SegmentHeader(LOG_ID, base, 3, TIME_NS, 7)).close()
    return Segment(base, Kind.RAW, path)


def some_segment() -> bytes:
    return segment([LINE * 9, b"\0\xff\r\n", LINE * 40])[0]


def damaged_segment() -> bytes:
    raw, offsets = segment([LINE * 9, LINE * 5, LINE * 40])
    data = bytearray(raw)
    data[offsets[2] + 80] ^= 1
    return bytes(data)


def seal_with(root: Root, found: Segment, disk: Disk) -> CompressedSegment:
    ledger = Ledger(root.ledger / "segments.jsonl", disk)
    try:
        return seal(root, found, disk, ledger, now=lambda: NOW_NS, moment=lambda: Moment("a boot", 7))
    finally:
        ledger.close()


def seal_all(root: Root) -> list[CompressedSegment]:
    """Seal all pending segments, as a start of the daemon does."""
    remove_temporaries(root, Disk())
    return [seal_with(root, found, Disk()) for found in segments_to_seal(root, 1 << 40)]


def reported(root: Root) -> list[dict[str, Any]]:
    """The ledger's entries; the chain is intact."""
    decoded = read_ledger(root.ledger / "segments.jsonl")
    assert decoded.broken_lines == []
    return decoded.entries


def names(root: Root) -> list[str]:
    return sorted(entry.name for entry in os.scandir(root.segments))


def raw_bytes(path: Path) -> bytes:
    """Return the raw bytes of a sealed file, after a check."""
    with SealedFile(path) as sealed:
        data = b"".join(sealed.frame(number) for number in range(len(sealed.index.frames)))
        assert hashlib.sha256(data).digest() == sealed.index.sha256
    return data


def test_a_cut_segment_becomes_a_sealed_one_and_the_ledger_tells_of_both(root: Root) -> None:
    """What an earlier attempt left is in nobody's way."""
    raw = some_segment()
    found = put(root, raw)
    os.utime(found.path, ns=(TIME_NS + 5, TIME_NS + 5))
    (root.segments / "00000000000000000001.wal.zst.tmp").write_bytes(b"x" * 10_000)
    sealed = seal_with(root, found, Disk())
    assert remove_temporaries(root, Disk()) == ["00000000000000000001.wal.zst.tmp"]
    path = root.segment(1, Kind.SEALED)
    assert names(root) == [path.name]
    assert raw_bytes(path) == raw
    assert subprocess.run(["zstd", "-dcq", path], check=True, capture_output=True).stdout == raw
    index = sealed.index
    assert (index.base_sequence, index.next_sequence, index.raw_bytes) == (1, 51, len(raw))
    assert (sealed.stored_bytes, sealed.gaps) == (path.stat().st_size, [])
    cut, entry = reported(root)
    assert cut == {"event": "cut", "base": 1, "next": 51, "bytes": len(raw), "at": TIME_NS + 5}
    assert entry == {
        "event": "sealed",
        "base": 1,
        "last": 50,
        "raw_bytes": len(raw),
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(raw).hexdigest(),
        "routes": [["web", 50, 1, 50, len(LINE) * 49 + 4]],
        "epoch": 3,
        "at": NOW_NS,
        "earliest": TIME_NS + 1,
        "latest": TIME_NS + 11,
        "boot": "a boot",
        "boottime": 7,
    }


@pytest.mark.parametrize(("content", "part"), [(some_segment, 0.0), (damaged_segment, 0.5)])
def test_a_crash_at_any_step_loses_nothing_and_doubles_nothing(
    tmp_path: Path, content: Callable[[], bytes], part: float
) -> None:
    raw = content()
    events = ["cut", "damaged", "sealed"] if content is damaged_segment else ["cut", "sealed"]
    for number, disk in enumerate(until_it_survives(lambda last: DyingDisk(last, part=part))):
        root = create_root(tmp_path / str(number), Disk(), now="2024-01-01T00:00:00Z")
        found = put(root, raw)
        path = root.segment(1, Kind.SEALED)
        with disk.attempt():
            seal_with(root, found, disk)
        assert found.path.exists() or raw_bytes(path) == raw
        if found.path.exists():
            assert found.path.read_bytes() == raw
        seal_all(root)
        assert names(root) == [path.name]
        assert raw_bytes(path) == raw
        assert [entry["event"] for entry in reported(root)] == events
        assert seal_all(root) == []
    assert number > 12


def test_a_failure_at_any_step_is_made_good_by_trying_again(tmp_path: Path) -> None:
    """Within one run: without a restart, with the same ledger, and without room for leftovers."""
    raw = damaged_segment()
    for number, disk in enumerate(until_it_survives(FailingDisk)):
        root = create_root(tmp_path / str(number), Disk(), now="2024-01-01T00:00:00Z")
        found = put(root, raw)
        opened: list[Ledger] = []
        with disk.attempt():
            opened.append(Ledger(root.ledger / "segments.jsonl", disk))
            seal(root, found, disk, opened[0], now=lambda: NOW_NS)
        ledger = opened[0] if opened else Ledger(root.ledger / "segments.jsonl", disk)
        if not disk.survived:
            assert not any(name.endswith(".tmp") for name in names(root))
            assert found.path.exists()
            seal(root, found, disk, ledger, now=lambda: NOW_NS)
        ledger.close()
        assert names(root) == [root.segment(1, Kind.SEALED).name]
        assert raw_bytes(root.segment(1, Kind.SEALED)) == raw
        assert [entry["event"] for entry in reported(root)] == ["cut", "damaged", "sealed"]
    assert number > 12


def test_each_step_waits_for_the_one_it_depends_on(root: Root) -> None:
    """Synced before it is named, named durably before it is reported, reported before the raw file goes."""
    found = put(root, some_segment())
    disk = TracingDisk()
    seal_with(root, found, disk)
    name = "00000000000000000001.wal"
    order = [
        ("sync", f"{name}.zst.tmp"),
        ("rename", f"{name}.zst"),
        ("sync_directory", "segments"),
        ("write", "segments.jsonl"),
        ("sync", "segments.jsonl"),
        ("unlink", f"{name}.idx"),
        ("unlink", name),
    ]
    assert [disk.steps.index(step) for step in order] == sorted(disk.steps.index(step) for step in order)
    assert disk.steps[-1] == ("unlink", name)
    last_write = max(at for at, step in enumerate(disk.steps) if step == ("write", f"{name}.zst.tmp"))
    assert last_write < disk.steps.index(order[0])


def test_a_disk_that_does_not_hold_what_it_was_given_keeps_the_raw_file(root: Root) -> None:
    """Every byte of the sealed file is read back before the raw one may go."""

    class LyingDisk(Disk):
        def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
            data = bytearray(b"".join(buffers))
            data[len(data) // 2] ^= 1
            return super().write(descriptor, [data], offset)

    raw = some_segment()
    found = put(root, raw)
    ledger = Ledger(root.ledger / "segments.jsonl", Disk())
    with pytest.raises(Damaged, match=r"\.wal\.zst\.\w+\.tmp: offset \d+: "):
        seal(root, found, LyingDisk(), ledger, now=lambda: NOW_NS)
    ledger.close()
    assert found.path.read_bytes() == raw
    assert names(root) == [found.path.name, f"{found.path.name}.idx"]
    assert reported(root) == []


def test_damage_is_told_once_with_its_place_and_reason(root: Root) -> None:
    raw = damaged_segment()
    sealed = seal_with(root, put(root, raw), Disk())
    (entry,) = [entry for entry in reported(root) if entry["event"] == "damaged"]
    (gap,) = sealed.gaps
    assert entry == {
        "event": "damaged",
        "base": 1,
        "position": gap.offset,
        "length": gap.length,
        "reason": gap.reason,
        "at": NOW_NS,
    }
    assert gap.reason
    with SealedFile(root.segment(1, Kind.SEALED)) as file:
        assert file.index.damage == [(gap.offset, gap.length)]


def test_a_sealed_file_that_is_not_whole_is_made_again_from_the_raw_one(root: Root) -> None:
    """A crash may lose the contents behind a name."""
    raw = some_segment()
    path = root.segment(1, Kind.SEALED)
    seal_with(root, put(root, raw), Disk())
    path.write_bytes(path.read_bytes()[:-100])
    put(root, raw)
    assert [sealed.index.base_sequence for sealed in seal_all(root)] == [1]
    assert names(root) == [path.name]
    assert raw_bytes(path) == raw
    assert [entry["event"] for entry in reported(root)] == ["cut", "sealed"]


def test_two_whole_forms_that_differ_are_both_kept(root: Root) -> None:
    raw, other = some_segment(), segment([LINE])[0]
    path = root.segment(1, Kind.SEALED)
    seal_with(root, put(root, other), Disk())
    found = put(root, raw)
    with pytest.raises(Damaged, match=hashlib.sha256(raw).hexdigest()):
        seal_with(root, found, Disk())
    assert found.path.read_bytes() == raw
    assert raw_bytes(path) == other
    assert not any(name.endswith(".tmp") for name in names(root))


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", Damaged, "too few"),
        (b"x" * 500, Damaged, "magic"),
        (segment([LINE], base=9)[0], Damaged, "segment 9"),
        (segment_header(version=3) + batch(), UnsupportedFormat, "version 3"),
    ],
    ids=["empty", "garbage", "another segment's", "a newer wald's"],
)
def test_a_raw_file_that_cannot_be_read_is_left_alone(
    root: Root, data: bytes, error: type[Exception], words: str
) -> None:
    found = put(root, data)
    with pytest.raises(error, match=rf"{found.path}: offset 0: .*{words}"):
        seal_with(root, found, Disk())
    assert found.path.read_bytes() == data
    assert names(root) == [found.path.name, f"{found.path.name}.idx"]
    assert reported(root) == []


def test_pending_are_the_raw_segments_below_the_active_one(root: Root) -> None:
    """Those with a sealed twin too: a crash has left it to be finished."""
    for base in (300, 1, 20, 4000):
        put(root, b"", base)
    root.segment(20, Kind.SEALED).write_bytes(b"")
    root.segment(5, Kind.SEALED).write_bytes(b"")
    (root.segments / "next.tmp").write_bytes(b"")
    assert [found.base_sequence for found in segments_to_seal(root, 300)] == [1, 20]
    assert {found.kind for found in segments_to_seal(root, 5000)} == {Kind.RAW}


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

    assert errors(built.root.path) == []
    found = "".join(found.message for found in verify(built.root))
    assert "13 records; 27 records were dropped" in found
    before = built.path(1, Kind.SEALED).read_bytes()
    (built.root.ledger / "reclaim.jsonl").unlink()
    assert built.log.where(4).state is State.RECLAIMED
    assert "by shrinking, and no ledger says when" in built.log.where(4).message
    assert errors(built.root.path) == []
    assert "the ledger has no line about its shrinking" in [found.message for found in verify(built.root)]
    assert not repair(built.root.path).actions
    assert built.path(1, Kind.SEALED).read_bytes() == before
    assert missing(built, "web") == [of_route]


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


def test_a_shrunk_segment_of_which_only_dropped_records_are_whole_is_repaired_once(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    noise = Random(0).randbytes(300_000).replace(b"\n", b"-")
    built.lines("web", [noise])
    built.lines("stuck", [noise], cut=True)
    built.lines("web", [b"newest"])
    built.seal()
    shrink(built, 1, web=3)
    path = built.path(1, Kind.SEALED)
    data = bytearray(path.read_bytes())
    data[250_000] ^= 0xFF
    path.write_bytes(bytes(data))

    assert [act.lost_spans for act in repair(built.root.path).actions] == [((2, 2),)]
    assert not repair(built.root.path).actions
    assert errors(built.root.path) == []
    built.crash()


def test_what_does_not_read_back_is_refused(built: Built, tmp_path: Path) -> None:
    path, made = built.path(1, Kind.SEALED), tmp_path / "made"
    shrinking = shrink_file(path, made, behind(web=40))
    with SealedFile(path) as old, SealedFile(made) as new:
        with pytest.raises(Damaged, match="is missing or differs") as refused:
            check_shrunk(old, new, shrinking, behind(web=30))
        assert refused.value.case == "sealed-segment-damaged"
    flip_bit(path, 200)
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
    tmp_path_factory: pytest.TempPathFactory, appends: list[tuple[str, int, bool]], moves: list[dict[str, int]]
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
        for each in built.view.segments[:-1]:
            shrink(built, each.base_sequence, **floors)
        for route, records in before.items():
            assert unread(built, route, floors[route]) == [each for each in records if each[0] > floors[route]]
        assert errors(built.root.path) == []
    built.crash()


def unread(built: Built, route: str, at: int) -> list[tuple[int, bytes]]:
    """Return the unread records of a group at ``at``; none may be missing."""
    batches = built.log.batches(route, at + 1, on_missing="error") if at < built.last else iter(())
    return [(record.sequence, record.value) for batch in batches for record in batch.records()]


BATCHES, OF_BATCH = 60, 5


@pytest.fixture
def shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """One sealed segment of several frames, of which the older half of one route is left, and all of another."""
    monkeypatch.setattr(shrinking, "FRAME_BYTES", 30_000)
    built, rng = Built(tmp_path / "log"), random.Random(3)
    for number in range(BATCHES):
        built.lines("stuck" if number % 3 else "web", [rng.randbytes(200).hex().encode()] * OF_BATCH)
    built.cut(seal=True)
    shrink(built, 1, stuck=150, web=250)
    built.crash()
    with SealedFile(built.path(1, Kind.SEALED)) as file:
        assert len(file.index.frames) > 4
    return built


def left_by_ledger(built: Built) -> dict[str, int]:
    """Return the records of each route that a shrink left, by its ledger line: the oracle."""
    (line,) = (each for each in read_ledger(built.root.ledger / "reclaim.jsonl").entries if each["event"] == "shrunk")
    return {route: count for route, count, *_ in line["routes"]}


def readable(built: Built) -> dict[str, int]:
    counts = dict.fromkeys(("stuck", "web"), 0)
    for record in wald.open(built.root.path).records(start=1, on_damage=lambda _: None, on_missing="skip"):
        counts[record.route] += 1
    return counts


def frame(built: Built, number: int) -> int:
    with SealedFile(built.path(1, Kind.SEALED)) as file:
        return file.index.frames[number].offset


def change(built: Built, damage: Callable[[bytes], bytes]) -> None:
    path = built.path(1, Kind.SEALED)
    path.write_bytes(damage(path.read_bytes()))


def flip(built: Built, *numbers: int, index: bool = False) -> None:
    """Damage frames, and the index."""
    places = [frame(built, number) + 40 for number in numbers]
    path = built.path(1, Kind.SEALED)
    for place in [*places, path.stat().st_size - 30][: None if index else -1]:
        flip_bit(path, place)


def cut(built: Built, number: int) -> None:
    at = frame(built, number) + 100
    change(built, lambda data: data[:at])


DAMAGE: dict[str, Callable[[Built], object]] = {
    "a frame": lambda built: flip(built, 1),
    "the last frame": lambda built: flip(built, -1),
    "two frames": lambda built: flip(built, 1, 3),
    "the end of the file": lambda built: cut(built, -2),
    "nearly all of the file": lambda built: cut(built, 0),
    "a frame and the index": lambda built: flip(built, 2, index=True),
    "the content of the file": lambda built: change(built, lambda data: bytes(len(data))),
    "the file": lambda built: built.path(1, Kind.SEALED).unlink(),
}
UNPROVEN = ("nearly all of the file", "the content of the file", "the file")  # nothing is left that shrink has made


def given_up(plan: Plan) -> int:
    return sum(act.lost_records for act in plan.actions)


@pytest.mark.parametrize("what", DAMAGE)
def test_what_was_given_up_and_what_is_there_is_what_shrinking_had_left(shrunk: Built, what: str) -> None:
    left = left_by_ledger(shrunk)
    assert 0 < left["web"] < left["stuck"] < BATCHES * OF_BATCH
    DAMAGE[what](shrunk)
    with planned_repair(shrunk.root) as (plan, _):
        expected = given_up(plan)
    assert given_up(repair(shrunk.root.path)) == expected

    assert errors(shrunk.root.path) == []
    found = readable(shrunk)
    held = {"stuck": 200, "web": 100} if what in UNPROVEN else left
    assert expected + sum(found.values()) == sum(held.values())
    lines = [each for each in read_ledger(shrunk.root.ledger / "segments.jsonl").entries if each["event"] == "lost"]
    assert sum(line.get("records", line["last"] - line["base"] + 1) for line in lines) == expected
    if what in ("two frames", "the last frame", "the file"):  # whose they were is known by index or ledger
        assert all("routes" in line for line in lines)
    if all("routes" in line for line in lines):
        for route, count in held.items():
            lost = sum(held[1] for line in lines for held in line["routes"] if held[0] == route)
            assert lost + found[route] == count
    pattern = r"(?:(\d+) of )?records (\d+) to (\d+) are lost: "
    losses = [match for each in verify(Root(shrunk.root.path)) if (match := re.match(pattern, each.message))]
    assert sum(int(match[1] or int(match[3]) - int(match[2]) + 1) for match in losses) == expected
    assert repair(shrunk.root.path).actions == ()


def taken_back(built: Built, path: Path) -> None:
    """Restore the old file's name, as after a cursor moved back during a shrink; its ledger line stays."""
    whole = path.read_bytes()
    shrink(built, 1, stuck=295, web=300)
    path.write_bytes(whole)


@pytest.fixture
def unshrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """One segment of several frames, all 300 records in it, and a line about a shrink that was taken back."""
    monkeypatch.setattr(sealing, "compress_segment", partial(compress_segment, frame_bytes=30_000))
    built, rng = Built(tmp_path / "log"), random.Random(3)
    for _ in range(BATCHES):
        built.lines("stuck", [rng.randbytes(400).hex().encode() for _ in range(OF_BATCH)])
    built.cut(seal=True)
    taken_back(built, built.path(1, Kind.SEALED))
    built.crash()
    return built


@pytest.mark.parametrize(
    "damage",
    [
        lambda built: flip(built, -1, index=True),
        lambda built: flip(built, 1, 3, index=True),
        lambda built: cut(built, 0),
        lambda built: built.path(1, Kind.SEALED).unlink(),
    ],
    ids=["newest frame and index", "two frames and index", "nearly all", "file"],
)
def test_a_shrink_that_was_taken_back_dropped_nothing(unshrunk: Built, damage: Callable[[Built], object]) -> None:
    damage(unshrunk)
    plan = repair(unshrunk.root.path, accept_loss=False)
    assert plan.loses_data
    before = given_up(plan)
    repair(unshrunk.root.path)
    assert before + readable(unshrunk)["stuck"] == BATCHES * OF_BATCH
    lines = [each for each in read_ledger(unshrunk.root.ledger / "segments.jsonl").entries if each["event"] == "lost"]
    assert sum(line.get("records", line["last"] - line["base"] + 1) for line in lines) == before
    for line in lines:
        assert "routes" not in line or sum(held[1] for held in line["routes"]) == line["last"] - line["base"] + 1


def test_that_nothing_is_lost_is_not_taken_from_the_ledger(shrunk: Built) -> None:
    """Only frames of dropped batches are damaged, but without the index only the counts of the ledger say so."""
    shrink(shrunk, 1, stuck=250, web=300)
    with SealedFile(shrunk.path(1, Kind.SEALED)) as file:
        number = next(number for number, each in enumerate(file.index.frames) if not each.routes and number)
    flip(shrunk, number, index=True)
    assert repair(shrunk.root.path, accept_loss=False).loses_data
