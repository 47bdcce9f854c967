"""A segment under another's name is reported as what it really is; what belongs there is missing, not replaced."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from logs import START_NS, Built

from wald.errors import Damaged
from wald.format.names import Kind
from wald.store.checking.finding import Level
from wald.store.checking.verifier import verify
from wald.store.reading.selection import Start
from wald.store.segments.view import State


def fill(built: Built, *, sealed: int, value: bytes = b"") -> None:
    """Records 1 to 8, two in each segment; the first ``sealed`` segments are sealed."""
    for base in (1, 3, 5, 7):
        built.lines("a", [value + b"%d" % base, value + b"%d" % (base + 1)])
        if base < 7:
            built.cut()
    built.seal(keep=3 - sealed)


def path_of(built: Built, base: int) -> Path:
    sealed = built.path(base, Kind.SEALED)
    return sealed if sealed.exists() else built.path(base, Kind.RAW)


def read(built: Built) -> tuple[list[int], list[str]]:
    """The sequences that are read, each with the value it was written with, and what is reported."""
    reported: list[str] = []
    records = list(built.log.records(on_damage=lambda error: reported.append(error.message)))
    assert [record.value for record in records] == [b"%d" % record.sequence for record in records]
    return [record.sequence for record in records], reported


def errors(built: Built) -> list[str]:
    return [f"{f.path.name} {f.message}" for f in verify(built.root) if f.level is Level.ERROR]


FORMS = pytest.mark.parametrize("sealed", [0, 3])


@FORMS
def test_a_copy_under_an_older_name_gives_no_record_twice(built: Built, sealed: int) -> None:
    fill(built, sealed=sealed)
    source, target = path_of(built, 5), path_of(built, 1)
    shutil.copy(source, target)
    found, reported = read(built)
    assert found == [3, 4, 5, 6, 7, 8]
    assert len(reported) == 1
    assert target.name in reported[0]
    assert "segment 5" in reported[0]
    assert "records 1 to 2 cannot be read" in reported[0]
    assert any(target.name in error for error in errors(built))


@FORMS
def test_a_copy_under_a_newer_name_gives_no_record_twice(built: Built, sealed: int) -> None:
    fill(built, sealed=sealed)
    target = path_of(built, 5)
    shutil.copy(path_of(built, 1), target)
    found, reported = read(built)
    assert found == [1, 2, 3, 4, 7, 8]
    assert len(reported) == 1
    assert target.name in reported[0]
    assert "segment 1" in reported[0]
    assert "records 5 to 6 cannot be read" in reported[0]
    assert any(target.name in error for error in errors(built))


@FORMS
def test_swapped_names_lose_both_and_nothing_else(built: Built, sealed: int) -> None:
    fill(built, sealed=sealed)
    one, other = path_of(built, 1), path_of(built, 5)
    aside = built.root.path / "aside"
    shutil.move(one, aside)
    shutil.move(other, one)
    shutil.move(aside, other)
    found, reported = read(built)
    assert found == [3, 4, 7, 8]
    assert [one.name in reported[0], other.name in reported[1]] == [True, True]


@FORMS
def test_a_copy_under_a_name_of_its_own_takes_nothing_away_and_is_reported(built: Built, sealed: int) -> None:
    """Nothing is missing; but who has put it there does not know what else was done."""
    fill(built, sealed=sealed)
    kind = Kind.SEALED if sealed else Kind.RAW
    target = built.path(4, kind)
    shutil.copy(path_of(built, 5), target)
    found, reported = read(built)
    assert found == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(reported) == 1
    assert target.name in reported[0]
    assert any(target.name in error for error in errors(built))


@FORMS
def test_the_active_segment_under_another_name_is_not_read_there(built: Built, sealed: int) -> None:
    fill(built, sealed=sealed)
    target = path_of(built, 3)
    target.unlink()
    target = built.path(3, Kind.RAW)
    shutil.copy(path_of(built, 7), target)
    found, reported = read(built)
    assert found == [1, 2, 5, 6, 7, 8]
    assert "segment 7" in reported[0]
    assert "records 3 to 4 cannot be read" in reported[0]


@FORMS
def test_a_segment_of_another_log_under_a_right_name_is_not_read(built: Built, tmp_path: Path, sealed: int) -> None:
    other = Built(tmp_path / "other")
    fill(built, sealed=sealed)
    fill(other, sealed=sealed, value=b"x")
    target = path_of(built, 3)
    shutil.copy(path_of(other, 3), target)
    found, reported = read(built)
    assert found == [1, 2, 5, 6, 7, 8]
    assert target.name in reported[0]
    assert other.log_id.hex() in reported[0]
    assert "records 3 to 4 cannot be read" in reported[0]


def test_a_raw_copy_whose_header_is_spoilt_is_known_by_its_first_batch(built: Built) -> None:
    fill(built, sealed=0)
    data = bytearray(path_of(built, 5).read_bytes())
    data[40] ^= 1
    path_of(built, 1).write_bytes(data)
    found, reported = read(built)
    assert found == [3, 4, 5, 6, 7, 8]
    assert "records 1 to 2 cannot be read" in reported[0]


@FORMS
@pytest.mark.parametrize("start", [1, 2, "earliest"])
def test_without_somebody_to_tell_it_is_an_error(built: Built, sealed: int, start: Start) -> None:
    fill(built, sealed=sealed)
    shutil.copy(path_of(built, 5), path_of(built, 1))
    with pytest.raises(Damaged, match="segment 5"):
        list(built.log.records(start=start))


@FORMS
def test_where_does_not_take_a_copy_for_the_record(built: Built, sealed: int) -> None:
    fill(built, sealed=sealed)
    target = path_of(built, 1)
    shutil.copy(path_of(built, 5), target)
    found = built.log.where(1)
    assert found.state is State.QUARANTINED
    assert target.name in found.message
    assert built.log.where(5).state is not State.QUARANTINED


@FORMS
@pytest.mark.parametrize("base", [1, 3, 5])
def test_from_a_time_a_segment_that_cannot_be_read_is_reported_and_not_passed_over(
    built: Built, sealed: int, base: int
) -> None:
    """Its records may be of that time; where older ones follow, they are not."""
    fill(built, sealed=sealed)
    path_of(built, base).write_bytes(b"")
    at = datetime.fromtimestamp(START_NS / 1e9 + (base + 1) / 2, UTC)
    with pytest.raises(Damaged, match=f"records {base} to {base + 1}"):
        list(built.log.records(start=at))
    after = built.log.records(start=at + timedelta(seconds=1.5))
    assert [record.sequence for record in after] == list(range(base + 4, 9))


@pytest.mark.parametrize("base", [3, 99])
def test_a_start_refuses_a_newest_segment_under_another_name(tmp_path: Path, base: int) -> None:
    """It was taken for one without records, and replaced: what it held was acknowledged."""
    log = Built(tmp_path / "log")
    log.lines("a", [b"one", b"two", b"three"])
    log.crash()
    right, wrong = log.path(1, Kind.RAW), log.path(base, Kind.RAW)
    right.rename(wrong)
    before = wrong.read_bytes()
    with pytest.raises(Damaged, match="begins with record 1") as caught:
        Built(tmp_path / "log", epoch=2)
    assert str(wrong) in caught.value.message
    assert wrong.read_bytes() == before
    wrong.rename(right)
    again = Built(tmp_path / "log", epoch=2)
    assert [record.value for record in again.log.records("a")] == [b"one", b"two", b"three"]
