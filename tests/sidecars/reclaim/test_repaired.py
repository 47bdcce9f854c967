"""Repaired logs and files under each other's names: no unread record is destroyed, and the ledger proves the rest."""

import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path

import pytest
import zstandard
from contents import errors, records
from faults import Died
from logs import Built, Unsynced
from powercut import RecordingDisk
from reclaiming import DyingAfterShrink, Reclaimer, bases, ledger, reclaim
from repairing import build, repair, small_frames
from running import run, wald

from wald.errors import Damaged, WaldError
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.format.names import WHOLE_SUFFIX, Kind, segment_name
from wald.retention.audit import audit_deletion
from wald.retention.cursor_moves import move_cursor
from wald.retention.history import History

HOUR_NS = 3600 * 10**9


@pytest.fixture
def repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """A frame in the middle of a sealed segment was damaged; all of the log is sealed now."""
    small_frames(monkeypatch)
    path = tmp_path / "log"
    build(path)
    sealed = sorted((path / "segments").glob("*.zst"))[1]
    data = bytearray(sealed.read_bytes())
    data[2500] ^= 0xFF
    sealed.write_bytes(data)
    assert repair(path).loses_data
    built = Built(path, epoch=2)
    built.seal()
    return built


def test_segments_of_a_repaired_log_go_when_they_are_read(repaired: Built) -> None:
    root = repaired.root
    assert len(bases(root)) > 5
    for route in root.route_names():
        repaired.log.set_cursor(route, repaired.last)
    reclaim(repaired)
    history, lines = History(root), ledger(root.path)
    assert len(lines) >= 5
    for line in lines:
        ruling = audit_deletion(line, history.sealing_of(line["base"]), exists=False)
        assert (ruling.errors, ruling.unread_records) == ((), 0)
    assert [segment.kind for segment in list_segments(root).segments[:-1]] in ([], [Kind.SEALED])
    assert errors(root.path) == []
    assert list(history.unexplained_spans(1, lines[-1]["last"])) == []


@pytest.fixture
def released(tmp_path: Path) -> Built:
    """Four segments, of which the first two are released and everybody has read those; no ledger says so."""
    built = Built(tmp_path / "log")
    for part in range(4):
        built.lines("a", [b"%d" % part] * 3)
        built.cut()
        built.seal()
    built.log.set_cursor("a", 6)
    reclaim(built, grace_ns=HOUR_NS)
    (built.root.ledger / "reclaim.jsonl").unlink()
    return built


def test_a_released_segment_without_a_line_of_the_ledger_is_not_given_up(released: Built) -> None:
    """Even if it was called released by hand."""
    root = released.root
    assert bases(root, Kind.RELEASED) == [1, 4]
    (found,) = errors(root.path)
    assert "00000000000000000004.wal.zst.released may contain them; a repair restores the name" in found
    assert not repair(root.path).loses_data
    assert (errors(root.path), bases(root)) == ([], [1, 4, 7, 10])
    assert [record.sequence for record in records(root.path)] == list(range(1, 13))
    reclaim(released, grace_ns=HOUR_NS)
    assert bases(root, Kind.RELEASED) == [1, 4]
    assert ([entry["base"] for entry in ledger(root.path)], errors(root.path)) == ([1, 4], [])
    assert repair(root.path).actions == ()

    path = root.segment(7, Kind.SEALED)
    path.rename(root.segment(7, Kind.RELEASED))
    assert not repair(root.path).loses_data
    assert (errors(root.path), path.exists()) == ([], True)


def test_of_a_damaged_released_segment_what_is_whole_is_kept(released: Built) -> None:
    root = released.root
    path = root.segment(4, Kind.RELEASED)
    path.write_bytes(bytes(path.stat().st_size))
    plan = repair(root.path)
    assert [act.lost_spans for act in plan.actions if act.loses_data] == [((4, 6),)]
    assert (errors(root.path), bases(root)) == ([], [1, 7, 10])


def story(base: Path, disk: RecordingDisk) -> None:
    """Three segments are released; then the cursor is moved back, two are restored, and the first is deleted."""
    built = Built(base / "log", disk=disk)
    for _ in range(3):
        built.lines("a", [b"x"])
        built.cut()
        built.seal()
    move_cursor(built.root, "a", "processed", 3, log_id=built.log_id, disk=disk, now="")
    reclaimer = Reclaimer(built.root, disk, grace_ns=10**18)
    reclaimer.look(now_ns=built.now_ns)
    assert bases(built.root, Kind.RELEASED) == [1, 2, 3]
    move_cursor(built.root, "a", "processed", 1, log_id=built.log_id, disk=disk, now="", rewind=True)
    disk.acknowledged = 1
    reclaimer.grace_ns = 0
    reclaimer.look(now_ns=built.now_ns)
    reclaimer.ledger.close()
    assert bases(built.root) == [2, 3]


