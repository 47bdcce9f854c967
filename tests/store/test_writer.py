"""The active segment: durable or not there, whatever step of the disk is the last one or fails."""

from __future__ import annotations

import copy
import errno
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from contents import assert_sound, records, values
from faults import Died, DyingDisk, FailingDisk, SteppingDisk, TracingDisk, until_it_survives
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import START_NS, Built

from wald.format import control
from wald.format.batch import HEADER, TRAILER, Flag, checksum_body, padding
from wald.format.names import Kind
from wald.format.segment import HEADER as SEGMENT_HEADER
from wald.store.directory import Root, create_root, list_segments
from wald.store.disk import Disk
from wald.store.indexes import read_index
from wald.store.raw import RawFile, Scanned
from wald.store.writer import Draft, Placement, Route, Writer

ROUTE = Route.named("web")
NEVER = 1 << 30  # steps a disk survives


def draft(payload: bytes, *, producer: tuple[int, int] = (0, 0), route: Route = ROUTE) -> Draft:
    """A batch of lines."""
    count = payload.count(b"\n")
    return Draft(route, [payload], len(payload), count, producer_id=producer[0], producer_sequence=producer[1])


def in_memory(writer: Writer) -> tuple[control.State, int, int]:
    """What must not change before the disk agreed."""
    return copy.deepcopy(writer.state), writer.base_sequence, writer.position


def batches(path: Path, *, limit: int | None = None) -> list[Scanned]:
    """The batches of a raw segment, which holds nothing else."""
    with path.open("rb") as file:
        *found, _tail = RawFile(file.fileno(), limit=limit).scan()
    assert all(isinstance(batch, Scanned) for batch in found)
    return [batch for batch in found if isinstance(batch, Scanned)]


def raw(built: Built) -> bytes:
    """The active segment up to its durable end."""
    return active(built).read_bytes()[: built.writer.position]


def active(built: Built) -> Path:
    return built.path(built.writer.base_sequence, Kind.RAW)


def with_some_records(path: Path, disk: Disk) -> Built:
    """Two segments; an open record, and a producer that will retry."""
    built = Built(path, disk=disk)
    built.lines("web", [b"1", b"2"])
    built.cut()
    built.piece("long", b"begin ", begins=True, ends=False)
    commit(built, [draft(b"4\n", producer=(7, 1))])
    return built


def commit(built: Built, drafts: list[Draft]) -> Placement:
    placement = built.writer.place(drafts, now_ns=built.now_ns)
    built.writer.commit(placement)
    built.publish()
    return placement


MORE = [b"5\n6\n", b"7\n"]


def commit_more(built: Built) -> None:
    commit(built, [draft(MORE[0], producer=(7, 2)), draft(MORE[1])])


def fail_and_replace(built: Built) -> None:
    """A commit of which everything got to the disk but the sync, and the same drafts in the next segment."""
    disk, built.writer._disk = built.writer._disk, FailingDisk(1)
    with pytest.raises(OSError, match="No space"):
        commit_more(built)
    built.writer._disk = disk
    built.writer.replace(now_ns=built.now_ns)
    commit_more(built)


def cut_with_a_spare(built: Built) -> None:
    built.writer.prepare_spare()
    built.cut()


def cut_then_commit(built: Built) -> None:
    built.cut()
    commit_more(built)


def fail_at_once_and_replace(built: Built) -> None:
    """The failing commit is the first one in its segment, so the next segment has the same name."""
    built.cut()
    fail_and_replace(built)


def piece_then_fail_and_replace(built: Built) -> None:
    """The segment has pieces of a record and no sequence of its own."""
    built.cut()
    built.piece("long", b"and on ", begins=False, ends=False)
    fail_and_replace(built)


OPERATIONS: list[Callable[[Built], None]] = [
    commit_more,
    Built.cut,
    cut_with_a_spare,
    cut_then_commit,
    fail_and_replace,
    fail_at_once_and_replace,
    piece_then_fail_and_replace,
    lambda built: built.writer.close(),
]
NAMES = [
    "commit",
    "cut",
    "cut with a spare",
    "cut then commit",
    "replace",
    "replace the first commit",
    "replace pieces",
    "close",
]


