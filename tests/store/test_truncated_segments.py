"""A complete raw segment that another program truncates at the end of a batch: no torn record gets anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from contents import errors
from logs import Built
from repairing import repair

from wald.checking.checker import Level
from wald.checking.verifier import verify
from wald.errors import Damaged
from wald.files.listing import Segment
from wald.format.names import Kind
from wald.reading.assembler import Batch
from wald.reading.reader import read_without_waiting
from wald.segments.raw_scan import RawFile, ScannedBatch
from wald.writing.sealing import seal

LOST = b"lost " * 100
KEPT = [(2, b"other"), (3, b"next"), (4, b"last")]


def begin(built: Built) -> None:
    """Record 1 has a piece at the end of the first segment, and ends later."""
    built.piece("a", b"begins ", begins=True, ends=False)
    built.lines("b", [b"other"])
    built.piece("a", LOST, begins=False, ends=False)
    built.cut()


def end(built: Built) -> None:
    built.piece("a", b"ends\n", begins=False, ends=True)
    built.lines("a", [b"next", b"last"])


def truncate(built: Built, *, size: int | None = None) -> int:
    """Remove the last batch of the first segment; return where it was."""
    path = built.path(1, Kind.RAW)
    with path.open("rb") as file:
        batches = [met for met in RawFile(file.fileno()).scan() if isinstance(met, ScannedBatch)]
    os.truncate(path, batches[-1].offset)
    if size is not None:
        os.truncate(path, size)
    return batches[-1].offset


def laid(path: Path) -> tuple[Built, int]:
    built = Built(path)
    begin(built)
    end(built)
    return built, truncate(built)


def restarted(built: Built) -> Built:
    built.crash()
    return Built(built.root.path, epoch=built.writer.epoch + 1, now_ns=built.now_ns)


def read(built: Built, route: str | None = None) -> tuple[list[tuple[int, bytes]], list[str]]:
    damage: list[str] = []
    found = built.log.records(route, on_damage=lambda error: damage.append(str(error)))
    return [(record.sequence, record.value) for record in found], damage


class TestReaders:
    def test_do_not_get_the_torn_record_and_get_all_others(self, tmp_path: Path) -> None:
        built, offset = laid(tmp_path / "root")
        path = built.path(1, Kind.RAW)
        for route, kept in (("a", KEPT[1:]), (None, KEPT)):
            found, (damage,) = read(built, route)
            assert found == kept
            assert f"{path}: offset {offset}: " in damage
            assert "record 1 cannot be read" in damage
        assert read(built, "b") == (KEPT[:1], [])

    def test_see_it_if_the_segment_has_its_length_again_and_if_only_the_next_one_is_sealed(
        self, tmp_path: Path
    ) -> None:
        built = Built(tmp_path / "root")
        begin(built)
        end(built)
        truncate(built, size=built.path(1, Kind.RAW).stat().st_size)
        assert read(built, "a")[0] == KEPT[1:]
        built.cut()
        second = Segment(3, Kind.RAW, built.path(3, Kind.RAW))
        seal(built.root, second, built.disk, built.ledger, now=lambda: built.now_ns)
        assert read(built, "a")[0] == KEPT[1:]

    @pytest.mark.parametrize("pieces", [0, 1])
    def test_see_it_after_starts_that_made_the_next_segment_again(self, tmp_path: Path, pieces: int) -> None:
        built = Built(tmp_path / "root")
        begin(built)
        for _ in range(pieces):
            built.piece("a", b"goes on ", begins=False, ends=False)
        built = restarted(restarted(built))
        end(built)
        truncate(built)
        found, (damage,) = read(built, "a")
        assert (found, "record 1 cannot be read" in damage) == (KEPT[1:], True)

    def test_see_it_after_a_start_that_cut_the_segment(self, tmp_path: Path) -> None:
        built = Built(tmp_path / "root")
        built.piece("a", b"begins ", begins=True, ends=False)
        built.lines("b", [b"other"])
        built.piece("a", LOST, begins=False, ends=False)
        built = restarted(built)
        end(built)
        truncate(built)
        assert read(built, "a")[0] == KEPT[1:]

    def test_a_follower_sees_it_unless_it_had_read_the_piece(self, tmp_path: Path) -> None:
        built = Built(tmp_path / "root")
        built.piece("a", b"begins ", begins=True, ends=False)
        built.lines("b", [b"other"])
        followers = {False: follower(built, damage := list[Damaged]())}
        assert step(followers[False]) == []
        built.piece("a", LOST, begins=False, ends=False)
        followers[True] = follower(built, undamaged := list[Damaged]())
        assert step(followers[True]) == []
        built.cut()
        end(built)
        truncate(built)
        assert step(followers[False]) == KEPT[1:]
        assert len(damage) == 1
        assert step(followers[True]) == [(1, b"begins " + LOST + b"ends"), *KEPT[1:]]
        assert undamaged == []


def follower(built: Built, damage: list[Damaged]) -> object:
    return read_without_waiting(built.view, route="a", start="earliest", stop=None, group="g", on_damage=damage.append)


def step(follower: object) -> list[tuple[int, bytes]]:
    """Everything to the end of the log."""
    found = []
    for met in follower:  # type: ignore[attr-defined]
        if isinstance(met, int):
            break
        if isinstance(met, Batch):
            found += [(record.sequence, record.value) for record in met.records()]
    return found


def test_the_sealer_refuses_it_and_verify_names_it(tmp_path: Path) -> None:
    built, offset = laid(tmp_path / "root")
    path = built.path(1, Kind.RAW)
    data = path.read_bytes()
    with pytest.raises(Damaged, match=f"{path}: offset {offset}: .*") as raised:
        built.seal()
    assert "repair" in str(raised.value.hint)
    assert path.read_bytes() == data
    assert [each.name for each in built.root.segments.glob("*.zst*")] == []
    (found,) = [each for each in verify(built.root) if each.level is Level.ERROR]
    assert (found.path, found.offset) == (path, offset)
    assert "wald --root" in found.message


@pytest.mark.parametrize("more", [lambda _: None, lambda built: built.cut()])
def test_a_repair_gives_up_exactly_that_record(tmp_path: Path, more: Callable[[Built], object]) -> None:
    built, _ = laid(tmp_path / "root")
    more(built)
    built.crash()
    lost = [span for act in repair(built.root.path).actions for span in act.lost_spans]
    assert lost == [(1, 1)]
    assert errors(built.root.path) == []
    built = Built(built.root.path, epoch=9, now_ns=built.now_ns)
    assert read(built)[0] == KEPT
    built.lines("a", [b"behind"])
    built.cut()
    built.seal()
    assert errors(built.root.path) == []
    assert [value for _, value in read(built)[0]] == [b"other", b"next", b"last", b"behind"]
    assert repair(built.root.path).actions == ()


def test_damage_in_the_next_segment_costs_no_record_of_this_one(tmp_path: Path) -> None:
    """Its end is not known then, as in a log of an older version."""
    built = Built(tmp_path / "root")
    begin(built)
    end(built)
    path = built.path(3, Kind.RAW)
    data = bytearray(path.read_bytes())
    data[64 + 70] ^= 1
    path.write_bytes(data)
    assert read(built, "b") == (KEPT[:1], [])
