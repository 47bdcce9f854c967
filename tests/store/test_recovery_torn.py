"""Torn ends after a crash during a write: the batches were not acknowledged, so truncating them is correct."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from contents import assert_sound, errors
from crashed import ALL, BASE, NOISE, SEGMENT_BYTES, goes_on, newest, offsets, quarantined, start_again, story
from damage import flipped
from logs import Built, commit, draft
from powercut import RecordingDisk

from wald.format.batch import HEADER
from wald.format.names import Kind
from wald.segments.raw_scan import FIRST_BATCH
from wald.writing.writer import Route


class TestUnfinishedWrites:
    """Effects of a crash on the last, unacknowledged batch."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> Path:
        """Return the log after the crash; each damage is done to a copy."""
        path = tmp_path / "left"
        story(path, last_is_durable=False)
        return path

    def check(self, log: Path, path: Path, data: bytes) -> None:
        shutil.copytree(log, path)
        start = offsets(path)[-2]
        newest(path).write_bytes(data)
        torn = data[start:].rstrip(b"\0")
        built = start_again(path)
        report = built.report
        assert report.errors == []
        assert report.fate == "cut"
        assert report.trimmed_bytes == len(torn)
        assert quarantined(path) == ([torn] if torn else [])
        if torn:
            (line,) = report.info
            assert f"/segments/{BASE:020d}.wal: offset {start}: {len(torn)} bytes" in line
            assert (path / report.kept_in).read_bytes() == torn
        else:
            assert report.info == []
        assert built.path(BASE, Kind.RAW).stat().st_size == start
        goes_on(built, ALL[:5], 6)
        assert errors(path) == []
        shutil.rmtree(path)

    @pytest.mark.parametrize("padding", [False, True], ids=["the file ends there", "zeros follow"])
    def test_cut_short_at_any_byte(self, log: Path, tmp_path: Path, padding: bool) -> None:
        data, (*_, start, end) = newest(log).read_bytes(), offsets(log)
        last = len(data[:end].rstrip(b"\0"))  # the rest is padding, which is zeros too
        for length in range(start + padding, last, 3):
            whole = data[:length].ljust(SEGMENT_BYTES, b"\0") if padding else data[:length]
            self.check(log, tmp_path / "log", whole)

    def test_a_bit_flipped_anywhere(self, log: Path, tmp_path: Path) -> None:
        data, (*_, start, end) = newest(log).read_bytes(), offsets(log)
        for position in range(start, end, 3):
            self.check(log, tmp_path / "log", flipped(data, 8 * position + position % 8))

    def test_only_its_end_is_there(self, log: Path, tmp_path: Path) -> None:
        """Pages reach the disk in any order."""
        data, (*_, start, end) = newest(log).read_bytes(), offsets(log)
        for length in (1, 8, HEADER.size, end - start - 4):
            self.check(log, tmp_path / "log", data[:start] + bytes(length) + data[start + length :])

    def test_garbage_instead(self, log: Path, tmp_path: Path) -> None:
        data, start = newest(log).read_bytes(), offsets(log)[-2]
        for noise in (NOISE, b"x", b"\0\0x", b"WBAT", b"WBAT" * 40):
            self.check(log, tmp_path / "log", data[:start] + noise)

    def test_a_power_cut_at_any_moment_leaves_it_in_the_segment_or_in_quarantine(self, log: Path) -> None:
        segment, start = newest(log), offsets(log)[-2]
        torn = flipped(segment.read_bytes(), 8 * start)
        segment.write_bytes(torn)
        torn = torn[start:].rstrip(b"\0")
        disk = RecordingDisk(log, seed=1, every=True, ordered=False)
        disk.platter.load(log)
        built = Built(log, segment_max_bytes=SEGMENT_BYTES, epoch=2, disk=disk)
        assert built.report.trimmed_bytes == len(torn)
        for state in disk.states:
            files = dict(state.files)
            in_segment = files.get(str(segment.relative_to(log))) or b""
            assert torn in in_segment or files.get(built.report.kept_in) == torn, state.after

    def test_whole_and_not_published(self, log: Path, tmp_path: Path) -> None:
        """It was not acknowledged, and may stay."""
        shutil.copytree(log, tmp_path / "log")
        built = start_again(tmp_path / "log")
        assert (built.report.info, built.report.errors) == ([], [])
        goes_on(built, ALL, 7)
        assert_sound(tmp_path / "log")


