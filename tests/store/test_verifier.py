"""Verification finds every damage, changes nothing and never crashes; dumps show contents at their offsets."""

import json
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import flip_bit, flipped
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import SECOND_NS, START_NS, Built, write_entries

from wald.checking.checker import CheckResult, Finding, Level, SegmentToCheck, check
from wald.checking.dump import dump
from wald.checking.verifier import Verification, verify
from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.disk import Disk
from wald.files.identity import create_root
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.format.batch import Flag
from wald.format.names import Kind


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return full(tmp_path / "root")


def full(path: Path) -> Built:
    """A sealed, a cut and an active segment, with every kind of batch, a cursor, and nothing wrong."""
    built = Built(path, segment_max_bytes=8192)
    for number in range(3):
        built.lines("a", [b"one", b"", b"three"])
        built.columns("b", [b"x", b"y"], keys=[b"k", None], times_ns=[1, 2])
        built.piece("a", b"lo", begins=True, ends=False)
        built.lines("b", [b"between"])
        if number < 2:
            built.cut()
        built.piece("a", b"ng\nrest", begins=False, ends=True)
        if number == 0:
            built.seal()
    built.log.set_cursor("a", 3)
    return built


def findings(built: Built, level: Level) -> list[Finding]:
    return [finding for finding in verify(built.root) if finding.level is level]


def errors(built: Built) -> list[str]:
    return [f"{finding.path.name} {finding.message}" for finding in findings(built, Level.ERROR)]


def spoil(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x11  # 0x10 alone may be the bit of a zstd frame's header that means nothing
    path.write_bytes(data)


def test_a_good_log_has_no_error_and_is_not_changed(built: Built) -> None:
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in built.root.path.rglob("*") if path.is_file()}

    before = content()
    assert errors(built) == []
    names = {finding.path.name for finding in findings(built, Level.OK)}
    assert {"head", "segments.jsonl", "processed.cursor"} < names
    assert len([name for name in names if ".wal" in name]) == 3
    assert content() == before
    with pytest.raises(NotFound):
        list(verify(Root(built.root.segments)))


def active(built: Built) -> Path:
    return built.path(built.writer.base_sequence, Kind.RAW)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere")


def begin_without_end(built: Built) -> None:
    built.append("a", b"begun", 1, flags=Flag.CONTINUED)
    built.lines("a", [b"next"])


def break_chain(built: Built) -> None:
    path = built.root.ledger / "segments.jsonl"
    spoil(path, path.read_bytes().index(b'"bytes"') + 10)


def record_wrong_digest(built: Built) -> None:
    path = built.root.ledger / "segments.jsonl"
    path.unlink()
    write_entries(path, {"event": "sealed", "base": 1, "last": 7, "sha256": "0" * 64, "routes": []})


def swap_segment(built: Built) -> None:
    other = full(built.root.path.with_name("other"))
    built.path(1, Kind.SEALED).write_bytes(other.path(1, Kind.SEALED).read_bytes())


def remove_segments_and_head(built: Built) -> None:
    built.cut(seal=True)
    for path in [*built.root.segments.iterdir(), built.root.head]:
        path.unlink()


def remove_one_record(built: Built) -> None:
    for _ in range(2):
        built.cut()
        built.lines("b", [b"one"])
    built.path(built.last - 1, Kind.RAW).unlink()


def remove_last_record_and_head(built: Built) -> None:
    built.cut()
    built.lines("a", [b"last"])
    built.cut(seal=True)
    for path in (built.path(built.last, Kind.SEALED), active(built), built.root.head):
        path.unlink()


