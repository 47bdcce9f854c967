"""``wald repair``: whatever has become of a log, it verifies afterwards, and what could be read still can be."""

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest
from contents import errors, readable
from faults import DyingDisk
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from logs import Built, Unsynced
from powercut import RecordingDisk
from repairing import build, repair, small_frames, snapshot
from spoiling import DAMAGE, Damage, flip, zero

import wald
from wald.errors import Damaged, NotFound
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.ledger_read import parts_of, read_files, read_ledger
from wald.files.ledger_write import Ledger
from wald.files.listing import list_segments
from wald.format.head import CursorLines, encode_cursor
from wald.format.names import Kind
from wald.repairing.apply import planned_repair
from wald.repairing.plan import ActionKind
from wald.repairing.survey import recover_identity
from wald.retention.history import History
from wald.segments.sealed_file import SealedFile
from wald.segments.view import State


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
    other.cut(seal=True)
    shutil.copy(next((root.parent / "other/segments").glob("*.zst")), root / "segments/00000000000000009000.wal.zst")


def both_forms(root: Path) -> None:
    sealed = middle(root)
    with SealedFile(sealed) as file:
        data = b"".join(file.frame(number) for number in range(len(file.index.frames)))
    sealed.with_suffix("").write_bytes(data)
    change(sealed, first_frame)


def end_of(path: Path) -> None:
    change(path, lambda data: data[:-40])


def sealings(root: Path) -> Path:
    return root / "ledger/segments.jsonl"


