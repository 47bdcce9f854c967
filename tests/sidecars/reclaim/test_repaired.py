"""A repaired log is read, archived and reclaimed like others, and the ledger proves that each deletion was allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from contents import errors, records
from logs import Built
from reclaiming import bases, ledger, reclaim
from repairing import build, repair, small_frames

from wald.files.listing import list_segments
from wald.format.names import Kind
from wald.retention.audit import audit_deletion
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