def assert_whole(built: Built) -> None:
    """End the open record, without which a sequence has nothing to show yet: then nothing is wrong and none missing."""
    if built.writer.state.open_records:
        built.piece("long", b"end\n", begins=False, ends=True)
    assert values(built.root.path, "long") in ([b"begin end"], [b"begin and on end"])
    assert_sound(built.root.path)


def check_after_a_crash(path: Path, *, published: int) -> None:
    """Everything that was published is there, nothing else that was not written, and the log goes on."""
    built = Built(path, epoch=2)
    assert built.report.errors == []
    state = built.writer.state
    found = values(path, "web")
    assert found in ([b"1", b"2", b"4"], [b"1", b"2", b"4", b"5", b"6"], [b"1", b"2", b"4", b"5", b"6", b"7"])
    assert built.last == len(found) + 1 >= published
    written = state.producers.find(7, 1)
    assert written is not None
    assert (written.first, written.last) == (4, 4)
    assert (state.producers.find(7, 2) is not None) == (b"6" in found)
    assert state.open_records == {"long": 3}
    assert built.lines("web", [b"next"]) == len(found) + 2
    built.cut()
    assert values(path, "web") == [*found, b"next"]
    assert_whole(built)
    assert not any(name.endswith(".tmp") for name in os.listdir(built.root.segments))
    built.writer.close()


@pytest.mark.parametrize("part", [0.0, 0.6, 1.0], ids=["nothing of it", "a part of it", "all of it"])
@pytest.mark.parametrize("operate", OPERATIONS, ids=NAMES)
def test_a_crash_at_any_step_keeps_what_was_committed_and_no_more(
    tmp_path: Path, operate: Callable[[Built], None], part: float
) -> None:
    for number, disk in enumerate(until_it_survives(lambda _: DyingDisk(NEVER, part=part))):
        assert isinstance(disk, DyingDisk)
        built = with_some_records(tmp_path / str(number), disk)
        disk.left = number
        try:
            operate(built)
            survived = True
        except Died:
            survived = False
        published = built.log.head()
        assert published is not None
        disk.abandon()
        check_after_a_crash(built.root.path, published=published.sequence)
        if survived:
            break
    assert number >= 2


@pytest.mark.parametrize("part", [0.0, 0.6], ids=["nothing of it", "a part of it"])
def test_a_first_start_that_crashes_at_any_step_is_made_again(tmp_path: Path, part: float) -> None:
    for number, disk in enumerate(until_it_survives(lambda last: DyingDisk(last, part=part))):
        assert isinstance(disk, DyingDisk)
        path = tmp_path / str(number)
        try:
            Built(path, disk=disk)
            survived = True
        except Died:
            survived = False
        disk.abandon()
        built = Built(path, epoch=2)
        assert built.report.errors == []
        assert built.lines("web", [b"first"]) == 1
        assert values(path) == [b"first"]
        assert_sound(path)
        built.writer.close()
        if survived:
            break
    assert number > 10


@pytest.mark.parametrize("part", [0.0, 0.6, 1.0], ids=["nothing of it", "a part of it", "all of it"])
def test_a_commit_that_fails_changes_nothing_and_its_drafts_go_to_the_next_segment(tmp_path: Path, part: float) -> None:
    """Also where the whole batch reached the disk, and only the sync said no."""
    for number, disk in enumerate(until_it_survives(lambda _: FailingDisk(NEVER, part=part, number=errno.EIO))):
        assert isinstance(disk, FailingDisk)
        built = with_some_records(tmp_path / str(number), disk)
        writer, before = built.writer, in_memory(built.writer)
        disk.left = number
        drafts = [draft(MORE[0], producer=(7, 2)), draft(MORE[1])]
        try:
            commit(built, drafts)
            survived = True
        except OSError:
            survived = False
            assert writer.failed
            assert in_memory(writer) == before
            writer.replace(now_ns=built.now_ns)
            assert writer.base_sequence == 5
            commit(built, drafts)
        disk.left = NEVER
        commit(built, [draft(b"8\n")])
        assert values(built.root.path, "web") == [b"1", b"2", b"4", b"5", b"6", b"7", b"8"]
        writer.close()
        built = Built(built.root.path, epoch=2)
        assert built.report.errors == []
        assert_whole(built)
        if survived:
            break
    assert number == 2  # one write, one sync


