"""Segments under wrong names get their names back, in any order and after any crash."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest
from contents import errors
from faults import Died, DyingDisk, until_it_survives
from logs import Built
from repairing import repair

from wald.repairing.plan import ActionKind

Digests = dict[str, str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four sealed segments and an active one."""
    path = tmp_path_factory.mktemp("whole") / "log"
    built = Built(path)
    for part in range(5):
        built.lines("a", [b"%d" % part] * (part + 2))
        if part < 4:
            built.cut()
    built.seal()
    built.crash()
    return path


@pytest.fixture
def log(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "log"))


def sealed(root: Path) -> list[Path]:
    return sorted((root / "segments").glob("*.wal.zst"))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digests(root: Path) -> Digests:
    return {path.name: digest(path) for path in sealed(root)}


def anywhere(root: Path) -> set[str]:
    return {digest(path) for path in root.rglob("*") if path.is_file()}


def arrange(root: Path, order: tuple[int | None, ...]) -> None:
    """Give the n-th name the content of segment ``order[n]``; None: none."""
    names = sealed(root)
    contents = [path.read_bytes() for path in names]
    for path, number in zip(names, order, strict=True):
        path.unlink()
        if number is not None:
            path.write_bytes(contents[number])


def orders(*segments: int | None) -> Iterator[tuple[int | None, ...]]:
    return (order for order in permutations(segments) if order != segments)


def check_order(whole: Path, scratch: Path, order: tuple[int | None, ...]) -> None:
    before = {name: each for n, (name, each) in enumerate(digests(whole).items()) if n in order}
    for number, disk in enumerate(until_it_survives(DyingDisk)):
        root = scratch / str(number)
        shutil.copytree(whole, root)
        arrange(root, order)
        try:
            repair(root, accept_loss=False, disk=disk)
        except Died:
            assert set(before.values()) <= anywhere(root), (order, number)
        else:
            assert digests(root) == before, order
            return
        repair(root, accept_loss=False)
        assert digests(root) == before, (order, number)
        assert bool(errors(root)) == (None in order), (order, number)
        shutil.rmtree(root)


SOME = [(1, 2, 3, 0), (1, 0, 3, 2), (1, 0, None, 2)]


@pytest.mark.parametrize("order", SOME, ids=str)
def test_segments_get_their_names_back_whatever_step_kills_the_repair(
    whole: Path, tmp_path: Path, order: tuple[int | None, ...]
) -> None:
    check_order(whole, tmp_path, order)


@pytest.mark.slow
@pytest.mark.parametrize("order", [*orders(0, 1, 2, 3), *list(orders(None, 1, 2, 3))[::3]], ids=str)
def test_all_orders_of_four_names(whole: Path, tmp_path: Path, order: tuple[int | None, ...]) -> None:
    check_order(whole, tmp_path, order)


def test_of_two_copies_under_wrong_names_one_gets_the_name(log: Path) -> None:
    before, (_, second, *_) = digests(log), sealed(log)
    shutil.copy(second, second.with_name("00000000000000005000.wal.zst"))
    second.rename(second.with_name("00000000000000006000.wal.zst"))
    repair(log, accept_loss=False)
    assert (digests(log), errors(log)) == (before, [])


def test_a_whole_segment_takes_its_name_from_one_that_is_not(log: Path) -> None:
    before, (_, second, third, _) = digests(log), sealed(log)
    third.unlink()
    second.rename(third)
    second.write_bytes(b"junk")
    plan = repair(log, accept_loss=False)
    assert [act.kind for act in plan.actions[:2]] == [ActionKind.QUARANTINE, ActionKind.RENAME]
    del before[third.name]
    assert digests(log) == before
    assert hashlib.sha256(b"junk").hexdigest() in anywhere(log)


def test_a_stray_file_behind_the_head_costs_no_record_that_has_not_ended(tmp_path: Path) -> None:
    path = tmp_path / "log"
    built = Built(path)
    built.lines("a", [b"x"])
    built.piece("p", b"begun", begins=True, ends=False)
    built.crash()
    active = path / "segments/00000000000000000001.wal"
    before = digest(active)
    stray = path / "segments/00000000000000005000.wal"
    stray.write_bytes(b"junk\n")
    plan = repair(path)
    assert [(act.kind, act.path, act.loses_data) for act in plan.actions] == [(ActionKind.QUARANTINE, stray, False)]
    assert (plan.damage, errors(path), digest(active)) == (False, [], before)


def test_the_raw_segment_that_a_wrong_name_hides_is_not_given_up(tmp_path: Path) -> None:
    path = tmp_path / "log"
    built = Built(path)
    for part in range(3):
        built.lines("a", [b"%d" % part] * 3)
        built.cut()
        if part == 0:
            built.seal()
    built.crash()
    (first,) = sealed(path)
    before = anywhere(path)
    first.rename(first.with_name("00000000000000000004.wal.zst"))
    assert not repair(path, accept_loss=False).loses_data
    assert (errors(path), first.exists(), before <= anywhere(path)) == ([], True, True)
