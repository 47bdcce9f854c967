"""``wald repair`` where ``log.json`` does not say which log it is: the other files do, or nothing is made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from contents import errors
from logs import Built
from repairing import repair, snapshot

import wald
from wald.errors import Damaged, NotFound
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.ledger_read import read_ledger
from wald.format.head import CursorLines, encode_cursor
from wald.format.names import Kind
from wald.repairing.apply import planned_repair
from wald.repairing.plan import ActionKind
from wald.repairing.survey import recover_identity

CREATED = "2023-11-14T22:13:20.000Z"  # START_NS, of the first segment


def write_cursor(root: Root, log_id: bytes, *, route: str = "a") -> None:
    lines = CursorLines(1, log_id, 1, "processed", "2026-11-21T10:00:00Z")
    root.cursor(route, "processed").write_bytes(encode_cursor(lines))


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A sealed segment, an active one with a sparse index, and a cursor: four files that name the log."""
    built = Built(tmp_path / "log")
    for part in range(2):
        built.lines("a", [b"%d" % part] * 5)
        if not part:
            built.cut()
            built.seal()
    write_cursor(built.root, built.log_id)
    built.crash()
    return built


@pytest.fixture
def other(tmp_path: Path) -> Built:
    """Another log, with as many records."""
    other = Built(tmp_path / "other")
    other.lines("a", [b"x"] * 5)
    other.cut()
    other.seal()
    other.lines("a", [b"x"] * 5)
    other.crash()
    return other


def values(root: Root) -> list[bytes]:
    return [record.value for record in wald.open(root.path).records(start=1)]


LOSSES: dict[str, Callable[[Path, Built], object]] = {
    "it is missing": lambda path, _: path.unlink(),
    "Expecting value": lambda path, _: path.write_bytes(b""),
    "the identity of the log cannot be decoded": lambda path, _: path.write_bytes(b"\x00\xff" * 40),
    "it belongs to log": lambda path, other: shutil.copy(other.root.identity, path),
}


@pytest.mark.parametrize("reason", LOSSES)
def test_it_is_made_again_of_what_all_files_say(built: Built, other: Built, reason: str) -> None:
    root, before = built.root, values(built.root)
    LOSSES[reason](root.identity, other)
    spoiled = root.identity.read_bytes() if root.identity.exists() else None
    as_found = snapshot(root.path)
    with planned_repair(root) as (plan, _):
        (act,) = plan.actions
    assert (act.kind, act.path, plan.loses_data, plan.damage) == (
        ActionKind.REWRITE_IDENTITY,
        root.identity,
        False,
        True,
    )
    assert reason in act.reason
    assert f"4 files say that this is log {built.log_id.hex()}" in act.reason
    assert snapshot(root.path) == as_found

    repair(root.path, accept_loss=False)
    identity = read_identity(root)
    assert (identity.log_id, identity.created) == (built.log_id, CREATED)
    assert errors(root.path) == []
    assert values(root) == before
    line = read_ledger(root.ledger / "segments.jsonl").entries[-1]
    assert (line["event"], line["log"], line["why"]) == ("identified", built.log_id.hex(), act.reason)
    kept = root.path / line["kept"] if "kept" in line else None
    assert (kept.read_bytes() if kept is not None else None) == spoiled
    assert repair(root.path).actions == ()


def test_the_log_of_a_made_up_identity_goes_on(built: Built) -> None:
    """The ledgers are good, so they are not copied; the index of a sealed segment is lost, too."""
    for path in built.root.segments.glob("*.zst"):
        path.write_bytes(path.read_bytes()[:-40])
    built.root.identity.unlink()
    with planned_repair(built.root) as (_, facts):
        assert facts.root.identity != built.root.identity
        assert facts.root.ledger == built.root.ledger
    repair(built.root.path, accept_loss=False)
    assert len(values(built.root)) == 10
    again = Built(built.root.path, epoch=2)
    assert again.lines("a", [b"new"]) == 11
    again.crash()
    assert errors(built.root.path) == []


