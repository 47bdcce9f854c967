"""State that recovery passes to the next start, and torn ends, which it truncates since nobody has an answer."""

import os
import shutil
from pathlib import Path

import pytest
from contents import assert_sound, errors
from crashed import ALL, BASE, NOISE, SEGMENT_BYTES, goes_on, newest, offsets, quarantined, readable, start_again, story
from damage import flipped
from logs import START_NS, Built, commit, draft
from powercut import RecordingDisk
from shrinking import shrink

from wald.errors import Damaged
from wald.files.ledger_write import Ledger
from wald.files.listing import list_segments
from wald.format.names import Kind
from wald.segments.raw_scan import FIRST_BATCH
from wald.writing.sealing import seal
from wald.writing.writer import Route


class TestLongRecords:
    """A record in pieces, and starts in the middle of it."""

    @pytest.mark.parametrize("kind", ["pieces", "control"])
    def test_a_segment_whose_records_are_gone_stays_where_it_is(self, tmp_path: Path, kind: str) -> None:
        """The sequences that are not there keep its name from being needed, and its pieces must not come twice."""
        path = tmp_path / "log"
        built = Built(path)
        built.piece("long", b"begin", begins=True, ends=False)
        built.cut()
        if kind == "pieces":
            built.piece("long", b" and on", begins=False, ends=False)
        end = built.writer.position
        built.lines("web", [b"2", b"3"])
        built.crash()
        os.truncate(newest(path), end)
        built = Built(path, epoch=2)
        assert built.report.fate == "cut"
        assert any("acknowledged records 2 to 3" in line for line in built.report.errors)
        assert [segment.base_sequence for segment in list_segments(built.root).segments] == [1, 2, 4]
        assert sum(file.read_bytes().count(b" and on") for file in built.root.segments.iterdir()) == (kind == "pieces")
        built.piece("long", b" end\n", begins=False, ends=True)
        built.lines("web", [b"4"])
        built.lines("long", [b"whole"])
        for _ in range(2):
            # A missing batch may have been a piece of the record, so the record is not returned as whole.
            assert readable(path, "long") == [b"whole"]
            assert readable(path, "web") == [b"4"]
            built.cut(seal=True)
            built.lines("other", [b"6"])

    @pytest.mark.parametrize("lost", ["the end of its segment", "all pieces", "all", "the file"])
    def test_one_is_not_joined_without_pieces_that_are_gone(self, tmp_path: Path, lost: str) -> None:
        """No sequence is missing, so a start passes over one: readers then know that something is."""
        path = tmp_path / "log"
        built = Built(path)
        built.piece("long", b"begin", begins=True, ends=False)
        if lost != "the end of its segment":
            built.cut()
        control_end = built.writer.position
        built.piece("long", b" and on", begins=False, ends=False)
        end = {"all pieces": control_end, "all": 0}.get(lost, built.writer.position)
        built.piece("long", b" and further", begins=False, ends=False)
        built.crash()
        if lost == "the file":
            newest(path).unlink()
        else:
            os.truncate(newest(path), end)
        built = Built(path, epoch=2)
        assert any("pieces of the unfinished record 1 are lost" in line for line in built.report.errors)
        built.piece("long", b" end\n", begins=False, ends=True)
        built.lines("long", [b"whole"])
        damage: list[Damaged] = []
        assert [record.value for record in built.log.records("long", on_damage=damage.append)] == [b"whole"]
        assert any("record 1 cannot be read" in each.message for each in damage)
        built.crash()
        built = Built(path, epoch=3)
        assert built.report.errors == []
        assert readable(path, "long") == [b"whole"]


