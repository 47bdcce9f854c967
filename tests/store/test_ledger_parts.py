"""A ledger that is cut: its lines are in sealed parts and an active file, and readers do not see the difference."""

import itertools
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zstandard
from damage import flipped
from effort import steps
from faults import DyingDisk, FailingDisk, SteppingDisk, until_it_survives
from logs import Unsynced, write_entries
from powercut import RecordingDisk

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.ledger_read import (
    LedgerLines,
    entries_of,
    frames_of,
    last_line_start,
    newest_entries,
    parts_of,
    read_files,
    read_index,
    stored_index,
)
from wald.files.ledger_write import Ledger
from wald.format.ledger_lines import decode_entry, encode_entry, encode_part_index
from wald.repairing.apply import rebuild_ledger
from wald.retention.history import History

PART_BYTES = 3000


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "ledger").mkdir()
    return Root(tmp_path)


@pytest.fixture
def path(root: Root) -> Path:
    return root.ledger / "reclaim.jsonl"


def reclaimed(base: int, last: int) -> dict[str, Any]:
    return {"event": "reclaimed", "base": base, "last": last, "at": base}


def opened(path: Path, disk: Disk | None = None) -> Ledger:
    return Ledger(path, disk or Unsynced(), part_bytes=PART_BYTES)


def filled(path: Path, count: int, *, begin: int = 0) -> None:
    """Deletions of ten records each, cut whenever the owner may."""
    ledger = opened(path)
    for number in range(begin, begin + count):
        ledger.append(reclaimed(10 * number + 1, 10 * number + 10))
        ledger.cut()
    ledger.close()


def bases(path: Path) -> list[int]:
    return [entry["base"] for entry in entries_of(path) if "base" in entry]


def assert_whole(path: Path, count: int) -> None:
    """Every line once and in order, and the chain goes through all files."""
    assert bases(path) == [10 * number + 1 for number in range(count)]
    files = list(read_files(path))
    assert [decoded.broken_lines for _, decoded in files] == [[] for _ in files]
    assert sum(entry["event"] == "reclaimed" for _, decoded in files for entry in decoded.entries) == count


def test_a_long_ledger_is_cut_and_goes_on_as_one(path: Path) -> None:
    """Its parts have the mode of the active file, which keeps its own."""
    filled(path, 1)
    path.chmod(0o600)
    filled(path, 99, begin=1)

    parts = parts_of(path)
    assert len(parts) > 3
    assert path.stat().st_size < 2 * PART_BYTES
    assert [stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()] == [0o600] * (1 + len(parts))
    assert_whole(path, 100)
    assert [line.number for line in LedgerLines(path).oldest_first()] == list(range(1, 101 + len(parts)))
    assert [line.number for line in LedgerLines(path).newest_first()] == list(range(100 + len(parts), 0, -1))


def test_a_part_is_standard_zstd_of_the_lines_as_they_were(path: Path) -> None:
    ledger = opened(path)
    ledger.append(*(reclaimed(number, number) for number in range(1, 25)))
    before = path.read_bytes()
    ledger.cut()
    ledger.close()

    (part,) = parts_of(path)
    assert part.path.name == "reclaim-00000000000000000001.jsonl.zst"
    shown = subprocess.run(["zstd", "-dc", part.path], capture_output=True, check=True).stdout
    assert shown == before
    (line,) = path.read_bytes().splitlines()
    assert json.loads(line)["event"] == "continues"
    assert next(newest_entries(path, "reclaimed"))["base"] == 24


