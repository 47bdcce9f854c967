"""Dumps of files, whose contents and damage are shown at their offsets."""

import json
from pathlib import Path
from typing import Any

import pytest
from damage import flip_bit
from logs import Built

from wald.checking.dump import dump
from wald.errors import Damaged, InvalidInput, NotFound
from wald.format.names import Kind


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """One segment with lines, columns, a record in two pieces; a cursor."""
    built = Built(tmp_path / "root")
    built.lines("a", [b"one", b"\xff"])
    built.columns("b", [b"x"], keys=[b"k"])
    built.piece("a", b"lo", begins=True, ends=False)
    built.piece("a", b"ng\nrest\n", begins=False, ends=True)
    built.log.set_cursor("a", 2)
    return built


def pieces(path: Path, *, records: bool = False) -> list[dict[str, Any]]:
    found = list(dump(path, records=records))
    assert json.loads(json.dumps(found)) == found
    return found


def kinds(path: Path) -> list[str]:
    return [piece["kind"] for piece in pieces(path)]


def test_records_and_pieces_of_records(built: Built) -> None:
    found = [p for p in pieces(built.path(1, Kind.RAW), records=True) if p["kind"] == "record"]
    assert [(p["sequence"], p.get("value", p.get("value_hex"))) for p in found] == [
        (1, "one"),
        (2, "ff"),
        (3, "x"),
        (4, "lo"),
        (4, "ng"),
        (5, "rest"),
    ]
    assert found[2]["key"] == "k"


def test_a_sealed_segment_holds_the_same_batches(built: Built) -> None:
    def batches(kind: Kind) -> list[dict[str, Any]]:
        return [piece for piece in pieces(built.path(1, kind), records=True) if piece["kind"] in ("batch", "record")]

    before = batches(Kind.RAW)
    built.cut(seal=True)
    assert batches(Kind.SEALED) == before
    assert kinds(built.path(1, Kind.SEALED))[0] == "frame"
    assert kinds(built.path(1, Kind.SEALED))[-1] == "index"


def test_what_does_not_fit_is_told_in_its_place(built: Built) -> None:
    path = built.path(1, Kind.RAW)
    place = next(piece["offset"] for piece in pieces(path) if piece.get("route") == "b")
    data = bytearray(path.read_bytes())
    data[place + 70] ^= 1
    data[built.writer.position : built.writer.position + 9] = b"WBATrests"
    path.write_bytes(data)
    assert kinds(path) == ["header", "control", "batch", "gap", "batch", "batch", "end"]
    gap, end = pieces(path)[3], pieces(path)[-1]
    assert (gap["offset"], gap["damage"]) == (place, "the body's checksum is wrong")
    assert (end["offset"], end["garbage_bytes"]) == (built.writer.position, 9)


def test_damage_in_a_sealed_segment_is_reported(built: Built) -> None:
    """Damage of its batches from before, damage of a frame, and an end that is lost."""
    raw = built.path(1, Kind.RAW)
    place = next(piece["offset"] for piece in pieces(raw) if piece.get("route") == "b")
    flip_bit(raw, place + 70)
    built.cut(seal=True)
    path = built.path(1, Kind.SEALED)
    assert [p["offset"] for p in pieces(path) if p["kind"] == "gap"] == [place]
    flip_bit(path, 40)
    reported = next(piece for piece in pieces(path) if "damage" in piece)
    assert reported["kind"] == "frame"
    assert str(reported["damage"]).startswith("frame 0 ")  # the path and the offset are reported already
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Damaged, match="offset"):
        pieces(path)


def test_a_sparse_index(tmp_path: Path) -> None:
    built = Built(tmp_path / "root")
    for _ in range(3):
        built.lines("a", [b"x" * 70_000])
    path = built.path(1, Kind.INDEX)
    path.write_bytes(path.read_bytes() + b"half")
    assert kinds(path) == ["header", "entry", "entry", "end"]
    assert [piece["sequence"] for piece in pieces(path)[1:3]] == [2, 3]
    assert "damage" in pieces(path)[-1]


def test_the_small_files(built: Built) -> None:
    built.cut(seal=True)
    assert pieces(built.root.head)[0]["sequence"] == 5
    assert pieces(built.root.cursor("a", "processed"))[0]["sequence"] == 2
    assert [piece["event"] for piece in pieces(built.root.ledger / "segments.jsonl")] == ["cut", "sealed"]
    assert pieces(built.root.identity)[0]["content"]["format"] == 1
    for name in ("head", "routes/a/cursors/processed.cursor", "log.json", "ledger/segments.jsonl"):
        path = built.root.path / name
        path.write_bytes(b"rub\xffbish\n")
        assert any("damage" in piece for piece in pieces(path))


def test_what_is_none_of_a_logs_files_is_an_error(built: Built, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        dump(tmp_path / "nowhere.wal")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InvalidInput):
        dump(tmp_path / "notes.txt")
