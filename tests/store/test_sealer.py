"""Sealing: whatever step a crash hits, one whole form of the data is there at least, and the next run does the rest."""

import hashlib
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from faults import DyingDisk, FailingDisk, TracingDisk, until_it_survives
from sample_segments import LOG_ID, TIME_NS, batch, segment, segment_header

from wald.errors import Damaged, UnsupportedFormat
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
from wald.segments.index_builder import SparseIndexWriter
from wald.segments.sealed_file import CompressedSegment, SealedFile
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
