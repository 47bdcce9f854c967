"""Cache of batches: redelivered records are read ahead once the previous batch is used."""

from __future__ import annotations

from collections.abc import Iterator
from threading import current_thread

import pytest
from logs import Built
from running import eventually

from wald.errors import NotFound
from wald.reading.assembler import Batch
from wald.work.source import BatchCache, CachedBatch

END = 10  # three batches of three records each


class Reads:
    """Reader of the log that can fail and that records start positions and threads."""

    def __init__(self, built: Built) -> None:
        for name in (b"a", b"b", b"c"):
            built.lines("a", [name] * 3)
        self.log = built.log
        self.starts: list[int] = []
        self.threads: set[str] = set()
        self.fails = False

    def __call__(self, first: int) -> Iterator[Batch]:
        self.starts.append(first)
        self.threads.add(current_thread().name)
        if self.fails:
            raise NotFound("reclaimed", hint="")
        return self.log.batches("a", first)

    def decoded(self, first: int, *, is_reread: bool = True) -> CachedBatch:
        return CachedBatch.of(next(self.log.batches("a", first)), is_reread=is_reread)


@pytest.fixture
def reads(built: Built) -> Reads:
    return Reads(built)


@pytest.fixture
def kept(reads: Reads) -> Iterator[BatchCache]:
    kept = BatchCache(1 << 20, reads)
    yield kept
    kept.close()


def values(kept: BatchCache, first: int, last: int, read_end: int = END) -> list[bytes]:
    rows = kept.rows(first, read_end)
    return [] if rows is None else list(rows.values_of(first, last))


def test_the_batch_behind_one_that_was_read_again_is_read_by_another_thread(kept: BatchCache, reads: Reads) -> None:
    kept.add(reads.decoded(1))
    assert values(kept, 1, 2) == [b"a", b"a"]
    for first, value in ((4, b"b"), (7, b"c")):
        eventually(lambda first=first: values(kept, first, first))  # type: ignore[misc]
        assert values(kept, first + 1, first + 2) == [value] * 2
    assert (reads.starts, reads.threads) == ([4, 7], {"wald-work-again"})


def test_nothing_is_read_ahead_for_what_was_read_in_order_or_is_not_taken_in(kept: BatchCache, reads: Reads) -> None:
    kept.add(reads.decoded(1, is_reread=False))
    kept.add(reads.decoded(4))
    assert values(kept, 1, 3) + values(kept, 4, 6, read_end=7) == [b"a"] * 3 + [b"b"] * 3
    kept.close()
    assert reads.starts == []


def test_what_cannot_be_read_ahead_is_left_to_who_wants_it(kept: BatchCache, reads: Reads) -> None:
    reads.fails = True
    kept.add(reads.decoded(1))
    values(kept, 1, 1)
    eventually(lambda: reads.starts == [4])
    assert values(kept, 4, 4) == []
    reads.fails = False
    kept.add(reads.decoded(4))
    values(kept, 4, 4)
    eventually(lambda: values(kept, 7, 7) == [b"c"])


def test_what_was_used_least_lately_is_not_kept_beyond_the_bound(reads: Reads) -> None:
    kept = BatchCache(3 * reads.decoded(1).size - 1, reads)
    for first in (1, 4, 7):
        kept.add(reads.decoded(first, is_reread=False))
        values(kept, 1, 1)
    assert [bool(values(kept, first, first)) for first in (1, 4, 7)] == [True, False, True]
    kept.close()
