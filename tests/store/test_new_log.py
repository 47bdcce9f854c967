"""Construction of a log from given records: segment ends, holes, and the moment it becomes a log."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from contents import errors
from faults import TracingDisk
from logs import START_NS, Unsynced

import wald
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.ledger_read import read_ledger
from wald.files.listing import list_segments
from wald.files.uptime import read_steps
from wald.format.batch import Encoding
from wald.format.names import Kind
from wald.format.segment import pack_version
from wald.log import Log
from wald.repairing.restore import SEGMENT_BYTES, NewLog, RestoredBatch
from wald.segments.sealed_file import SealedFile


def begun(path: Path, *, disk: Disk | None = None, segment_max_bytes: int = SEGMENT_BYTES) -> NewLog:
    return NewLog(
        path,
        disk or Unsynced(),
        describe=lambda first, last: {"why": f"{first} to {last}"},
        now=lambda: START_NS,
        moment="",
        version=pack_version(wald.__version__),
        segment_max_bytes=segment_max_bytes,
    )


def batch(first: int, value: bytes = b"x") -> RestoredBatch:
    return RestoredBatch("a", first, 1, START_NS + first, value + b"\n", Encoding.LINES)


def made(path: Path, sequences: list[int], *, segment_max_bytes: int = SEGMENT_BYTES) -> Iterator[int]:
    """The bases of the segments of a log of these records, each a batch; it has no error, and its holes are counted."""
    with begun(path, segment_max_bytes=segment_max_bytes) as log:
        for sequence in sequences:
            log.add(batch(sequence))
        log.finish()
        assert log.missing == sequences[-1] - len(sequences)
    assert [record.sequence for record in Log(path).records()] == sequences
    assert errors(path) == []
    return (segment.base_sequence for segment in list_segments(Root(path)).segments)


def test_a_segment_is_cut_before_it_gets_too_long_and_sealed_at_once(tmp_path: Path) -> None:
    """A restore of many segments takes the room of one that is not sealed."""
    path = tmp_path / "log"
    with begun(path, segment_max_bytes=64 << 10) as log:
        for sequence in range(1, 101):
            log.add(batch(sequence, b"x" * 2000))
            there = list_segments(log.root).segments
            assert [segment.kind for segment in there[:-1]] == [Kind.SEALED] * (len(there) - 1)
        log.finish()
    segments = list_segments(Root(path)).segments
    assert len(segments) == 4
    for segment in segments:
        with SealedFile(segment.path) as sealed:
            assert sealed.index.raw_bytes <= 64 << 10


@pytest.mark.parametrize(("missing", "bases"), [(1, [1]), (65_536, [1]), (65_537, [1, 65_539])])
def test_a_hole_of_up_to_65536_records_does_not_end_a_segment(tmp_path: Path, missing: int, bases: list[int]) -> None:
    assert list(made(tmp_path / "log", [1, missing + 2])) == bases


def test_each_hole_has_one_line(tmp_path: Path) -> None:
    """They are written in groups; the first hole is before the first record."""
    list(made(tmp_path / "log", list(range(2, 2010, 2))))
    lines = [line for line in read_ledger(tmp_path / "log/ledger/segments.jsonl").entries if line["event"] == "lost"]
    assert [(line["base"], line["last"]) for line in lines] == [(n, n) for n in range(1, 2009, 2)]


def test_it_becomes_a_log_when_all_else_is_durable(tmp_path: Path) -> None:
    disk = TracingDisk()
    with begun(tmp_path / "log", disk=disk) as log:
        log.add(batch(1))
        log.finish()
        assert not log.root.lock.exists()
    at = disk.steps.index(("rename", "log.json"))
    assert disk.steps[at - 1 : at + 3] == [
        ("sync_directory", "log"),
        ("rename", "log.json"),
        ("sync_directory", "log"),
        ("sync_directory", tmp_path.name),
    ]


def test_append_times_that_go_back_are_a_clock_step(tmp_path: Path) -> None:
    """The log of the records had such a step."""
    path = tmp_path / "log"
    times_ns = [START_NS, START_NS + 9, START_NS + 3, START_NS + 3, START_NS + 1]
    with begun(path) as log:
        for first, time_ns in enumerate(times_ns, start=1):
            log.add(RestoredBatch("a", first, 1, time_ns, b"x\n", Encoding.LINES))
        log.finish()
    assert [record.append_time_ns for record in Log(path).records()] == times_ns
    assert [step.base for step in read_steps(Root(path))] == [3, 5]
    assert errors(path) == []
