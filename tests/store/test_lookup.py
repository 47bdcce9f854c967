"""Look-ups of every sequence, each of which has exactly one state."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from contents import errors
from damage import flipped
from logs import SECOND_NS, START_NS, Built

from wald.errors import Damaged, InvalidInput
from wald.files.ledger_write import Ledger
from wald.format.names import Kind
from wald.format.work import PAGE_RECORDS, Commit, JournalLine, JournalPage, JournalStart, encode_work
from wald.segments.sealed_file import SealedFile
from wald.segments.view import State

BLANK = b"\n"


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """Records 1–2 reclaimed, 3–4 released, 5–6 sealed, 7–8 cut, 9–10 active, 11 not durable."""
    built = Built(tmp_path / "root")
    for base in (1, 3, 5, 7, 9):
        built.lines("a", [b"x"])
        built.lines("b", [b"y"])
        if base < 9:
            built.cut()
    built.seal(keep=1)
    built.reclaim(1)
    built.reclaim(3, keep=True)
    built.lines("a", [b"z"], publish=False)
    return built


def test_each_state_is_reported(built: Built) -> None:
    reclaimed, sealed, never = State.RECLAIMED, State.SEALED, State.NEVER_ISSUED
    states = [reclaimed, reclaimed, State.RELEASED, State.RELEASED, sealed, sealed, State.CUT, State.CUT]
    expected = dict(enumerate([*states, State.ACTIVE, State.ACTIVE, never], start=1)) | {10**40: never}
    for sequence, state in expected.items():
        found = built.log.where(sequence)
        assert found.state is state
        assert found.message
        assert found.durable == (state not in (reclaimed, never))
    assert built.log.where(2).segment == "00000000000000000001.wal.zst"
    for wrong in (0, -1):
        with pytest.raises(InvalidInput):
            built.log.where(wrong)


def test_a_record_that_is_there_is_described(built: Built) -> None:
    built.log.set_cursor("b", 5)
    built.log.set_cursor("b", 6, "archive")
    found = built.log.where(6)
    assert (found.route, found.segment) == ("b", "00000000000000000005.wal.zst")
    assert found.append_time_ns == START_NS + 6 * SECOND_NS
    assert found.processed == {"processed": False, "archive": True}
    with SealedFile(built.path(5, Kind.SEALED)) as sealed:
        assert found.position == sealed.index.batch_table().positions[1]


def test_a_record_that_workers_have_acknowledged_above_the_floor_is_processed(built: Built) -> None:
    """By the journal of the group; not by that of another one, or without a cursor that counts."""
    page, acked = JournalPage(0, bytes([1]) * PAGE_RECORDS), JournalPage(0, bytes([255]) * PAGE_RECORDS)
    behind, read, done = JournalPage(PAGE_RECORDS, bytes([1]) * PAGE_RECORDS), [(6, 6)], Commit(done=[(6, 6)])
    path = built.root.cursor("b", "g")

    def is_processed(*lines: JournalLine | bytes, route: str = "b") -> bool:
        data = [JournalStart(built.log_id, route, "g", 2, 100), *lines]
        journal = [line if isinstance(line, bytes) else encode_work(line, 0) for line in data]
        path.with_suffix(".work").write_bytes(b"".join(journal) + BLANK * 100)
        return built.log.where(6).processed["g"]

    built.log.set_cursor("b", 2, "g")
    for several in ([], [acked], [behind], [page, Commit(done=[(2, 6)])], [Commit(read=read), done]):
        assert is_processed(*several), several
        assert not is_processed(*several, route="a")
    for several in ([page], [page, Commit(done=[(2, 4)])], [Commit(read=read)], [page, BLANK, done]):
        assert not is_processed(*several), several
    path.write_text("no number\n")
    assert not is_processed(acked)


def test_damaged_bytes_are_quarantined(built: Built) -> None:
    position = built.log.where(8).position
    assert position is not None
    path = built.path(7, Kind.RAW)
    data = bytearray(path.read_bytes())
    data[position + 70] ^= 1
    path.write_bytes(data)
    found = built.log.where(8)
    assert found.state is State.QUARANTINED
    assert f"offset {position}" in found.message
    assert built.log.where(7).state is State.CUT


def test_a_sealed_file_is_quarantined_if_nothing_is_whole_or_it_is_not_there(built: Built) -> None:
    path = built.path(5, Kind.SEALED)
    whole = path.read_bytes()
    for length, state in ((-1, State.SEALED), (30, State.QUARANTINED)):
        path.write_bytes(whole[:length])
        assert built.log.where(6).state is state
    path.unlink()
    path.symlink_to("/nowhere")
    found = built.log.where(6)
    assert found.state is State.QUARANTINED
    assert str(path) in found.message
    path.unlink()
    found = built.log.where(5)
    assert (found.state, found.segment) == (State.UNKNOWN, path.name)
    shutil.rmtree(built.root.segments)
    with pytest.raises(Damaged, match="is gone"):
        built.log.where(1)


def archive(built: Built, *entries: dict[str, object]) -> None:
    ledger = Ledger(built.root.ledger / "archive.jsonl", built.disk)
    ledger.append(*({"event": "archived", "dest": "/tape/7", "bag": "x/1-4", "after": 0} | entry for entry in entries))
    ledger.close()


def test_a_bundle_and_the_member_in_it_are_told(built: Built) -> None:
    """Records of two routes took turns, so their bundles span the same numbers; one record is still in the log."""
    of_a, of_b = ({"path": f"x/1-4/data/{route}.tar", "runs": [n, 1, 1, 1]} for n, route in enumerate("ab"))
    parts = [[1, "a/records/1.txt"], [3, "a/records/3.txt"]]
    archive(
        built,
        {"route": "a", "first": 1, "last": 3, "parts": parts} | of_a,
        {"route": "b", "first": 2, "last": 4, "parts": [[2, "b/records/2.txt"]]} | of_b,
        {"route": "b", "first": 6, "last": 6, "path": of_b["path"], "after": 5, "parts": [[6, "b/records/6.txt"]]},
    )
    found = [built.log.where(sequence) for sequence in (1, 2, 6)]

    assert [each.state for each in found] == [State.ARCHIVED, State.ARCHIVED, State.SEALED]
    assert [each.route for each in found] == ["a", "b", "b"]
    assert found[1].bundle == found[2].bundle == "/tape/7/x/1-4/data/b.tar"
    assert found[1].member == "b/records/2.txt"
    assert "/tape/7/x/1-4/data/b.tar" in found[1].message
    assert found[0].reclaimed is not None
    assert found[2].reclaimed is None


def test_a_reclaimed_record_says_when_by_which_rule_and_under_which_cursors(built: Built) -> None:
    """Also by the rule of its route, and who had not read it."""
    at = "reclaimed at 2023-11-14T22:13:20Z by the rule"
    a, b = {"route": "a", "first": 1, "last": 1}, {"route": "b", "first": 2, "last": 2}
    line = {"event": "reclaimed", "base": 1, "last": 2, "at": START_NS}
    b_cursors = {"cursors": {"processed": 3, "audit": 2}}
    tell_reclaim(built, line | {"rule": "max_age", "routes": [a | {"cursors": {"processed": 7}}, b | b_cursors]})
    found = built.log.where(2)
    assert (found.state, found.reclaimed and found.reclaimed["rule"]) == (State.RECLAIMED, "max_age")
    assert found.message == f"{at} 'max_age'; cursors: b/processed at 3, b/audit at 2"

    a |= {"rule": "read", "cursors": {"processed": 7}}
    b |= {"rule": "max_bytes", "cursors": {"processed": 0, "audit": 2}}
    tell_reclaim(built, line | {"rule": "each_route", "lost": {"b": 1}, "routes": [a, b]})
    assert built.log.where(1).message == f"{at} 'read' of route a; cursors: a/processed at 7"
    assert built.log.where(2).message == (
        f"{at} 'max_bytes' of route b, though b/processed had not read it; cursors: b/processed at 0, b/audit at 2"
    )


def tell_reclaim(built: Built, *lines: Mapping[str, object]) -> None:
    ledger = Ledger(built.root.ledger / "reclaim.jsonl", built.disk)
    ledger.append(*map(dict, lines))
    ledger.close()


def test_a_ledger_with_lines_that_make_no_sense_still_gives_an_answer(built: Built) -> None:
    archive(built, {"route": 7, "first": 1, "last": 2, "path": None, "runs": 3, "parts": "x"})
    line = {"event": "reclaimed", "base": 3, "last": 4, "at": "soon", "routes": [7, {"route": "a"}], "rule": []}
    tell_reclaim(built, line, {"event": "reclaimed", "base": [1], "last": 2}, {"event": "kept", "base": {}})
    tell_reclaim(built, {"event": "reclaimed", "base": 1, "last": 2, "at": 10**30, "routes": 5})

    assert [built.log.where(sequence).state for sequence in (1, 3)] == [State.ARCHIVED, State.RELEASED]


@pytest.mark.parametrize("name", ["reclaim.jsonl", "archive.jsonl", "segments.jsonl"])
def test_a_damaged_ledger_answers_nothing_about_what_is_gone_and_leaves_the_rest(built: Built, name: str) -> None:
    archive(built, {"route": "a", "first": 1, "last": 1, "bundle": "a.tar"})
    path = built.root.ledger / name
    path.write_bytes(flipped(path.read_bytes(), 99))
    with pytest.raises(Damaged, match=f"{name}: line 1: checksum mismatch"):
        built.log.where(1)

    found = built.log.where(5)
    assert found.state is State.SEALED
    assert found.message.endswith("wald cannot rely on this ledger") == (name != "segments.jsonl")
    assert f"{path}: line 1" in " ".join(errors(built.root.path))


def test_without_ledgers_and_head_every_number_has_an_answer(built: Built) -> None:
    for path in (*built.root.ledger.iterdir(), built.root.head):
        path.unlink()
    states = [built.log.where(sequence).state for sequence in range(1, 13)]
    assert states[:2] == [State.UNKNOWN] * 2
    assert states[4:8] == [State.SEALED] * 2 + [State.CUT] * 2
    assert states[8:] == [State.UNKNOWN] * 4