def test_a_cursor_alone_says_it(built: Built) -> None:
    for directory in (built.root.segments, built.root.recovery):
        shutil.rmtree(directory)
        directory.mkdir()
    built.root.identity.unlink()
    found = recover_identity(built.root)
    assert found is not None
    assert (found[0].log_id, found[0].created) == (built.log_id, "")


def test_of_a_segment_that_was_reclaimed_and_is_not_deleted_it_is_taken_too(built: Built) -> None:
    sealed = built.path(1, Kind.SEALED)
    for path in built.root.segments.iterdir():
        if path != sealed:
            path.unlink()
    sealed.rename(built.path(1, Kind.RELEASED))
    built.root.cursor("a", "processed").unlink()
    built.root.identity.unlink()
    found = recover_identity(built.root)
    assert found is not None
    assert found[0].log_id == built.log_id


@pytest.mark.parametrize("identity", ["missing", "of the other"])
def test_where_files_disagree_nothing_is_made_and_all_are_named(built: Built, other: Built, identity: str) -> None:
    root, third = built.root, bytes(16)
    write_cursor(root, third)
    shutil.copy(other.root.identity, root.identity)
    if identity == "missing":
        root.identity.unlink()
    as_found = snapshot(root.path)
    with pytest.raises(Damaged) as caught:
        repair(root.path)
    said = [
        f"segments/00000000000000000001.wal.zst and 2 more say {built.log_id.hex()}",
        f"routes/a/cursors/processed.cursor says {third.hex()}",
    ]
    if identity == "of the other":
        said.insert(0, f"log.json says {other.log_id.hex()}")
    assert caught.value.message == f"{root.path}: the identity of the log is uncertain: {'; '.join(said)}"
    assert caught.value.hint.endswith(f"wald --root {root.path} repair")
    assert snapshot(root.path) == as_found


@pytest.mark.parametrize("lost", ["the head", "the segment of the head", "the records up to the head"])
def test_segments_of_another_log_are_not_believed_against_an_identity(built: Built, other: Built, lost: str) -> None:
    """Unless one of them contains the head, they may have been copied here."""
    root, active = built.root, built.path(6, Kind.RAW)
    shutil.copy(other.root.identity, root.identity)
    match lost:
        case "the head":
            root.head.unlink()
        case "the segment of the head":
            active.unlink()
        case _:
            shutil.copy(active, root.path / "copy")
            active.write_bytes(active.read_bytes()[:64])
    with pytest.raises(Damaged, match=f"log.json says {other.log_id.hex()}"):
        repair(root.path)


def test_a_stray_segment_says_nothing_where_others_are_of_the_log(built: Built, other: Built) -> None:
    shutil.copy(other.path(1, Kind.SEALED), built.path(9000, Kind.SEALED))
    assert recover_identity(built.root) is None


def test_what_is_no_log_does_not_become_one(tmp_path: Path, built: Built) -> None:
    with pytest.raises(NotFound):
        recover_identity(Root(tmp_path / "nothing"))
    (tmp_path / "empty/segments").mkdir(parents=True)
    with pytest.raises(NotFound):
        recover_identity(Root(tmp_path / "empty"))
    built.root.identity.rename(built.root.unfinished_identity)  # a restore that was killed
    with pytest.raises(NotFound):
        recover_identity(built.root)


def test_a_newer_format_is_not_taken_for_damage(built: Built) -> None:
    fields = json.loads(built.root.identity.read_text()) | {"format": 99}
    built.root.identity.write_text(json.dumps(fields))
    with pytest.raises(wald.errors.UnsupportedFormat):
        repair(built.root.path)


def test_with_a_broken_ledger_both_are_made_again(built: Built) -> None:
    built.root.identity.unlink()
    ledger = built.root.ledger / "segments.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"sealed"', b'"sealeD"'))
    plan = repair(built.root.path, accept_loss=False)
    assert [act.kind for act in plan.actions][:2] == [ActionKind.REBUILD_LEDGER, ActionKind.REWRITE_IDENTITY]
    assert errors(built.root.path) == []
    assert len(values(built.root)) == 10
