"""Damaged logs compared with the intact log as an oracle.

After damage at a few places of any segment, records are read once, in order and unchanged, and missing records are
reported.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from contents import errors, records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs import Built
from sample_segments import batch, joined
from spoiling import DAMAGE, Damage

import wald
from wald.errors import Damaged
from wald.format.batch import HEADER, padded
from wald.format.records import Record

FORGED = b"forged"


def forge(built: Built, route: str) -> bytes:
    """Return a payload that contains a batch of another route, encoded for its future position."""
    writer = built.writer
    at = writer.position + HEADER.size + padded(len(route))
    forged = batch(FORGED + b"\n", base=writer.state.next_sequence, route=b"other", append_time_ns=built.now_ns)
    return joined([forged], start=at, salt=writer._salt) + b"\n"


def build(path: Path) -> None:
    """Three segments, one in each form; records short and long, in pieces and in columns, and forged ones in them."""
    built = Built(path, segment_max_bytes=1 << 20)
    for part in range(3):
        for number in range(12):
            built.lines("a", [b"%d-%d" % (part, number), b"x" * (37 * number)])
            payload = forge(built, "web")
            built.append("web", payload, payload.count(b"\n"))
        built.piece("a", b"begin" * 100, begins=True, ends=False)
        built.columns("b", [b"one", b"\n", b""], keys=[b"k", None, b""])
        built.piece("a", b"end\n", begins=False, ends=True)
        built.lines("b", [b"%d" % number for number in range(40)])
        if part < 2:
            built.cut()
        if part == 0:
            built.seal()
    built.crash()


class Written:
    """The log, and its records by their sequences."""

    def __init__(self, path: Path) -> None:
        self.path = path
        build(path)
        self.records = {record.sequence: record for record in records(path)}
        assert len(self.records) > 150


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("written") / "log")


SPOILED = st.lists(st.tuples(st.integers(0, 2), DAMAGE), min_size=1, max_size=3)


def check_reading(root: Path, written: dict[int, Record], start: int = 1) -> set[int]:
    """Check that no record is forged, repeated or silently missing; return the records read."""
    reported: list[Damaged] = []
    found = list(wald.open(root).records(start=start, on_damage=reported.append))
    for record in found:
        assert record == written[record.sequence]
    there = {record.sequence for record in found}
    assert len(there) == len(found)
    assert there == {sequence for sequence in written if sequence >= start} or reported
    return there


def check_damaged(log: Written, spoiled: list[tuple[int, Damage]], start: int) -> None:
    written = log.records
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "log"
        shutil.copytree(log.path, root)
        segments = sorted(file for file in (root / "segments").iterdir() if file.suffix in (".wal", ".zst"))
        assert len(segments) == 3
        for number, damage in spoiled:
            data = segments[number].read_bytes()
            segments[number].write_bytes(damage(data) if data else data)
        there = check_reading(root, written)
        check_reading(root, written, start)
        assert len(there) == len(written) or errors(root)

        built = Built(root, epoch=2)
        assert check_reading(root, written) <= there
        newest = set(range(segments_base(segments[2]), max(written) + 1))
        assert newest <= there or built.report.errors
        added = built.lines("a", [b"new"])
        assert added > max(written)
        assert [record.value for record in wald.open(root).records(start=added)] == [b"new"]
        built.crash()


def segments_base(path: Path) -> int:
    return int(path.name.split(".")[0])


QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(max_examples=20, deadline=None, suppress_health_check=QUIET)
@given(spoiled=SPOILED, start=st.integers(1, 150))
def test_what_is_read_was_written_and_what_is_missing_is_reported(
    written: Written, spoiled: list[tuple[int, Damage]], start: int
) -> None:
    check_damaged(written, spoiled, start)


@pytest.mark.slow
@settings(max_examples=800, deadline=None, suppress_health_check=QUIET)
@given(spoiled=SPOILED, start=st.integers(1, 150))
def test_what_is_read_was_written_and_what_is_missing_is_told_at_length(
    written: Written, spoiled: list[tuple[int, Damage]], start: int
) -> None:
    check_damaged(written, spoiled, start)
