"""Records that are read again: by one reader while they follow each other, and from a bounded cache."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from logs import Built
from running import eventually

from wald.reading.assembler import Batch
from wald.work.source import BatchCache, CachedBatch, Source


def test_records_that_follow_each_other_are_read_again_by_one_reader_that_keeps_no_file_open(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (b"a", b"b", b"c"):
        built.lines("a", [name] * 3)
    log, starts = built.log, list[int]()
    batches = log.batches

    def counted(route: str, start: int, **options: Any) -> Iterator[Batch]:
        starts.append(start)
        return batches(route, start, **options)

    monkeypatch.setattr(log, "batches", counted)
    reading = Source(log, "a", 1, lambda: None, lambda _: None, lambda _: None)
    for first in (1, 4, 7):
        eventually(lambda: reading.next(0))
        values = (reading.pop() or pytest.fail("lost")).values_of(first, first + 2)
        assert list(values) == [b"abc"[first // 3 :][:1]] * 3
    monkeypatch.setattr(reading, "_cache", BatchCache(1 << 20))
    opened = open_files(built)
    for first in (5, 7, 1, 8):
        assert list(reading.rows(first).values_of(first, first)) == [b"abc"[(first - 1) // 3 :][:1]]
        assert open_files(built) == opened
    reading.close()
    assert starts == [1, 5, 1]


def test_reading_again_does_not_search_the_log_for_the_next_records_of_a_rare_route(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers of the group would wait for as long as that takes."""
    monkeypatch.setattr("wald.work.source._AGAIN_DISTANCE", 1)
    for number in range(6):
        built.lines("a", [b"%d" % number], cut=number % 2 == 1)
    log, read = built.log, list[int]()
    reading = Source(log, "a", 7, lambda: None, lambda _: None, lambda _: None)
    batches = log.batches

    def counted(route: str, start: int, **options: Any) -> Iterator[Batch]:
        for batch in batches(route, start, **options):
            read.append(batch.first_sequence)
            yield batch

    monkeypatch.setattr(log, "batches", counted)
    reading.rows(1)
    reading.rows(4)
    reading.close()
    assert read == [1, 2, 4, 5]


def open_files(built: Built) -> list[str]:
    """Return the segment files that this process has open."""
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    targets = (os.readlink(link) for link in links if os.path.lexists(link))
    return sorted(target for target in targets if target.startswith(str(built.root.segments)))


def test_what_was_used_least_lately_is_not_kept_beyond_the_bound(built: Built) -> None:
    for name in (b"a", b"b", b"c"):
        built.lines("a", [name] * 3)
    batches = [CachedBatch.of(batch) for batch in built.log.batches("a")]
    kept = BatchCache(3 * batches[0].size - 1)
    for batch in batches:
        kept.add(batch)
        kept.rows(1)
    assert [kept.rows(first) is not None for first in (1, 4, 7, 10)] == [True, False, True, False]
