"""``wald repair``: whatever has become of a log, it verifies afterwards, and what could be read still can be."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from contents import errors
from faults import SteppingDisk
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from logs import Built, Unsynced
from powercut import RecordingDisk
from repairing import build, repair, small_frames, snapshot
from shrinking import shrink
from spoiling import DAMAGE, Damage, flip, zero

import wald
from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.ledger_read import parts_of, read_files, read_ledger
from wald.files.ledger_write import Ledger
from wald.files.listing import list_segments
from wald.format.records import Record
from wald.repairing.apply import planned_repair
from wald.repairing.plan import ActionKind
from wald.retention.history import History
from wald.segments.sealed_file import SealedFile
from wald.segments.view import State

Records = dict[int, Record]


def readable(root: Path) -> tuple[Records, list[Damaged]]:
    reported: list[Damaged] = []
    found = wald.open(root).records(start=1, on_damage=reported.append, on_missing="skip")
    return {record.sequence: record for record in found}, reported


class Written:
    def __init__(self, path: Path) -> None:
        self.path = path
        build(path)
        self.records, reported = readable(path)
        assert not reported
        self.last = Built(path, epoch=2).last
        self.names = sorted(file.name for file in (path / "segments").iterdir() if file.suffix != ".idx")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    with pytest.MonkeyPatch.context() as patch:
        small_frames(patch)
        yield Written(tmp_path_factory.mktemp("written") / "log")


@pytest.fixture
def log(written: Written, tmp_path: Path) -> Path:
    shutil.copytree(written.path, tmp_path / "log")
    return tmp_path / "log"


def change(path: Path, damage: Callable[[bytes], bytes]) -> None:
    path.write_bytes(damage(path.read_bytes()))


def first_frame(data: bytes) -> bytes:
    return data[:300] + bytes([data[300] ^ 0xFF]) + data[301:]


def middle(root: Path) -> Path:
    return sorted((root / "segments").glob("*.zst"))[1]


def raw(root: Path) -> Path:
    return min((root / "segments").glob("*.wal"))


def foreign(root: Path) -> None:
    other = Built(root.parent / "other")
    other.lines("a", [b"x"] * 60)
    other.cut()
    other.seal()
    shutil.copy(next((root.parent / "other/segments").glob("*.zst")), root / "segments/00000000000000009000.wal.zst")


def both_forms(root: Path) -> None:
    sealed = middle(root)
    with SealedFile(sealed) as file:
        data = b"".join(file.frame(number) for number in range(len(file.index.frames)))
    sealed.with_suffix("").write_bytes(data)
    change(sealed, first_frame)


def end_of(path: Path) -> None:
    change(path, lambda data: data[:-40])


# Kinds of damage: how to make it, whether it loses records, and the expected action.
KINDS: dict[str, tuple[Callable[[Path], None], bool, ActionKind]] = {
    "the index of a sealed segment": (lambda root: end_of(middle(root)), False, ActionKind.REBUILD),
    "a frame": (lambda root: change(middle(root), first_frame), True, ActionKind.REBUILD),
    "a sealed segment that is cut short": (
        lambda root: change(middle(root), lambda data: data[:900]),
        True,
        ActionKind.REBUILD,
    ),
    "all of a sealed segment": (
        lambda root: change(middle(root), lambda data: bytes(len(data))),
        True,
        ActionKind.QUARANTINE,
    ),
    "a sealed segment that is gone": (lambda root: middle(root).unlink(), True, ActionKind.GIVE_UP),
    "a sealed segment whose raw form is whole": (both_forms, False, ActionKind.QUARANTINE),
    "a batch of a raw segment": (
        lambda root: change(raw(root), lambda d: d[:900] + b"!" + d[901:]),
        True,
        ActionKind.REBUILD,
    ),
    "the header of a raw segment": (
        lambda root: change(raw(root), lambda d: b"!" * 64 + d[64:]),
        False,
        ActionKind.REBUILD,
    ),
    "a raw segment that is gone": (lambda root: raw(root).unlink(), True, ActionKind.GIVE_UP),
    "a line of the sealer's ledger": (
        lambda root: change(root / "ledger/segments.jsonl", flip([0.4])),
        False,
        ActionKind.REBUILD_LEDGER,
    ),
    "the ledger of the sealer is gone": (
        lambda root: (root / "ledger/segments.jsonl").unlink(),
        False,
        ActionKind.RECORD_SEALING,
    ),
    "the head": (lambda root: change(root / "head", flip([0.1])), False, ActionKind.MOVE_HEAD),
    "the head is gone": (lambda root: (root / "head").unlink(), False, ActionKind.MOVE_HEAD),
    "a segment of another log": (foreign, False, ActionKind.QUARANTINE),
    "a segment under a wrong name": (
        lambda root: os.rename(middle(root), root / "segments/00000000000000000060.wal.zst"),
        False,
        ActionKind.RENAME,
    ),
    "a temporary file": (lambda root: (root / "segments/x.tmp").touch(), False, ActionKind.REMOVE),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_damage(written: Written, log: Path, kind: str) -> None:
    spoil, loses, deed = KINDS[kind]
    spoil(log)
    before, _ = readable(log)
    as_found = snapshot(log)
    with planned_repair(Root(log)) as (plan, _):
        assert (deed in {act.kind for act in plan.actions}, plan.loses_data) == (True, loses)
    assert snapshot(log) == as_found

    repair(log, accept_loss=False)
    assert bool(errors(log)) == loses
    assert before.items() <= readable(log)[0].items()

    repair(log)
    assert errors(log) == []
    after, reported = readable(log)
    assert before.items() <= after.items() <= written.records.items()
    assert reported == []
    assert (after == written.records) != loses
    if loses:
        assert {wald.open(log).where(each).state for each in written.records.keys() - after.keys()} == {State.LOST}
    assert repair(log).actions == ()


def test_a_good_log_is_not_touched_and_a_rebuilt_index_has_the_digest_of_the_ledger(log: Path) -> None:
    as_found = snapshot(log)
    assert repair(log).actions == ()
    assert snapshot(log) == as_found
    path = middle(log)
    sealed = History(Root(log)).sealing_of(int(path.name[:20]))
    end_of(path)
    repair(log, accept_loss=False)
    with SealedFile(path) as file:
        assert sealed is not None
        assert file.index.sha256.hex() == sealed["sha256"]
    assert list((log / "quarantine").iterdir()) == []


def test_what_is_cut_out_stays_in_quarantine_and_the_ledger_says_whose_it_was(log: Path, written: Written) -> None:
    path = middle(log)
    change(path, first_frame)
    damaged = path.read_bytes()
    repair(log)
    (kept,) = (log / "quarantine").glob(f"{path.name}.*")
    assert kept.read_bytes() == damaged
    lost = [entry for entry in read_ledger(log / "ledger/segments.jsonl").entries if entry["event"] == "lost"]
    assert f"quarantine/{kept.name}" in {entry["kept"] for entry in lost}
    counted: dict[str, int] = {}
    for entry in lost:
        for route, count, *_ in entry["routes"]:
            counted[route] = counted.get(route, 0) + count
    gone = [written.records[each].route for each in written.records.keys() - readable(log)[0].keys()]
    assert counted == {route: gone.count(route) for route in set(gone)}


@pytest.mark.parametrize("kind", ["a frame", "all of a sealed segment"])
def test_a_power_cut_leaves_each_segment_in_quarantine_that_the_ledger_names(log: Path, kind: str) -> None:
    spoil, _, _ = KINDS[kind]
    spoil(log)
    found = {path.name: path.read_bytes() for path in (log / "segments").iterdir()}
    disk = RecordingDisk(log, seed=1, every=False, ordered=False)
    disk.platter.load(log)
    repair(log, disk=disk)
    named = 0
    for state in disk.states:
        files = dict(state.files)
        for kept in re.findall(rb'"kept":"([^"]+)"', files["ledger/segments.jsonl"] or b""):
            assert files.get(kept.decode()) == found[Path(kept.decode()).stem], state.after
            named += 1
    assert named > 10


def test_a_damaged_segment_and_a_deleted_one_behind_it_are_given_up_each_with_its_own_reason(log: Path) -> None:
    damaged, deleted = sorted((log / "segments").glob("*.zst"))[:2]
    change(damaged, lambda data: data[:900])
    deleted.unlink()
    first = int(deleted.name[:20])
    repair(log)
    (loss,) = History(Root(log)).losses(first, first)
    assert loss.extent.first == first
    assert "no segment contains these records" in loss.reason
    assert "quarantine" not in loss.reason
    (before,) = History(Root(log)).losses(first - 1, first - 1)
    assert before.extent.last == first - 1
    assert f"quarantine/{damaged.name}" in before.reason


def test_the_lines_of_a_broken_ledger_are_carried_over(log: Path) -> None:
    path = log / "ledger/reclaim.jsonl"
    built = Built(log, epoch=3)
    built.reclaim(1)
    built.crash()
    change(path, lambda data: data + b"not a line\n")
    old = path.read_bytes()
    repair(log, accept_loss=False)
    (kept,) = (log / "quarantine").iterdir()
    assert kept.read_bytes() == old
    opening, carried = read_ledger(path).entries
    assert (opening["event"], opening["kept"], opening["damaged"]) == ("begun-again", f"quarantine/{kept.name}", 1)
    assert (carried["event"], carried["base"], carried["carried"]) == ("reclaimed", 1, 1)
    assert errors(log) == []
    assert wald.open(log).where(1).state is State.RECLAIMED


def test_a_deletion_that_was_taken_back_by_a_damaged_line_is_not_believed(log: Path) -> None:
    """Otherwise the loss of the segment would later be mistaken for its deletion."""
    path = log / "ledger/reclaim.jsonl"
    segment = min((log / "segments").glob("*.zst"))
    base = int(segment.name[:20])
    with closing(Ledger(path, Unsynced())) as ledger:
        ledger.append({"event": "reclaimed", "base": base, "last": base + 1, "rule": "read", "at": 1})
        ledger.append({"event": "kept", "base": base, "why": "a group has not read it", "at": 2})
    change(path, lambda data: data.replace(b'"kept"', b'"kepT"'))
    repair(log, accept_loss=False)
    assert errors(log) == []

    segment.unlink()
    assert errors(log)
    assert wald.open(log).where(base).state is not State.RECLAIMED


class KillingDisk(SteppingDisk):
    """Kills its process at its n-th step."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.left = last

    def step(self, name: str, path: Path | None = None, descriptor: int = -1) -> None:
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def link(self, source: Path, target: Path) -> None:
        self.step("link", target)
        super().link(source, target)