def needed(built: Built) -> list[int]:
    return [record.sequence for record in built.log.records("a", "cursor")]


def test_what_a_cursor_needs_outlives_a_power_cut(tmp_path: Path) -> None:
    base = tmp_path / "run"
    base.mkdir()
    disk = RecordingDisk(base, seed=1, every=False)
    story(base, disk)
    states = [state for state in disk.states if any(path.endswith("reclaim.jsonl") for path, _ in state.files)]
    assert len(states) > 10
    for number, state in enumerate(states):
        cut = tmp_path / str(number)
        cut.mkdir()
        state.put(cut)
        built = Built(cut / "log", epoch=100)
        at = built.log.cursor("a").effective
        assert at in ((1,) if state.acknowledged else (1, 3)), state.after
        assert needed(built) == [2, 3][at - 1 :], state.after
        reclaim(built)
        assert needed(built) == [2, 3][at - 1 :], state.after
        assert bases(built.root, Kind.RELEASED) == bases(built.root, Kind.DELETING) == []
        assert errors(built.root.path) == []
        ledger(built.root.path)
        shutil.rmtree(cut)


def test_a_power_cut_leaves_no_shrunk_segment_without_its_line_in_the_ledger(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    for number in range(10):
        built.lines("stuck" if number in (1, 8) else "web", [random.Random(number).randbytes(3000).hex().encode()])
    built.cut()
    built.lines("web", [b"newest"])
    built.seal()
    built.log.set_cursor("web", built.last)
    path = built.path(1, Kind.SEALED)
    old, name = path.read_bytes(), str(path.relative_to(built.root.path))
    disk = RecordingDisk(built.root.path, seed=1, every=True, ordered=False)
    disk.platter.load(built.root.path)
    reclaim(built, disk=disk, shrink_pinned=True)
    assert path.read_bytes() != old
    shrunk = 0
    for state in disk.states:
        files = dict(state.files)
        if files.get(name) != old:
            assert b'"shrunk"' in (files.get("ledger/reclaim.jsonl") or b""), state.after
            shrunk += 1
    assert shrunk


LATER_NS = 2_000_000_000_000_000_000
LONG_NS = 1_000_000_000_000_000_000
NOISE = random.Random(4).randbytes(200_000).replace(b"\n", b"-")
ZSTD = b"\x28\xb5\x2f\xfd"
SUFFIXES = [*(kind.value for kind in Kind), Kind.SEALED.value + WHOLE_SUFFIX]


@dataclass(frozen=True)
class Original:
    """A log with a segment in each state; each unread record begins with ``unread``."""

    path: Path
    unread: dict[int, bytes]

    @property
    def files(self) -> list[str]:
        """All files but cursors, which do not name their route."""
        found = (path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file())
        return sorted(str(path) for path in found if path.suffix not in (".cursor", ".lock", ".json"))


def build_each_state(path: Path) -> Original:
    """Segments 1 (released), 3 (deleting), 5 (in two forms), 15, 17, 19 (sealed), 21, 23 (raw) and 25 (active)."""
    built, unread = Built(path), dict[int, bytes]()
    plan = [["read"] * 2, ["read"] * 2, ["web", "kept", *["web"] * 6, "kept", "web"], *[["kept"] * 2] * 6]
    for number, routes in enumerate(plan):
        for route in routes:
            mark = b"<%d>" % (built.last + 1)
            sequence = built.lines(route, [mark + NOISE[6000 * built.last :][:6000]])
            if route == "kept":
                unread[sequence] = mark
        if number < len(plan) - 1:
            built.cut()
        if number == 5:
            built.seal()
    built.log.set_cursor("read", 4)
    built.log.set_cursor("web", 14)
    with pytest.raises(Died):
        reclaim(built, disk=DyingAfterShrink(), grace_ns=LONG_NS, shrink_pinned=True)
    built.path(3, Kind.RELEASED).rename(built.path(3, Kind.DELETING))
    built.crash()
    return Original(path, unread)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    return build_each_state(tmp_path_factory.mktemp("original") / "log")


@pytest.fixture
def root(original: Original, tmp_path: Path) -> Path:
    """Copy of the log."""
    return Path(shutil.copytree(original.path, tmp_path / "log"))


def kept_bytes(root: Path) -> bytes:
    """Return the contents of all files, decompressed."""
    found = []
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            found.append(path.read_bytes())
            if found[-1].startswith(ZSTD):
                with suppress(zstandard.ZstdError):
                    stream = zstandard.ZstdDecompressor().stream_reader(found[-1], read_across_frames=True)
                    found.append(stream.read())
    return b"\0".join(found)


def run_everything(root: Path) -> int | None:
    """Run RECLAIM, repair and a start that seals; return the first sequence that it gives out, None if it refuses."""
    given_out = None
    for _ in range(2):
        with suppress(WaldError, OSError):
            look(root)
        with suppress(WaldError, OSError):
            repair(root, accept_loss=False)
    with suppress(WaldError, OSError):
        built = Built(root, epoch=2, now_ns=LATER_NS)
        given_out = built.lines("kept", [b"a new one"])
        try:
            built.seal()
        finally:
            built.crash()
    with suppress(WaldError, OSError):
        look(root)
    return given_out


def look(root: Path) -> None:
    reclaimer = Reclaimer(Root(root), Unsynced(), shrink_pinned=True)
    try:
        reclaimer.look(now_ns=LATER_NS)
    finally:
        reclaimer.ledger.close()


def check(original: Original, root: Path) -> None:
    given_out = run_everything(root)
    kept = kept_bytes(root)
    assert [sequence for sequence, mark in original.unread.items() if mark not in kept] == []
    assert given_out is None or given_out > max(original.unread)


def exchange(one: Path, other: Path) -> None:
    """Swap two files, or rename one if the other does not exist."""
    if not other.exists():
        one.rename(other)
        return
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def segment(base: int, suffix: str) -> str:
    return f"segments/{segment_name(base, Kind.RAW).removesuffix(Kind.RAW.value)}{suffix}"


SWAPS = [
    (segment(5, ".wal.zst"), segment(5, ".wal.zst.whole")),
    (segment(5, ".wal.zst"), segment(15, ".wal.zst")),
    (segment(5, ".wal.zst"), segment(21, ".wal")),
    (segment(5, ".wal.zst.whole"), segment(17, ".wal.zst")),
    (segment(1, ".wal.zst.released"), segment(15, ".wal.zst")),
    (segment(3, ".wal.zst.deleting"), segment(19, ".wal.zst")),
    (segment(3, ".wal.zst.deleting"), segment(23, ".wal")),
    (segment(15, ".wal.zst"), segment(21, ".wal.idx")),
    (segment(23, ".wal"), segment(25, ".wal.idx")),
    ("ledger/reclaim.jsonl", "ledger/segments.jsonl"),
]


MOVES = [
    (segment(17, ".wal.zst"), segment(15, ".wal.zst.whole")),
    (segment(17, ".wal.zst"), segment(15, ".wal.zst.released")),
    (segment(17, ".wal.zst"), segment(15, ".wal.zst.deleting")),
    (segment(17, ".wal.zst"), segment(21, ".wal.released")),
    (segment(17, ".wal.zst"), segment(3, ".wal.zst.whole")),
    (segment(21, ".wal"), segment(15, ".wal.deleting")),
    (segment(21, ".wal"), segment(1, ".wal.zst.deleting")),
    (segment(21, ".wal"), segment(21, ".wal.zst.released")),
    (segment(5, ".wal.zst.whole"), segment(15, ".wal.zst.whole")),
]


@pytest.mark.parametrize("names", [*SWAPS, *MOVES], ids=" ".join)
def test_two_files_under_each_others_names_or_one_under_a_free_name_cost_no_unread_record(
    original: Original, root: Path, names: tuple[str, str]
) -> None:
    exchange(root / names[0], root / names[1])
    check(original, root)


@pytest.mark.parametrize("names", [MOVES[0], MOVES[1], MOVES[3]], ids=" ".join)
def test_verify_names_a_segment_under_the_name_of_another_that_nothing_reads(
    original: Original, root: Path, names: tuple[str, str]
) -> None:

    assert not [each for each in errors(root) if names[1] in each]
    (root / names[0]).rename(root / names[1])
    assert [each for each in errors(root) if names[1] in each and "name" in each]


@pytest.mark.slow
def test_every_third_swap_and_move(original: Original, tmp_path: Path) -> None:
    for number, (one, other) in enumerate(islice(all_pairs(original), None, None, 3)):
        root = Path(shutil.copytree(original.path, tmp_path / str(number)))
        exchange(root / one, root / other)
        try:
            check(original, root)
        except AssertionError as error:
            raise AssertionError((one, other)) from error
        shutil.rmtree(root)


def all_pairs(original: Original) -> Iterator[tuple[str, str]]:
    yield from combinations(original.files, 2)
    segments = [name for name in original.files if name.startswith("segments/") and not name.endswith(".idx")]
    for name in segments:
        for base in (1, 3, 5, 15, 17, 19, 21, 23, 25):
            free = (segment(base, suffix) for suffix in SUFFIXES if segment(base, suffix) not in original.files)
            yield from ((name, other) for other in free)


def test_repair_names_misplaced_segments_again_and_everything_is_read(original: Original, root: Path) -> None:

    strays = [segment(17, ".wal.zst.whole"), segment(23, ".wal.zst.deleting"), segment(21, ".wal.released")]
    for base, stray in zip((15, 17, 19), strays, strict=True):
        (root / segment(base, ".wal.zst")).rename(root / stray)
    reclaimed = run([sys.executable, "-m", "wald_reclaim", "--root", str(root)])
    for stray in strays:
        assert str(root / stray) in reclaimed.stderr.decode()
        assert (root / stray).exists()
    repair(root, accept_loss=False)
    assert wald("read", "kept", "--root", root, "--from", "earliest").stdout.count(b"\n") == len(original.unread)


@pytest.mark.parametrize("name", ["head", "lock", "transfers"])
@pytest.mark.parametrize(
    "stray", [segment(25, ".wal"), "ledger/segments.jsonl", "routes/read/cursors/processed.cursor"]
)
def test_no_start_overwrites_another_file_under_the_name_of_one_of_its_own(
    original: Original, root: Path, stray: str, name: str
) -> None:

    content = (root / stray).read_bytes()
    (root / stray).rename(root / name)
    started = wald("run", "--root", root)

    assert (started.returncode, (root / name).read_bytes()) == (Damaged.exit_code, content), started.stderr
    message = started.stderr.decode()
    assert f"{root / name}: offset 0: " in message
    back = f"mv {root / name} {root / stray}; then restart the daemon"
    assert (
        back if stray.startswith("segments") else "move the file to where it belongs; then restart the daemon"
    ) in message


REFUSED = {
    "the active segment and a sealed one": ([(25, ".wal"), (17, ".wal.zst")], 25, ".wal"),
    "the active segment and a raw one": ([(25, ".wal"), (23, ".wal")], 25, ".wal"),
    "a sealed segment behind the active one": ([(17, ".wal.zst"), (99, ".wal.zst")], 99, ".wal.zst"),
    "a raw segment behind the active one": ([(21, ".wal"), (99, ".wal")], 99, ".wal"),
}


@pytest.mark.parametrize(("pair", "base", "suffix"), REFUSED.values(), ids=REFUSED)
def test_a_start_is_refused_if_the_newest_name_is_that_of_another_segment(
    original: Original, root: Path, pair: list[tuple[int, str]], base: int, suffix: str
) -> None:

    exchange(*(root / segment(*each) for each in pair))
    before = {path: path.read_bytes() for path in root.glob("segments/*")}
    with pytest.raises(Damaged) as refused:
        Built(root, epoch=2, now_ns=LATER_NS)
    assert str(root / segment(base, suffix)) in refused.value.message
    assert "restart the daemon" in refused.value.hint
    assert {path: path.read_bytes() for path in root.glob("segments/*")} == before

    repair(root, accept_loss=False)
    built = Built(root, epoch=2, now_ns=LATER_NS)
    assert built.lines("kept", [b"next"]) == max(original.unread) + 1
    assert built.report.errors == []
    built.crash()


REPORTED = {
    "a sealed one and a raw one": ([(17, ".wal.zst"), (21, ".wal")], 1),
    "two raw": ([(21, ".wal"), (23, ".wal")], 2),
    "the active one under an older name": ([(25, ".wal"), (18, ".wal")], 1),
}


@pytest.mark.parametrize(("pair", "named"), REPORTED.values(), ids=REPORTED)
def test_a_start_reports_older_raw_files_that_are_other_segments_and_gives_out_no_number_twice(
    original: Original, root: Path, pair: list[tuple[int, str]], named: int
) -> None:

    paths = [root / segment(*each) for each in pair]
    exchange(*paths)
    built = Built(root, epoch=2, now_ns=LATER_NS)
    misplaced = [error for error in built.report.errors if "wald --root" in error and "repair" in error]
    assert len(misplaced) == named
    assert all(any(str(path) in error for error in misplaced) for path in paths[-named:])
    assert built.lines("kept", [b"next"]) == max(original.unread) + 1
    built.crash()