def test_a_replace_that_fails_at_any_step_can_be_tried_again(tmp_path: Path) -> None:
    for operate in (fail_and_replace, fail_at_once_and_replace, piece_then_fail_and_replace):
        for number, disk in enumerate(until_it_survives(lambda _: FailingDisk(NEVER))):
            assert isinstance(disk, FailingDisk)
            built = with_some_records(tmp_path / f"{operate.__name__}{number}", disk)
            if operate is not fail_and_replace:
                built.cut()
            if operate is piece_then_fail_and_replace:
                built.piece("long", b"and on ", begins=False, ends=False)
            descriptors = len(disk.descriptors)
            disk.left = 1
            with pytest.raises(OSError, match="No space"):
                commit_more(built)
            disk.left = number
            before = in_memory(built.writer)[0]
            try:
                built.writer.replace(now_ns=built.now_ns)
                survived = True
            except OSError:
                survived = False
                assert in_memory(built.writer)[0] == before
                assert built.writer.failed
                assert len(disk.descriptors) == descriptors
                built.writer.replace(now_ns=built.now_ns)
            disk.left = NEVER
            commit_more(built)
            assert len(disk.descriptors) == descriptors
            assert values(built.root.path, "web") == [b"1", b"2", b"4", b"5", b"6", b"7"]
            assert_whole(built)
            built.writer.close()
            if survived:
                break
        assert number > 7


@pytest.mark.parametrize("spare", [False, True], ids=["without a spare", "with a spare"])
@pytest.mark.parametrize("more", [0, 1, 100], ids=["one failure", "two failures", "a disk that is gone"])
def test_a_cut_that_fails_at_any_step_leaves_a_log_that_goes_on(tmp_path: Path, more: int, spare: bool) -> None:
    """In the old segment where that is untouched; else in the next."""
    for number, disk in enumerate(until_it_survives(lambda _: FailingDisk(NEVER, more=more))):
        assert isinstance(disk, FailingDisk)
        built = with_some_records(tmp_path / str(number), disk)
        writer = built.writer
        descriptors = len(disk.descriptors)
        if spare:
            writer.prepare_spare()
        before = in_memory(writer)[0]
        disk.left = number
        try:
            writer.cut(now_ns=built.now_ns)
            survived = True
        except OSError:
            survived = False
        survived = survived and disk.left >= 0
        disk.left = NEVER
        assert in_memory(writer)[0] == before
        assert len(disk.descriptors) == descriptors
        if writer.failed:
            writer.replace(now_ns=built.now_ns)
        commit_more(built)
        assert values(built.root.path, "web") == [b"1", b"2", b"4", b"5", b"6", b"7"]
        writer.close()
        built = Built(built.root.path, epoch=2)
        assert built.report.errors == []
        assert_whole(built)
        if survived:
            break
    assert number > 5


def test_a_cut_without_room_for_the_next_segment_leaves_the_active_one_usable(tmp_path: Path) -> None:
    class Full(TracingDisk):
        full = False

        def allocate(self, descriptor: int, length: int) -> bool:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().allocate(descriptor, length)

    disk = Full()
    built = with_some_records(tmp_path / "log", disk)
    before = in_memory(built.writer)
    disk.full = True
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            built.cut()
        built.writer.prepare_spare()  # says nothing: the cut has said it
        assert in_memory(built.writer) == before
        assert not built.writer.failed
    commit_more(built)
    assert built.writer.base_sequence == before[1]
    disk.full = False
    built.cut()
    assert built.writer.base_sequence == 8
    assert values(built.root.path, "web") == [b"1", b"2", b"4", b"5", b"6", b"7"]
    assert_whole(built)


