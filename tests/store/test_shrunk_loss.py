"""Losses that a repair records for a damaged shrunk segment."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from contents import errors
from logs import Built
from repairing import repair
from shrinking import shrink

import wald
from wald.checking.verifier import verify
from wald.files.layout import Root
from wald.files.ledger_read import read_ledger
from wald.format.names import Kind
from wald.repairing.apply import planned_repair
from wald.repairing.plan import Plan
from wald.segments import shrinking
from wald.segments.sealed_file import SealedFile, compress_segment
from wald.writing import sealing

BATCHES, OF_BATCH = 60, 5


@pytest.fixture
def shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """One sealed segment of several frames, of which the older half of one route is left, and all of another."""
    monkeypatch.setattr(shrinking, "FRAME_BYTES", 30_000)
    built, rng = Built(tmp_path / "log"), random.Random(3)
    for number in range(BATCHES):
        built.lines("stuck" if number % 3 else "web", [rng.randbytes(200).hex().encode()] * OF_BATCH)
    built.cut()
    built.seal()
    shrink(built, 1, stuck=150, web=250)
    built.crash()
    with SealedFile(built.path(1, Kind.SEALED)) as file:
        assert len(file.index.frames) > 4
    return built


def left_by_ledger(built: Built) -> dict[str, int]:
    """Return the records of each route that a shrink left, by its ledger line: the oracle."""
    (line,) = (each for each in read_ledger(built.root.ledger / "reclaim.jsonl").entries if each["event"] == "shrunk")
    return {route: count for route, count, *_ in line["routes"]}


def readable(built: Built) -> dict[str, int]:
    counts = dict.fromkeys(("stuck", "web"), 0)
    for record in wald.open(built.root.path).records(start=1, on_damage=lambda _: None, on_missing="skip"):
        counts[record.route] += 1
    return counts


def frame(built: Built, number: int) -> int:
    with SealedFile(built.path(1, Kind.SEALED)) as file:
        return file.index.frames[number].offset


def change(built: Built, damage: Callable[[bytes], bytes]) -> None:
    path = built.path(1, Kind.SEALED)
    path.write_bytes(damage(path.read_bytes()))


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def two_frames(built: Built) -> None:
    for number in (1, 3):
        at = frame(built, number) + 40
        change(built, lambda data, at=at: flip(data, at))  # type: ignore[misc]


def cut(built: Built, number: int) -> None:
    at = frame(built, number) + 100
    change(built, lambda data: data[:at])


def frames_and_index(built: Built, *numbers: int) -> None:
    for number in numbers:
        at = frame(built, number) + 40
        change(built, lambda data, at=at: flip(data, at))  # type: ignore[misc]
    change(built, lambda data: flip(data, len(data) - 30))


DAMAGE: dict[str, Callable[[Built], object]] = {
    "a frame": lambda built: change(built, lambda data: flip(data, frame(built, 1) + 40)),
    "the last frame": lambda built: change(built, lambda data: flip(data, frame(built, -1) + 40)),
    "two frames": two_frames,
    "the end of the file": lambda built: cut(built, -2),
    "nearly all of the file": lambda built: cut(built, 0),
    "a frame and the index": lambda built: frames_and_index(built, 2),
    "the content of the file": lambda built: change(built, lambda data: bytes(len(data))),
    "the file": lambda built: built.path(1, Kind.SEALED).unlink(),
}

UNPROVEN = ("nearly all of the file", "the content of the file", "the file")  # nothing is left that shrink has made


def given_up(plan: Plan) -> int:
    return sum(act.lost_records for act in plan.actions)


@pytest.mark.parametrize("what", DAMAGE)
def test_what_was_given_up_and_what_is_there_is_what_shrinking_had_left(shrunk: Built, what: str) -> None:
    left = left_by_ledger(shrunk)
    assert 0 < left["web"] < left["stuck"] < BATCHES * OF_BATCH
    DAMAGE[what](shrunk)
    with planned_repair(shrunk.root) as (plan, _):
        expected = given_up(plan)
    assert given_up(repair(shrunk.root.path)) == expected

    assert errors(shrunk.root.path) == []
    found = readable(shrunk)
    held = {"stuck": 200, "web": 100} if what in UNPROVEN else left
    assert expected + sum(found.values()) == sum(held.values())
    lines = [each for each in read_ledger(shrunk.root.ledger / "segments.jsonl").entries if each["event"] == "lost"]
    assert sum(line.get("records", line["last"] - line["base"] + 1) for line in lines) == expected
    if what in ("two frames", "the last frame", "the file"):  # whose they were is known by index or ledger
        assert all("routes" in line for line in lines)
    if all("routes" in line for line in lines):
        for route, count in held.items():
            lost = sum(held[1] for line in lines for held in line["routes"] if held[0] == route)
            assert lost + found[route] == count
    pattern = r"(?:(\d+) of )?records (\d+) to (\d+) are lost: "
    losses = [match for each in verify(Root(shrunk.root.path)) if (match := re.match(pattern, each.message))]
    assert sum(int(match[1] or int(match[3]) - int(match[2]) + 1) for match in losses) == expected
    assert repair(shrunk.root.path).actions == ()


def taken_back(built: Built, path: Path) -> None:
    """Restore the old file's name, as after a cursor moved back during a shrink; its ledger line stays."""
    whole = path.read_bytes()
    shrink(built, 1, stuck=295, web=300)
    path.write_bytes(whole)