def killed_at(step: int, root: Path) -> bool:
    """Repair in a separate process that is killed at a step; return False if it has fewer steps."""
    child = os.fork()
    if not child:
        try:
            repair(root, disk=KillingDisk(step))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a batch of a raw segment", "a line of the sealer's ledger", "the head"])
def test_any_repair_that_is_killed_is_finished_by_the_next(log: Path, tmp_path: Path, kind: str) -> None:
    check_killed(log, tmp_path, kind, every=1)


def test_a_repair_that_is_killed_is_finished_by_the_next(log: Path, tmp_path: Path) -> None:
    check_killed(log, tmp_path, "a frame", every=13)


def check_killed(log: Path, tmp_path: Path, kind: str, *, every: int) -> None:
    KINDS[kind][0](log)
    step = 0
    shutil.copytree(log, tmp_path / "whole")
    repair(tmp_path / "whole")
    expected = readable(tmp_path / "whole")[0]
    while True:
        root = tmp_path / str(step)
        shutil.copytree(log, root)
        killed = killed_at(step, root)
        before, _ = readable(root)
        repair(root)
        assert errors(root) == [], step
        found, reported = readable(root)
        assert (found, reported) == (expected, []), step
        assert before.items() <= found.items()
        lost = [entry for entry in read_ledger(root / "ledger/segments.jsonl").entries if entry["event"] == "lost"]
        spans = sorted((entry["base"], entry["last"]) for entry in lost)
        assert all(one[1] < other[0] for one, other in pairwise(spans)), "nothing is lost twice"
        shutil.rmtree(root)
        if not killed:
            break
        step += every
    assert step > 3


