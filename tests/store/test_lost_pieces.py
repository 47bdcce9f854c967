"""Each piece of a long record whole or lost in some way: a repair loses nothing else, and verify agrees with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from contents import errors
from logs import Built
from repairing import repair
from shrinking import shrink

import wald
from wald.files.layout import Root
from wald.files.listing import list_segments

Fate = Callable[[Path], None]


def whole(path: Path) -> None:
    """Leave the segment intact."""


def gone(path: Path) -> None:
    path.unlink()


def last_batch_cut(path: Path) -> None:
    """Cut the last batch short; of a sealed segment the last frame and the index."""
    with path.open("r+b") as file:
        file.truncate(max(file.seek(0, 2) // 2, 70) if path.suffix == ".zst" else _end(path) - 5)


def first_batch_damaged(path: Path) -> None:
    """Damage the control batch; of a sealed segment the first frame."""
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def without_index(path: Path) -> None:
    """Damage the index of a sealed segment; all batches stay whole."""
    data = bytearray(path.read_bytes())
    data[data.rfind(b"WALDSIX1") + 20] ^= 1
    path.write_bytes(data)


def _end(path: Path) -> int:
    return len(path.read_bytes().rstrip(b"\0"))


def build(path: Path, *, sealed: bool, reclaimed: bool = False, shrunk: str = "") -> Built:
    """Return a log of five segments: p's record has pieces in three of them, q's in each, r's in the first three.

    Args:
        reclaimed: whether RECLAIM has deleted the first segment.
        shrunk: a route; in the first and third segment, shrinking has dropped its batches. Empty: no shrinking.
    """
    built = Built(path, segment_max_bytes=1 << 20)
    built.lines("a", [b"first"])
    for route in "qr":
        built.piece(route, route.encode() + b" begins ", begins=True, ends=False)
    built.lines("a", [b"behind them"])
    built.cut()
    for route in "qr":
        built.piece(route, b"continues ", begins=False, ends=False)
    built.piece("p", b"p begins ", begins=True, ends=False)  # no other record begins in this segment
    built.cut()
    built.lines("a", [b"second"])
    built.piece("r", b"and ends\n", begins=False, ends=True)
    for route in "pq":
        built.piece(route, b"continues ", begins=False, ends=False)
    built.cut()
    built.piece("q", b"continues ", begins=False, ends=False)
    built.lines("a", [b"third"])
    built.piece("p", b"and ends\n", begins=False, ends=True)  # leaves no gap in the sequences if it is lost
    built.cut()
    built.piece("q", b"and ends\n", begins=False, ends=True)
    built.lines("p", [b"last"])
    if sealed or reclaimed:
        built.seal(keep=0 if sealed else 3)
    if reclaimed:
        built.reclaim(1, named=True)
    if shrunk:
        bases = [segment.base_sequence for segment in list_segments(built.root).segments]
        for base in bases[:3:2] if shrunk == "a" else bases[2:3]:
            shrink(built, base, **{shrunk: 100})
    built.crash()
    return built


def readable(root: Path) -> set[tuple[int, bytes]]:
    """Return the records that a reader of all routes or of one route gets."""
    log = wald.open(root)
    found = set[tuple[int, bytes]]()
    for route in (None, *(each.name for each in Root(root).routes.iterdir())):
        records = log.records(route, start=1, on_damage=lambda _: None, on_missing="skip")
        found |= {(record.sequence, record.value) for record in records}
    return found


RAW = [whole, gone, last_batch_cut, first_batch_damaged]
SEALED = [whole, gone, without_index, last_batch_cut]


def some(*parameters: object, damaged_max: int = 2) -> object:
    return pytest.param(*parameters, damaged_max)


def many(*parameters: object, damaged_max: int = 4) -> object:
    return pytest.param(*parameters, damaged_max, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("sealed", "reclaimed", "shrunk", "fates", "damaged_max"),
    [
        some(False, False, "", RAW, damaged_max=1),
        some(False, True, "", RAW[:3]),
        some(True, False, "", SEALED[:3]),
        some(True, False, "a", [whole, first_batch_damaged]),
        some(True, False, "r", [whole, first_batch_damaged]),
        many(False, False, "", RAW),
        many(True, False, "", SEALED),
        many(True, True, "", [*SEALED, first_batch_damaged]),
        many(True, False, "a", [*SEALED, first_batch_damaged], damaged_max=2),
        many(True, False, "r", [*SEALED, first_batch_damaged], damaged_max=2),
    ],
)
def test_a_repair_loses_no_record_that_was_readable_and_leaves_no_error(
    tmp_path: Path, sealed: bool, reclaimed: bool, shrunk: str, fates: list[Fate], damaged_max: int
) -> None:
    log = build(tmp_path / "log", sealed=sealed, reclaimed=reclaimed, shrunk=shrunk)
    written = readable(log.root.path)
    assert len(written) == {"": 4 if reclaimed else 8, "a": 5, "r": 7}[shrunk]
    damaged = 3 if reclaimed else 4  # the last segment is whole
    for number, fated in enumerate(product(fates, repeat=damaged)):
        if damaged - fated.count(whole) > damaged_max:
            continue
        root = tmp_path / str(number)
        shutil.copytree(log.root.path, root)
        segments = list_segments(Root(root)).segments[:damaged]
        for fate, segment in zip(fated, segments, strict=True):
            fate(segment.path)
        before = readable(root)
        repair(root)
        names = [fate.__name__ for fate in fated]
        assert before <= written, names
        assert readable(root) == before, names
        assert errors(root) == [], names
        assert repair(root).actions == (), names
        shutil.rmtree(root)
