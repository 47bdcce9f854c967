"""Writes to the disk, disk space, the identity of files, and sparse indexes."""

import itertools
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest
from damage import every_truncation
from faults import FailingDisk, TracingDisk, until_it_survives
from full_disk import fill, small_file_system
from running import run
from sample_segments import LOG_ID, TIME_NS, segment
from tracing import strace

from wald.files.disk import Disk, free_bytes
from wald.files.listing import Segment
from wald.files.safe_open import FileIdentity, is_regular
from wald.format.batch import BatchHeader, Buffer, checksum_body, encode_batch, route_prefix, seed
from wald.format.names import Kind, segment_name
from wald.format.segment import SPARSE_INTERVAL_BYTES, SegmentHeader, SparseIndex, encode_segment_header
from wald.segments.index_builder import SparseIndexWriter, find_index
from wald.segments.raw_scan import RawFile, ScannedBatch
from wald.segments.reader import RawSegment
from wald.segments.sealed_file import compress_segment
from wald.setting_types import GIB, KIB, MIB, TIB, format_bytes
from wald.writing.disk_budget import Cause, DiskBudget, Sizes, sealed_bytes_max, sizes_for


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.mark.parametrize(("error", "answer"), [("EOPNOTSUPP", "False 0 0"), ("ENOSPC", "28"), ("EINTR:when=1", "True")])
def test_room_is_reserved_by_the_file_system_or_not_at_all(tmp_path: Path, error: str, answer: str) -> None:
    """The C library would write into every block if the file system cannot."""
    script = f"""
import os, pathlib
from wald.files.disk import Disk
descriptor = Disk().create(pathlib.Path({str(tmp_path / "file")!r}))
try:
    done = Disk().allocate(descriptor, 1 << 20)
    status = os.fstat(descriptor)
    print(done, *[status.st_size, status.st_blocks] if not done else ())
except OSError as error:
    print(error.errno)
"""
    injected = ["-e", "trace=fallocate", "-e", f"inject=fallocate:error={error}"]
    done = run([strace(), "-qq", "-o", os.devnull, *injected, sys.executable, "-c", script])
    assert (done.stdout.decode().strip(), done.stderr) == (answer, b"")