def test_a_start_that_fails_at_any_step_leaves_a_whole_segment_or_none(tmp_path: Path) -> None:
    path = tmp_path / "log"
    root = create_root(path, Disk(), now="2026-11-21T10:00:00Z")
    for disk in until_it_survives(FailingDisk):
        assert isinstance(disk, FailingDisk)
        try:
            Writer(root, disk, control.State(), log_id=bytes(16), epoch=1, segment_max_bytes=4096, now_ns=START_NS)
            survived = True
        except OSError:
            survived = False
            disk.abandon()
            for segment in list_segments(root).segments:  # only its name was not synced
                assert batches(segment.path)[0].header.is_control
        if survived:
            break
    assert [segment.base_sequence for segment in list_segments(root).segments] == [1]


def test_a_segment_is_made_whole_before_it_is_named_and_named_before_it_is_used(tmp_path: Path) -> None:
    disk = TracingDisk()
    built = with_some_records(tmp_path / "log", disk)
    disk.steps.clear()
    cut_then_commit(built)
    old, new = "00000000000000000003.wal", "00000000000000000005.wal"
    assert disk.steps == [
        ("create", "next-1.tmp"),
        ("allocate", "next-1.tmp"),
        ("write", "next-1.tmp"),
        ("sync", "next-1.tmp"),
        ("truncate", old),
        ("sync", old),
        ("rename", new),
        ("sync_directory", "segments"),
        ("write", new),
        ("sync", new),
    ]


def test_what_is_in_doubt_is_gone_before_its_sequences_are_given_again(tmp_path: Path) -> None:
    disk = TracingDisk()
    built = with_some_records(tmp_path / "log", disk)
    built.writer.failed = True
    disk.steps.clear()
    built.writer.replace(now_ns=built.now_ns)
    old, new = "00000000000000000003.wal", "00000000000000000005.wal"
    assert disk.steps[:2] == [("truncate", old), ("sync", old)]
    assert ("write", old) not in disk.steps
    assert disk.steps[-2:] == [("rename", new), ("sync_directory", "segments")]


class TestPlaces:
    """Where batches go."""

    def test_the_next_batch_overshoots_only_a_segment_that_has_a_sequence(self, tmp_path: Path) -> None:
        built = Built(tmp_path / "log", segment_max_bytes=4096)
        writer = built.writer
        assert not writer.overshoots(1 << 30)
        built.lines("web", [b"1"])
        room = 4096 - writer.position
        assert not writer.overshoots(room)
        assert writer.overshoots(room + 1)

    def test_a_record_larger_than_a_segment_makes_its_segment_grow(self, tmp_path: Path) -> None:
        built = Built(tmp_path / "log", segment_max_bytes=4096)
        large = bytes(range(1, 10)) * 10_000
        built.lines("web", [large])
        assert built.writer.base_sequence == 1
        assert built.path(1, Kind.RAW).stat().st_size == built.writer.position > 90_000
        assert built.writer.overshoots(8)
        built.cut()
        built.lines("web", [b"small"])
        assert values(built.root.path) == [large, b"small"]
        assert_sound(built.root.path)

    def test_a_control_batch_larger_than_a_segment_does_not_make_every_commit_a_cut(self, tmp_path: Path) -> None:
        built = Built(tmp_path / "log", segment_max_bytes=4096)
        for producer in range(1, 200):
            built.writer.state.producers.add(producer, control.Written(1, 1, 1, 1))
        built.lines("web", [b"1"])
        built.cut()
        assert built.writer.position > 4096
        built.lines("web", [b"2"])
        assert not built.writer.overshoots(1024)
        assert built.writer.overshoots(built.writer.position)

    def test_a_segment_without_a_sequence_is_not_cut(self, tmp_path: Path) -> None:
        built = Built(tmp_path / "log")
        assert not built.writer.advanced
        with pytest.raises(AssertionError, match="successor"):
            built.cut()

    def test_placing_changes_nothing(self, tmp_path: Path) -> None:
        built = with_some_records(tmp_path / "log", TracingDisk())
        before, steps = in_memory(built.writer), len(built.disk.steps)  # type: ignore[attr-defined]
        first = built.writer.place([draft(b"a\nb\n"), draft(b"c\n")], now_ns=built.now_ns)
        assert built.writer.place([draft(b"a\nb\n"), draft(b"c\n")], now_ns=built.now_ns).end == first.end
        assert [placed.base_sequence for placed in first.batches] == [5, 7]
        assert [placed.last_sequence for placed in first.batches] == [6, 7]
        assert (in_memory(built.writer), len(built.disk.steps)) == (before, steps)  # type: ignore[attr-defined]

    def test_a_cut_segment_ends_with_its_last_batch_and_the_active_one_is_allocated(self, tmp_path: Path) -> None:
        built = Built(tmp_path / "log", segment_max_bytes=1 << 16)
        built.lines("web", [b"1"])
        end = built.writer.position
        built.cut()
        assert built.path(1, Kind.RAW).stat().st_size == end
        assert built.path(2, Kind.RAW).stat().st_size == 1 << 16
        built.writer.close()
        assert built.path(2, Kind.RAW).stat().st_size == built.writer.position

    def test_every_batch_says_which_life_wrote_it(self, tmp_path: Path) -> None:
        Built(tmp_path / "log", epoch=5).lines("web", [b"1"])
        built = Built(tmp_path / "log", epoch=(1 << 32) + 6)
        built.lines("web", [b"2"])
        found = [batch.header.epoch for base in (1, 2) for batch in batches(built.path(base, Kind.RAW))]
        assert found == [5, 5, 6, 6]