@pytest.fixture
def unshrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """One segment of several frames, all 300 records in it, and a line about a shrink that was taken back."""
    monkeypatch.setattr(sealing, "compress_segment", partial(compress_segment, frame_bytes=30_000))
    built, rng = Built(tmp_path / "log"), random.Random(3)
    for _ in range(BATCHES):
        built.lines("stuck", [rng.randbytes(400).hex().encode() for _ in range(OF_BATCH)])
    built.cut()
    built.seal()
    taken_back(built, built.path(1, Kind.SEALED))
    built.crash()
    return built


@pytest.mark.parametrize(
    "damage",
    [
        lambda built: frames_and_index(built, -1),
        lambda built: frames_and_index(built, 1, 3),
        lambda built: cut(built, 0),
        lambda built: built.path(1, Kind.SEALED).unlink(),
    ],
    ids=["newest frame and index", "two frames and index", "nearly all", "file"],
)
def test_a_shrink_that_was_taken_back_dropped_nothing(unshrunk: Built, damage: Callable[[Built], object]) -> None:
    damage(unshrunk)
    plan = repair(unshrunk.root.path, accept_loss=False)
    assert plan.loses_data
    before = given_up(plan)
    repair(unshrunk.root.path)
    assert before + readable(unshrunk)["stuck"] == BATCHES * OF_BATCH
    lines = [each for each in read_ledger(unshrunk.root.ledger / "segments.jsonl").entries if each["event"] == "lost"]
    assert sum(line.get("records", line["last"] - line["base"] + 1) for line in lines) == before
    for line in lines:
        assert "routes" not in line or sum(held[1] for held in line["routes"]) == line["last"] - line["base"] + 1


def test_a_second_shrink_that_was_taken_back_is_not_believed_over_the_first(shrunk: Built) -> None:
    left = left_by_ledger(shrunk)
    taken_back(shrunk, shrunk.path(1, Kind.SEALED))
    frames_and_index(shrunk, -1)
    assert repair(shrunk.root.path, accept_loss=False).loses_data
    plan = repair(shrunk.root.path)
    assert given_up(plan) + sum(readable(shrunk).values()) == sum(left.values())


def test_that_nothing_is_lost_is_not_taken_from_the_ledger(shrunk: Built) -> None:
    """Only frames of dropped batches are damaged, but without the index only the counts of the ledger say so."""
    shrink(shrunk, 1, stuck=250, web=300)
    with SealedFile(shrunk.path(1, Kind.SEALED)) as file:
        number = next(number for number, each in enumerate(file.index.frames) if not each.routes and number)
    frames_and_index(shrunk, number)
    assert repair(shrunk.root.path, accept_loss=False).loses_data


def test_where_shrinking_had_dropped_all_that_is_damaged_nothing_is_given_up(shrunk: Built) -> None:
    """The first frames contain only DROPPED batches."""
    path = shrunk.path(1, Kind.SEALED)
    shrink(shrunk, 1, stuck=250, web=300)
    with SealedFile(path) as file:
        number, first = next(
            (number, each) for number, each in enumerate(file.index.frames) if not each.routes and number
        )
    change(shrunk, lambda data: flip(data, first.offset + 14))
    before = readable(shrunk)
    plan = repair(shrunk.root.path, accept_loss=False)
    assert (plan.actions != (), plan.loses_data, given_up(plan)) == (True, False, 0), number
    assert errors(shrunk.root.path) == []
    assert readable(shrunk) == before
