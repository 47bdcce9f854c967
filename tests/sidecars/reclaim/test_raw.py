"""Read segments are deleted even if raw; the sealer and RECLAIM do not disturb each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from contents import errors
from logs import Built, Unsynced
from reclaiming import EXPIRE, Reclaimer, bases, ledger, reclaim, rulings

from wald.files.layout import TEMPORARY
from wald.files.listing import list_segments
from wald.format.names import Kind
from wald.segments.view import State
from wald.writing.sealing import seal, segments_to_seal
from wald_reclaim.policy import Limits


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Cut 1 (a: 1–2, b: 3) and 4 (a: 4), active 5 (b: 5)."""
    built = Built(tmp_path / "root")
    built.lines("a", [b"1", b"2"])
    built.lines("b", [b"3"])
    built.cut()
    built.lines("a", [b"4"])
    built.cut()
    built.lines("b", [b"5"])
    return built


def raw(built: Built) -> list[int]:
    return bases(built.root, Kind.RAW)


def test_a_raw_segment_that_everybody_has_read_goes(built: Built) -> None:
    """The active segment stays; the ledger describes the deleted one, and its sparse index is deleted too."""
    built.log.set_cursor("a", 4)
    built.log.set_cursor("b", 5)
    reclaim(built)

    assert raw(built) == [5]
    assert sorted(path.name for path in built.root.segments.iterdir() if path.name < f"{5:020d}") == []
    first, second = ledger(built.root.path)
    assert (first["base"], first["last"], first["form"], first["rule"]) == (1, 3, "raw", "read")
    assert [(route["route"], route["count"], route["first"], route["last"]) for route in first["routes"]] == [
        ("a", 2, 1, 2),
        ("b", 1, 3, 3),
    ]
    assert (second["base"], second["last"]) == (4, 4)
    assert built.log.where(2).state is State.RECLAIMED
    assert [record.value for record in built.log.records(start="earliest")] == [b"5"]
    assert errors(built.root.path) == []


def test_a_raw_segment_that_somebody_has_not_read_stays(built: Built) -> None:
    built.log.set_cursor("a", 4)
    built.log.set_cursor("b", 2)
    reclaim(built)

    assert raw(built) == [1, 5]


def test_a_raw_segment_waits_out_its_grace_and_comes_back_for_who_needs_it(built: Built) -> None:
    """Readable all the time."""
    built.log.set_cursor("a", 4)
    built.log.set_cursor("b", 5)
    reclaim(built, grace_ns=10**18)
    assert [segment.kind for segment in list_segments(built.root).released] == [Kind.RAW_RELEASED] * 2
    assert built.log.where(2).state is State.RELEASED
    built.log.set_cursor("a", 2, rewind=True)
    assert [record.sequence for record in built.log.records("a", start="cursor")] == [4]
    reclaim(built, grace_ns=10**18)

    assert raw(built) == [4, 5]
    assert [line["event"] for line in ledger(built.root.path)] == ["reclaimed", "reclaimed", "kept"]


class _SealingMeanwhile(Unsynced):
    """The sealer is done with everything at the moment at which the first raw segment is to be renamed."""

    def __init__(self, built: Built) -> None:
        super().__init__()
        self._built = built

    def rename_to_free(self, source: Path, target: Path) -> None:
        if target == self._built.path(1, Kind.RAW_RELEASED):
            self._built.seal()
        super().rename_to_free(source, target)


def test_a_raw_segment_that_is_sealed_before_it_is_renamed_is_judged_anew(built: Built) -> None:
    """It went from under RECLAIM, which called the disk broken."""
    built.log.set_cursor("a", 4)
    built.log.set_cursor("b", 5)
    reclaim(built, disk=_SealingMeanwhile(built))
    assert bases(built.root, Kind.SEALED) == [1, 4]
    assert [record.value for record in built.log.records("a", start=1)] == [b"1", b"2", b"4"]
    assert [line["event"] for line in ledger(built.root.path)] == ["reclaimed", "reclaimed", "kept", "kept"]
    reclaim(built)

    assert (raw(built), bases(built.root, Kind.SEALED)) == ([5], [])
    assert all("sha256" in line for line in ledger(built.root.path)[4:])
    assert rulings(built.root) == {1: (), 4: ()}
    assert errors(built.root.path) == []


