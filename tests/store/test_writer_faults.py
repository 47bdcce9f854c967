"""The active segment: durable or not there, and under its name, whatever step of the disk is the last one or fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from contents import assert_sound, values
from faults import Died, DyingDisk, FailingDisk, TracingDisk, until_it_survives
from logs import START_NS, Built, commit, draft
from writing import MORE, NEVER, assert_whole, batches, commit_more, in_memory, with_some_records

from wald.files.disk import Disk
from wald.files.identity import create_root
from wald.files.listing import list_segments
from wald.format.log_state import LogState
from wald.writing.writer import Writer


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


@pytest.mark.parametrize("part", [0.6], ids=["a part of it"])
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


@pytest.mark.parametrize("part", [0.0, 1.0], ids=["nothing of it", "all of it"])
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


@pytest.mark.parametrize(
    ("more", "spare"),
    [(0, False), (0, True), (1, True), (100, False)],
    ids=["one failure", "one failure, with a spare", "two failures", "a disk that is gone"],
)
def test_a_cut_that_fails_at_any_step_leaves_a_log_that_goes_on(tmp_path: Path, more: int, spare: bool) -> None:
    """The old segment continues if it is unchanged; otherwise the next one does."""
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
            Writer(root, disk, LogState(), log_id=bytes(16), epoch=1, segment_max_bytes=4096, now_ns=START_NS)
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


def test_a_failure_at_any_step_loses_nothing_and_leaves_no_name_in_doubt(tmp_path: Path) -> None:
    for bad in range(40):
        disk = FailingDisk(NEVER)
        built = Built(tmp_path / str(bad), disk=disk)
        built.lines("a", [b"1"])
        path = built.writer.path
        path.unlink()
        path.write_bytes(b"a stranger")
        disk.left = bad
        try:
            built.writer.restore_name()
            survived = disk.left >= 0
        except OSError:
            survived = False
            assert path.exists()
            assert built.writer.failed == built.writer.is_named()
        disk.left = NEVER
        if survived:
            break
    assert bad > 4


def test_what_stands_in_its_place_is_linked_before_it_is_replaced(tmp_path: Path) -> None:
    disk = TracingDisk()
    built = Built(tmp_path / "log", disk=disk)
    built.lines("a", [b"1"])
    built.writer.path.unlink()
    built.writer.path.write_bytes(b"a stranger")
    disk.steps.clear()
    found = built.writer.restore_name()
    assert found is not None
    assert found.read_bytes() == b"a stranger"
    assert [name for name, _ in disk.steps if name == "rename"] == ["rename"]
    assert disk.steps[-1] == ("sync_directory", "segments")
    assert values(built.root.path) == [b"1"]
