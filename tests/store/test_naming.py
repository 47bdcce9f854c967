"""An active segment that lost its name gets it back, whatever step of that fails."""

from __future__ import annotations

from pathlib import Path

from contents import values
from faults import FailingDisk, TracingDisk
from logs import Built

NEVER = 1 << 30  # steps a disk survives


def test_a_failure_at_any_step_loses_nothing_and_leaves_no_name_in_doubt(tmp_path: Path) -> None:
    for bad in range(40):
        disk = FailingDisk(NEVER)
        built = Built(tmp_path / str(bad), disk=disk)
        built.lines("a", [b"1"])
        path = built.writer.path
        path.unlink()
        path.write_bytes(b"a stranger")
        disk.left = bad
        try:
            built.writer.restore_name()
            survived = disk.left >= 0
        except OSError:
            survived = False
            assert path.exists()
            assert built.writer.failed == built.writer.is_named()
        disk.left = NEVER
        if survived:
            break
    assert bad > 4


def test_what_stands_in_its_place_is_linked_before_it_is_replaced(tmp_path: Path) -> None:
    disk = TracingDisk()
    built = Built(tmp_path / "log", disk=disk)
    built.lines("a", [b"1"])
    built.writer.path.unlink()
    built.writer.path.write_bytes(b"a stranger")
    disk.steps.clear()
    found = built.writer.restore_name()
    assert found is not None
    assert found.read_bytes() == b"a stranger"
    assert [name for name, _ in disk.steps if name == "rename"] == ["rename"]
    assert disk.steps[-1] == ("sync_directory", "segments")
    assert values(built.root.path) == [b"1"]