SPOILED = st.lists(st.tuples(st.integers(0, 4), DAMAGE | st.none()), min_size=1, max_size=3)
QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


def check_repair(written: Written, spoiled: list[tuple[int, Damage | None]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "log"
        shutil.copytree(written.path, root)
        for number, damage in spoiled:
            path = root / "segments" / written.names[number]
            if damage is None:
                path.unlink(missing_ok=True)
            elif path.exists() and path.stat().st_size:
                change(path, damage)
        before, _ = readable(root)
        repair(root)
        assert errors(root) == []
        after, reported = readable(root)
        assert reported == []
        assert before.items() <= after.items() <= written.records.items()
        assert repair(root).actions == ()
        built = Built(root, epoch=8)
        assert built.lines("a", [b"new"]) > written.last
        built.crash()
        assert errors(root) == []
        assert len(list_segments(Root(root)).segments) >= 1


@settings(max_examples=6, deadline=None, suppress_health_check=QUIET)
@given(spoiled=SPOILED)
@example(spoiled=[(1, flip([0.31])), (0, None)])
@example(spoiled=[(0, zero(0.8125)), (0, flip([0.0])), (2, zero(0.5))])  # 49 is broken, and open in between
def test_after_a_repair_all_is_good_and_what_could_be_read_still_can(
    written: Written, spoiled: list[tuple[int, Damage | None]]
) -> None:
    check_repair(written, spoiled)


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=QUIET)
@given(spoiled=SPOILED)
def test_after_a_repair_all_is_good_at_length(written: Written, spoiled: list[tuple[int, Damage | None]]) -> None:
    check_repair(written, spoiled)


@pytest.mark.parametrize("loses", [False, True])
def test_what_shrinking_has_dropped_is_not_lost(tmp_path: Path, loses: bool) -> None:
    built = Built(tmp_path / "log")
    for number in range(40):
        built.lines("web" if number % 2 else "stuck", [b"%d" % number * 50] * 5)
    built.cut()
    built.seal()
    path = built.root.path / "segments/00000000000000000001.wal.zst"
    shrinking = shrink(built, 1, web=100, stuck=20)
    built.crash()
    before, _ = readable(built.root.path)
    change(path, (lambda data: data[: shrinking.index.frames[-1].offset + 200]) if loses else (lambda data: data[:-40]))
    repair(built.root.path, accept_loss=loses)
    assert errors(built.root.path) == []
    after, reported = readable(built.root.path)
    assert reported == []
    assert (after == before) != loses
    dropped = set(range(1, 201)) - before.keys()
    assert {each for each in dropped if built.log.where(each).state is not State.RECLAIMED} == set()


def test_a_sealed_part_of_a_ledger_that_is_damaged_makes_way_for_its_whole_lines(log: Path) -> None:
    path = log / "ledger/segments.jsonl"
    before = readable(log)[0]
    ledger = Ledger(path, Unsynced(), part_bytes=2000)
    for number in range(60):
        ledger.append({"event": "skipped", "base": 9000 + number, "last": 9000 + number, "why": "a test"})
        ledger.cut()
    ledger.close()
    parts = parts_of(path)
    assert len(parts) > 3
    change(parts[1].path, lambda data: data[:30] + bytes([data[30] ^ 0xFF]) + data[31:])
    assert errors(log) != []
    root = log.parent / "killed"
    for step in (0, 12, 20):
        shutil.copytree(log, root)
        killed_at(step, root)
        repair(root, accept_loss=False)
        assert errors(root) == []
        assert readable(root)[0] == before
        assert History(Root(root)).skip_of(9059) is not None
        entries = [entry for _, decoded in read_files(root / "ledger/segments.jsonl") for entry in decoded.entries]
        bases = [entry["base"] for entry in entries if entry["event"] == "skipped"]
        assert len(bases) == len(set(bases)) < 60
        assert repair(root).actions == ()
        shutil.rmtree(root)
