"""A long record across a gap or a truncation: whole if no piece is lost, otherwise dropped and reported, never torn."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contents import errors
from damage import flip_bit
from logs import Built
from reading import numbered, until_it_waits
from reclaiming import bases, reclaim
from repairing import repair
from shrinking import shrink
from writing import batches

from wald.checking.checker import Level
from wald.checking.verifier import verify
from wald.errors import Damaged, NotFound
from wald.files.routes import add_route
from wald.format.names import Kind
from wald.reading.assembler import Batch
from wald.reading.reader import read_selection, read_without_waiting
from wald.reading.selection import Selection, Start
from wald.retention.missing import Missing
from wald_reclaim import evidence

LONG = b"be" + b"gun"


def begin(built: Built, *between: Callable[[], object]) -> None:
    """Record 1 of route a begins, a segment with ``between`` follows, and the record ends in the one behind it."""
    built.piece("a", b"be", begins=True, ends=False)
    built.cut()
    for append in between:
        append()
    built.cut()
    built.piece("a", b"gun\nnext\n", begins=False, ends=True)
    built.cut(seal=True)


def of_another_route(built: Built) -> None:
    begin(built, lambda: built.lines("b", [b"x" * 4000] * 3))


def with_a_piece(built: Built) -> None:
    """The gap holds a piece of record 1."""
    begin(built, lambda: built.lines("b", [b"x" * 4000] * 3), lambda: built.piece("a", b"-", begins=False, ends=False))


def with_its_end(built: Built) -> None:
    """The gap holds the end of record 1, and the beginning of record 5, which ends behind the gap."""
    begin(
        built,
        lambda: built.lines("b", [b"x" * 4000] * 3),
        lambda: built.piece("a", b"-\nand be", begins=False, ends=False),
    )


def delete_middle(built: Built) -> None:
    """RECLAIM deletes the second segment; its line names the routes that it held."""
    built.log.set_cursor("b", 4, group="b")
    built.log.set_cursor("a", 0, group="g")
    reclaim(built)
    assert bases(built.root)[:2] == [1, 5]


def spoil_index(built: Built, base: int) -> None:
    path = built.path(base, Kind.SEALED)
    flip_bit(path, b"WALDSIX1", 20)


WHOLE = [(1, LONG), (5, b"next")]


class TestAReclaimedSegmentWithoutAPiece:
    def test_a_long_record_is_whole_across_it(self, built: Built) -> None:
        """For readers of its route, of all routes, and of a span that ends in front of the gap."""
        of_another_route(built)
        delete_middle(built)
        starts: tuple[Start, ...] = ("earliest", 1, "cursor")
        for start in starts:
            assert numbered(built.log.records("a", start=start, group="g")) == WHOLE
        assert numbered(built.log.records(on_missing="skip")) == WHOLE
        spans = read_selection(built.view, Selection(frozenset("a"), 1, last=1))
        assert [bytes(batch.raw()) for batch in spans] == [LONG + b"\n"]

    def test_it_is_dropped_if_the_line_does_not_name_the_routes(self, built: Built) -> None:
        of_another_route(built)
        built.reclaim(2)
        (built.root.ledger / "segments.jsonl").unlink()
        assert numbered(built.log.records("a")) == [(5, b"next")]
        with pytest.raises(NotFound, match="removed records 1 to 4: up to 4 records of route a are missing"):
            list(built.log.records("a", start=1))


class TestAReclaimedSegmentWithAPiece:
    @pytest.mark.parametrize("lay", [with_a_piece, with_its_end])
    def test_a_long_record_is_dropped_and_reported_where_it_was_asked_for(
        self, built: Built, lay: Callable[[Built], object]
    ) -> None:
        lay(built)
        built.reclaim(2, named=True)
        assert numbered(built.log.records("a")) == ([(5, b"next")] if lay is with_a_piece else [(6, b"next")])
        missing: list[Missing] = []
        list(built.log.records("a", start=1, on_missing=missing.append))
        assert [(each.first, each.route, each.asked) for each in missing] == [(1, "a", True)]
        assert sum(each.records for each in missing) == (1 if lay is with_a_piece else 2)

    def test_it_is_not_torn_by_a_stop_in_front_of_the_gap_and_whole_once_the_deletion_is_taken_back(
        self, built: Built
    ) -> None:
        with_a_piece(built)
        built.reclaim(2, named=True, keep=True)
        built.path(2, Kind.RELEASED).rename(built.root.path / "away")
        assert numbered(built.log.records("a", stop=1)) == []
        with pytest.raises(NotFound, match="record 1: 1 record of route a is missing"):
            list(built.log.records("a", start=1, stop=1))
        with pytest.raises(NotFound, match="record 1"):
            list(read_selection(built.view, Selection(frozenset("a"), 1, last=1)))
        (built.root.path / "away").rename(built.path(2, Kind.RELEASED))
        assert numbered(built.log.records("a", start=1)) == [(1, b"be-gun"), (5, b"next")]

    def test_it_is_dropped_if_a_line_says_only_what_several_segments_held_together(
        self, built: Built, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One line covers the segments that RECLAIM deletes together; the more exact lines about sealing are lost."""
        built.lines("kept", [b"x"])
        built.piece("a", b"begins ", begins=True, ends=False)
        for text in (b"middle ", b"more "):
            built.cut()
            built.lines("b", [b"x"] * 3)
            built.piece("a", text, begins=False, ends=False)
        built.cut()
        built.lines("kept", [b"x"])
        built.piece("a", b"ends\nnext\n", begins=False, ends=True)
        built.cut(seal=True)
        monkeypatch.setattr(evidence, "LISTED_MAX", 1)
        for route, to in (("a", 2), ("b", 8), ("kept", 0)):
            built.log.set_cursor(route, to, group="g")
        reclaim(built)
        assert bases(built.root) == [1, 9]
        assert '"event":"evidence"' in (built.root.ledger / "reclaim.jsonl").read_text()
        assert numbered(built.log.records("a")) == [(10, b"next")]
        (built.root.ledger / "segments.jsonl").unlink()
        assert numbered(built.log.records("a")) == [(10, b"next")]


