"""The shares of a run equal the portions that a single reader would cut."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Built
from some_logs import STEPS, Step, build

from wald.log import Log
from wald.reading.assembler import Batch
from wald_archive.parts import Bytes, Records, Size, bundle_batches
from wald_spark.engine import Share, Stretch, decode, encode, shares, stretches


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return Built(tmp_path / "root")


def shares_of(log: Log, size: Size, *, pieces: list[int], stretch_bytes: int) -> list[Share]:
    """Measure pieces that begin at the given records, even in the middle of a batch."""
    last = max((record.sequence for record in log.records()), default=0)
    starts = sorted({1, *(start for start in pieces if start <= last), last + 1})
    measured: list[Stretch] = []
    for start, following in pairwise(starts):
        found = stretches(log.batches("a", start, following - 1), size, limit_bytes=stretch_bytes)
        measured += decode(encode(found))

    def read(stretch: Stretch) -> Iterator[Batch]:
        return log.batches("a", stretch.first, stretch.last)

    return list(shares(measured, size, after=0, read=read))


def expected(log: Log, size: Size) -> list[Share]:
    found, after = [], 0
    for portion in bundle_batches(log.batches("a"), size):
        sequences = [record.sequence for batch in portion for record in batch.records()]
        found.append(Share(after, sequences[0], sequences[-1]))
        after = sequences[-1]
    return found


@settings(max_examples=80, deadline=None)
@given(
    steps=STEPS,
    size=st.builds(Bytes, st.integers(1, 60)) | st.builds(Records, st.integers(1, 9)),
    pieces=st.lists(st.integers(1, 40), max_size=4),
    stretch_bytes=st.sampled_from([1, 20, 1000]),
)
def test_shares_are_portions(steps: list[Step], size: Size, pieces: list[int], stretch_bytes: int) -> None:
    """The batches of a share equal those of the portion: the same bytes of the same stored batches."""
    with tempfile.TemporaryDirectory() as folder:
        log = build(Path(folder) / "root", steps).log
        found = shares_of(log, size, pieces=pieces, stretch_bytes=stretch_bytes)
        assert found == expected(log, size)
        for share, portion in zip(found, bundle_batches(log.batches("a"), size), strict=True):
            assert list(log.batches("a", share.first, share.last)) == list(portion)


@pytest.mark.parametrize("size", [Records(100), Bytes(10_000)])
def test_only_stretches_in_which_a_bundle_ends_are_read(built: Built, size: Size) -> None:
    for _ in range(10):
        built.lines("a", [b"x" * 99] * 10)
    measured = list(stretches(built.log.batches("a"), size, limit_bytes=1))
    assert len(measured) == 10

    def never(stretch: Stretch) -> list[Batch]:
        raise AssertionError(stretch)

    assert list(shares(measured, size, after=0, read=never)) == [Share(0, 1, 100)]


def test_small_batches_are_measured_together(built: Built) -> None:
    for _ in range(10):
        built.lines("a", [b"x" * 99])
    assert list(stretches(built.log.batches("a"), Records(1), limit_bytes=300)) == [
        Stretch(1, 3, 3),
        Stretch(4, 6, 3),
        Stretch(7, 9, 3),
        Stretch(10, 10, 1),
    ]


def test_nothing_has_no_shares() -> None:
    assert list(shares(decode(encode([])), Records(1), after=0, read=lambda _: [])) == []