def spool(made: Draft, directory: str, payload: bytes) -> int:
    """Put ``payload`` in a file, as the daemon does with a large one; returns the descriptor."""
    descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR)
    os.write(descriptor, payload)
    made.spool, made.payload = descriptor, []
    made.body_checksum = checksum_body(made.route.prefix, [payload], padding(made.payload_bytes))
    return descriptor


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=40), st.booleans()), min_size=1, max_size=6))
def test_a_spooled_draft_becomes_the_same_bytes_as_one_in_memory(lines: list[tuple[bytes, bool]]) -> None:
    """Alone and among others, of every length modulo the alignment."""
    with tempfile.TemporaryDirectory() as directory:
        written = []
        for through_files in (False, True):
            built = Built(Path(directory) / str(through_files))
            drafts = [draft(line.replace(b"\n", b"") + b"\n") for line, _ in lines]
            for made, (_, through_a_file) in zip(drafts, lines, strict=True):
                if through_files and through_a_file:
                    spool(made, directory, bytes(made.payload[0]))
            commit(built, drafts)
            for made in drafts:
                if made.spool is not None:
                    os.close(made.spool)
            data = raw(built)
            salted = [(each.offset + 4, each.offset + 8) for each in batches(active(built))]
            salted += [(each.end - TRAILER.size, each.end) for each in batches(active(built))]
            for start, end in salted:  # the checksums, which each segment has its own of
                data = data[:start] + bytes(end - start) + data[end:]
            written.append(data[SEGMENT_HEADER.size :])
            assert values(built.root.path) == [line.replace(b"\n", b"") for line, _ in lines]
            built.writer.close()
        assert written[0] == written[1]


def test_a_spool_that_became_shorter_fails_the_commit(tmp_path: Path) -> None:
    built = with_some_records(tmp_path / "log", TracingDisk())
    made = draft(b"5" * 100 + b"\n")
    descriptor = spool(made, str(tmp_path), b"5" * 50)
    with pytest.raises(OSError, match="shorter"):
        commit(built, [made])
    assert built.writer.failed
    built.writer.replace(now_ns=built.now_ns)
    commit_more(built)
    assert values(built.root.path, "web") == [b"1", b"2", b"4", b"5", b"6", b"7"]
    assert_whole(built)
    os.close(descriptor)


ACTIONS = st.lists(
    st.one_of(
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3)), min_size=1, max_size=4),
        st.sampled_from(["cut", "fail", "seal", "restart", "crash"]),
    ),
    max_size=25,
)