# How to damage a log, and what some error says.
DAMAGE: dict[str, tuple[Callable[[Built], object], tuple[str, ...]]] = {
    "a missing segment": (lambda built: built.path(8, Kind.RAW).unlink(), ("are in no segment",)),
    "a missing segment of one record": (remove_one_record, ("are in no segment",)),
    "a link to nowhere instead of a raw segment": (lambda built: link(built.path(8, Kind.RAW)), ("8.wal not a reg",)),
    "a link instead of a sealed one": (lambda built: link(built.path(1, Kind.SEALED)), ("1.wal.zst not a regular",)),
    "no segments": (lambda built: shutil.rmtree(built.root.segments), ("segments", "is gone")),
    "neither segments nor head": (remove_segments_and_head, ("were sealed, but are in no segment",)),
    "the last record and the head": (remove_last_record_and_head, ("were sealed, but are in no segment",)),
    "a segment of another log": (swap_segment, ("belongs to log", "the ledger says")),
    "a durable batch": (lambda built: spoil(active(built), built.writer.position - 20), ("before the head",)),
    "a broken chain of a ledger": (break_chain, ("segments.jsonl line",)),
    "a wrong digest in a ledger": (record_wrong_digest, ("the ledger says 0000",)),
    "a header that miscounts": (
        lambda built: built.append("a", b"one\ntwo\n", 3),
        ("the header counts 3 records, but the payload has 2",),
    ),
    "a missing piece": (begin_without_end, ("is unfinished",)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found(built: Built, kind: str) -> None:
    damage, expected = DAMAGE[kind]
    damage(built)
    found = errors(built)
    assert [words for words in expected if not any(words in error for error in found)] == [], found


def test_a_reclaimed_segment_is_not_missing_and_a_lost_one_does_not_take_it_along(built: Built) -> None:
    """Leftovers are reported."""
    built.cut(seal=True)
    built.reclaim(1, keep=True)
    (built.root.segments / "notes.txt").write_text("mine")
    reported = {finding.path.name for finding in findings(built, Level.INFO)}
    assert {"00000000000000000001.wal.zst.released", "notes.txt"} <= reported
    built.path(1, Kind.RELEASED).unlink()
    reclaimed = "records 1 to 7, before this segment, were reclaimed"
    assert errors(built) == []
    assert reclaimed in [found.message for found in findings(built, Level.INFO)]

    built.path(8, Kind.SEALED).unlink()
    assert errors(built) == ["segments records 8 to 15 are in no segment, and no ledger explains why"]
    assert reclaimed in [found.message for found in findings(built, Level.INFO)]


def test_what_is_behind_the_head_or_was_never_synced_is_no_error(built: Built) -> None:
    """A crash leaves such bytes, and so does a daemon that is writing, maybe the second batch before the first."""
    position, path = built.writer.position, built.path(built.writer.base_sequence, Kind.RAW)
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(position)
        file.write(b"WBAT" + b"torn" * 50)
    assert errors(built) == []
    assert any("unfinished" in finding.message for finding in findings(built, Level.INFO))
    path.write_bytes(whole)
    built.lines("a", [b"first"], publish=False)
    built.lines("a", [b"second"], publish=False)
    spoil(path, position)
    assert errors(built) == []

    ledger_path = built.root.ledger / "segments.jsonl"
    begin = ledger_path.stat().st_size
    write_entries(ledger_path, *({"event": "cut", "base": 100 + n} for n in range(20)))
    left = bytearray(ledger_path.read_bytes())
    sector = 512 * (begin // 512 + 1)
    left[sector : sector + 512] = bytes(512)
    ledger_path.write_bytes(left)
    assert errors(built) == []
    assert any("the next append removes it" in finding.message for finding in findings(built, Level.INFO))


def test_cursors_routes_and_an_identity_that_are_bad_or_gone_are_reported(built: Built) -> None:
    """Routes that are gone with their cursors are no damage, and a log without segments needs no head."""
    built.root.cursor("b", "processed").write_bytes(b"999\n")
    built.root.cursor("b", "archive").write_bytes(b"\xff")
    assert len([error for error in errors(built) if ".cursor" in error]) == 2
    assert [each for each in findings(built, Level.INFO) if each.path == built.root.routes] == []
    shutil.rmtree(built.root.routes)
    assert errors(built) == []
    assert [each for each in findings(built, Level.INFO) if each.path == built.root.routes]
    built.root.identity.write_bytes(b"{}")
    assert errors(built)[0].startswith("log.json")
    assert len(findings(built, Level.OK)) >= 4
    root = create_root(built.root.path.with_name("empty"), Disk(), now="2026-11-21T10:00:00Z")
    assert [finding.message for finding in verify(root) if finding.level is Level.ERROR] == []


def test_a_segment_sealed_while_it_runs_is_read_in_its_new_form(built: Built) -> None:
    running = verify(built.root)
    while next(running).path != built.path(1, Kind.SEALED):
        pass
    built.seal()
    rest = list(running)
    assert [finding for finding in rest if finding.level is Level.ERROR] == []
    assert built.path(8, Kind.SEALED) in {finding.path for finding in rest}


def test_what_comes_behind_the_head_meanwhile_is_not_read(built: Built) -> None:
    """So it comes to an end, however fast the daemon writes; a cursor may be set there all the same."""
    running = verify(built.root)
    begun = [next(running)]
    built.cut()
    last = built.lines("a", [b"later"])
    built.log.set_cursor("a", last)
    begun += running
    assert [finding for finding in begun if finding.level is Level.ERROR] == []
    assert built.path(built.writer.base_sequence, Kind.RAW) not in {finding.path for finding in begun}


def test_a_deletion_that_is_taken_back_meanwhile_is_no_loss(tmp_path: Path) -> None:
    """Between the first hole and the place of that segment may be hours."""
    built = Built(tmp_path / "log")
    for number in range(7):
        built.lines("a", [b"%d" % number], cut=True)
    built.seal()
    built.reclaim(2)
    built.reclaim(5, keep=True)
    findings = verify(built.root)
    found = [next(finding for finding in findings if finding.path == built.path(3, Kind.SEALED))]
    built.path(5, Kind.RELEASED).rename(built.path(5, Kind.SEALED))
    write_entries(built.root.ledger / "reclaim.jsonl", {"event": "kept", "base": 5})
    found += findings

    assert [finding for finding in found if finding.level is Level.ERROR] == []
    assert built.path(5, Kind.SEALED) in [finding.path for finding in found]


@pytest.mark.parametrize(
    "name",
    ["segments/*1.wal.zst", "segments/*8.wal", "segments/*16.wal", "head", "log.json", "routes/a/cursors/*.cursor"],
)
def test_what_has_an_error_is_not_ok_as_well_and_its_place_is_told_once(built: Built, name: str) -> None:
    """Nothing that comes behind an error says of the same file that all is well."""
    (path,) = built.root.path.glob(name)
    whole = path.read_bytes()
    for part in range(5):
        spoil(path, len(whole) * part // 5)
        found = list(verify(built.root))

        wrong = {finding.path for finding in found if finding.level is Level.ERROR}
        assert [finding for finding in found if finding.level is Level.OK and finding.path in wrong] == []
        assert [finding.message for finding in found if str(finding.path) in finding.message] == []
        assert [finding.message for finding in found if "offset" in finding.message] == []
        path.write_bytes(whole)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 40))
def test_no_damage_makes_it_fall_over(seed: int, changes: int) -> None:
    """Whatever bytes of any file change, verification reports findings and raises nothing."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        built = full(Path(folder) / "root")
        files = sorted(path for path in built.root.path.rglob("*") if path.is_file())
        for _ in range(changes):
            path = chance.choice(files)
            data = bytearray(path.read_bytes()[:4000])
            what = chance.randrange(4)
            if what == 0 and data:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            elif what == 1:
                del data[chance.randrange(len(data) + 1) :]
            elif what == 2:
                data += chance.randbytes(chance.randrange(200))
            else:
                at = chance.randrange(len(data) + 1)
                data[at : at + 8] = chance.randbytes(chance.randrange(16))
            path.write_bytes(data)
        assert all(finding.message for finding in verify(built.root))
        built.writer.close()


Write = Callable[[Built], object]


def checked_ahead(root: Root) -> list[Finding]:
    """All findings, where each segment was checked before those in front of it, and maybe elsewhere."""
    verification = Verification(root)
    reported: dict[SegmentToCheck, bytes] = {
        target: pickle.dumps(check(target)) for target in reversed(verification.segments_to_check())
    }

    def ahead(target: SegmentToCheck) -> CheckResult:
        checked: CheckResult = pickle.loads(reported[target])
        return checked

    return list(verification.findings(ahead))


def messages(findings: list[Finding]) -> list[str]:
    return [finding.message for finding in findings if finding.level is Level.ERROR]


def write_anything(built: Built, chance: random.Random, batches: int) -> None:
    """Batches of three routes, records in pieces over segments among them, some of them never continued."""
    for _ in range(batches):
        route = chance.choice("abc")
        is_open = route in built.writer.state.open_records
        what = chance.randrange(6)
        if what == 0 and built.writer.has_advanced:
            built.cut()
        elif what == 1 and not is_open:
            built.piece(route, b"begun", begins=True, ends=False)
        elif what == 2 and not is_open:
            built.columns(route, [b"x", b"y"], keys=[b"k", None])
        elif is_open and chance.random() < 0.9:
            built.piece(route, b"ended\n", begins=False, ends=True)
        else:
            built.lines(route, [b"one", b"two"])
    built.seal(keep=chance.randrange(3))


@pytest.mark.parametrize("examples", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_whatever_came_before_the_findings_are_the_same(examples: int) -> None:
    """Mix the segments of two logs with a common past: checksums hold, but no segment fits the previous one."""
    settings(max_examples=examples, deadline=None)(given(st.integers(0, 1 << 32))(assert_same_findings))()


def assert_same_findings(seed: int) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder, "one"), Path(folder, "other")
        first = Built(one)
        write_anything(first, chance, 6)
        first.crash()
        shutil.copytree(one, other)
        for path in (one, other):
            built = Built(path, epoch=2, now_ns=first.now_ns + chance.randrange(-20, 20) * SECOND_NS)
            write_anything(built, chance, 12)
            built.crash()
        for path in list((other / "segments").iterdir()):
            if chance.random() < 0.4:
                path.rename(one / "segments" / path.name)
        if chance.random() < 0.5:
            (one / "head").unlink()
        root = Root(one)
        assert checked_ahead(root) == list(verify(root))


def test_a_good_log_is_read_once(tmp_path: Path) -> None:
    """Records that span segments, and routes that appear and disappear, do not cause a second check."""
    built = Built(tmp_path / "root")
    built.piece("long", b"begun", begins=True, ends=False)
    for _ in range(3):
        built.lines("a", [b"one"], cut=True)
        built.piece("long", b" and on", begins=False, ends=False)
    built.lines("b", [b"two"], cut=True)
    built.piece("long", b"\nlast\n", begins=False, ends=True)
    built.cut(seal=True)
    verification = Verification(built.root)
    reported = {target: check(target) for target in verification.segments_to_check()}
    for target in reported:
        target.segment.path.unlink()
    assert messages(list(verification.findings(reported.get))) == []


def line_of(route: str) -> Write:
    return lambda built: built.lines(route, [b"one"])


def begin(built: Built) -> None:
    built.piece("a", b"one", begins=True, ends=False)


@pytest.mark.parametrize(
    ("write", "write_other", "late_s", "expected"),
    [
        (line_of("a"), line_of("a"), 100, ["the append time is earlier than that of the previous batch"] * 2),
        (begin, line_of("a"), 0, ["record 1 of route a is unfinished, but the control state does not list it"]),
        (line_of("b"), line_of("a"), 0, ["the last record of route b is 1, but the control state says 0"]),
    ],
    ids=["older", "an open record", "a record"],
)
def test_a_segment_that_does_not_fit_the_one_before_it_is_found(
    tmp_path: Path, write: Write, write_other: Write, late_s: int, expected: list[str]
) -> None:
    """The last segment and the head are those of the other log."""
    Built(tmp_path / "one").crash()
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    for name, write_this, at_s in (("one", write, late_s), ("other", write_other, 0)):
        built = Built(tmp_path / name, epoch=2, now_ns=START_NS + at_s * SECOND_NS)
        write_this(built)
        built.cut()
        built.lines("a" if late_s else "b", [b"two"])
        built.crash()
    last = list_segments(built.root).segments[-1].path
    for path in (last, built.root.head):
        shutil.copy(path, tmp_path / "one" / path.relative_to(built.root.path))
    assert messages(checked_ahead(Root(tmp_path / "one"))) == expected


def test_what_has_ended_in_a_lost_frame_is_not_open(tmp_path: Path) -> None:
    """The next segment correctly continues with another record."""
    built = Built(tmp_path / "root")
    built.piece("a", b"begun", begins=True, ends=False)
    built.cut()
    built.piece("a", b"ended\n", begins=False, ends=True)
    built.lines("b", [b"two"], cut=True)
    built.lines("a", [b"three"])
    built.seal()
    lost = built.path(2, Kind.SEALED)
    lost.write_bytes(flipped(lost.read_bytes(), 300))
    assert len(messages(checked_ahead(built.root))) == 1
    assert checked_ahead(built.root) == list(verify(built.root))


@pytest.fixture
def dumped(tmp_path: Path) -> Built:
    """One segment with lines, columns, a record in two pieces; a cursor."""
    dumped = Built(tmp_path / "root")
    dumped.lines("a", [b"one", b"\xff"])
    dumped.columns("b", [b"x"], keys=[b"k"])
    dumped.piece("a", b"lo", begins=True, ends=False)
    dumped.piece("a", b"ng\nrest\n", begins=False, ends=True)
    dumped.log.set_cursor("a", 2)
    return dumped


def pieces(path: Path, *, records: bool = False) -> list[dict[str, Any]]:
    found = list(dump(path, records=records))
    assert json.loads(json.dumps(found)) == found
    return found


def kinds(path: Path) -> list[str]:
    return [piece["kind"] for piece in pieces(path)]


def test_records_and_pieces_of_records(dumped: Built) -> None:
    found = [p for p in pieces(dumped.path(1, Kind.RAW), records=True) if p["kind"] == "record"]
    assert [(p["sequence"], p.get("value", p.get("value_hex"))) for p in found] == [
        (1, "one"),
        (2, "ff"),
        (3, "x"),
        (4, "lo"),
        (4, "ng"),
        (5, "rest"),
    ]
    assert found[2]["key"] == "k"


def test_a_sealed_segment_holds_the_same_batches(dumped: Built) -> None:
    def batches(kind: Kind) -> list[dict[str, Any]]:
        return [piece for piece in pieces(dumped.path(1, kind), records=True) if piece["kind"] in ("batch", "record")]

    before = batches(Kind.RAW)
    dumped.cut(seal=True)
    assert batches(Kind.SEALED) == before
    assert kinds(dumped.path(1, Kind.SEALED))[0] == "frame"
    assert kinds(dumped.path(1, Kind.SEALED))[-1] == "index"


def test_what_does_not_fit_is_told_in_its_place(dumped: Built) -> None:
    path = dumped.path(1, Kind.RAW)
    place = next(piece["offset"] for piece in pieces(path) if piece.get("route") == "b")
    data = bytearray(path.read_bytes())
    data[place + 70] ^= 1
    data[dumped.writer.position : dumped.writer.position + 9] = b"WBATrests"
    path.write_bytes(data)
    assert kinds(path) == ["header", "control", "batch", "gap", "batch", "batch", "end"]
    gap, end = pieces(path)[3], pieces(path)[-1]
    assert (gap["offset"], gap["damage"]) == (place, "the body's checksum is wrong")
    assert (end["offset"], end["garbage_bytes"]) == (dumped.writer.position, 9)


def test_damage_in_a_sealed_segment_is_reported(dumped: Built) -> None:
    """Damage of its batches from before, damage of a frame, and an end that is lost."""
    raw = dumped.path(1, Kind.RAW)
    place = next(piece["offset"] for piece in pieces(raw) if piece.get("route") == "b")
    flip_bit(raw, place + 70)
    dumped.cut(seal=True)
    path = dumped.path(1, Kind.SEALED)
    assert [p["offset"] for p in pieces(path) if p["kind"] == "gap"] == [place]
    flip_bit(path, 40)
    reported = next(piece for piece in pieces(path) if "damage" in piece)
    assert reported["kind"] == "frame"
    assert str(reported["damage"]).startswith("frame 0 ")  # the path and the offset are reported already
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Damaged, match="offset"):
        pieces(path)


def test_a_sparse_index(tmp_path: Path) -> None:
    dumped = Built(tmp_path / "root")
    for _ in range(3):
        dumped.lines("a", [b"x" * 70_000])
    path = dumped.path(1, Kind.INDEX)
    path.write_bytes(path.read_bytes() + b"half")
    assert kinds(path) == ["header", "entry", "entry", "end"]
    assert [piece["sequence"] for piece in pieces(path)[1:3]] == [2, 3]
    assert "damage" in pieces(path)[-1]


def test_the_small_files(dumped: Built) -> None:
    dumped.cut(seal=True)
    assert pieces(dumped.root.head)[0]["sequence"] == 5
    assert pieces(dumped.root.cursor("a", "processed"))[0]["sequence"] == 2
    assert [piece["event"] for piece in pieces(dumped.root.ledger / "segments.jsonl")] == ["cut", "sealed"]
    assert pieces(dumped.root.identity)[0]["content"]["format"] == 1
    for name in ("head", "routes/a/cursors/processed.cursor", "log.json", "ledger/segments.jsonl"):
        path = dumped.root.path / name
        path.write_bytes(b"rub\xffbish\n")
        assert any("damage" in piece for piece in pieces(path))


def test_what_is_none_of_a_logs_files_is_an_error(dumped: Built, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        dump(tmp_path / "nowhere.wal")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InvalidInput):
        dump(tmp_path / "notes.txt")
