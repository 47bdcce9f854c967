"""A repaired log is read, archived and reclaimed like others, and the ledger proves that each deletion was allowed."""

import random
import shutil
from pathlib import Path

import pytest
from contents import errors, records
from logs import Built
from powercut import RecordingDisk
from reclaiming import Reclaimer, bases, ledger, reclaim
from repairing import build, repair, small_frames

from wald.files.listing import list_segments
from wald.format.names import Kind
from wald.retention.audit import audit_deletion
from wald.retention.cursor_moves import move_cursor
from wald.retention.history import History

HOUR_NS = 3600 * 10**9


@pytest.fixture
def repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """A frame in the middle of a sealed segment was damaged; all of the log is sealed now."""
    small_frames(monkeypatch)
    path = tmp_path / "log"
    build(path)
    sealed = sorted((path / "segments").glob("*.zst"))[1]
    data = bytearray(sealed.read_bytes())
    data[2500] ^= 0xFF
    sealed.write_bytes(data)
    assert repair(path).loses_data
    built = Built(path, epoch=2)
    built.seal()
    return built


def test_segments_of_a_repaired_log_go_when_they_are_read(repaired: Built) -> None:
    root = repaired.root
    assert len(bases(root)) > 5
    for route in root.route_names():
        repaired.log.set_cursor(route, repaired.last)
    reclaim(repaired)
    history, lines = History(root), ledger(root.path)
    assert len(lines) >= 5
    for line in lines:
        ruling = audit_deletion(line, history.sealing_of(line["base"]), exists=False)
        assert (ruling.errors, ruling.unread_records) == ((), 0)
    assert [segment.kind for segment in list_segments(root).segments[:-1]] in ([], [Kind.SEALED])
    assert errors(root.path) == []
    assert list(history.unexplained_spans(1, lines[-1]["last"])) == []


@pytest.fixture
def released(tmp_path: Path) -> Built:
    """Four segments, of which the first two are released and everybody has read those; no ledger says so."""
    built = Built(tmp_path / "log")
    for part in range(4):
        built.lines("a", [b"%d" % part] * 3)
        built.cut()
        built.seal()
    built.log.set_cursor("a", 6)
    reclaim(built, grace_ns=HOUR_NS)
    (built.root.ledger / "reclaim.jsonl").unlink()
    return built


def test_a_released_segment_without_a_line_of_the_ledger_is_not_given_up(released: Built) -> None:
    root = released.root
    assert bases(root, Kind.RELEASED) == [1, 4]
    (found,) = errors(root.path)
    assert "00000000000000000004.wal.zst.released may contain them; a repair restores the name" in found
    assert not repair(root.path).loses_data
    assert (errors(root.path), bases(root)) == ([], [1, 4, 7, 10])
    assert [record.sequence for record in records(root.path)] == list(range(1, 13))
    reclaim(released, grace_ns=HOUR_NS)
    assert bases(root, Kind.RELEASED) == [1, 4]
    assert ([entry["base"] for entry in ledger(root.path)], errors(root.path)) == ([1, 4], [])
    assert repair(root.path).actions == ()


def test_a_segment_that_was_called_released_by_hand_is_not_given_up(released: Built) -> None:
    root = released.root
    repair(root.path)
    path = root.segment(7, Kind.SEALED)
    path.rename(root.segment(7, Kind.RELEASED))
    assert not repair(root.path).loses_data
    assert (errors(root.path), path.exists()) == ([], True)


def test_of_a_damaged_released_segment_what_is_whole_is_kept(released: Built) -> None:
    root = released.root
    path = root.segment(4, Kind.RELEASED)
    path.write_bytes(bytes(path.stat().st_size))
    plan = repair(root.path)
    assert [act.lost_spans for act in plan.actions if act.loses_data] == [((4, 6),)]
    assert (errors(root.path), bases(root)) == ([], [1, 7, 10])


def story(base: Path, disk: RecordingDisk) -> None:
    """Three segments are released; then the cursor is moved back, two are restored, and the first is deleted."""
    built = Built(base / "log", disk=disk)
    for _ in range(3):
        built.lines("a", [b"x"])
        built.cut()
        built.seal()
    move_cursor(built.root, "a", "processed", 3, log_id=built.log_id, disk=disk, now="")
    reclaimer = Reclaimer(built.root, disk, grace_ns=10**18)
    reclaimer.look(now_ns=built.now_ns)
    assert bases(built.root, Kind.RELEASED) == [1, 2, 3]
    move_cursor(built.root, "a", "processed", 1, log_id=built.log_id, disk=disk, now="", rewind=True)
    disk.acknowledged = 1
    reclaimer.grace_ns = 0
    reclaimer.look(now_ns=built.now_ns)
    reclaimer.ledger.close()
    assert bases(built.root) == [2, 3]


def needed(built: Built) -> list[int]:
    return [record.sequence for record in built.log.records("a", "cursor")]


def test_what_a_cursor_needs_outlives_a_power_cut(tmp_path: Path) -> None:
    base = tmp_path / "run"
    base.mkdir()
    disk = RecordingDisk(base, seed=1, every=False)
    story(base, disk)
    states = [state for state in disk.states if any(path.endswith("reclaim.jsonl") for path, _ in state.files)]
    assert len(states) > 10
    for number, state in enumerate(states):
        cut = tmp_path / str(number)
        cut.mkdir()
        state.put(cut)
        built = Built(cut / "log", epoch=100)
        at = built.log.cursor("a").effective
        assert at in ((1,) if state.acknowledged else (1, 3)), state.after
        assert needed(built) == [2, 3][at - 1 :], state.after
        reclaim(built)
        assert needed(built) == [2, 3][at - 1 :], state.after
        assert bases(built.root, Kind.RELEASED) == bases(built.root, Kind.DELETING) == []
        assert errors(built.root.path) == []
        ledger(built.root.path)
        shutil.rmtree(cut)


def test_a_power_cut_leaves_no_shrunk_segment_without_its_line_in_the_ledger(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    for number in range(10):
        built.lines("stuck" if number in (1, 8) else "web", [random.Random(number).randbytes(3000).hex().encode()])
    built.cut()
    built.lines("web", [b"newest"])
    built.seal()
    built.log.set_cursor("web", built.last)
    path = built.path(1, Kind.SEALED)
    old, name = path.read_bytes(), str(path.relative_to(built.root.path))
    disk = RecordingDisk(built.root.path, seed=1, every=True, ordered=False)
    disk.platter.load(built.root.path)
    reclaim(built, disk=disk, shrink_pinned=True)
    assert path.read_bytes() != old
    shrunk = 0
    for state in disk.states:
        files = dict(state.files)
        if files.get(name) != old:
            assert b'"shrunk"' in (files.get("ledger/reclaim.jsonl") or b""), state.after
            shrunk += 1
    assert shrunk
