"""A power cut at any moment loses no acknowledged record, and recovery reports no damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from contents import assert_sound, values
from logs import Built
from powercut import RecordingDisk

from wald.files.safe_open import InPlaceFile
from wald.format.head import HEAD_BYTES, Head, encode_head
from wald.writing.writer import Draft, Route

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