def damaged(place: Callable[[Path], Path], damage: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda root: change(place(root), damage)


# Kinds of damage: how to make it, whether it loses records, and the expected action.
KINDS: dict[str, tuple[Callable[[Path], None], bool, ActionKind]] = {
    "the index of a sealed segment": (lambda root: end_of(middle(root)), False, ActionKind.REBUILD),
    "a frame": (damaged(middle, first_frame), True, ActionKind.REBUILD),
    "a sealed segment that is cut short": (damaged(middle, lambda data: data[:900]), True, ActionKind.REBUILD),
    "all of a sealed segment": (damaged(middle, lambda data: bytes(len(data))), True, ActionKind.QUARANTINE),
    "a sealed segment that is gone": (lambda root: middle(root).unlink(), True, ActionKind.GIVE_UP),
    "a sealed segment whose raw form is whole": (both_forms, False, ActionKind.QUARANTINE),
    "a batch of a raw segment": (damaged(raw, lambda d: d[:900] + b"!" + d[901:]), True, ActionKind.REBUILD),
    "the header of a raw segment": (damaged(raw, lambda data: b"!" * 64 + data[64:]), False, ActionKind.REBUILD),
    "a raw segment that is gone": (lambda root: raw(root).unlink(), True, ActionKind.GIVE_UP),
    "a line of the sealer's ledger": (damaged(sealings, flip([0.4])), False, ActionKind.REBUILD_LEDGER),
    "the ledger of the sealer is gone": (lambda root: sealings(root).unlink(), False, ActionKind.RECORD_SEALING),
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


class KillingDisk(DyingDisk):
    """Disk that kills its process."""

    def die(self, name: str) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


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
    check_killed(log, tmp_path, kind, every=3)


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
@settings(max_examples=60, deadline=None, suppress_health_check=QUIET)
@given(spoiled=SPOILED)
def test_after_a_repair_all_is_good_at_length(written: Written, spoiled: list[tuple[int, Damage | None]]) -> None:
    check_repair(written, spoiled)


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


CREATED = "2023-11-14T22:13:20.000Z"  # START_NS, of the first segment


def write_cursor(root: Root, log_id: bytes, *, route: str = "a") -> None:
    lines = CursorLines(1, log_id, 1, "processed", "2026-11-21T10:00:00Z")
    root.cursor(route, "processed").write_bytes(encode_cursor(lines))


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A sealed segment, an active one with a sparse index, and a cursor: four files that name the log."""
    built = Built(tmp_path / "log")
    for part in range(2):
        built.lines("a", [b"%d" % part] * 5)
        if not part:
            built.cut(seal=True)
    write_cursor(built.root, built.log_id)
    built.crash()
    return built


@pytest.fixture
def other(tmp_path: Path) -> Built:
    """Another log, with as many records."""
    other = Built(tmp_path / "other")
    other.lines("a", [b"x"] * 5)
    other.cut(seal=True)
    other.lines("a", [b"x"] * 5)
    other.crash()
    return other


def values_of(root: Root) -> list[bytes]:
    return [record.value for record in wald.open(root.path).records(start=1)]


LOSSES: dict[str, Callable[[Path, Built], object]] = {
    "it is missing": lambda path, _: path.unlink(),
    "Expecting value": lambda path, _: path.write_bytes(b""),
    "the identity of the log cannot be decoded": lambda path, _: path.write_bytes(b"\x00\xff" * 40),
    "it belongs to log": lambda path, other: shutil.copy(other.root.identity, path),
}


@pytest.mark.parametrize("reason", LOSSES)
def test_it_is_made_again_of_what_all_files_say(built: Built, other: Built, reason: str) -> None:
    root, before = built.root, values_of(built.root)
    LOSSES[reason](root.identity, other)
    spoiled = root.identity.read_bytes() if root.identity.exists() else None
    as_found = snapshot(root.path)
    with planned_repair(root) as (plan, _):
        (act,) = plan.actions
    assert (act.kind, act.path, plan.loses_data, plan.damage) == (
        ActionKind.REWRITE_IDENTITY,
        root.identity,
        False,
        True,
    )
    assert reason in act.reason
    assert f"4 files say that this is log {built.log_id.hex()}" in act.reason
    assert snapshot(root.path) == as_found

    repair(root.path, accept_loss=False)
    identity = read_identity(root)
    assert (identity.log_id, identity.created) == (built.log_id, CREATED)
    assert errors(root.path) == []
    assert values_of(root) == before
    line = read_ledger(root.ledger / "segments.jsonl").entries[-1]
    assert (line["event"], line["log"], line["why"]) == ("identified", built.log_id.hex(), act.reason)
    kept = root.path / line["kept"] if "kept" in line else None
    assert (kept.read_bytes() if kept is not None else None) == spoiled
    assert repair(root.path).actions == ()


def test_a_reclaimed_segment_that_is_not_deleted_or_a_cursor_alone_says_it(built: Built) -> None:
    sealed = built.path(1, Kind.SEALED)
    cursor = built.root.cursor("a", "processed").read_bytes()
    for path in built.root.segments.iterdir():
        if path != sealed:
            path.unlink()
    sealed.rename(built.path(1, Kind.RELEASED))
    built.root.cursor("a", "processed").unlink()
    built.root.identity.unlink()
    found = recover_identity(built.root)
    assert found is not None
    assert found[0].log_id == built.log_id
    built.root.cursor("a", "processed").write_bytes(cursor)
    for directory in (built.root.segments, built.root.recovery):
        shutil.rmtree(directory)
        directory.mkdir()
    found = recover_identity(built.root)
    assert found is not None
    assert (found[0].log_id, found[0].created) == (built.log_id, "")


@pytest.mark.parametrize("identity", ["missing", "of the other"])
def test_where_files_disagree_nothing_is_made_and_all_are_named(built: Built, other: Built, identity: str) -> None:
    root, third = built.root, bytes(16)
    write_cursor(root, third)
    shutil.copy(other.root.identity, root.identity)
    if identity == "missing":
        root.identity.unlink()
    as_found = snapshot(root.path)
    with pytest.raises(Damaged) as caught:
        repair(root.path)
    said = [
        f"segments/00000000000000000001.wal.zst and 2 more say {built.log_id.hex()}",
        f"routes/a/cursors/processed.cursor says {third.hex()}",
    ]
    if identity == "of the other":
        said.insert(0, f"log.json says {other.log_id.hex()}")
    assert caught.value.message == f"{root.path}: the identity of the log is uncertain: {'; '.join(said)}"
    assert caught.value.hint.endswith(f"wald --root {root.path} repair")
    assert snapshot(root.path) == as_found


@pytest.mark.parametrize("lost", ["the head", "the segment of the head", "the records up to the head"])
def test_segments_of_another_log_are_not_believed_against_an_identity(built: Built, other: Built, lost: str) -> None:
    """Unless one of them contains the head, they may have been copied here."""
    root, active = built.root, built.path(6, Kind.RAW)
    shutil.copy(other.root.identity, root.identity)
    match lost:
        case "the head":
            root.head.unlink()
        case "the segment of the head":
            active.unlink()
        case _:
            shutil.copy(active, root.path / "copy")
            active.write_bytes(active.read_bytes()[:64])
    with pytest.raises(Damaged, match=f"log.json says {other.log_id.hex()}"):
        repair(root.path)


def test_what_is_no_log_does_not_become_one_and_a_newer_format_is_not_taken_for_damage(
    tmp_path: Path, built: Built
) -> None:
    fields = json.loads(built.root.identity.read_text()) | {"format": 99}
    built.root.identity.write_text(json.dumps(fields))
    with pytest.raises(wald.errors.UnsupportedFormat):
        repair(built.root.path)
    (tmp_path / "empty/segments").mkdir(parents=True)
    built.root.identity.rename(built.root.unfinished_identity)  # a restore that was killed
    for root in (Root(tmp_path / "nothing"), Root(tmp_path / "empty"), built.root):
        with pytest.raises(NotFound):
            recover_identity(root)