class TestAGapThatNoLedgerExplains:
    def test_a_long_record_is_dropped_and_named_also_with_a_stop_in_front_of_the_gap(self, built: Built) -> None:
        with_a_piece(built)
        built.path(2, Kind.SEALED).unlink()
        damage: list[Damaged] = []
        assert numbered(built.log.records("a", on_damage=damage.append)) == [(5, b"next")]
        assert [(each.message.partition(": ")[2], each.last) for each in damage] == [
            ("records 2 to 4 are missing, and no ledger explains why; record 1 cannot be read", 4)
        ]
        damage.clear()
        assert numbered(built.log.records("a", stop=1, on_damage=damage.append)) == []
        assert [each.last for each in damage] == [1]


class TestAShrunkSegment:
    def test_a_long_record_is_whole_across_what_was_dropped_of_another_route(self, built: Built) -> None:
        """Unless neither index nor ledger says what was dropped."""
        of_another_route(built)
        shrink(built, 2, b=4)
        assert numbered(built.log.records("a", start=1)) == WHOLE
        spoil_index(built, 2)
        assert numbered(built.log.records("a", start=1)) == WHOLE
        (built.root.ledger / "reclaim.jsonl").unlink()
        damage: list[Damaged] = []
        assert numbered(built.log.records("a", on_damage=damage.append)) == [(5, b"next")]
        assert ["record 1 cannot be read" in each.message for each in damage] == [True]

    @pytest.mark.parametrize("lay", [with_a_piece, with_its_end])
    def test_it_is_dropped_with_a_piece_of_it_and_reported(self, built: Built, lay: Callable[[Built], object]) -> None:
        lay(built)
        shrink(built, 2, a=1 if lay is with_a_piece else 5)
        rest = [(5, b"next")] if lay is with_a_piece else [(6, b"next")]
        for _ in range(2):
            assert numbered(built.log.records("a")) == rest
            missing: list[Missing] = []
            assert numbered(built.log.records("a", start=1, on_missing=missing.append)) == rest
            assert (min(each.first for each in missing), {each.route for each in missing}) == (1, {"a"})
            spoil_index(built, 2)


def follow(built: Built, on_damage: Callable[[Damaged], None] | None = None) -> Iterator[Batch | int | None]:
    return read_without_waiting(built.view, route="a", start="earliest", stop=None, group="g", on_damage=on_damage)


def removed_and_named_again(built: Built) -> Built:
    built.writer.path.unlink()
    built.writer.restore_name()
    return built


def failed_write(built: Built) -> Built:
    built.writer.replace(now_ns=built.now_ns)
    return built


