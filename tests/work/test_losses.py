"""Records that `wald repair --accept-loss` gave up: the group continues after them and reports them."""

import shutil
from pathlib import Path

import pytest
from leasing import cursor, group, leased, sequences
from logs import Built
from reclaiming import pinned_hole
from repairing import repair
from running import eventually

from wald.errors import Damaged, NotFound
from wald.format.names import Kind
from wald.work.group import Order, WorkGroup
from wald.work.journal import RecoveredProgress, recover_progress


@pytest.fixture
def log(built: Built) -> Built:
    """Three segments with ten records each, all with the same ten keys; the second segment will be lost."""
    for part in range(3):
        for number in range(10):
            built.columns("a", [b"damaged" if part == 1 else b"fine"], keys=[b"%d" % number])
        if part < 2:
            built.cut()
    return built


def lose(log: Built) -> None:
    """Damage a record, and accept its loss as an operator."""
    (segment,) = log.root.segments.glob("*00011.wal")
    segment.write_bytes(segment.read_bytes().replace(b"damaged", b"DAMAGED"))
    log.crash()
    repair(log.root.path)


def drained(work: WorkGroup, last: int) -> list[int]:
    """Return all deliveries up to the end of the log, in order."""
    got: list[int] = []

    def at_end() -> bool:
        more = sequences(work.lease("x", 100, wait=0.1))
        work.ack("x", more)
        got.extend(more)
        return work.floor >= last

    eventually(at_end)
    return got


@pytest.mark.parametrize("order", ["log", "key"])
def test_what_was_not_read_is_passed_over(log: Built, order: Order) -> None:
    lose(log)
    said: list[str] = []
    with WorkGroup(log.root.path, "a", "g", order=order, report=said.append) as work:
        assert drained(work, 30) == [*range(1, 11), *range(21, 31)]
        eventually(lambda: said)
    assert len(said) == 1
    assert said[0].startswith("a: ")
    assert "records 11 to 20 are lost" in said[0]
    assert said[0].endswith("; continuing after them")
    assert cursor(log) == 30


@pytest.mark.parametrize("order", ["log", "key"])
def test_what_an_owner_before_had_read_is_passed_over(log: Built, order: Order) -> None:
    """This includes leased records, and delayed ones that are due."""
    with group(log, order=order) as work:
        work.ack("x", {*leased(work, 10)} - {3})
        assert 15 in leased(work, 9)
        work.nack("x", [15], delay=0.001)
        work.lease("x", 5)  # continues reading, in any order
    lose(log)
    said: list[str] = []
    with WorkGroup(log.root.path, "a", "g", order=order, report=said.append) as work:
        assert drained(work, 30) == [3, *range(21, 31)]
        eventually(lambda: said)
    assert len(said) == 1