def test_look_ups_find_the_same_before_and_after_a_cut(root: Root, path: Path) -> None:
    ledger = Ledger(path, Unsynced(), part_bytes=PART_BYTES)
    history = History(root)
    for number in range(60):
        ledger.append(reclaimed(10 * number + 1, 10 * number + 10))
        if number % 7 == 3:
            ledger.append({"event": "kept", "base": 10 * number + 1})
    before = [history.deletion_of(sequence) for sequence in range(700)]
    gaps = list(history.unexplained_spans(1, 650))
    deletions = list(history.deletions())
    there = list(History(root).latest_deletions(range(700)))
    for again in (history, History(root)):
        ledger.cut()
        assert parts_of(path)
        assert [again.deletion_of(sequence) for sequence in range(700)] == before
        assert list(again.unexplained_spans(1, 650)) == gaps
        assert list(again.deletions()) == deletions
        assert list(again.latest_deletions(range(700))) == there
    ledger.append({"event": "kept", "base": 1}, reclaimed(31, 40))
    ledger.close()
    assert history.deletion_of(5) is None
    assert history.deletion_of(35) is not None
    assert {entry["base"] for entry in history.latest_deletions({1, 31, 41})} == {31, 41}


def test_a_ledger_from_before_is_cut_into_parts_at_once(path: Path) -> None:
    for number in range(200):
        write_entries(path, reclaimed(10 * number + 1, 10 * number + 10))
    ledger = opened(path)
    ledger.cut()
    ledger.append(reclaimed(2001, 2010))
    ledger.close()

    sizes = [stored_index(part).lines for part in parts_of(path)]
    assert len(sizes) > 3
    assert sum(sizes) == 200
    assert_whole(path, 201)


@pytest.mark.parametrize(("make", "part"), [(DyingDisk, 0.0), (DyingDisk, 0.5), (FailingDisk, 0.5)])
def test_a_cut_that_ends_at_any_step_loses_nothing(
    tmp_path: Path, make: Callable[..., SteppingDisk], part: float
) -> None:
    """The owner dies or its disk fails; the next owner continues, and readers see every line once in between."""
    for number, disk in enumerate(until_it_survives(lambda step: make(step, part=part))):
        path = tmp_path / str(number) / "reclaim.jsonl"
        path.parent.mkdir()
        write_entries(path, *(reclaimed(10 * each + 1, 10 * each + 10) for each in range(60)))
        with disk.attempt():
            ledger = opened(path, disk)
            ledger.cut()
            ledger.append(reclaimed(601, 610))
            ledger.close()
        disk.abandon()
        count = len(bases(path))
        assert count == 61 if disk.survived else count in (60, 61)
        assert_whole(path, count)
        ledger = opened(path)
        ledger.cut()
        for each in range(count, 70):
            ledger.append(reclaimed(10 * each + 1, 10 * each + 10))
        ledger.close()
        assert_whole(path, 70)
        assert len(parts_of(path)) > 1
        assert sorted(each.name for each in path.parent.iterdir()) == sorted(
            [path.name, *(each.path.name for each in parts_of(path))]
        )
        disk.survived = disk.survived and getattr(disk, "left", 0) > 0


def test_a_part_with_another_last_line_breaks_the_chain(path: Path) -> None:
    """The line, its frame and the index have valid checksums."""
    ledger = opened(path)
    ledger.append(*(reclaimed(number, number) for number in range(1, 25)))
    ledger.cut()
    ledger.close()
    (part,) = parts_of(path)
    index, (*before, (_, lines)) = stored_index(part), frames_of(part.path)
    start = last_line_start(lines, len(lines))
    last = decode_entry(lines[start:-1])
    forged = lines[:start] + encode_entry(reclaimed(23, 24), last["prev"], last["append"])
    frame = zstandard.compress(forged)
    index.frames[-1] = index.frames[-1]._replace(stored_bytes=len(frame), raw_bytes=len(forged))
    kept_bytes = sum(length for length, _ in before)
    part.path.write_bytes(part.path.read_bytes()[:kept_bytes] + frame + encode_part_index(index))

    broken = {file.name: decoded.broken_lines for file, decoded in read_files(path) if decoded.broken_lines}
    assert broken == {part.path.name: [(25, "does not follow the line before it")]}


