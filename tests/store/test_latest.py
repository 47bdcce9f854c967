"""Start positions of a route's last records, compared with a read of all records."""

from __future__ import annotations

import random

import pytest
from logs import Built

from wald.format.sealed_index import BatchTable, SealedIndex
from wald.reading.latest import start_of_latest
from wald.reading.pattern import Matcher

END = (1 << 64) - 1


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Eleven segments, sealed, cut and active; route rare is in two of them; lines in pieces, and columns."""
    chance = random.Random(7)
    built = Built(tmp_path_factory.mktemp("latest") / "log")
    for number in range(10):
        for _ in range(chance.randrange(1, 6)):
            built.lines("a", [b"%d" % chance.randrange(30) for _ in range(chance.randrange(1, 900))])
            built.columns("b", [b"x", b"7"])
        if number in (2, 7):
            built.lines("rare", [b"r1", b"r7", b"r3"])
        built.piece("a", b"begins here", begins=True, ends=False)
        built.piece("a", b", and ends\n", begins=False, ends=True)
        built.cut()
        if number < 7:
            built.seal()
    built.lines("b", [b"1", b"2", b"3"])
    return built


@pytest.mark.parametrize(
    ("route", "last", "pattern"),
    [("a", END, None), ("a", "middle", b"7"), ("b", END, b"7"), ("b", 3, None), ("rare", END, None), (None, END, b"7")],
)
def test_the_last_records_are_found_from_behind(
    built: Built, route: str | None, last: int | str, pattern: bytes | None
) -> None:
    upto = built.last // 2 if last == "middle" else int(last)
    matcher = None if pattern is None else Matcher(pattern)
    every = [
        record.sequence
        for record in built.log.records(route)
        if record.sequence <= upto and (matcher is None or matcher.matches(record.value))
    ]
    for count in (0, 1, 2, 3, 20, 1000, 10**6):
        found = matcher.matching_records if matcher else None
        start = start_of_latest(built.view, route, count, last=upto, find_records=found)
        assert [sequence for sequence in every if sequence >= start] == (every[-count:] if count else []), count


def test_only_segments_that_hold_a_rare_route_are_unpacked(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of the other segments is enough."""
    unpacked: list[int] = []
    table = SealedIndex.batch_table

    def counted(index: SealedIndex) -> BatchTable:
        unpacked.append(index.base_sequence)
        return table(index)

    monkeypatch.setattr(SealedIndex, "batch_table", counted)
    start_of_latest(built.view, "rare", 5, last=END)

    assert len(unpacked) == 1