class TestState:
    """Producers, open records and routes outlive their segments."""

    def build(self, path: Path, *, sealed: bool = False) -> Built:
        built = Built(path)
        for number in range(1, 4):
            commit(built, [draft(b"a\nb\n", producer=(7, number)), draft(b"c\n", producer=(8, 10 * number))])
        built.lines("other", [b"d"])
        built.piece("long", b"begin", begins=True, ends=False)
        built.piece("done", b"begin", begins=True, ends=False)
        built.cut()
        if sealed:
            built.seal()
        built.piece("done", b"end\n", begins=False, ends=True)
        commit(built, [draft(b"e\n", producer=(7, 4))])
        return built

    @pytest.mark.parametrize("end", ["crash", "close"])
    def test_it_is_the_same_after_starts_and_cuts(self, tmp_path: Path, end: str) -> None:
        path = tmp_path / "log"
        built = self.build(path)
        for epoch in range(2, 5):
            state = built.writer.state
            built.crash() if end == "crash" else built.writer.close()
            built = Built(path, epoch=epoch)
            assert built.writer.state == state
            built.lines("other", [b"more"], cut=True)
            built.lines("other", [b"more"])
        assert built.writer.state.open_records == {"long": 11}
        assert built.writer.state.producers.next_expected(7) == 5

    @pytest.mark.parametrize("sealed", [False, True], ids=["raw", "sealed"])
    @pytest.mark.parametrize("empty", [False, True], ids=["with records", "empty"])
    def test_without_a_control_batch_it_comes_from_the_segment_before(
        self, tmp_path: Path, sealed: bool, empty: bool
    ) -> None:
        path = tmp_path / "log"
        built = self.build(path, sealed=sealed and not empty)
        if empty:
            built.cut()
            if sealed:
                built.seal()
        state = built.writer.state
        built.crash()
        newest(path).write_bytes(flipped(newest(path).read_bytes(), 8 * (FIRST_BATCH + 80)))
        built = Built(path, epoch=2)
        assert (built.report.fate == "quarantine") == empty
        assert len(built.report.errors) == 1 or empty
        assert built.writer.state == state

    def test_a_record_stays_open_if_shrinking_has_dropped_others_behind_its_beginning(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        built = Built(path)
        built.piece("long", b"begin", begins=True, ends=False)
        built.lines("other", [b"read by everybody"])
        built.cut(seal=True)
        shrink(built, 1, other=2)
        built.crash()
        newest(path).write_bytes(flipped(newest(path).read_bytes(), 8 * (FIRST_BATCH + 80)))
        built = Built(path, epoch=2)
        assert built.report.fate == "quarantine"
        assert built.writer.state.open_records == {"long": 1}
        assert built.writer.state.routes == {"long": 1, "other": 2}
        built.piece("long", b" and end\n", begins=False, ends=True)
        assert readable(path, "long") == [b"begin and end"]
        assert errors(path) == []


class TestHead:
    """The head is a hint about what must be there; it may be lost."""

    @pytest.mark.parametrize("head", [None, bytes(160)], ids=["missing", "zeros"])
    def test_without_one_everything_that_is_there_counts(self, tmp_path: Path, head: bytes | None) -> None:
        path = tmp_path / "log"
        built = story(path)
        if head is None:
            built.root.head.unlink()
        else:
            built.root.head.write_bytes(head)
        built = start_again(path)
        assert (built.report.info, built.report.errors) == ([], [])
        goes_on(built, ALL, 7)
        assert_sound(path)


class TestSealedLogs:
    """A log whose segments are all sealed: nothing is unfinished."""

    def build(self, path: Path) -> Built:
        built = story(path)
        os.truncate(newest(path), offsets(path)[-1])
        ledger = Ledger(built.root.ledger / "segments.jsonl", built.disk)
        for segment in list_segments(built.root).segments:
            seal(built.root, segment, built.disk, ledger, now=lambda: START_NS)
        ledger.close()
        assert [segment.kind for segment in list_segments(built.root).segments] == [Kind.SEALED] * 2
        return built

    def test_neither_head_nor_sealed_file_nor_ledger_readable_still_hides_nothing_new(self, tmp_path: Path) -> None:
        """A new segment of the same name as the sealed one would not be seen."""
        path = tmp_path / "log"
        built = self.build(path)
        built.path(BASE, Kind.SEALED).write_bytes(NOISE)
        (built.root.ledger / "segments.jsonl").unlink()
        built.root.head.unlink()
        built = start_again(path)
        assert built.writer.base_sequence == BASE + 1
        goes_on(built, ALL[:2], BASE + 1)

    def test_one_without_its_index_hands_on_all_that_its_frames_hold(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        built = self.build(path)
        state = built.writer.state
        sealed = built.path(BASE, Kind.SEALED)
        sealed.write_bytes(sealed.read_bytes()[:-10])
        built = start_again(path)
        assert any(str(sealed) in line for line in built.report.errors)
        assert built.writer.state == state
        goes_on(built, ALL, 7)


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
        for length in range(start + padding, last, 5):
            whole = data[:length].ljust(SEGMENT_BYTES, b"\0") if padding else data[:length]
            self.check(log, tmp_path / "log", whole)

    def test_a_bit_flipped_anywhere(self, log: Path, tmp_path: Path) -> None:
        data, (*_, start, end) = newest(log).read_bytes(), offsets(log)
        for position in range(start, end, 5):
            self.check(log, tmp_path / "log", flipped(data, 8 * position + position % 8))

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

    @pytest.mark.parametrize("missing", [2, 4])
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

    def test_no_head_is_needed_to_tell(self, tmp_path: Path) -> None:
        """A power cut may take it, or leave its pages empty."""
        path = tmp_path / "log"
        built, places = self.build(path, [b"2", b"3"], [b"4", b"5"])
        rest = self.spoil(path, places, 4)
        built.root.head.write_bytes(bytes(160))
        built = Built(path, epoch=2)
        assert built.report.errors == []
        assert quarantined(path) == [rest]
        goes_on(built, [b"1", b"2", b"3"], 4)

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
