"""Clocks that are set: forward, back, by years. Times never decrease within a log, and no decision rests on them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from contents import assert_sound, errors, records, values
from damage import flipped
from logs import SECOND_NS, START_NS, Built

import wald
from wald.errors import Damaged
from wald.files.listing import list_segments
from wald.format.log_state import decode_state
from wald.format.names import Kind
from wald.segments.raw_scan import RawFile, ScannedBatch

YEAR_NS = 365 * 24 * 3600 * SECOND_NS
STEPS = {
    "forward and back": [3600 * SECOND_NS, -3600 * SECOND_NS],
    "to before 1970": [0, -60 * YEAR_NS],
    "forward": [YEAR_NS, 0],
}


def steps(path: Path, name: str, *, publish: bool = True) -> Built:
    """Return a log with a cut between two clock steps and then one commit round a second for records 3 to 6."""
    ahead, back = STEPS[name]
    built = Built(path)
    built.lines("web", [b"1"])
    built.lines("web", [b"2"])
    built.now_ns += ahead
    built.cut()
    built.now_ns += back
    for number in range(3, 7):
        built.lines("web", [b"%d" % number], publish=publish)
    return built


def batches(path: Path) -> list[ScannedBatch]:
    with path.open("rb") as file:
        return [found for found in RawFile(file.fileno()).scan() if isinstance(found, ScannedBatch)]


def spoil(built: Built, sequence: int) -> int:
    """Flip a bit in the record's batch; return the batch's position."""
    path = built.path(built.writer.base_sequence, Kind.RAW)
    offset = next(found.offset for found in batches(path)[1:] if found.header.base_sequence == sequence)
    path.write_bytes(flipped(path.read_bytes(), 8 * (offset + 73)))
    return offset


@pytest.mark.parametrize("name", STEPS)
class TestClocks:
    def test_a_healthy_log_is_sound_in_either_form_and_control_batches_hand_its_time_on(
        self, tmp_path: Path, name: str
    ) -> None:
        built = steps(tmp_path, name)
        times = [record.append_time_ns for record in records(tmp_path)]
        assert times == sorted(times)
        for segment in list_segments(built.root).segments:
            with segment.path.open("rb") as file:
                raw = RawFile(file.fileno())
                first, *others = batches(segment.path)
                reported = decode_state(raw.payload(first)).append_time_ns
            assert reported == first.header.append_time_ns
            assert all(batch.header.append_time_ns >= reported for batch in others)
        assert_sound(tmp_path)
        built.cut()
        built.seal()
        assert_sound(tmp_path)

    @pytest.mark.parametrize("publish", [True, False], ids=["head", "old-head"])
    def test_a_start_keeps_every_whole_record_behind_a_flipped_bit(
        self, tmp_path: Path, name: str, publish: bool
    ) -> None:
        """A power cut leaves an old head; intact batches after the damage show that they were synced."""
        built = steps(tmp_path, name, publish=publish)
        offset = spoil(built, 4)
        if publish:
            found = errors(tmp_path)
            assert ["not a batch" in line or "instead of 4" in line for line in found] == [True] * 2
        built.crash()
        built = Built(tmp_path, epoch=2, now_ns=built.now_ns)
        assert [f"offset {offset}: " in line for line in built.report.errors] == [True]
        assert built.report.trimmed_bytes == 0
        reported: list[Damaged] = []
        read = [record.value for record in wald.open(tmp_path).records("web", on_damage=reported.append)]
        assert read == [b"1", b"2", b"3", b"5", b"6"]
        assert len(reported) == 1

    def test_the_next_life_does_not_go_back_in_time(self, tmp_path: Path, name: str) -> None:
        built = steps(tmp_path, name)
        latest = built.writer.state.append_time_ns
        built.crash()
        built = Built(tmp_path, epoch=2, now_ns=START_NS - YEAR_NS)
        built.lines("web", [b"7"])
        assert records(tmp_path)[-1].append_time_ns >= latest
        built.cut()
        built.seal()
        assert_sound(tmp_path)

    def test_reading_from_a_time_meets_every_record_of_it_and_later(self, tmp_path: Path, name: str) -> None:
        built = steps(tmp_path, name)
        for sealed in (False, True):
            if sealed:
                built.cut()
                built.seal()
            for since in {record.append_time_ns for record in records(tmp_path)}:
                wanted = [record.value for record in records(tmp_path) if record.append_time_ns >= since]
                start = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=since // 1000)
                lines = built.log.records("web", start=start)
                assert [record.value for record in lines] == wanted
        assert values(tmp_path) == [b"%d" % number for number in range(1, 7)]