def test_what_is_unread_and_expires_is_counted(built: Built) -> None:
    built.log.set_cursor("a", 1)
    built.log.set_cursor("b", 5)
    reclaim(built, Limits(max_bytes=0, others=EXPIRE))

    assert [line["lost"] for line in ledger(built.root.path)] == [{"a": 1}, {"a": 1}]


def test_a_damaged_raw_segment_is_left_to_the_sealer(built: Built) -> None:
    """The routes in the damaged part are unknown."""
    built.log.set_cursor("a", 4)
    built.log.set_cursor("b", 5)
    path = built.path(1, Kind.RAW)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    reclaim(built)

    assert raw(built) == [1, 5]


def test_a_segment_that_is_being_sealed_is_left_alone(built: Built) -> None:
    built.log.set_cursor("a", 4)
    built.log.set_cursor("b", 5)
    temporary = built.path(1, Kind.SEALED)
    temporary.with_name(f"{temporary.name}.1{TEMPORARY}").touch()
    reclaim(built)

    assert raw(built) == [1, 5]


def test_a_sealer_that_begins_at_the_wrong_moment_is_noticed(built: Built) -> None:
    """It has made its temporary file before the segment was renamed: the segment gets its name back, and is sealed."""
    built.log.set_cursor("a", 4)
    built.log.set_cursor("b", 5)
    temporary = built.path(1, Kind.SEALED).with_name(f"{built.path(1, Kind.SEALED).name}.1{TEMPORARY}")
    reclaimer = Reclaimer(built.root, built.disk)
    rename = built.disk.rename_to_free

    def meet(source: Path, target: Path) -> None:
        if target == built.path(1, Kind.RAW_RELEASED):
            temporary.touch()
        rename(source, target)

    built.disk.rename_to_free = meet  # type: ignore[method-assign]  # the moment between its look and its rename
    reclaimer.look(now_ns=built.now_ns)
    reclaimer.ledger.close()

    assert raw(built) == [1, 5]
    assert [(line["base"], line["event"]) for line in ledger(built.root.path)] == [
        (1, "reclaimed"),
        (4, "reclaimed"),
        (1, "kept"),
    ]


def test_a_sealer_that_comes_too_late_makes_nothing(built: Built) -> None:
    """The segment is gone: no sealed form of it appears again."""
    built.log.set_cursor("a", 4)
    built.log.set_cursor("b", 5)
    seen = segments_to_seal(built.root, 5)
    reclaim(built)
    for segment in seen:
        with pytest.raises(FileNotFoundError):
            seal(built.root, segment, built.disk, built.ledger, now=lambda: built.now_ns)

    assert bases(built.root, Kind.SEALED) == []
    assert not [path for path in built.root.segments.iterdir() if path.name.endswith(TEMPORARY)]


def test_watching_it_leaves_the_sealer_a_while(built: Built) -> None:
    """Segments of the first pass count as old."""
    now = [0.0]
    reclaimer = Reclaimer(built.root, built.disk, clock=lambda: now[0])
    reclaimer.look(now_ns=built.now_ns)
    built.log.set_cursor("a", 4)
    built.log.set_cursor("b", 5)
    built.cut()
    built.lines("a", [b"6"])
    reclaimer.look(now_ns=built.now_ns)
    assert raw(built) == [5, 6]
    now[0] = 10.0
    reclaimer.look(now_ns=built.now_ns)
    reclaimer.ledger.close()

    assert raw(built) == [6]
