"""Look-ups of every sequence, each of which has exactly one state."""

from __future__ import annotations

import shutil
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


@pytest.mark.parametrize(
    ("sequence", "state"),
    [
        (1, State.RECLAIMED),
        (2, State.RECLAIMED),
        (3, State.RELEASED),
        (5, State.SEALED),
        (6, State.SEALED),
        (8, State.CUT),
        (9, State.ACTIVE),
        (10, State.ACTIVE),
        (11, State.NEVER_ISSUED),
        (10**40, State.NEVER_ISSUED),
    ],
)
def test_each_state_is_reported(built: Built, sequence: int, state: State) -> None:
    found = built.log.where(sequence)
    assert found.state is state
    assert found.message
    assert found.durable == (state not in (State.RECLAIMED, State.NEVER_ISSUED))


def test_a_record_that_is_there_is_described(built: Built) -> None:
    built.log.set_cursor("b", 5)
    built.log.set_cursor("b", 6, "archive")
    found = built.log.where(6)
    assert (found.route, found.segment) == ("b", "00000000000000000005.wal.zst")
    assert found.append_time_ns == START_NS + 6 * SECOND_NS
    assert found.processed == {"processed": False, "archive": True}
    with SealedFile(built.path(5, Kind.SEALED)) as sealed:
        assert found.position == sealed.index.batch_table().positions[1]


@pytest.mark.parametrize(
    ("lines", "done"),
    [
        ([], True),
        ([JournalPage(0, bytes([1]) * PAGE_RECORDS)], False),
        ([JournalPage(0, bytes([255]) * PAGE_RECORDS)], True),
        ([JournalPage(PAGE_RECORDS, bytes([1]) * PAGE_RECORDS)], True),
        ([JournalPage(0, bytes([1]) * PAGE_RECORDS), Commit(done=[(2, 4)])], False),
        ([JournalPage(0, bytes([1]) * PAGE_RECORDS), Commit(done=[(2, 6)])], True),
        ([Commit(read=[(6, 6)])], False),
        ([Commit(read=[(6, 6)]), Commit(done=[(6, 6)])], True),
        ([JournalPage(0, bytes([1]) * PAGE_RECORDS), BLANK, Commit(done=[(6, 6)])], False),
    ],
)
@pytest.mark.parametrize("of", ["a", "b", None])
def test_a_record_that_workers_have_acknowledged_above_the_floor_is_processed(
    built: Built, of: str | None, lines: list[JournalLine | bytes], done: bool
) -> None:
    """By the journal of the group; not by that of another one, or without a cursor that counts."""
    built.log.set_cursor("b", 2, "g")
    start = JournalStart(built.log_id, of or "b", "g", 2, 100)
    data = [line if isinstance(line, bytes) else encode_work(line, 0) for line in (start, *lines)]
    path = built.root.cursor("b", "g")
    path.with_suffix(".work").write_bytes(b"".join(data) + BLANK * 100)
    if of is None:
        path.write_text("no number\n")

    assert built.log.where(6).processed == {"g": done and of == "b"}


def test_a_reclaimed_record_names_its_segment(built: Built) -> None:
    assert built.log.where(2).segment == "00000000000000000001.wal.zst"


@pytest.mark.parametrize("sequence", [0, -1])
def test_what_can_never_be_a_sequence_is_an_error(built: Built, sequence: int) -> None:
    with pytest.raises(InvalidInput):
        built.log.where(sequence)


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


def test_a_sealed_file_of_which_nothing_is_whole_is_quarantined(built: Built) -> None:
    path = built.path(5, Kind.SEALED)
    path.write_bytes(path.read_bytes()[:30])
    assert built.log.where(6).state is State.QUARANTINED


def test_a_sealed_file_that_lost_its_index_still_tells(built: Built) -> None:
    path = built.path(5, Kind.SEALED)
    path.write_bytes(path.read_bytes()[:-1])
    assert built.log.where(6).state is State.SEALED


def test_a_file_that_is_listed_and_not_there_is_quarantined(built: Built) -> None:
    path = built.path(5, Kind.SEALED)
    path.unlink()
    path.symlink_to("/nowhere")
    found = built.log.where(6)
    assert found.state is State.QUARANTINED
    assert str(path) in found.message


def test_without_the_segments_directory_it_says_so(built: Built) -> None:
    shutil.rmtree(built.root.segments)
    with pytest.raises(Damaged, match="is gone"):
        built.log.where(1)


def archive(built: Built, *entries: dict[str, object]) -> None:
    ledger = Ledger(built.root.ledger / "archive.jsonl", built.disk)
    ledger.append(*({"event": "archived", "dest": "/tape/7", "bag": "x/1-4", "after": 0} | entry for entry in entries))
    ledger.close()