@settings(max_examples=50, deadline=None)
@given(ACTIONS, st.randoms(use_true_random=False))
def test_sequences_have_no_gap_whatever_happens_between_commits(
    actions: list[str | list[tuple[str, int]]], chance: random.Random
) -> None:
    """Compared with a list, read back through :func:`wald.open`."""
    with tempfile.TemporaryDirectory() as directory:
        path, model = Path(directory) / "log", list[tuple[int, str, bytes]]()
        built = Built(path, segment_max_bytes=4096)
        for action in actions:
            built.now_ns += chance.randrange(-5, 10) * 1_000_000_000
            if action == "cut":
                if built.writer.advanced:
                    built.cut()
            elif action == "seal":
                built.seal()
            elif action == "fail":
                built.writer.failed = True
                built.writer.replace(now_ns=built.now_ns)
                built.publish()
            elif action in ("restart", "crash"):
                if action == "restart":
                    built.writer.close()
                else:
                    built.crash()
                epoch = built.writer.epoch + 1
                built = Built(path, segment_max_bytes=4096, epoch=epoch, now_ns=built.now_ns)
                assert built.report.errors == []
            elif isinstance(action, list):
                drafts = []
                for route, count in action:
                    lines = [b"%d" % chance.randrange(1000) for _ in range(count)]
                    drafts.append(draft(b"".join(line + b"\n" for line in lines), route=Route.named(route)))
                    model += [(len(model) + number, route, line) for number, line in enumerate(lines, start=1)]
                if built.writer.overshoots(sum(made.total_bytes for made in drafts)):
                    built.cut()
                commit(built, drafts)
            assert built.last == len(model)
        found = records(path)
        assert [(record.sequence, record.route, record.value) for record in found] == model
        times = [record.append_time_ns for record in found]
        assert times == sorted(times)
        built.writer.close()


def test_the_append_time_never_decreases_when_the_clock_jumps_back(tmp_path: Path) -> None:
    path = tmp_path / "log"
    built = Built(path)
    built.lines("web", [b"1"])
    latest = built.writer.state.append_time_ns
    for epoch, operate in enumerate((lambda: None, built.cut, built.writer.close), start=1):
        operate()
        if epoch == 3:
            built = Built(path, epoch=epoch, now_ns=START_NS)
        built.now_ns = START_NS - 10**18
        built.lines("web", [b"more"])
        assert built.writer.state.append_time_ns == latest
    assert {record.append_time_ns for record in records(path)} == {latest}
    controls = [batches(segment.path)[0].header.append_time_ns for segment in list_segments(built.root).segments]
    assert controls == sorted(controls)
    assert_sound(path)


class TestUnsyncedCommits:
    """``sync = "interval"`` and ``"never"``."""

    @pytest.fixture
    def disk(self) -> TracingDisk:
        return TracingDisk()

    @pytest.fixture
    def built(self, tmp_path: Path, disk: TracingDisk) -> Built:
        built = Built(tmp_path / "log", disk=disk, sync_commits=False)
        built.lines("web", [b"1"])
        disk.steps.clear()
        return built

    def test_a_commit_does_not_sync(self, built: Built, disk: TracingDisk) -> None:
        commit(built, [draft(b"2\n")])
        assert [name for name, _ in disk.steps] == ["write"]
        assert built.writer.unsynced

    def test_a_sync_makes_up_for_it(self, built: Built, disk: TracingDisk) -> None:
        built.writer.sync()
        assert [name for name, _ in disk.steps] == ["sync"]
        assert not built.writer.unsynced

    def test_a_cut_syncs_before_there_is_a_next_segment(self, built: Built, disk: TracingDisk) -> None:
        built.cut()
        name = "00000000000000000001.wal"
        assert disk.steps.index(("sync", name)) < disk.steps.index(("rename", "00000000000000000002.wal"))
        assert not built.writer.unsynced

    def test_a_sync_that_fails_finishes_the_descriptor(self, built: Built) -> None:
        built.writer._disk = FailingDisk(0)
        with pytest.raises(OSError, match="No space"):
            built.writer.sync()
        assert built.writer.failed
        assert not built.writer.unsynced
        built.writer.replace(now_ns=built.now_ns)
        commit(built, [draft(b"2\n")])
        assert values(built.root.path) == [b"1", b"2"]

    def test_with_synced_commits_nothing_is_ever_left(self, tmp_path: Path) -> None:
        built = Built(tmp_path / "synced")
        built.lines("web", [b"1"])
        assert not built.writer.unsynced