def test_a_damaged_index_is_rebuilt_from_the_lines(root: Root, path: Path) -> None:
    filled(path, 100)
    for part in parts_of(path):
        index, data = stored_index(part), part.path.read_bytes()
        part.path.write_bytes(flipped(data, 8 * (len(data) - 40)))
        assert read_index(part) == replace(index, before=None)

    assert [History(root).deletion_of(sequence) is not None for sequence in (1, 500, 1000, 1001)] == [True] * 3 + [
        False
    ]
    ledger = opened(path)
    ledger.append(reclaimed(1001, 1010))
    ledger.close()
    assert History(root).deletion_of(1001) is not None
    broken = [decoded.broken_lines for _, decoded in read_files(path)]
    assert [line for each in broken for line, _ in each] == [0] * len(parts_of(path))


def test_an_unreadable_part_concerns_only_questions_about_its_sequences(root: Root, path: Path) -> None:
    """The next part, or the current file, says which sequences these are."""
    filled(path, 100)
    for part, content in zip(parts_of(path), itertools.cycle([b"damaged", b""]), strict=False):
        whole, (low, high) = part.path.read_bytes(), stored_index(part).span
        part.path.write_bytes(content)
        history = History(root)
        assert all(history.deletion_of(sequence) for sequence in range(1, 1000, 7) if not low <= sequence <= high)
        assert list(history.unexplained_spans(high + 1, 1005)) == [(1001, 1005)]
        assert list(history.latest_deletions([high + 1, 2000])) == (
            [] if high == 1000 else [history.deletion_of(high + 1)]
        )
        for sequence in range(low, high + 1, 50):
            with pytest.raises(Damaged, match=part.path.name):
                history.deletion_of(sequence)
        broken = {file.name for file, decoded in read_files(path) if decoded.broken_lines}
        assert part.path.name in broken
        part.path.write_bytes(whole)
        assert history.deletion_of(low) is not None  # the same reader notices that it was restored


def test_records_in_bundles_are_known_around_an_unreadable_part(root: Root) -> None:
    path = root.ledger / "archive.jsonl"
    ledger = opened(path)
    for number in range(1, 61):
        ledger.append({"event": "archived", "route": "a", "first": number, "last": number, "after": number - 1})
        ledger.cut()
    ledger.close()
    part = parts_of(path)[1]
    whole, (low, high) = part.path.read_bytes(), stored_index(part).span
    part.path.write_bytes(b"damaged")

    history = History(root)
    assert history.all_archived("a", 1, low - 1)
    assert history.all_archived("a", high + 1, 60)
    assert not history.all_archived("a", high + 1, 61)
    for _ in range(2):
        with pytest.raises(Damaged, match=part.path.name):
            history.all_archived("a", low - 1, 60)
        with pytest.raises(Damaged, match=part.path.name):
            history.archived_spans()
    part.path.write_bytes(whole)
    assert history.all_archived("a", 1, 60)


def test_a_part_that_is_missing_in_between_is_damage_and_one_at_the_beginning_is_not_known(
    root: Root, path: Path
) -> None:
    filled(path, 100)
    parts = parts_of(path)
    parts[0].path.unlink()
    assert History(root).deletion_of(1) is None
    assert History(root).deletion_of(1000) is not None
    assert [decoded.broken_lines for _, decoded in read_files(path)] == [[]] * len(parts)
    parts[2].path.unlink()
    with pytest.raises(Damaged, match=rf"{parts[3].path.name}: line 1: does not follow the line before it"):
        History(root).deletion_of(1000)
    assert [decoded.broken_lines for _, decoded in read_files(path) if decoded.broken_lines] == [
        [(1, "does not follow the line before it")]
    ]