def test_all_buffers_are_written_however_few_bytes_a_call_takes(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, at_once = os.pwritev, 0

    def short(descriptor: int, given: Sequence[Buffer], offset: int) -> int:
        assert len(given) <= 1024
        return real(descriptor, [b"".join(given)[:at_once]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    several: list[Sequence[Buffer]] = [[], [b""], [b"one"], [b"", b"one", b"", b"two", b""], [b""] * 2500 + [b"x"]]
    several += [[memoryview(b"view"), bytearray(b"array"), b"bytes"], [b"%d," % i for i in range(3000)]]
    for number, (at_once, buffers) in enumerate(product([1 << 30, 7, 1], several)):  # noqa: B007
        path = tmp_path / str(number)
        descriptor = disk.create(path)
        assert disk.write(descriptor, buffers, 5) == len(b"".join(buffers))
        disk.close(descriptor)
        assert path.read_bytes() == (bytes(5) + b"".join(buffers) if any(buffers) else b"")


def test_a_write_that_the_disk_takes_half_of_raises(disk: Disk, tmp_path: Path) -> None:
    """Not a short count: the caller must not think the rest is there."""
    descriptor = disk.create(tmp_path / "file")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            disk.write(descriptor, [b"x" * 600, b"y" * 600], 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        disk.close(descriptor)


def test_a_replace_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    descriptors = len(os.listdir("/proc/self/fd"))
    for steps, disk in enumerate(until_it_survives(FailingDisk)):
        with disk.attempt():
            disk.replace(path, b"new")
        content = b"old" if steps < 4 else b"new"  # after create, write, sync and rename
        assert (path.read_bytes(), os.listdir(tmp_path)) == (content, ["file"])
        assert len(os.listdir("/proc/self/fd")) == descriptors
    assert steps > 4


@pytest.mark.parametrize("name", ["file/new", "x" * 250], ids=["below-a-file", "too-long-a-name"])
def test_a_replace_that_cannot_even_begin_names_the_file_that_was_to_be_replaced(
    disk: Disk, tmp_path: Path, name: str
) -> None:
    """The cause may also prevent the removal of the temporary file, whose name the user does not know."""
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(OSError, match=r"Not a directory|File name too long") as caught:
        disk.replace(tmp_path / name, b"new")

    assert caught.value.filename == f"{tmp_path}/{name}"


def test_replace_syncs_the_content_before_the_name_and_the_name_before_it_returns(tmp_path: Path) -> None:
    """Rename before sync would leave an empty file after a power cut."""
    disk = TracingDisk()
    disk.replace(tmp_path / "file", b"new")
    assert [name for name, _ in disk.steps][-3:] == ["sync", "rename", "sync_directory"]
    assert disk.steps[-1] == ("sync_directory", tmp_path.name)


@pytest.mark.parametrize("is_old", [False, True], ids=["renameat2", "an old C library"])
def test_a_rename_to_a_free_name_and_the_making_of_a_file_replace_none(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_old: bool
) -> None:
    if is_old:
        monkeypatch.setattr("wald.files.disk._libc", object)
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    for replacing in (lambda: disk.rename_to_free(old, new), lambda: disk.create(new)):
        with pytest.raises(FileExistsError):
            replacing()
    assert (old.read_bytes(), new.read_bytes()) == (b"old", b"new")

    disk.rename_to_free(old, tmp_path / "free")
    assert not old.exists()
    assert (tmp_path / "free").read_bytes() == b"old"
    (tmp_path / "directory").mkdir()
    disk.rename_to_free(tmp_path / "directory", tmp_path / "moved")
    assert (tmp_path / "moved").is_dir()
    assert not (tmp_path / "directory").exists()


def test_the_error_of_a_call_that_takes_a_descriptor_names_the_file(tmp_path: Path) -> None:
    script = f"""
import pathlib
from wald.files.disk import Disk
disk, path = Disk(), pathlib.Path({os.fspath(tmp_path)!r})
descriptor, source = disk.create(path / "file"), disk.create(path / "source")
disk.write(source, [b"x"], 0)
for step in (
    lambda: disk.write(descriptor, [b"x"], 0),
    lambda: disk.update(descriptor, b"x", 0),
    lambda: disk.copy(descriptor, source, 1, 0),
    lambda: disk.allocate(descriptor, 1),
    lambda: disk.sync(descriptor),
    lambda: disk.truncate(descriptor, 0),
    lambda: disk.close(descriptor),
    lambda: disk.sync_directory(path / "apart"),
):
    try:
        step()
    except OSError as error:
        print(error.errno, error.filename)
"""
    (tmp_path / "apart").mkdir()
    calls = "/pwritev,pwrite64,sendfile,fallocate,fdatasync,ftruncate,close"
    for name, failing, count in (("file", calls, 7), ("apart", "fsync", 1)):
        injected = ["-P", os.fspath(tmp_path / name), "-e", f"trace={failing}", "-e", f"inject={failing}:error=EIO"]
        done = run([strace(), "-qq", "-o", os.devnull, *injected, sys.executable, "-c", script])
        assert (done.stdout.decode().splitlines(), done.stderr) == ([f"5 {tmp_path}/{name}"] * count, b"")
        for each in ("file", "source"):
            (tmp_path / each).unlink()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"")
    return path


@pytest.fixture(params=["early", "late"])
def name(path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[FileIdentity]:
    """The first calls of a process are by stat(2), the others by statx(2)."""
    monkeypatch.setattr("wald.files.safe_open._early_calls", iter([1] * 9 if request.param == "early" else []))
    with path.open("rb") as file:
        yield FileIdentity(path, file.fileno())


def test_it_holds_whatever_is_written_and_not_if_it_is_removed_moved_or_replaced(
    path: Path, name: FileIdentity
) -> None:
    path.write_bytes(b"more")
    assert name.is_current()
    path.rename(path.with_name("elsewhere"))
    assert not name.is_current()
    path.write_bytes(b"")
    assert not name.is_current()
    path.unlink()
    path.symlink_to("elsewhere")
    assert not name.is_current()  # readers do not follow links
    path.unlink()
    path.with_name("elsewhere").rename(path)
    assert name.is_current()


def test_an_inode_of_another_device_is_another_file(path: Path) -> None:
    """Numbers are given out by each file system for itself: here both roots have the same one, mostly."""
    for folder in (Path("/proc"), Path("/sys"), path.parent):
        descriptor = os.open(folder, os.O_RDONLY)
        assert [
            FileIdentity(other, descriptor).is_current() for other in (Path("/proc"), Path("/sys"), path.parent)
        ] == [other == folder for other in (Path("/proc"), Path("/sys"), path.parent)]
        os.close(descriptor)


def test_where_statx_is_forbidden_stat_tells_as_much(tmp_path: Path) -> None:
    """Some container runtimes of 2019 forbid it."""
    script = """
import pathlib, sys
from wald.files import safe_open
from wald.files.safe_open import FileIdentity, is_regular
safe_open._early_calls = iter(())
path = pathlib.Path(sys.argv[1])
file = path.open("wb")
name = FileIdentity(path, file.fileno())
held = name.is_current()
path.rename(path.with_name("elsewhere"))
print(is_regular(file.fileno()), held, name.is_current())
"""
    line: list[str | Path] = [sys.executable, "-c", script, tmp_path / "file"]
    trace = tmp_path / "trace"

    done = subprocess.run(
        [strace(), "-o", trace, "-e", "inject=statx:error=EPERM", *line], capture_output=True, check=True
    )

    assert done.stdout == b"True True False\n"
    assert trace.read_text().count("EPERM") == 4


def test_only_a_regular_file_is_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By statx(2), by stat(2) in the first calls of a process, and with a C library without statx."""
    monkeypatch.setattr("wald.files.safe_open._early_calls", iter([1] * 4))
    for _ in range(2):
        for place in (path, path.parent, Path("/dev/null")):
            descriptor = os.open(place, os.O_RDONLY)
            assert is_regular(descriptor) == place.is_file()
            os.close(descriptor)
        assert not is_regular(descriptor)
        assert not FileIdentity(path, descriptor).is_current()
    monkeypatch.setattr("wald.files.safe_open._statx", lambda: lambda *_: -1)
    with path.open("rb") as file:
        assert FileIdentity(path, file.fileno()).is_current()
        assert is_regular(file.fileno())


HEADER = SegmentHeader(LOG_ID, 7, 3, TIME_NS, 7)


def scanned(raw: Path) -> list[ScannedBatch]:
    """The batches of records in a raw segment."""
    with raw.open("rb") as file:
        found = RawFile(file.fileno()).scan()
        return [batch for batch in found if isinstance(batch, ScannedBatch) and not batch.header.is_control]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A raw segment of some 600 KB in batches of 1 to 40 KB."""
    payloads = [b"a line of some bytes\n" * (50 + 1900 * (number % 7 == 0)) for number in range(100)]
    path = tmp_path / segment_name(7, Kind.RAW)
    path.write_bytes(segment(payloads, base=7)[0])
    return path


@pytest.fixture
def index(raw: Path) -> Path:
    """The index a writer makes of it."""
    path = raw.with_name(segment_name(7, Kind.INDEX))
    writer = SparseIndexWriter(path, HEADER)
    for batch in scanned(raw):
        writer.add(batch.header.base_sequence, batch.offset, batch.header.append_time_ns)
    writer.close()
    return path


def test_every_record_is_found_at_or_behind_the_place_the_index_names(raw: Path, index: Path) -> None:
    """Entries are at least an interval apart: the index of any segment stays small, and a seek scans little."""
    positions = [position for _, position, _ in find_index(index.parent, LOG_ID, 7).entries]
    assert len(positions) > 5
    largest = max(batch.header.total_bytes for batch in scanned(raw))
    distances = [after - before for before, after in itertools.pairwise(positions)]
    assert all(SPARSE_INTERVAL_BYTES <= distance < SPARSE_INTERVAL_BYTES + largest for distance in distances)
    with closing(RawSegment(Segment(7, Kind.RAW, raw), LOG_ID)) as opened:
        for batch in scanned(raw):
            header = batch.header
            for find, wanted in (
                (opened.position_of_sequence, header.base_sequence),
                (opened.position_of_sequence, header.end_sequence - 1),
                (opened.position_of_time, header.append_time_ns),
            ):
                place = find(wanted, None)
                assert place in {64, *positions}
                assert place <= batch.offset < place + 3 * SPARSE_INTERVAL_BYTES
                assert place == 64 or find(wanted, place) < place
    index.unlink()
    with closing(RawSegment(Segment(7, Kind.RAW, raw), LOG_ID)) as opened:
        assert (opened.position_of_sequence(999, None), opened.position_of_time(TIME_NS + 999, None)) == (64, 64)


def test_an_index_that_cannot_be_written_stops_nobody() -> None:
    """A full disk fails the append itself, where it matters."""
    before = len(os.listdir("/proc/self/fd"))
    for path in ("/dev/full", "/nowhere/at/all.idx"):
        writer = SparseIndexWriter(Path(path), HEADER)
        writer.add(8, 1 << 20, TIME_NS)
        writer.add(9, 2 << 20, TIME_NS)
        writer.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_is_written_behind_half_an_entry(tmp_path: Path) -> None:
    """A file size limit makes the kernel write a part, as a full disk does; then there is room again."""
    path = tmp_path / segment_name(7, Kind.INDEX)
    writer = SparseIndexWriter(path, HEADER)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 + 32 + 10, hard))
    try:
        writer.add(8, 1 << 20, TIME_NS)
        writer.add(9, 2 << 20, TIME_NS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.add(10, 3 << 20, TIME_NS)
    writer.close()
    assert path.stat().st_size == 64 + 32 + 10
    assert find_index(path.parent, LOG_ID, 7) == SparseIndex([(8, 1 << 20, TIME_NS)], HEADER.salt)


def test_a_truncated_index_is_a_shorter_one(index: Path) -> None:
    """It is not synced: after a power cut any part of it may be missing."""
    whole = find_index(index.parent, LOG_ID, 7)
    for cut in every_truncation(index.read_bytes()):
        index.write_bytes(cut)
        read = find_index(index.parent, LOG_ID, 7)
        assert read.salt == (None if len(cut) < 64 else HEADER.salt)
        entries = max(0, len(cut) - 64) // 32
        assert read.entries == whole.entries[:entries]


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
    for size, reserve in itertools.product(SEGMENTS, RESERVES):
        found = sizes(disk, size, reserve)

        assert 0 < found.segment_bytes <= size
        assert 0 <= found.reserve_bytes <= reserve
        assert found.payload_bytes > 0
        # It gathers in a file and is copied; when all else is reclaimed, both fit without the room for others.
        assert 2 * found.payload_bytes <= disk - disk // 32 - found.needed_bytes
        if reserve < disk // 8 and size < disk // 8:
            assert (found.segment_bytes, found.reserve_bytes) == (size, reserve)


@each_disk
def test_no_disk_is_ever_wedged_by_the_log_itself(disk: int) -> None:
    """Filled, blocked, read and reclaimed, it takes a whole segment again, over and over; the reserve stays free."""
    for size, reserve, compressed, sealed_each_time in itertools.product(SEGMENTS, RESERVES, (0.01, 1.0), (0, 2)):
        model = Model(disk, sizes(disk, size, reserve), compressed)
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
