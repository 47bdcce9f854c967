"""Disk space as a table: disk × segment × reserve × compression."""

import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from full_disk import fill, small_file_system

from wald.files.disk import Disk, free_bytes
from wald.format.batch import BatchHeader, checksum_body, encode_batch, route_prefix, seed
from wald.format.segment import SegmentHeader, encode_segment_header
from wald.segments.sealed_file import compress_segment
from wald.setting_types import GIB, KIB, MIB, TIB, format_bytes
from wald.writing.disk_budget import Cause, DiskBudget, Sizes, sealed_bytes_max, sizes_for

DISKS = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1400 * MIB, 100 * GIB)
SEGMENTS = (64 * KIB, MIB, 4 * MIB, 64 * MIB, 256 * MIB, 64 * GIB)
RESERVES = (0, MIB, 8 * MIB, 48 * MIB, 248 * MIB, 256 * MIB, 1390 * MIB, 1024 * TIB)


def sizes(disk: int, segment: int, reserve: int) -> Sizes:
    return sizes_for(disk, segment_max_bytes=segment, free_space_min=reserve)


each_disk = pytest.mark.parametrize("disk", DISKS, ids=format_bytes)


@dataclass
class Model:
    """A daemon on a disk, in bytes; other files use up the rest."""

    disk: int
    sizes: Sizes
    compressed: float
    active: int = 0  # share of its allocation
    spare: bool = False
    raw: list[int] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)

    @property
    def free(self) -> int:
        segments = self.sizes.segment_bytes * (1 + self.spare) + sum(self.raw) + sum(self.sealed)
        return self.disk - self.disk // 32 - segments

    def takes(self) -> bool:
        """Fill a segment and begin another; return True if the disk has room."""
        segment = self.sizes.segment_bytes
        if not self.spare and self.free >= self.sizes.headroom_bytes + segment:
            self.spare = True
        if self.free + self.spare * segment < self.sizes.needed_bytes:
            return False
        self.raw.append(segment)
        self.spare = False
        return True

    def seals(self) -> bool:
        """Seal the oldest segment; return True if it fits without the reserve."""
        if not self.raw or self.free < self.sizes.reserve_bytes + sealed_bytes_max(self.raw[0]):
            return False
        self.sealed.append(int(sealed_bytes_max(self.raw.pop(0)) * self.compressed))
        return True

    def reclaim(self) -> None:
        """Everybody has read everything."""
        self.raw.clear()
        self.sealed.clear()


@each_disk
def test_what_is_in_force_is_not_more_than_was_asked_for(disk: int) -> None:
    for segment, reserve in itertools.product(SEGMENTS, RESERVES):
        found = sizes(disk, segment, reserve)

        assert 0 < found.segment_bytes <= segment
        assert 0 <= found.reserve_bytes <= reserve
        assert found.payload_bytes > 0
        # It gathers in a file and is copied; when all else is reclaimed, both fit without the room for others.
        assert 2 * found.payload_bytes <= disk - disk // 32 - found.needed_bytes
        if reserve < disk // 8 and segment < disk // 8:
            assert (found.segment_bytes, found.reserve_bytes) == (segment, reserve)


@each_disk
def test_no_disk_is_ever_wedged_by_the_log_itself(disk: int) -> None:
    """Filled, blocked, read and reclaimed, it takes a whole segment again, over and over; the reserve stays free."""
    for segment, reserve, compressed, sealed_each_time in itertools.product(SEGMENTS, RESERVES, (0.01, 1.0), (0, 2)):
        model = Model(disk, sizes(disk, segment, reserve), compressed)
        for _ in range(2):
            taken = 0
            while taken < 20 and model.takes():
                taken += 1
                for _ in range(sealed_each_time):
                    model.seals()
                assert model.free >= model.sizes.reserve_bytes
            assert taken >= 1
            if model.raw:
                assert model.seals(), "there is always room to seal one"
            model.reclaim()


def test_a_file_system_that_does_not_tell_its_size_is_taken_at_the_settings_word() -> None:
    assert sizes(0, 64 * MIB, 256 * MIB).segment_bytes == 64 * MIB
    assert sizes(0, 64 * MIB, 256 * MIB).reserve_bytes == 256 * MIB


@pytest.mark.parametrize("payload", [1, 100, 5000])
def test_no_sealed_form_is_larger_than_its_worst_case(tmp_path: Path, payload: int) -> None:
    """Random bytes, in batches of the smallest and of larger sizes."""
    raw = tmp_path / "raw"
    with raw.open("wb") as file:
        file.write(encode_segment_header(SegmentHeader(bytes(16), 1, 1, 0, 7)))
        prefix = route_prefix(b"a")
        for number in range(2000):
            body = os.urandom(payload)
            time_ns = 1_700_000_000_000_000_000 + (number << 32) + int.from_bytes(os.urandom(4), "big")
            checksum = checksum_body(prefix, [body], payload)
            header = BatchHeader(checksum, payload, 1 + number, time_ns, 0, 0, 1, 1, 1, 0, 1)
            file.writelines(encode_batch(header, prefix, [body], seed(7, file.tell())))
    disk = Disk()
    target = disk.create(tmp_path / "sealed")
    with raw.open("rb", buffering=0) as source:
        compressed = compress_segment(source.fileno(), target, disk)
    disk.close(target)

    assert compressed.index.routes[0].count > 0
    assert compressed.stored_bytes <= sealed_bytes_max(raw.stat().st_size)


def test_what_fills_the_disk_is_reported(tmp_path: Path) -> None:
    """The cause is the log's own segments or another program's files."""
    with small_file_system(tmp_path / "disk", 16 * MIB) as disk:
        segments = disk / "segments"
        segments.mkdir()
        room = DiskBudget(segments, sizes(16 * MIB, MIB, 2 * MIB))
        fill(segments / "1.wal")
        assert room.cause(free_bytes(segments)) is Cause.SEGMENTS
        assert not room.can_seal(MIB)
        assert not room.can_allocate(MIB)
        assert room.remaining_bytes(0) < 0
        (segments / "1.wal").unlink()
        assert room.can_seal(MIB)
        assert room.can_allocate(MIB)
        fill(disk / "other")
        assert room.cause(free_bytes(segments)) is Cause.OTHERS