def test_a_ledger_behind_moved_parts_keeps_its_line_numbers(root: Root, path: Path) -> None:
    """A repair moves a damaged part and those behind it away, and carries their lines over."""
    filled(path, 100)
    for directory in (root.quarantine, root.segments):
        directory.mkdir()
    parts = parts_of(path)
    parts[1].path.write_bytes(parts[1].path.read_bytes()[:-1])
    parts[2].path.write_bytes(flipped(parts[2].path.read_bytes(), 8 * 60))
    rebuild_ledger(root, Unsynced(), path, now_ns=1)

    assert parts_of(path) == parts[:1] or parts_of(path) == parts[:2]
    numbers = [line.number for line in LedgerLines(path).oldest_first()]
    assert numbers == list(range(1, len(numbers) + 1))
    moved = LedgerLines(path)
    last = parts_of(path)[-1]
    assert next(moved.newest_first()).number == len(numbers)
    assert [line.number for line in moved.oldest_first(after=last.line)] == numbers[last.line :]
    filled(path, 60, begin=100)
    numbers = [line.number for line in LedgerLines(path).oldest_first()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert bases(path)[-60:] == [10 * number + 1 for number in range(100, 160)]


def test_a_long_ledger_is_read_with_a_few_steps_a_line_and_a_look_up_reads_the_lines_of_one_frame(
    root: Root, path: Path
) -> None:
    """Its parts are decoded once, whatever number of them there is; a look-up makes a comparison for each frame."""
    costs, look_ups = [], []
    for begin, count in ((0, 100), (100, 300)):
        filled(path, count, begin=begin)
        costs.append(steps(lambda: sum(1 for _ in LedgerLines(path).oldest_first())))
        history = History(root)
        assert history.deletion_of(5) is not None
        look_ups.append(steps(partial(history.deletion_of, 315)))

    assert costs[1] < 4.6 * costs[0]
    assert look_ups[1] < 2 * look_ups[0]


@pytest.mark.parametrize("seed", range(3))
def test_lines_outlive_a_power_cut_at_any_moment_of_a_cut(tmp_path: Path, seed: int) -> None:
    """Lines come in pairs that are longer than a sector; of the last pair, both, the first or none may be there."""
    base = tmp_path / "run"
    (base / "ledger").mkdir(parents=True)
    disk = RecordingDisk(base, seed=seed, every=False, ordered=False)
    disk.platter.load(base)
    ledger = opened(base / "ledger" / "reclaim.jsonl", disk)
    for first in range(1, 25, 2):
        ledger.append(*(reclaimed(number, number) | {"why": "." * 700} for number in (first, first + 1)))
        disk.acknowledged = first + 1
        ledger.cut()
    ledger.close()
    assert len(parts_of(base / "ledger" / "reclaim.jsonl")) > 2

    for number, state in enumerate(disk.states):
        root = Root(tmp_path / f"{number}")
        root.path.mkdir()
        state.put(root.path)
        path = root.ledger / "reclaim.jsonl"
        opened(path).close()
        found = bases(path)
        assert len(found) >= state.acknowledged, state.after
        assert found == list(range(1, len(found) + 1)), state.after
        assert [entry for entry in entries_of(path) if entry["event"] not in ("reclaimed", "continues")] == []
        shutil.rmtree(root.path)


class SpoiledIndex(Unsynced):
    """A disk that stores a part's index, which is written last, with one bit flipped."""

    def sync(self, descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith(".tmp"):
            end = os.fstat(descriptor).st_size
            os.pwrite(descriptor, bytes([os.pread(descriptor, 1, end - 20)[0] ^ 1]), end - 20)


def test_lines_stay_in_the_active_file_if_the_index_of_their_part_was_stored_wrong(root: Root, path: Path) -> None:
    filled(path, 10)
    before = bases(path)
    parts = parts_of(path)
    ledger = opened(path, SpoiledIndex())
    for number in range(10, 100):
        ledger.append(reclaimed(10 * number + 1, 10 * number + 10))
        with suppress(Damaged):
            ledger.cut()
    ledger.close()

    assert parts_of(path) == parts
    assert len(bases(path)) == len(before) + 90
