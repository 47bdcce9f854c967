"""Reads of a ledger that is cut at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import Unsynced

from wald.checking.audit_report import DeletionAudit
from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.ledger_read import LedgerLine, LedgerLines, parts_of
from wald.files.ledger_write import Ledger
from wald.retention.history import History

BASES = [10 * number + 1 for number in range(60)]
READINGS: dict[str, Callable[[LedgerLines], Iterator[LedgerLine]]] = {
    "oldest first": LedgerLines.oldest_first,
    "newest first": LedgerLines.newest_first,
    "about": lambda lines: lines.about(1, 600),
    "written": lambda lines: lines.written_between(0, 1000),
}


def deletion(base: int) -> dict[str, Any]:
    last = base + 9
    held = {"route": "a", "count": 10, "first": base, "last": last, "cursors": {"processed": last}}
    return {
        "event": "reclaimed",
        "base": base,
        "last": last,
        "at": base,
        "rule": "read",
        "sha256": "x",
        "routes": [held],
    }


def append(path: Path, bases: list[int], part_bytes: int) -> None:
    """Delete, and cut the ledger if it is longer than a part."""
    ledger = Ledger(path, Unsynced(), part_bytes=part_bytes)
    ledger.append(*map(deletion, bases))
    ledger.cut()
    ledger.close()


def cut(path: Path) -> None:
    """Seal the active file in parts of a few lines."""
    before = len(parts_of(path))
    append(path, [], 1000)
    assert len(parts_of(path)) > before + 1


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Forty deletions in parts, twenty in the active file."""
    (tmp_path / "ledger").mkdir()
    path = tmp_path / "ledger" / "reclaim.jsonl"
    append(path, BASES[:40], 3000)
    append(path, BASES[40:], 1 << 20)
    assert len(parts_of(path)) > 1
    return Root(tmp_path)


@pytest.fixture
def path(root: Root) -> Path:
    return root.ledger / "reclaim.jsonl"


@pytest.mark.parametrize("begun", [1, 45])
@pytest.mark.parametrize("reading", READINGS)
def test_a_reading_gives_each_line_once_though_the_ledger_is_cut_and_looked_up_meanwhile(
    path: Path, reading: str, begun: int
) -> None:
    lines, found = LedgerLines(path), list[int]()
    for number, line in enumerate(READINGS[reading](lines)):
        if number == begun:
            cut(path)
        if line.is_range("reclaimed"):
            found.append(line.entry["base"])
            # The blocks of the new parts start where those of the old active file did, and end elsewhere.
            about = [each.number for base in (line.low, 401, 591) for each in lines.about(base, base)]
            assert about == [line.number, *about[1:]]
            assert len(set(about[1:])) == len(about[1:]) == 2

    assert sorted(found) == BASES


def test_no_file_of_a_ledger_stays_open_between_lines(path: Path) -> None:
    def held() -> list[str]:
        links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return [link for link in links if link.startswith(str(path.parent))]

    lines = LedgerLines(path)
    readings = [lines.newest_first(), lines.oldest_first(), lines.about(1, 600), lines.written_between(0, 1000)]
    found = [[next(reading)] for reading in readings]
    cut(path)
    assert held() == []
    assert [len([*each, *reading]) for each, reading in zip(found, readings, strict=True)] == [
        len(list(lines.newest_first())) - 1
    ] * 2 + [60] * 2

    parts_of(path)[0].path.write_bytes(b"damaged")
    for _ in range(3):
        with pytest.raises(Damaged):
            list(LedgerLines(path).oldest_first())
    assert held() == []


def test_deletions_are_found_once_though_the_ledger_is_cut_meanwhile(root: Root, path: Path) -> None:
    gone = History(root).reclaimed_segments(1, 600)
    found = [next(gone).first]
    cut(path)
    assert sorted([*found, *(each.first for each in gone)]) == BASES


def test_legal_deletions_stay_legal_though_the_ledger_is_cut_while_they_are_judged(root: Root, path: Path) -> None:
    story = DeletionAudit(root)
    events = story.events()
    found = [next(events)]
    append(path, [601], 1 << 20)
    cut(path)
    found += events

    assert [event.entry["base"] for event in found if event.ruling] == BASES
    assert [event.ruling.errors for event in found if event.ruling and event.ruling.errors] == []
    assert story.not_allowed == 0
