"""After a power cut during a deletion or a withdrawal, all needed records exist, and nothing is damaged."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from contents import errors
from logs import Built
from powercut import RecordingDisk
from reclaiming import Reclaimer, bases, ledger, reclaim

from wald.format.names import Kind
from wald.retention.cursor_moves import move_cursor


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
        reclaimer = Reclaimer(built.root, built.disk)
        reclaimer.look(now_ns=built.now_ns)
        reclaimer.ledger.close()
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