class TestAFollowerThatIsPaused:
    """Its file of the active segment is not the one in which the writer has continued and which was cut then."""

    @pytest.mark.parametrize(
        ("again", "sealed"), [(Built.restart, False), (removed_and_named_again, True), (failed_write, False)]
    )
    def test_it_gets_every_piece(self, tmp_path: Path, again: Callable[[Built], Built], *, sealed: bool) -> None:
        built = Built(tmp_path / "root")
        built.piece("a", b"begins ", begins=True, ends=False)
        built.cut()
        built.piece("a", b"seen ", begins=False, ends=False)
        follower = follow(built)
        assert until_it_waits(follower) == []
        built = again(built)
        built.piece("a", b"unseen ", begins=False, ends=False)
        built.piece("a", b"ends\n", begins=False, ends=True)
        built.lines("a", [b"next"], cut=True)
        if sealed:
            built.seal()
        built.lines("a", [b"last"])
        assert until_it_waits(follower) == [(1, b"begins seen unseen ends"), (2, b"next"), (3, b"last")]

    def test_a_start_may_write_a_longer_control_batch_over_a_segment_without_records(self, tmp_path: Path) -> None:
        built = Built(tmp_path / "root")
        built.lines("a", [b"first"])
        built.piece("a", b"begins ", begins=True, ends=False)
        built = built.restart()
        follower = follow(built)
        assert until_it_waits(follower) == [(1, b"first")]
        add_route(built.root, built.disk, "n" * 100)
        built = built.restart()
        assert until_it_waits(follower) == []
        built.piece("a", b"ends\n", begins=False, ends=True)
        built.lines("a", [b"next"])
        assert until_it_waits(follower) == [(2, b"begins ends"), (3, b"next")]

    @pytest.mark.parametrize("named", [True, False])
    def test_it_gets_no_record_whose_middle_was_deleted_with_the_other_file(
        self, tmp_path: Path, *, named: bool
    ) -> None:
        built, follower = paused_in_a_copy(tmp_path)
        built.piece("a", b"unseen ", begins=False, ends=False)
        delete_paused(built, named=named)
        assert until_it_waits(follower) == [(4, b"next")]

    def test_it_gets_damage_or_the_record_as_the_other_file_was_deleted_without_a_word_or_without_a_piece(
        self, tmp_path: Path
    ) -> None:
        damage: list[Damaged] = []
        built, follower = paused_in_a_copy(tmp_path / "no ledger", on_damage=damage.append)
        built.piece("a", b"unseen ", begins=False, ends=False)
        delete_paused(built)
        (built.root.ledger / "reclaim.jsonl").unlink()
        assert until_it_waits(follower) == [(4, b"next")]
        assert ["record 2 cannot be read" in each.message for each in damage] == [True]

        built, follower = paused_in_a_copy(tmp_path / "no piece", seen=b"")
        built.lines("b", [b"unseen"])
        delete_paused(built)
        assert until_it_waits(follower) == [(2, b"begins ends"), (5, b"next")]

        built, follower = paused_in_a_copy(tmp_path / "complete")
        delete_paused(built)
        assert until_it_waits(follower) == [(2, b"begins seen ends"), (4, b"next")]

    @pytest.mark.parametrize("spoiled", [False, True])
    def test_it_continues_inside_a_run_of_batches_that_shrink_dropped(self, tmp_path: Path, *, spoiled: bool) -> None:
        built, damage = Built(tmp_path / "root"), list[Damaged]()
        built.lines("a", [b"read"])
        built.lines("b", [b"x" * 1000] * 3)
        follower = follow(built, damage.append)
        assert until_it_waits(follower) == [(1, b"read")]
        built.lines("b", [b"y" * 1000] * 3)
        built.lines("a", [b"unread", b"too"])
        built.cut(seal=True)
        shrink(built, 1, b=7)
        if spoiled:
            spoil_index(built, 1)
        assert until_it_waits(follower) == [(8, b"unread"), (9, b"too")]
        assert damage == []


def paused_in_a_copy(
    place: Path, *, seen: bytes = b"seen ", on_damage: Callable[[Damaged], None] | None = None
) -> tuple[Built, Iterator[Batch | int | None]]:
    """Return a log, and a follower with record 2 open in a file of segment 3 that the writer has left."""
    built = Built(place / "root")
    built.lines("a", [b"first"])
    built.piece("a", b"begins ", begins=True, ends=False)
    built.cut()
    built.lines("b", [b"of another route"])
    if seen:
        built.piece("a", seen, begins=False, ends=False)
    follower = follow(built, on_damage)
    assert until_it_waits(follower) == [(1, b"first")]
    return removed_and_named_again(built), follower


def delete_paused(built: Built, *, named: bool = True) -> None:
    """Let RECLAIM delete segment 3, and append the end of record 2 and the next one."""
    built.cut()
    built.piece("a", b"ends\nnext\n", begins=False, ends=True)
    built.cut(seal=True)
    built.reclaim(3, named=named)


