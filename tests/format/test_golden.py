"""Golden files: what was written by the first release of a format version is read and written in the same way today."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from golden.samples import FOLDER, SAMPLES, SEALED_SEGMENT, SEGMENT_PAYLOADS, Sample

from wald.format.names import Kind, segment_name
from wald.store.files.disk import Disk
from wald.store.segments.compression import SealedFile, compress_segment
from wald.store.segments.raw import RawFile, ScannedBatch

MAKE_GOLDEN = Path(__file__).parents[2] / "scripts" / "make-golden"


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_golden_file_decodes_to_its_value(sample: Sample) -> None:
    assert sample.decode(sample.path.read_bytes()) == sample.value


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.exact], ids=lambda sample: sample.name)
def test_a_value_encodes_to_its_golden_file(sample: Sample) -> None:
    assert sample.encode() == sample.path.read_bytes()


@pytest.mark.parametrize("sample", [s for s in SAMPLES if not s.exact], ids=lambda sample: sample.name)
def test_a_compressed_value_comes_back(sample: Sample) -> None:
    """Its bytes depend on the version of zstd; what they decode to does not."""
    assert sample.decode(sample.encode()) == sample.value


def test_every_golden_file_has_a_sample() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {s.name for s in SAMPLES} | {SEALED_SEGMENT.name}


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
        index, table = golden.index, golden.index.batch_table()

    assert raw == SEALED_SEGMENT.with_suffix("").read_bytes()

    disk = Disk()
    path = tmp_path / segment_name(1, Kind.SEALED)
    source, target = disk.open(SEALED_SEGMENT.with_suffix("")), disk.create(path)
    compress_segment(source, target, disk)
    disk.close(source)
    disk.close(target)
    with SealedFile(path) as again:
        assert again.index.batch_table() == table
        assert (again.index.routes, again.index.sha256) == (index.routes, index.sha256)
        assert (again.index.base_sequence, again.index.next_sequence) == (index.base_sequence, index.next_sequence)


def test_making_golden_files_does_not_overwrite_them(tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in FOLDER.iterdir()}

    done = subprocess.run([sys.executable, MAKE_GOLDEN], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "exists" in done.stderr
    assert {path.name: path.read_bytes() for path in FOLDER.iterdir()} == before
