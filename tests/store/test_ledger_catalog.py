"""A ledger of many parts: one of 64 says what all before it are about, so that a look-up opens a few of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from logs import Unsynced

from wald.errors import Damaged
from wald.format.ledger_part import encode_index
from wald.store.files.directory import Root
from wald.store.files.ledger import Ledger
from wald.store.files.ledger_parts import PartName, parts_of, stored_index, summaries
from wald.store.files.lines import Lines
from wald.store.retention.history import History

LINES = 2600
PART_BYTES = 1500


def root_with(path: Path, line: Callable[[int], dict[str, Any]]) -> Root:
    """A root whose ledger of deletions was cut into parts."""
    (path / "ledger").mkdir(parents=True)
    ledger = Ledger(path / "ledger" / "reclaim.jsonl", Unsynced(), part_bytes=PART_BYTES)
    ledger.append(*(line(number) for number in range(LINES)))
    ledger.cut()
    ledger.append(line(LINES))
    ledger.close()
    return Root(path)


def deletion(number: int) -> dict[str, Any]:
    moment = {"boot": "b", "boottime": 100 * number}
    return {"event": "reclaimed", "base": 10 * number + 1, "last": 10 * number + 10, "at": 1000 + number} | moment


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return root_with(tmp_path / "root", deletion)


@pytest.fixture
def path(root: Root) -> Path:
    return root.ledger / "reclaim.jsonl"


def forget_catalogs(path: Path) -> None:
    for part in parts_of(path):
        index = stored_index(part)
        lines = part.path.read_bytes()[: sum(frame.stored_bytes for frame in index.frames)]
        part.path.write_bytes(lines + encode_index(replace(index, before=[])))


def answers(root: Root) -> list[object]:
    """What the ledger says, asked in each of the ways that there are."""
    lines = Lines(root.ledger / "reclaim.jsonl")
    written = [line.number for line in lines.written(1500, 1700)]
    elapsed = [lines.elapsed_ns(line) for line in lines.about(7000, 7100)]
    orders = [line.number for line in lines.oldest_first(behind=1234)], [line.number for line in lines.newest_first()]
    history = History(root)
    deletions = [history.reclaimed(sequence) for sequence in range(1, 10 * LINES + 30, 997)]
    there = list(history.deletions_of({1, 10_001, 25_991, 25_992}))
    return [written, elapsed, orders, lines.highest("reclaimed"), lines.elapsed().clock, deletions, there]


def behind_a_catalog(path: Path) -> PartName:
    return parts_of(path)[10]


def test_one_part_of_64_says_what_all_before_it_are_about(path: Path) -> None:
    parts = parts_of(path)
    indexes = [stored_index(part) for part in parts]

    assert len(parts) > 130
    assert [number for number, index in enumerate(indexes) if index.before] == list(range(64, len(parts), 64))
    assert indexes[128].before == [index.summary() for index in indexes[:128]]
    assert list(summaries(parts)) == [index.summary() for index in indexes]
    assert list(summaries(parts, indexes[64].before)) == [index.summary() for index in indexes[64:]]


def test_answers_are_the_same_without_a_catalog(root: Root, path: Path) -> None:
    with_catalogs = answers(root)
    assert with_catalogs[0] == list(range(501, 701))
    forget_catalogs(path)
    assert answers(root) == with_catalogs


def test_a_ledger_that_has_grown_by_many_parts_is_read_on(root: Root, path: Path) -> None:
    lines = Lines(path)
    assert lines.highest("reclaimed") == 10 * LINES + 10
    ledger = Ledger(path, Unsynced(), part_bytes=PART_BYTES)
    ledger.append(*(deletion(number) for number in range(LINES + 1, 2 * LINES)))
    ledger.cut()
    ledger.close()

    assert len(parts_of(path)) > 192
    assert [line.low for line in lines.about(1, 20 * LINES)] == [10 * n + 1 for n in reversed(range(2 * LINES))]
    assert answers(root)[2] == (
        [line.number for line in lines.oldest_first(behind=1234)],
        [line.number for line in lines.newest_first()],
    )


def test_a_part_that_cannot_be_read_concerns_the_look_ups_that_need_it(root: Root, path: Path) -> None:
    part = behind_a_catalog(path)
    known = stored_index(part).summary()
    part.path.write_bytes(b"damaged")

    held = range(known.low, known.high + 1)
    history = History(root)
    assert all(history.reclaimed(sequence) for sequence in range(1, 10 * LINES, 97) if sequence not in held)
    for sequence in held[::50]:
        with pytest.raises(Damaged, match=part.path.name):
            History(root).reclaimed(sequence)


def test_a_part_that_is_not_the_one_that_the_catalog_knows_is_not_believed(root: Root, path: Path) -> None:
    other = root_with(root.path.parent / "other", lambda number: deletion(number) | {"rule": "forged"})
    part = behind_a_catalog(path)
    same = next(each for each in parts_of(other.ledger / "reclaim.jsonl") if each.line >= part.line)
    known = stored_index(part).summary()
    shutil.copyfile(same.path, part.path)

    with pytest.raises(Damaged):
        History(root).reclaimed((known.low + known.high) // 2)


def test_a_part_that_is_not_there_is_noticed_in_front_of_a_catalog(root: Root, path: Path) -> None:
    behind_a_catalog(path).path.unlink()
    with pytest.raises(Damaged, match="does not follow the line before it"):
        History(root).reclaimed(10 * LINES)