def spoil(built: Built, base: int, kind: Kind, *, gone: bool) -> None:
    """Remove segment ``base``, or damage the piece in it."""
    path = built.path(base, kind)
    if gone:
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    at = data.find(b"middle") if kind is Kind.RAW else 40  # in the only frame
    data[at] ^= 1
    path.write_bytes(data)


def repaired(built: Built) -> Built:
    """Stop the daemon, let ``wald repair --accept-loss`` run, and start it."""
    built.crash()
    repair(built.root.path)
    return Built(built.root.path, epoch=built.writer.epoch + 8, now_ns=built.now_ns)


class TestAFollowerAcrossARepair:
    """It holds the beginning of record 2, which a repair gives up because another piece is lost."""

    @pytest.mark.parametrize(
        ("kind", "gone", "seen"),
        [(Kind.RAW, False, True), (Kind.RAW, True, False), (Kind.SEALED, False, False), (Kind.SEALED, True, True)],
    )
    def test_the_record_is_lost_as_for_a_fresh_reader(
        self, tmp_path: Path, kind: Kind, *, gone: bool, seen: bool
    ) -> None:
        lost: list[Missing] = []
        built = Built(tmp_path / "root")
        built.lines("a", [b"first"])
        built.piece("a", b"begins ", begins=True, ends=False)
        follower = read_without_waiting(built.view, route="a", start=1, stop=None, on_missing=lost.append)
        assert until_it_waits(follower) == [(1, b"first")]
        built.cut()
        built.lines("b", [b"of another route"])
        built.piece("a", b"middle ", begins=False, ends=False)
        built.lines("b", [b"of another route"])
        if seen:
            assert until_it_waits(follower) == []
        built.cut()
        built.piece("a", b"ends\nnext\n", begins=False, ends=True)
        if kind is Kind.SEALED:
            built.seal()
        spoil(built, 3, kind, gone=gone)
        built = repaired(built)
        built.lines("a", [b"after"])
        assert until_it_waits(follower) == [(5, b"next"), (6, b"after")]
        assert [(each.first, each.last) for each in lost if each.exact] == [(2, 2)]
        assert "given up by a repair" in lost[0].lost
        assert numbered(built.log.records("a", on_missing="skip")) == [(1, b"first"), (5, b"next"), (6, b"after")]


LOST = b"lost " * 100
KEPT = [(2, b"other"), (3, b"next"), (4, b"last")]


def begin_at_the_end(built: Built, *, cut: bool = True) -> None:
    """Record 1 has a piece at the end of the first segment, and ends later."""
    built.piece("a", b"begins ", begins=True, ends=False)
    built.lines("b", [b"other"])
    built.piece("a", LOST, begins=False, ends=False)
    if cut:
        built.cut()


def end(built: Built) -> None:
    built.piece("a", b"ends\n", begins=False, ends=True)
    built.lines("a", [b"next", b"last"])


def truncate(built: Built, *, size: int | None = None) -> int:
    """Remove the last batch of the first segment; return where it was."""
    path = built.path(1, Kind.RAW)
    offset = batches(path)[-1].offset
    os.truncate(path, offset)
    if size is not None:
        os.truncate(path, size)
    return offset


def laid(path: Path) -> tuple[Built, int]:
    built = Built(path)
    begin_at_the_end(built)
    end(built)
    return built, truncate(built)


def read(built: Built, route: str | None = None) -> tuple[list[tuple[int, bytes]], list[str]]:
    damage: list[str] = []
    found = built.log.records(route, on_damage=lambda error: damage.append(str(error)))
    return numbered(found), damage


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

    @pytest.mark.parametrize("pieces", [None, 0, 1])
    def test_see_it_after_starts_that_made_the_next_segment_again_or_one_that_cut(
        self, tmp_path: Path, pieces: int | None
    ) -> None:
        built = Built(tmp_path / "root")
        begin_at_the_end(built, cut=pieces is not None)
        for _ in range(pieces or 0):
            built.piece("a", b"goes on ", begins=False, ends=False)
        built = (built if pieces is None else built.restart()).restart()
        end(built)
        truncate(built)
        found, (damage,) = read(built, "a")
        assert (found, "record 1 cannot be read" in damage) == (KEPT[1:], True)


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
    built.cut(seal=True)
    assert errors(built.root.path) == []
    assert [value for _, value in read(built)[0]] == [b"other", b"next", b"last", b"behind"]
    assert repair(built.root.path).actions == ()
