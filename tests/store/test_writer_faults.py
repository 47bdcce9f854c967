"""The active segment is durable or not there, whatever step of the disk is the last one or fails, in any order."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from contents import assert_sound, values
from faults import DyingDisk, FailingDisk, until_it_survives
from interleaving import Lock, PausingDisk, Schedule, interleavings
from logs import Built, commit, draft
from powercut import RecordingDisk
from writing import MORE, NEVER, assert_whole, commit_more, in_memory, with_some_records

from wald.files.safe_open import InPlaceFile
from wald.format.head import HEAD_BYTES, Head, encode_head
from wald.format.names import Kind
from wald.writing.writer import Draft, Route


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
    """The segment has pieces of a record but has used no sequence."""
    built.cut()
    built.piece("long", b"and on ", begins=False, ends=False)
    fail_and_replace(built)


OPERATIONS: dict[str, Callable[[Built], None]] = {
    "commit": commit_more,
    "cut": Built.cut,
    "cut with a spare": cut_with_a_spare,
    "cut then commit": cut_then_commit,
    "replace": fail_and_replace,
    "replace the first commit": fail_at_once_and_replace,
    "replace pieces": piece_then_fail_and_replace,
    "close": lambda built: built.writer.close(),
}


def check_after_a_crash(path: Path, *, published: int) -> None:
    """Check that published records exist, that other records were written, and that appends work."""
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


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(0.0, id="nothing of it", marks=pytest.mark.slow),
        pytest.param(0.6, id="a part of it"),
        pytest.param(1.0, id="all of it", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("operate", OPERATIONS.values(), ids=OPERATIONS)
def test_a_crash_at_any_step_keeps_what_was_committed_and_no_more(
    tmp_path: Path, operate: Callable[[Built], None], part: float
) -> None:
    for number, disk in enumerate(until_it_survives(lambda _: DyingDisk(NEVER, part=part))):
        built = with_some_records(tmp_path / str(number), disk)
        disk.left = number
        with disk.attempt():
            operate(built)
        published = built.log.head()
        assert published is not None
        disk.abandon()
        check_after_a_crash(built.root.path, published=published.sequence)
    assert number >= 2


@pytest.mark.parametrize("part", [0.6], ids=["a part of it"])
def test_a_first_start_that_crashes_at_any_step_is_made_again(tmp_path: Path, part: float) -> None:
    for number, disk in enumerate(until_it_survives(lambda last: DyingDisk(last, part=part))):
        path = tmp_path / str(number)
        with disk.attempt():
            Built(path, disk=disk)
        disk.abandon()
        built = Built(path, epoch=2)
        assert built.report.errors == []
        assert built.lines("web", [b"first"]) == 1
        assert values(path) == [b"first"]
        assert_sound(path)
        built.writer.close()
    assert number > 10


@pytest.mark.parametrize("part", [0.0, 1.0], ids=["nothing of it", "all of it"])
def test_a_commit_that_fails_changes_nothing_and_its_drafts_go_to_the_next_segment(tmp_path: Path, part: float) -> None:
    """Also where the whole batch reached the disk, and only the sync said no."""
    for number, disk in enumerate(until_it_survives(lambda _: FailingDisk(NEVER, part=part, number=errno.EIO))):
        built = with_some_records(tmp_path / str(number), disk)
        writer, before = built.writer, in_memory(built.writer)
        disk.left = number
        drafts = [draft(MORE[0], producer=(7, 2)), draft(MORE[1])]
        with disk.attempt():
            commit(built, drafts)
        if not disk.survived:
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
    assert number == 2  # one write, one sync


def test_a_replace_that_fails_at_any_step_can_be_tried_again(tmp_path: Path) -> None:
    for operate in (fail_and_replace, fail_at_once_and_replace, piece_then_fail_and_replace):
        for number, disk in enumerate(until_it_survives(lambda _: FailingDisk(NEVER))):
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
            with disk.attempt():
                built.writer.replace(now_ns=built.now_ns)
            if not disk.survived:
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
        assert number > 7


@pytest.mark.parametrize(
    ("more", "spare"),
    [(0, False), (0, True), (1, True), (100, False)],
    ids=["one failure", "one failure, with a spare", "two failures", "a disk that is gone"],
)
def test_a_cut_that_fails_at_any_step_leaves_a_log_that_goes_on(tmp_path: Path, more: int, spare: bool) -> None:
    """The old segment continues if it is unchanged; otherwise the next one does."""
    for number, disk in enumerate(until_it_survives(lambda _: FailingDisk(NEVER, more=more))):
        built = with_some_records(tmp_path / str(number), disk)
        writer = built.writer
        descriptors = len(disk.descriptors)
        if spare:
            writer.prepare_spare()
        before = in_memory(writer)[0]
        disk.left = number
        with disk.attempt():
            writer.cut(now_ns=built.now_ns)
        disk.survived = disk.survived and disk.left >= 0
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
    assert number > 5


def test_a_failure_at_any_step_loses_nothing_and_leaves_no_name_in_doubt(tmp_path: Path) -> None:
    for bad, disk in enumerate(until_it_survives(lambda _: FailingDisk(NEVER))):
        built = Built(tmp_path / str(bad), disk=disk)
        built.lines("a", [b"1"])
        path = built.writer.path
        path.unlink()
        path.write_bytes(b"a stranger")
        disk.left = bad
        with disk.attempt():
            built.writer.restore_name()
        if not disk.survived:
            assert path.exists()
            assert built.writer.failed == built.writer.is_named()
        disk.survived = disk.survived and disk.left >= 0
    assert bad > 4


LOG = "new/above/log"  # below a directory that is there
SEGMENT_BYTES = 4096


class Recorded(Built):
    """A log on a disk that is recorded; its head is never synced, because nothing may rest on it."""

    def __init__(self, base: Path, disk: RecordingDisk, epoch: int = 1) -> None:
        self._recording = disk
        super().__init__(base / LOG, segment_max_bytes=SEGMENT_BYTES, disk=disk, epoch=epoch)

    def publish(self) -> None:
        writer = self.writer
        file = InPlaceFile(self.root.head, HEAD_BYTES, self.disk)
        head = Head(self.last, writer.base_sequence, writer.position, writer.epoch, writer.state.append_time_ns)
        file.write(encode_head(head))
        file.close()
        self._recording.acknowledged = self.last

    def drafts(self, batches: int) -> list[Draft]:
        """The batches of a turn; each line is its own number, and longer than a sector."""
        lines = [line(self.last + number) for number in range(1, batches + 1)]
        return [Draft(Route.named(f"r{at}"), [each + b"\n"], len(each) + 1, 1) for at, each in enumerate(lines)]

    def turn(self, batches: int) -> None:
        self.writer.commit(self.writer.place(self.drafts(batches)), now_ns=self.now_ns)
        self.publish()

    def is_killed_before_the_sync(self, batches: int) -> None:
        self.writer._write(self.writer.place(self.drafts(batches)), self.now_ns)
        self.crash()


def line(number: int) -> bytes:
    return b"%d " % number + b"." * 700


def first_turns(base: Path, disk: RecordingDisk) -> None:
    built = Recorded(base, disk)
    built.turn(1)
    built.turn(3)


def cuts(base: Path, disk: RecordingDisk) -> None:
    built = Recorded(base, disk)
    for batches in (1, 2):
        built.turn(batches)
        built.writer.prepare_spare()
        built.cut()
    built.turn(2)
    built.writer.close()


def sealing(base: Path, disk: RecordingDisk) -> None:
    built = Recorded(base, disk)
    built.turn(2)
    built.cut()
    built.turn(1)
    built.seal()
    built.turn(1)


def failures(base: Path, disk: RecordingDisk) -> None:
    """Fail the first commit in a segment, and a later one."""
    built = Recorded(base, disk)
    for batches in (0, 2):
        if batches:
            built.turn(batches)
        built.writer._write(built.writer.place(built.drafts(2)), built.now_ns)
        built.writer.failed = True
        built.writer.replace(now_ns=built.now_ns)
        built.turn(2)


def kills(base: Path, disk: RecordingDisk) -> None:
    """Kill two runs before their sync; the next run still finds their batches."""
    Recorded(base, disk).is_killed_before_the_sync(2)
    built = Recorded(base, disk, epoch=2)
    assert disk.acknowledged == 2
    built.turn(1)
    built.is_killed_before_the_sync(1)
    Recorded(base, disk, epoch=3).turn(2)


STORIES = [first_turns, cuts, sealing, failures, kills]


def check(path: Path, acknowledged: int, last: int) -> None:
    """Start again, and append."""
    built = Built(path, epoch=100)
    assert built.report.errors == []
    found = values(path)
    assert acknowledged <= len(found) <= last
    assert found == [line(number) for number in range(1, len(found) + 1)]
    assert built.lines("next", [b"next"]) == len(found) + 1
    assert_sound(path)
    built.writer.close()
    built.ledger.close()


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
@pytest.mark.parametrize("story", STORIES)
def test_what_was_acknowledged_outlives_a_power_cut(
    tmp_path: Path, story: Callable[[Path, RecordingDisk], None], every: bool
) -> None:
    base = tmp_path / "run"
    base.mkdir()
    disk = RecordingDisk(base, seed=1, every=every)
    story(base, disk)
    assert len(disk.states) > 10
    for number, state in enumerate(disk.states):
        cut = tmp_path / str(number)
        cut.mkdir()
        state.put(cut)
        check(cut / LOG, state.acknowledged, disk.acknowledged + 3)
        shutil.rmtree(cut)


NAMING = ("create", "allocate", "rename", "unlink")  # steps that the other thread can see


def scheduled(path: Path, schedule: Schedule) -> Built:
    """A log of which the writer pauses where it meets its other thread; it holds one record."""
    built = Built(path, disk=PausingDisk(schedule, *NAMING), segment_max_bytes=1 << 16)
    built.writer._preallocator._mutex = Lock(schedule)  # type: ignore[assignment]
    built.lines("a", [b"0"])
    return built


def assert_the_active_file_is_the_named_one(built: Built) -> None:
    named = built.path(built.writer.base_sequence, Kind.RAW).stat()
    opened = os.fstat(built.writer._descriptor)
    assert (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def cutting(built: Built, rounds: int) -> Callable[[], None]:
    """Return the steps of a commit round."""

    def work() -> None:
        for number in range(1, rounds + 1):
            built.cut()
            assert_the_active_file_is_the_named_one(built)
            built.lines("a", [b"%d" % number])

    return work


def preparing(built: Built, rounds: int) -> Callable[[], None]:
    """Return the steps of the background thread."""

    def work() -> None:
        for _ in range(rounds):
            built.writer.prepare_spare()

    return work


@pytest.mark.parametrize("spare", [False, True], ids=["without a spare", "with a spare"])
@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_cuts_while_spares_are_made_lose_nothing(tmp_path: Path, rounds: int, spare: bool) -> None:
    orders = 0
    for orders, schedule in enumerate(interleavings(), start=1):
        built = scheduled(tmp_path / str(orders), schedule)
        if spare:
            built.writer.prepare_spare()
        schedule.run(cutting(built, rounds), preparing(built, rounds))
        assert values(built.root.path) == [b"%d" % number for number in range(rounds + 1)]
        built.writer.close()
        assert not list(built.root.segments.glob("*.tmp"))
        assert_sound(built.root.path)
    assert orders >= 10


def test_a_file_that_two_replace_at_once_is_wholly_what_one_of_them_wrote(tmp_path: Path) -> None:
    """Threads here; processes that have the same id in their containers are no different."""
    for schedule in interleavings():
        disk = PausingDisk(schedule, "create", "write", "rename")
        path = tmp_path / "file"
        schedule.run(lambda: disk.replace(path, b"one"), lambda: disk.replace(path, b"another"))  # noqa: B023
        assert path.read_bytes() in (b"one", b"another")
        assert os.listdir(tmp_path) == ["file"]