class TestTornTurns:
    """Several batches in one write, of which the disk has some: cut as a whole if that can be what happened."""

    def build(self, path: Path, *turns: list[bytes], publish: int = 0) -> tuple[Built, list[int]]:
        """A commit for each of ``turns``, a batch for each of its lines; the head moves with the first ``publish``."""
        built = Built(path, segment_max_bytes=SEGMENT_BYTES)
        built.lines("web", [b"1"])
        for number, lines in enumerate(turns):
            built.now_ns += 1
            drafts = [draft(line + b"\n", route=Route.named(f"r{at}")) for at, line in enumerate(lines)]
            commit(built, drafts, publish=number < publish)
        built.crash()
        return built, offsets(path)

    def spoil(self, path: Path, places: list[int], batch: int) -> bytes:
        """Zero a batch; return all bytes after its start."""
        data = newest(path).read_bytes()
        data = data[: places[batch]] + bytes(places[batch + 1] - places[batch]) + data[places[batch + 1] :]
        newest(path).write_bytes(data)
        return data[places[batch] : places[-1]]

    @pytest.mark.parametrize("missing", [2, 3, 4])
    def test_what_is_behind_its_hole_goes_too(self, tmp_path: Path, missing: int) -> None:
        path = tmp_path / "log"
        _, places = self.build(path, [b"2", b"3", b"4", b"5"])
        rest = self.spoil(path, places, missing)
        built = Built(path, epoch=2)
        assert built.report.errors == []
        assert built.report.trimmed_bytes == len(rest)
        assert quarantined(path) == [rest]
        (line,) = built.report.info
        assert f"offset {places[missing]}: " in line
        goes_on(built, [b"%d" % number for number in range(1, missing)], missing)

    @pytest.mark.parametrize("head", ["missing", "zeros"])
    def test_no_head_is_needed_to_tell(self, tmp_path: Path, head: str) -> None:
        """A power cut may take it, or leave its pages empty."""
        path = tmp_path / "log"
        built, places = self.build(path, [b"2", b"3"], [b"4", b"5"])
        rest = self.spoil(path, places, 4)
        if head == "missing":
            built.root.head.unlink()
        else:
            built.root.head.write_bytes(bytes(160))
        built = Built(path, epoch=2)
        assert built.report.errors == []
        assert quarantined(path) == [rest]
        goes_on(built, [b"1", b"2", b"3"], 4)

    def test_without_a_head_a_hole_in_a_turn_that_was_synced_is_damage(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        built, places = self.build(path, [b"2", b"3"], [b"4"])
        self.spoil(path, places, 2)
        built.root.head.unlink()
        built = Built(path, epoch=2)
        assert [f"offset {places[2]}: " in line for line in built.report.errors] == [True]
        assert quarantined(path) == []
        goes_on(built, [b"1", b"3", b"4"], 5)

    def test_two_turns_behind_the_hole_mean_that_it_was_synced(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        _, places = self.build(path, [b"2", b"3"], [b"4"])
        self.spoil(path, places, 2)
        built = Built(path, epoch=2)
        assert [f"offset {places[2]}: " in line for line in built.report.errors] == [True]
        assert quarantined(path) == []
        goes_on(built, [b"1", b"3", b"4"], 5)

    def test_a_hole_below_the_head_is_damage(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        _, places = self.build(path, [b"2", b"3", b"4"], publish=1)
        self.spoil(path, places, 3)
        built = Built(path, epoch=2)
        assert [f"offset {places[3]}: " in line for line in built.report.errors] == [True]
        goes_on(built, [b"1", b"2", b"4"], 5)

    def test_a_hole_below_the_head_and_a_torn_turn_above_it(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        _, places = self.build(path, [b"2", b"3"], [b"4", b"5"], publish=1)
        self.spoil(path, places, 2)
        rest = self.spoil(path, places, 4)
        built = Built(path, epoch=2)
        assert [f"offset {places[2]}: " in line for line in built.report.errors] == [True]
        assert quarantined(path) == [rest]
        goes_on(built, [b"1", b"3"], 4)

    def test_a_control_batch_is_never_in_a_turn(self, tmp_path: Path) -> None:
        """It was durable before its segment had a name, however old the head that a power cut left."""
        path = tmp_path / "log"
        built = Built(path)
        built.lines("web", [b"1"])
        old = built.root.head.read_bytes()
        built.cut()
        built.lines("web", [b"2"])
        built.crash()
        built.root.head.write_bytes(old)
        self.spoil(path, offsets(path), 0)
        built = Built(path, epoch=2)
        assert [f"offset {FIRST_BATCH}: " in line for line in built.report.errors] == [True]
        assert quarantined(path) == []
        goes_on(built, [b"1", b"2"], 3)