def test_a_bundle_and_the_member_in_it_are_told_when_the_segment_is_gone(built: Built) -> None:
    """Records of two routes took turns, so their bundles span the same numbers."""
    archive(
        built,
        {
            "route": "a",
            "first": 1,
            "last": 3,
            "path": "x/1-4/data/a.tar",
            "runs": [0, 1, 1, 1],
            "parts": [[1, "a/records/1.txt"], [3, "a/records/3.txt"]],
        },
        {
            "route": "b",
            "first": 2,
            "last": 4,
            "path": "x/1-4/data/b.tar",
            "runs": [1, 1, 1, 1],
            "parts": [[2, "b/records/2.txt"]],
        },
    )
    found = [built.log.where(sequence) for sequence in (1, 2)]

    assert [each.state for each in found] == [State.ARCHIVED] * 2
    assert [each.route for each in found] == ["a", "b"]
    assert found[1].bundle == "/tape/7/x/1-4/data/b.tar"
    assert found[1].member == "b/records/2.txt"
    assert "/tape/7/x/1-4/data/b.tar" in found[1].message
    assert found[0].reclaimed is not None


def test_a_record_that_is_still_in_the_log_says_in_which_bundle_it_is_too(built: Built) -> None:
    archive(
        built,
        {
            "route": "b",
            "first": 6,
            "last": 6,
            "path": "x/1-4/data/b.tar",
            "after": 5,
            "parts": [[6, "b/records/6.txt"]],
        },
    )
    found = built.log.where(6)

    assert (found.state, found.bundle, found.reclaimed) == (State.SEALED, "/tape/7/x/1-4/data/b.tar", None)


def test_a_reclaimed_record_says_when_by_which_rule_and_under_which_cursors(built: Built) -> None:
    ledger = Ledger(built.root.ledger / "reclaim.jsonl", built.disk)
    routes = [
        {"route": "a", "first": 1, "last": 1, "cursors": {"processed": 7}},
        {"route": "b", "first": 2, "last": 2, "cursors": {"processed": 3, "audit": 2}},
    ]
    ledger.append({"event": "reclaimed", "base": 1, "last": 2, "at": START_NS, "rule": "max_age", "routes": routes})
    ledger.close()
    found = built.log.where(2)

    assert found.state is State.RECLAIMED
    assert found.message == (
        "reclaimed at 2023-11-14T22:13:20Z by the rule 'max_age'; cursors: b/processed at 3, b/audit at 2"
    )
    assert found.reclaimed is not None
    assert found.reclaimed["rule"] == "max_age"


def test_a_record_that_went_by_the_rule_of_its_route_says_which_and_who_had_not_read_it(built: Built) -> None:
    ledger = Ledger(built.root.ledger / "reclaim.jsonl", built.disk)
    routes = [
        {"route": "a", "first": 1, "last": 1, "rule": "read", "cursors": {"processed": 7}},
        {"route": "b", "first": 2, "last": 2, "rule": "max_bytes", "cursors": {"processed": 0, "audit": 2}},
    ]
    line = {"event": "reclaimed", "base": 1, "last": 2, "at": START_NS, "rule": "each_route", "lost": {"b": 1}}
    ledger.append(line | {"routes": routes})
    ledger.close()

    at = "reclaimed at 2023-11-14T22:13:20Z by the rule"
    assert built.log.where(1).message == f"{at} 'read' of route a; cursors: a/processed at 7"
    assert built.log.where(2).message == (
        f"{at} 'max_bytes' of route b, though b/processed had not read it; cursors: b/processed at 0, b/audit at 2"
    )


def test_a_ledger_with_lines_that_make_no_sense_still_gives_an_answer(built: Built) -> None:
    archive(built, {"route": 7, "first": 1, "last": 2, "path": None, "runs": 3, "parts": "x"})
    ledger = Ledger(built.root.ledger / "reclaim.jsonl", built.disk)
    ledger.append({"event": "reclaimed", "base": 3, "last": 4, "at": "soon", "routes": [7, {"route": "a"}], "rule": []})
    ledger.append({"event": "reclaimed", "base": [1], "last": 2}, {"event": "kept", "base": {}})
    ledger.append({"event": "reclaimed", "base": 1, "last": 2, "at": 10**30, "routes": 5})
    ledger.close()

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


def test_what_no_ledger_explains_is_unknown(built: Built) -> None:
    built.path(5, Kind.SEALED).unlink()
    found = built.log.where(5)
    assert found.state is State.UNKNOWN
    assert found.segment == "00000000000000000005.wal.zst"


def test_without_ledgers_and_head_every_number_has_an_answer(built: Built) -> None:
    for path in (*built.root.ledger.iterdir(), built.root.head):
        path.unlink()
    states = [built.log.where(sequence).state for sequence in range(1, 13)]
    assert states[:2] == [State.UNKNOWN] * 2
    assert states[4:8] == [State.SEALED] * 2 + [State.CUT] * 2
    assert states[8:] == [State.UNKNOWN] * 4
