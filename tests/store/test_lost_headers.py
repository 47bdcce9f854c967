"""Segments that have lost their header, which holds the salt of all checksums.

The salt is also in the sparse index, in the index of the sealed form, and at the start of the next segment.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from contents import assert_sound, errors, values
from crashed import ALL, BASE, newest, quarantined, readable, start_again, story
from logs import Built, Unsynced
from repairing import repair

from wald.format.names import Kind
from wald.segments.raw_scan import FIRST_BATCH

SECTOR = 512
LINE = b"x" * 200


def zero(path: Path, length: int = FIRST_BATCH) -> None:
    with path.open("r+b") as file:
        file.write(bytes(length))


def three_segments(path: Path) -> Built:
    """Return a log of three raw segments, 20 records each; the last one is active."""
    built = Built(path)
    for part in range(3):
        for number in range(20):
            built.lines("a", [b"%d-%d " % (part, number) + LINE])
        if part < 2:
            built.cut()
    built.crash()
    return built


@pytest.mark.parametrize(("index", "sector"), [(True, False), (False, True)], ids=["header", "sector, no index"])
class TestCutSegment:
    def damaged(self, path: Path, *, index: bool, sector: bool) -> tuple[Built, list[bytes], list[bytes]]:
        """Return the log, its records, and those that its segments still hold."""
        built = three_segments(path)
        whole = values(path)
        zero(built.path(21, Kind.RAW), SECTOR if sector else FIRST_BATCH)
        if not index:
            built.path(21, Kind.INDEX).unlink()
        left = readable(path)
        assert set(whole) - set(left) <= set(whole[20:22]) if sector else whole == left
        return built, whole, left

    def test_it_loses_only_the_batches_that_are_hit(self, tmp_path: Path, index: bool, sector: bool) -> None:
        _, _, left = self.damaged(tmp_path / "log", index=index, sector=sector)
        assert any("magic" in error for error in errors(tmp_path / "log"))
        built = Built(tmp_path / "log", epoch=2)
        assert built.lines("a", [b"new"]) == 61
        assert readable(tmp_path / "log") == [*left, b"new"]

    def test_a_repair_that_is_killed_loses_nothing(self, tmp_path: Path, index: bool, sector: bool) -> None:
        _, _, left = self.damaged(tmp_path / "log", index=index, sector=sector)
        for step in range(1, 100):
            root = tmp_path / f"killed {step}"
            shutil.copytree(tmp_path / "log", root)
            killed = False
            try:
                repair(root, disk=KilledDisk(step))
            except Killed:
                killed = True
            assert readable(root) == left, step
            repair(root)
            assert errors(root) == [], step
            assert values(root) == left, step
            if not killed:
                break
        assert step >= 4


class Killed(BaseException):
    """The process was killed."""


class KilledDisk(Unsynced):
    """A disk whose process is killed after the given number of names were changed."""

    def __init__(self, step: int) -> None:
        self._left = step

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._count()

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._count()

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self._count()

    def _count(self) -> None:
        self._left -= 1
        if not self._left:
            raise Killed


class TestNewestSegment:
    def test_the_sparse_index_gives_the_salt(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        story(path)
        zero(newest(path))
        built = start_again(path)
        assert built.report.fate == "cut"
        assert [error for error in built.report.errors if "magic" in error]
        assert built.lines("web", [b"new"]) == 7
        assert readable(path) == [*ALL, b"new"]

    def test_without_header_and_sparse_index_it_goes_to_quarantine(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        built = story(path)
        zero(newest(path))
        built.path(BASE, Kind.INDEX).unlink()
        lost = newest(path).read_bytes()
        built = start_again(path)
        assert built.report.fate == "quarantine"
        assert built.report.errors
        assert quarantined(path) == [lost]
        assert readable(path) == ALL[:2]
        assert built.lines("web", [b"new"]) == 7  # no sequence is given out twice
        assert readable(path) == [*ALL[:2], b"new"]
        built.crash()
        repair(path)
        assert errors(path) == []
        assert values(path) == [*ALL[:2], b"new"]

    def test_pieces_of_a_long_record_are_carried_over(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        built = Built(path)
        built.piece("long", b"begin", begins=True, ends=False)
        built.cut()
        built.piece("long", b" middle", begins=False, ends=False)
        built.crash()
        zero(newest(path))
        built = Built(path, epoch=2)
        assert built.report.fate == "carry"
        built.piece("long", b" end\n", begins=False, ends=True)
        assert values(path) == [b"begin middle end"]
        assert_sound(path)