def test_what_is_lost_while_an_owner_runs_is_passed_over_when_it_comes_back(
    log: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wald.work.source._CACHE_BYTES", 1)
    said: list[str] = []
    with WorkGroup(log.root.path, "a", "g", report=said.append) as work:
        leased(work, 30)
        work.ack("x", range(1, 11))
        lose(log)
        work.release("x")
        assert drained(work, 30) == list(range(21, 31))
        eventually(lambda: said)
    assert len(said) == 1


def test_the_end_of_the_log_may_be_lost(built: Built) -> None:
    built.lines("a", [b"fine"] * 5)
    built.cut()
    built.lines("a", [b"damaged"] * 5)
    built.cut()
    built.lines("b", [b"other"])
    (segment,) = built.root.segments.glob("*00006.wal")
    segment.write_bytes(segment.read_bytes().replace(b"damaged", b"DAMAGED"))
    built.crash()
    repair(built.root.path)
    with group(built) as work:
        assert drained(work, 10) == [1, 2, 3, 4, 5]


def test_a_journal_that_is_newer_than_the_log_waits_for_a_start_of_the_daemon(built: Built, tmp_path: Path) -> None:
    """The log is an older copy without its routes; new records would reuse the sequences of done ones."""
    built.lines("a", [b"1", b"2"])
    shutil.copytree(built.root.path, tmp_path / "older")
    built.lines("a", [b"3", b"4", b"5"])
    with group(built) as work:
        work.ack("x", {*leased(work, 5)} - {1, 4})
    shutil.copytree(built.root.route("a"), tmp_path / "older/routes/a", dirs_exist_ok=True)
    with pytest.raises(Damaged, match="it lists records up to 5, but the last record of the log is 2"):
        WorkGroup(tmp_path / "older", "a", "g")

    started, said = Built(tmp_path / "older", epoch=2), list[str]()
    assert started.report.skipped is not None
    started.ledger.append(
        dict(zip(("base", "last", "why"), started.report.skipped, strict=True)) | {"event": "skipped"}
    )
    with WorkGroup(tmp_path / "older", "a", "g", report=said.append) as work:
        assert started.lines("a", [b"new"]) == 6
        assert drained(work, 6) == [1, 6]
        eventually(lambda: said)
    assert "records 4 to 5 are lost" in said[0]
    assert "a start of the daemon skipped them, as routes/a/cursors/g.work is at 5" in said[0]


def test_each_of_several_losses_is_reported(built: Built) -> None:
    for route, value in (("a", b"fine"), ("a", b"damaged"), ("b", b"fine"), ("a", b"damaged"), ("a", b"fine")):
        built.lines(route, [value])
        built.cut()
    built.lines("b", [b"fine"])
    with group(built) as work:
        leased(work, 4)
    for base in (2, 4):
        path = built.path(base, Kind.RAW)
        path.write_bytes(path.read_bytes().replace(b"damaged", b"DAMAGED"))
    built.crash()
    repair(built.root.path)
    said: list[str] = []
    with WorkGroup(built.root.path, "a", "g", report=said.append) as work:
        assert drained(work, 5) == [1, 5]
        eventually(lambda: len(said) == 2)
    assert ["record 2 is lost" in said[0], "record 4 is lost" in said[1]] == [True, True]


def test_a_record_that_is_given_up_may_be_lost(log: Built) -> None:
    with group(log) as work:  # without a daemon
        leased(work, 30)
        work.give_up("x", [12], "it has teeth")
        work.ack("x", [*range(1, 12), *range(13, 31)])
    lose(log)
    with group(log) as work:
        eventually(lambda: work.floor == 30)
        assert work.given_up == 0


def test_a_group_without_workers_passes_over_what_they_had_read(log: Built) -> None:
    with group(log) as work:
        leased(work, 30)
        work.ack("x", [*range(1, 11), 22])
    lose(log)
    assert recover_progress(log.log, "a", "g") == RecoveredProgress(10, 1, 0)


def test_what_was_reclaimed_is_an_error(log: Built, tmp_path: Path) -> None:
    """No operator has accepted the loss."""
    log.seal()
    with group(log) as work:
        leased(work, 5)
        work.ack("x", [1, 2, 3, 4])
    log.reclaim(11)
    with group(log) as work:
        assert sequences(work.lease("x", 100, wait=5)) == [5, 6, 7, 8, 9, 10]
        with pytest.raises(NotFound, match="RECLAIM has removed records 11 to 20"):
            work.lease("x", wait=5)


@pytest.mark.parametrize("order", ["log", "key", "strict"])
def test_a_new_group_passes_over_what_was_reclaimed_behind_a_pinned_segment(built: Built, order: Order) -> None:
    """Also after a restart in front of it, with what comes behind it leased and acknowledged."""
    pinned_hole(built)
    said: list[str] = []
    with WorkGroup(built.root.path, "a", "g", order=order, report=said.append) as work:
        assert leased(work, 5) == [2, 3, 7, 8, 9]
        work.ack("x", [2] if order == "strict" else [2, 7])
    assert work.floor == 2
    eventually(lambda: said)
    with WorkGroup(built.root.path, "a", "g", order=order, report=said.append) as work:
        rest = [3, 7, 8, 9] if order == "strict" else [3, 8, 9]
        assert leased(work, len(rest)) == rest
        assert work.ack("x", rest) == []
        assert work.floor == 9
    (line,) = set(said)
    assert line.startswith(f"a: {built.root.segments}: RECLAIM has removed records 4 to 6: 3 records of route a ")
    assert recover_progress(built.log, "a", "g") == RecoveredProgress(9, 0, 0)


def test_a_group_that_existed_when_records_were_reclaimed_does_not_pass_over_them(built: Built) -> None:
    pinned_hole(built)
    built.log.set_cursor("a", 2, "old", rewind=True)
    with WorkGroup(built.root.path, "a", "old") as work:
        assert leased(work, 1) == [3]
        with pytest.raises(NotFound, match="RECLAIM has removed records 4 to 6"):
            work.lease("x", wait=5)
