"""Golden files: the bytes of the first release still decode."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from golden.samples import FOLDER, PEER, SAMPLES, SEALED_SEGMENT, SEGMENT_PAYLOADS, SHRUNK_SEGMENT, Sample, keeps
from shrinking import shrink_file

from wald.files.disk import Disk
from wald.format.names import Kind, segment_name
from wald.format.sealed_index import DroppedRecords, RouteEntry
from wald.segments.raw_scan import RawFile, ScannedBatch
from wald.segments.sealed_file import SealedFile, compress_segment
from wald.segments.shrinking import check_shrunk


def _id(sample: Sample) -> str:
    return sample.name


MAKE_GOLDEN = Path(__file__).parents[2] / "scripts" / "make-golden"


def test_a_golden_file_decodes_to_its_value() -> None:
    for sample in SAMPLES:
        assert sample.decode(sample.path.read_bytes()) == sample.value


def test_a_value_encodes_to_its_golden_file_and_a_compressed_one_comes_back() -> None:
    """Compressed bytes depend on the version of zstd; their contents do not."""
    for sample in SAMPLES:
        if sample.exact:
            assert sample.encode() == sample.path.read_bytes()
        else:
            assert sample.decode(sample.encode()) == sample.value


def test_every_golden_file_has_a_sample() -> None:
    assert set(FOLDER.iterdir()) == {*(sample.path for sample in SAMPLES), SEALED_SEGMENT, SHRUNK_SEGMENT}


def test_the_golden_segment_holds_its_batches() -> None:
    descriptor = os.open(SEALED_SEGMENT.with_suffix(""), os.O_RDONLY)
    try:
        raw = RawFile(descriptor)
        scanned = [found for found in raw.scan() if isinstance(found, ScannedBatch)]
        assert [raw.payload(found) for found in scanned if not found.header.is_control] == SEGMENT_PAYLOADS
    finally:
        os.close(descriptor)


def test_the_golden_sealed_segment_gives_back_the_raw_one(tmp_path: Path) -> None:
    with SealedFile(SEALED_SEGMENT) as golden:
        raw = b"".join(golden.frame(number) for number in range(len(golden.index.frames)))
        index, table, peers = golden.index, golden.index.batch_table(), golden.index.peers()

    assert raw == SEALED_SEGMENT.with_suffix("").read_bytes()
    assert list(peers.values()) == [PEER]

    disk = Disk()
    path = tmp_path / segment_name(1, Kind.SEALED)
    source, target = disk.open(SEALED_SEGMENT.with_suffix("")), disk.create(path)
    compress_segment(source, target, disk)
    disk.close(source)
    disk.close(target)
    with SealedFile(path) as again:
        assert (again.index.batch_table(), again.index.peers()) == (table, peers)
        assert (again.index.routes, again.index.sha256) == (index.routes, index.sha256)
        assert (again.index.base_sequence, again.index.next_sequence) == (index.base_sequence, index.next_sequence)


def test_the_golden_shrunk_segment_holds_what_was_kept(tmp_path: Path) -> None:
    made = tmp_path / SHRUNK_SEGMENT.name
    again = shrink_file(SEALED_SEGMENT, made, keeps)
    with SealedFile(SHRUNK_SEGMENT) as golden, SealedFile(SEALED_SEGMENT) as sealed:
        check_shrunk(sealed, golden, replace(again, index=golden.index), keeps)
        assert golden.index.shrunk == DroppedRecords(
            sealed.index.sha256, SEALED_SEGMENT.stat().st_size, [(1, 3)], [RouteEntry("web", 3, 1, 3, 9)]
        )
        assert list(golden.index.peers().values()) == [PEER]
        assert (golden.index.sha256, list(golden.index.routes)) == (
            again.index.sha256,
            [RouteEntry("web", 20, 4, 23, 140)],
        )


def test_making_golden_files_does_not_overwrite_them(tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in FOLDER.iterdir()}

    done = subprocess.run([sys.executable, MAKE_GOLDEN], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "exists" in done.stderr
    assert {path.name: path.read_bytes() for path in FOLDER.iterdir()} == before