class TestSpare:
    """The file for the next cut, made beforehand."""

    def test_a_cut_takes_it_and_allocates_nothing(self, tmp_path: Path) -> None:
        disk = TracingDisk()
        built = with_some_records(tmp_path / "log", disk)
        built.writer.prepare_spare()
        built.writer.prepare_spare()
        assert disk.steps.count(("allocate", "spare-1.tmp")) == 1
        (spare,) = built.root.segments.glob("spare-*.tmp")
        number = spare.stat().st_ino
        disk.steps.clear()
        built.cut()
        assert "allocate" not in [name for name, _ in disk.steps]
        assert built.path(5, Kind.RAW).stat().st_ino == number
        assert not spare.exists()

    def test_it_is_gone_when_the_writer_is_closed(self, tmp_path: Path) -> None:
        disk = TracingDisk()
        built = with_some_records(tmp_path / "log", disk)
        built.writer.prepare_spare()
        built.writer.close()
        assert [name for name in os.listdir(built.root.segments) if name.endswith(".tmp")] == []
        assert all("ledger" in os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in disk.descriptors)

    def test_one_that_cannot_be_used_is_given_up(self, tmp_path: Path) -> None:
        """And the next attempt makes another."""
        disk = FailingDisk(NEVER)
        built = with_some_records(tmp_path / "log", disk)
        descriptors = set(disk.descriptors)
        built.writer.prepare_spare()
        disk.left = 0
        with pytest.raises(OSError, match="No space"):
            built.cut()
        assert disk.descriptors == descriptors
        built.writer.prepare_spare()
        built.cut()
        commit_more(built)
        assert_whole(built)

    @pytest.mark.parametrize("harm", ["removed", "replaced"])
    def test_one_that_lost_its_name_never_becomes_a_segment(self, tmp_path: Path, harm: str) -> None:
        """The cut makes another, and leaves nothing of it open."""
        disk = TracingDisk()
        built = with_some_records(tmp_path / "log", disk)
        descriptors = set(disk.descriptors)
        built.writer.prepare_spare()
        (spare,) = built.root.segments.glob("spare-*.tmp")
        spare.unlink()
        if harm == "replaced":
            spare.touch()
        built.cut()
        assert (len(disk.descriptors), built.writer.base_sequence) == (len(descriptors), 5)
        assert built.writer.is_named()
        commit_more(built)
        assert values(built.root.path, "web") == [b"1", b"2", b"4", b"5", b"6", b"7"]
        assert_whole(built)


def test_index_entries_land_on_batches(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    for number in range(60):
        built.lines("web", [b"%d" % number * 2000] * 3)
        built.piece("long", b"x" * 500, begins=number == 0, ends=False)
    path = built.path(1, Kind.RAW)
    index = read_index(built.path(1, Kind.INDEX), built.log_id, 1)
    assert index is not None
    assert len(index.positions) > 5
    places = {batch.offset: batch.header for batch in batches(path, limit=built.writer.position)}
    for sequence, position, time_ns in zip(index.sequences, index.positions, index.times_ns, strict=True):
        assert (places[position].base_sequence, places[position].append_time_ns) == (sequence, time_ns)


def test_the_control_batch_carries_the_state(tmp_path: Path) -> None:
    built = with_some_records(tmp_path / "log", SteppingAlong())
    built.cut()
    first, *rest = batches(built.path(5, Kind.RAW), limit=built.writer.position)
    assert rest == []
    assert first.offset == SEGMENT_HEADER.size
    assert (first.header.count, first.header.flags, first.route) == (0, Flag.CONTROL, "")
    with built.path(5, Kind.RAW).open("rb") as file:
        assert control.decode(RawFile(file.fileno()).payload(first)) == built.writer.state


class SteppingAlong(SteppingDisk):
    """Steps that mean nothing."""

    def step(self, name: str, path: Path | None = None, descriptor: int = -1) -> None:
        pass


def test_a_draft_knows_what_it_takes(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    before = built.writer.position
    made = draft(b"12345\n")
    placement = commit(built, [made])
    assert placement.end - before == made.total_bytes == HEADER.size + 8 + 8 + TRAILER.size
    assert Root(built.root.path).segment(1, Kind.RAW).stat().st_size == 1 << 20
