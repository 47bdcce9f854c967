"""A restore gives the same bytes as the log, or an error that names the bundle."""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
from archives import archive, bags, restored
from damage import peak_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Built
from some_logs import STEPS, Step, build

from wald.errors import Damaged, NotFound
from wald.files.disk import Disk
from wald_archive.codecs import Codec
from wald_archive.lookup import runs_of
from wald_archive.objects import Directory
from wald_archive.parts import Bytes, Records

MIB = 1 << 20


def read(built: Built, *, first: int = 1, last: int | None = None, as_json: bool = False) -> bytes:
    """Return the output of ``wald read``."""
    batches = [batch for batch in built.log.batches("a", "earliest", last) if batch.last_sequence >= first]
    trimmed = [batch.between(first, batch.last_sequence) for batch in batches]
    if not as_json:
        return b"".join(bytes(batch.raw()) for batch in trimmed if batch)
    return b"".join(record.to_json().encode() + b"\n" for batch in trimmed if batch for record in batch.records())


@pytest.mark.parametrize("examples", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_restored_is_what_was_read(examples: int) -> None:
    """For any log, packed in one run or two, completely or in part, raw or as JSON."""
    given_anything = given(
        steps=STEPS,
        records=st.integers(1, 8),
        codec=st.sampled_from(Codec),
        bounds=st.tuples(st.integers(1, 30), st.none() | st.integers(1, 30)),
        runs=st.integers(0, 6),
    )
    settings(max_examples=examples, deadline=None)(given_anything(assert_restored))()


def assert_restored(steps: list[Step], records: int, codec: Codec, bounds: tuple[int, int | None], runs: int) -> None:
    first, last = bounds
    with tempfile.TemporaryDirectory() as folder:
        dest = Path(folder) / "dest"
        built = build(Path(folder) / "root", steps[:runs])
        archive(built, dest, size=Records(records), codec=codec)
        for step in steps[runs:]:
            step.append(built)
        archive(built, dest, size=Records(records), codec=codec)
        if not read(built):
            with pytest.raises(NotFound, match="there is no route 'a' here"):
                restored(dest)
            return

        for as_json in (False, True):
            assert restored(dest, as_json=as_json) == read(built, as_json=as_json)
            expected = read(built, first=first, last=last, as_json=as_json)
            assert restored(dest, first=first, last=last, as_json=as_json) == expected


@pytest.fixture
def three(built: Built, dest: Path) -> Path:
    """Records 1 to 6 in a bag of two bundles, 7 to 9 in a bag of one."""
    built.lines("a", [b"%d" % number for number in range(1, 7)])
    archive(built, dest, size=Records(3))
    built.lines("a", [b"%d" % number for number in range(7, 10)])
    archive(built, dest, size=Records(3))
    return dest


def harm(dest: Path, first: int) -> Path:
    """Change a byte of a record in the bundle that begins with ``first``."""
    (bundle,) = dest.rglob(f"a-{first:020d}.tar")
    data = bytearray(bundle.read_bytes())
    data[data.index(b"%d\n" % first)] ^= 0x10
    bundle.write_bytes(data)
    return bundle


def test_nothing_of_a_damaged_bundle_is_given_out(three: Path) -> None:
    bundle = harm(three, 4)
    pieces = runs_of(Directory(three, Disk()), "a", 1, None)

    assert next(pieces).data == b"1\n2\n3\n"
    with pytest.raises(Damaged, match=f"{bundle}: its sha256 is not"):
        next(pieces)


def test_bundles_outside_the_range_are_not_read(three: Path) -> None:
    """So damage in them does not matter."""
    harm(three, 1)
    harm(three, 7)

    assert restored(three, first=4, last=6) == b"4\n5\n6\n"
    assert restored(three, first=5, last=5) == b"5\n"


def test_a_bundle_that_is_gone_is_reported(three: Path) -> None:
    (bundle,) = three.rglob(f"a-{4:020d}.tar")
    bundle.unlink()

    with pytest.raises(Damaged, match=f"{bundle}: missing"):
        restored(three)


def test_a_gap_inside_the_range_is_reported_and_one_outside_does_not_matter(three: Path, built: Built) -> None:
    """The bag of records 7 to 9 is gone, and one follows."""
    built.lines("a", [b"10"])
    archive(built, three)
    shutil.rmtree(bags(three)[1])
    said = "begins after record 9, and no bundle has the records after record"
    for first, last in ((1, None), (6, None), (1, 8), (1, 7), (6, 7)):
        with pytest.raises(Damaged, match=said) as damaged:
            restored(three, first=first, last=last)
        assert "--from 10" in damaged.value.hint
    assert restored(three, first=1, last=6) == b"1\n2\n3\n4\n5\n6\n"
    for last in (None, 99):
        assert restored(three, first=10, last=last) == b"10\n"


def test_a_missing_beginning_is_reported(three: Path) -> None:
    """The first bundle that is left follows one that is not here."""
    shutil.rmtree(bags(three)[0])

    with pytest.raises(Damaged, match="begins after record 6, and no bundle has the records after record 0"):
        restored(three)
    assert restored(three, first=7) == b"7\n8\n9\n"


def test_what_two_groups_have_archived_comes_once(built: Built, dest: Path) -> None:
    built.lines("a", [b"1", b"2", b"3"])
    archive(built, dest)
    built.lines("a", [b"4"])
    archive(built, dest, group="cold")

    assert restored(dest) == b"1\n2\n3\n4\n"


def test_a_manifest_that_is_damaged_is_reported(three: Path) -> None:
    path = bags(three)[0] / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 7'))

    with pytest.raises(Damaged, match=f"{path}: format 7"):
        restored(three)


@pytest.mark.parametrize("codec", [Codec.ZST, Codec.GZ])
def test_memory_does_not_grow_with_the_bundle(tmp_path: Path, codec: Codec) -> None:
    line = os.urandom(500).replace(b"\n", b" ") + b"\n"
    peaks = []
    for times in (24, 96):
        built = Built(tmp_path / f"root-{times}", segment_max_bytes=1 << 30)
        for _ in range(times):
            built.append("a", line * 1000, 1000)
        dest = tmp_path / f"dest-{times}"
        archive(built, dest, size=Bytes(1 << 30), codec=codec)
        peaks.append(peak_bytes(partial(discard, Directory(dest, Disk()))))

    assert peaks[1] < peaks[0] + 8 * MIB


def discard(destination: Directory) -> None:
    for _ in runs_of(destination, "a", 1, None):
        """Only the memory is of interest."""
