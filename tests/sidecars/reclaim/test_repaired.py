"""A log that was repaired is read, archived and reclaimed like any other, and each deletion is legal by its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from contents import errors
from logs import Built
from reclaiming import bases, ledger, reclaim
from repairing import build, repair, small_frames

from wald.format.names import Kind
from wald.store.files.listing import list_segments
from wald.store.retention.history import History
from wald.store.retention.legality import judge


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
    assert repair(path).loses
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
        ruling = judge(line, history.sealed(line["base"]), there=False)
        assert (ruling.errors, ruling.lost) == ((), 0)
    assert [segment.kind for segment in list_segments(root).segments[:-1]] in ([], [Kind.SEALED])
    assert errors(root.path) == []
    assert list(history.unexplained(1, lines[-1]["last"])) == []
