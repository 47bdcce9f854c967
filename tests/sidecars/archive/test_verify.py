"""A proof finds every change of every file, names it, and changes nothing itself."""

import random
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType

import pytest
from archives import archive, bags, copied, errors, files, findings, interrupt, ledger_lines, manifest, wald_archive
from damage import flipped
from logs import Built, Unsynced
from running import eventually

from wald.checking.checker import Level
from wald.errors import Damaged, NotFound
from wald.files.disk import Disk
from wald.files.ledger_write import Ledger
from wald_archive.bundle import Records
from wald_archive.codecs import Codec
from wald_archive.ledger import Recorded, RecordedBag, recorded_at
from wald_archive.manifest import Manifest
from wald_archive.objects import Directory
from wald_archive.verify import Bags

SMALL_BYTES = 500  # of these files every byte is changed; of larger ones every STRIDE-th, and both ends
STRIDE = 41

MISSING = "missing; the ledger says that it is here; if it was moved, verify its new DEST as well"


@pytest.fixture
def place(mixed: Built, dest: Path) -> Path:
    """Two bags of route a, one of two bundles, one of one; and a bag of route b."""
    archive(mixed, dest, size=Records(7), codec=Codec.ZST)
    mixed.lines("a", [b"more"])
    archive(mixed, dest, codec=Codec.GZ)
    archive(mixed, dest, "b")
    return dest


def named(place: Path, path: Path) -> str:
    """A file as a finding names it: in its bag."""
    return str(path.relative_to(place)).split("/", 2)[2]


def every_file(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file())


def test_a_good_archive_has_no_other_finding(place: Path, mixed: Built) -> None:
    """With the ledger and without; and nothing is changed by looking."""
    before = files(place)

    assert [found.level for found in findings(place)] == [Level.OK] * 4
    assert [found.level for found in findings(place, root=mixed.root)] == [Level.OK] * 4
    assert files(place) == before


@pytest.mark.slow
def test_every_changed_byte_is_found_and_its_file_named(place: Path) -> None:
    """One bit of it, at a place that differs from byte to byte."""
    chance = random.Random(1)
    looked = 0
    for bag in bags(place)[1:]:
        shutil.rmtree(bag)
    for path in every_file(bags(place)[0]):
        data = path.read_bytes()
        offsets = range(len(data)) if len(data) <= SMALL_BYTES else {*range(0, len(data), STRIDE), len(data) - 1}
        for offset in offsets:
            path.write_bytes(flipped(data, 8 * offset + chance.randrange(8)))
            wrong = [file for file, _ in errors(place)]
            assert named(place, path) in wrong, f"{path}: offset {offset}: {wrong}"
            looked += 1
        path.write_bytes(data)
    assert looked > 1000
    assert errors(place) == []


def test_every_longer_shorter_or_missing_file_is_named(place: Path) -> None:
    for path in every_file(place):
        data = path.read_bytes()
        for changed in (data[:-1], data + b"\n", b"", None):
            if changed is None:
                path.unlink()
            else:
                path.write_bytes(changed)
            assert named(place, path) in [file for file, _ in errors(place)]
        path.write_bytes(data)
    assert errors(place) == []


def test_a_changed_tag_file_is_reported_with_its_offset_and_nothing_else_is_accused(place: Path) -> None:
    path = bags(place)[0] / "bag-info.txt"
    path.write_bytes(flipped(path.read_bytes(), 8 * 20))

    (found,) = [found for found in findings(place) if found.level is Level.ERROR]

    assert (found.file, found.offset, found.name) == ("bag-info.txt", 20, str(path))


def test_a_changed_manifest_is_named_and_its_bundles_are_still_proven(place: Path) -> None:
    """By the digests that are left; they are good, so nothing is said of them."""
    for old in [b'"count": 7', b'"log": "', b'"sha256": "', b'"archived_at": "2026', b'"format": 1']:
        path = bags(place)[0] / "manifest.json"
        data = path.read_bytes()
        assert old in data
        at = data.index(old) + len(old) + (1 if old.endswith(b'"') else -1)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])

        wrong = [file for file, _ in errors(place)]
        assert "manifest.json" in wrong
        assert not any(file.startswith("data/") for file in wrong)

        harmed = next(bags(place)[0].glob("data/*.zst"))
        whole = harmed.read_bytes()
        harmed.write_bytes(flipped(whole, 8 * 100))
        assert named(place, harmed) in [file for file, _ in errors(place)]
        harmed.write_bytes(whole)
        path.write_bytes(data)


def test_foreign_files_are_named(place: Path) -> None:
    bag = bags(place)[0]
    strangers = [bag / "x", bag / "data" / "x", bag / "folder" / "x", bag / "data" / "folder" / "x"]
    for stranger in strangers:
        stranger.parent.mkdir(exist_ok=True)
        stranger.write_bytes(b"")
    (place / "a" / "x").write_bytes(b"")
    (place / "a" / "1-2").mkdir()
    (place / "lost+found").mkdir()

    assert sorted(file for file, _ in errors(place)) == ["a/1-2", "a/x", "data/folder", "data/x", "folder", "x"]
    assert "lost+found" in [found.file for found in findings(place) if found.level is Level.INFO]


def test_exchanged_bundles_are_named(place: Path) -> None:
    one, two = sorted(bags(place)[0].glob("data/*.zst"))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)

    assert {named(place, one), named(place, two)} <= {file for file, _ in errors(place)}


def test_exchanged_bags_are_named(place: Path) -> None:
    one, two, _ = bags(place)
    one.rename(place / "kept")
    two.rename(one)
    (place / "kept").rename(two)

    wrong = [(found.bag, found.file) for found in findings(place) if found.level is Level.ERROR]
    assert wrong == [(f"a/{one.name}", "manifest.json"), (f"a/{two.name}", "manifest.json")]


def test_a_missing_last_bag_shows_in_the_ledger_only(place: Path, mixed: Built) -> None:
    shutil.rmtree(bags(place)[1])

    assert errors(place) == []
    assert errors(place, root=mixed.root) == [(f"data/a-{18:020d}.tar.gz", MISSING)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sha256": "0" * 64}, f"the ledger says that its sha256 is {'0' * 64}"),
        ({"runs": [1, 6]}, "it does not hold the sequences that the ledger records"),
    ],
)
def test_what_the_ledger_tells_has_to_fit(place: Path, mixed: Built, changed: dict[str, object], message: str) -> None:
    """Otherwise another intact bag could replace the archived one."""
    lines = ledger_lines(mixed.root)
    path = mixed.root.ledger / "archive.jsonl"
    path.unlink()
    ledger = Ledger(path, mixed.disk)
    ledger.append(lines[0], lines[1] | changed, *lines[2:])
    ledger.close()

    assert errors(place, root=mixed.root) == [(f"data/a-{1:020d}.tar.zst", message)]


def test_a_place_where_nothing_is_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is nothing here"):
        findings(tmp_path / "none")


LOG = "ab" * 16


def chain(*ranges: tuple[int, int]) -> list[Manifest]:
    """One bundle a bag, each behind the one before."""
    found: list[Manifest] = []
    for first, last in ranges:
        previous = found[-1].entries[0].as_previous() if found else None
        after = found[-1].last if found else first - 1
        found.append(manifest(log=LOG, first=first, last=last, after=after, previous=previous))
    return found


def judged(*manifests: Manifest, place: str = "/dest") -> list[tuple[Level, str, str]]:
    """Level, first sequence of the bundle as its name has it, and message."""
    found = together(*manifests, place=place).broken_links()
    return [(each.level, each.file.removesuffix(".tar").rpartition("-")[2].lstrip("0"), each.message) for each in found]


def together(*manifests: Manifest, place: str = "/dest") -> Bags:
    found = Bags()
    for each in manifests:
        found.add(place, each.bag, each, {entry.bundle.name: entry.bundle.sha256 for entry in each.entries})
    return found


ONE, TWO, THREE = chain((1, 10), (11, 20), (21, 30))


def test_a_whole_chain_is_good_in_any_order_and_beside_others() -> None:
    others = [
        manifest(log="00" * 16, first=1, last=10, after=0, previous=None),
        manifest(log=LOG, route="b", first=1, last=10, after=0, previous=None),
        manifest(log=LOG, group="other", first=1, last=10, after=0, previous=None),
    ]
    assert judged(THREE, ONE, TWO) == judged(ONE, TWO, ONE, TWO) == judged(ONE, *others) == []


def test_a_broken_link_shows_in_the_bundle_after_it() -> None:
    beginning = ONE.entries[0].as_previous()
    second = manifest(log=LOG, first=11, last=20, after=10, previous=None)
    another = manifest(log=LOG, first=11, last=20, after=10, previous=beginning, digest="f")
    doubled = manifest(log=LOG, first=5, last=15, after=4, previous=None)
    early = manifest(log=LOG, first=11, last=20, after=9, previous=beginning)
    later = manifest(log=LOG, first=31, last=40, after=30, previous=beginning)  # somebody has moved the cursor
    next_but_one = manifest(log=LOG, first=12, last=20, after=11, previous=beginning)
    digest = TWO.entries[0].bundle.sha256
    for manifests, level, bundle, said in (
        ((ONE, THREE), Level.ERROR, "21", f"follows a-{11:020d}.tar with sha256 {digest}, which is missing"),
        ((TWO, THREE), Level.ERROR, "11", ""),
        ((ONE, another, THREE), Level.ERROR, "21", f"the a-{11:020d}.tar here is a different one"),
        ((ONE, second), Level.ERROR, "11", ""),
        ((ONE, doubled), Level.ERROR, "5", f"has records that are also in a-{1:020d}.tar"),
        ((ONE, early), Level.ERROR, "11", ""),
        ((ONE, later), Level.INFO, "31", "records from 11 to 30"),
        ((ONE, next_but_one), Level.INFO, "12", "records from 11 to 11"),
    ):
        ((found_level, found_bundle, message),) = judged(*manifests)
        assert (found_level, found_bundle) == (level, bundle)
        assert said in message


def test_what_a_damaged_bag_holds_counts_as_present() -> None:
    """The damage itself is reported; what follows it is not damaged."""
    found = together(ONE, THREE)
    found.add("/dest", TWO.bag, None, {entry.bundle.name: entry.bundle.sha256 for entry in TWO.entries})

    assert list(found.broken_links()) == []


PIECE_BYTES = 4000


class Changed(Directory):
    """A destination that gives its files piece by piece, and one byte of the bundle changed."""

    def __init__(self, bundle: Path, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__(bundle.parents[3], Disk())
        self._bundle = bundle.name
        self._piece_bytes = piece_bytes
        self._files: dict[str, bytes] = {}
        self.offset: int | None = None

    def read(self, name: str) -> Iterator[bytes]:
        if name not in self._files:
            self._files[name] = b"".join(super().read(name))
        data = self._files[name]
        of_bundle = name.endswith(self._bundle)
        if of_bundle and self.offset is not None:
            data = flipped(data, 8 * self.offset + self.offset % 8)
        for start in range(0, len(data), self._piece_bytes):
            if of_bundle and start:
                self.on_next_piece()
            yield data[start : start + self._piece_bytes]

    def on_next_piece(self) -> None:
        """Called before each piece of the bundle except the first."""


def accused(place: Directory) -> list[str]:
    return [found.file for found in findings(place) if found.level is Level.ERROR]


def bundle_of(built: Built, dest: Path, codec: Codec) -> Path:
    """The only one of an archive."""
    archive(built, dest, codec=codec)
    (path,) = bags(dest)[0].glob(f"data/*{codec.suffix}")
    return path


@pytest.mark.parametrize(
    "codec", [Codec.ZST, Codec.GZ, pytest.param(Codec.NONE, marks=pytest.mark.slow)], ids=lambda codec: codec.value
)
def test_every_changed_byte_is_found(mixed: Built, dest: Path, codec: Codec) -> None:
    bundle = bundle_of(mixed, dest, codec)
    place = Changed(bundle)
    assert accused(place) == []
    for place.offset in range(bundle.stat().st_size):
        assert accused(place) == [f"data/{bundle.name}"], place.offset


def is_waiting(thread: int) -> bool:
    """Return True if a thread waits for the result of another one."""
    frame: FrameType | None = sys._current_frames()[thread]
    while frame is not None and frame.f_code is not Future.result.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("offset", [100, 600])
def test_damage_is_found_while_a_slow_destination_is_being_read(mixed: Built, dest: Path, offset: int) -> None:
    """The next piece arrives only after the damage was found."""
    prover = threading.get_ident()

    class Slow(Changed):
        def on_next_piece(self) -> None:
            eventually(lambda: is_waiting(prover) or threading.get_ident() == prover)

    bundle = bundle_of(mixed, dest, Codec.NONE)
    place = Slow(bundle, 512)
    place.offset = offset

    assert accused(place) == [f"data/{bundle.name}"]


def test_a_destination_that_fails_behind_damage_says_so(mixed: Built, dest: Path) -> None:
    """An error of the reading thread is kept; otherwise the digest would cover half a file."""

    class Failing(Changed):
        def on_next_piece(self) -> None:
            raise OSError("no such sector")

    place = Failing(bundle_of(mixed, dest, Codec.NONE), 512)
    place.offset = 100

    with pytest.raises(OSError, match="no such sector"):
        findings(place)


ENOUGH_STEPS = 100
PARTS = [0.5, pytest.param(0.0, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.slow)]
UNFINISHED = "unfinished: an interrupted run; wald-archive a --group processed continues it"
ABANDONED = "an abandoned run; it may be removed"


def tell(built: Built, event: str, **changed: object) -> None:
    """Append a line to the ledger about the run that was begun last."""
    begun = [line for line in ledger_lines(built.root) if line["event"] == "begun"][-1]
    keys = ("route", "group", "dest", "bag", "first", "last")
    ledger = Ledger(built.root.ledger / "archive.jsonl", Unsynced())
    ledger.append({"event": event} | {key: begun[key] for key in keys} | changed | {"at": 2})
    ledger.close()


def notes(place: Path, built: Built) -> list[str]:
    return [found.message for found in findings(place, root=built.root) if found.level is Level.INFO]


@pytest.mark.parametrize("event", ["", "abandoned"])
@pytest.mark.parametrize("part", PARTS)
def test_wherever_a_run_was_interrupted_it_is_no_damage(tmp_path: Path, part: float, event: str) -> None:
    """Nothing, half a bundle, half of the tag files, all: it is reported at most once; complete files are verified."""
    seen: set[str] = set()
    for step in range(ENOUGH_STEPS):
        built, dest = Built(tmp_path / f"{step}"), tmp_path / f"{step}.dest"
        built.lines("a", [b"line %d" % number for number in range(14)])
        died = interrupt(built, dest, step, part=part)
        if event and any(line["event"] == "begun" for line in ledger_lines(built.root)):
            tell(built, event)
        try:
            assert errors(dest, root=built.root) == [], step
            assert len(notes(dest, built)) <= 1
            seen.update(notes(dest, built))
        except NotFound:
            assert died
        if not died:
            break
    assert step > 30
    assert seen == {ABANDONED if event else UNFINISHED}


def test_any_flipped_bit_of_the_ledger_is_an_error_although_the_archive_is_good(mixed: Built, dest: Path) -> None:
    archive(mixed, dest, size=Records(7))
    path = mixed.root.ledger / "archive.jsonl"
    whole = path.read_bytes()
    assert errors(dest, root=mixed.root) == []
    for bit in (3, 8 * len(whole) // 2, 8 * len(whole) - 400, 8 * len(whole) - 5):
        path.write_bytes(flipped(whole, bit))
        done = wald_archive("verify", dest, "--root", mixed.root.path)
        assert done.returncode == Damaged.exit_code
        assert f"error  {path}: line ".encode() in done.stdout


@pytest.fixture
def tags_torn(mixed: Built, dest: Path) -> Path:
    """A bag of which all is there but the last tag file, and half of another."""
    archive(mixed, dest, size=Records(7))
    (bag,) = bags(dest)
    (bag / "tagmanifest-sha256.txt").unlink()
    info = bag / "manifest-sha256.txt"
    info.write_bytes(info.read_bytes()[:50])
    ledger = mixed.root.ledger / "archive.jsonl"
    begun = ledger_lines(mixed.root)[0]
    ledger.unlink()
    again = Ledger(ledger, Unsynced())
    again.append(begun)
    again.close()
    return dest


def test_the_bundles_and_tag_files_of_an_unfinished_bag_are_proven(tags_torn: Path, mixed: Built) -> None:
    """A crash leaves the beginning of a file, not another one; without the ledger, half of the files are an error."""
    assert notes(tags_torn, mixed) == [UNFINISHED]
    assert errors(tags_torn)
    assert errors(tags_torn, root=mixed.root) == []
    (bag,) = bags(tags_torn)
    for path in (*sorted(bag.glob("data/*")), bag / "README.txt"):
        data = path.read_bytes()
        path.write_bytes(flipped(data, 8 * (len(data) // 2)))
        found = [file for file, _ in errors(tags_torn, root=mixed.root)]
        assert found
        assert path.name == "README.txt" or f"data/{path.name}" in found
        path.write_bytes(data)


@pytest.mark.parametrize("event", ["begun", "abandoned"])
def test_the_run_of_another_group_excuses_nothing(mixed: Built, dest: Path, event: str) -> None:
    """It was to make a bag of the same name, and was interrupted or refused."""
    archive(mixed, dest)
    tell(mixed, event, group="other")
    assert [found.level for found in findings(dest, root=mixed.root)] == [Level.OK]

    (bundle,) = dest.rglob("*.tar")
    data = bundle.read_bytes()
    bundle.write_bytes(flipped(data, 8 * 700))
    assert [file for file, _ in errors(dest, root=mixed.root)] == [f"data/{bundle.name}"]
    bundle.write_bytes(data)

    for path in [path for path in bags(dest)[0].iterdir() if path.is_file()]:
        path.unlink()
    assert "manifest.json" in [file for file, _ in errors(dest, root=mixed.root)]


def test_an_unfinished_bag_without_tag_files_is_that_of_any_group(mixed: Built, dest: Path) -> None:
    assert interrupt(mixed, dest)
    tell(mixed, "abandoned")
    assert notes(dest, mixed) == [ABANDONED]
    tell(mixed, "begun")
    assert notes(dest, mixed) == [UNFINISHED]
    tell(mixed, "begun", group="other")
    assert notes(dest, mixed) == ["unfinished: an interrupted run; wald-archive a --group other continues it"]


def test_the_whole_bag_of_an_abandoned_run_is_no_part_of_the_chain(tags_torn: Path, mixed: Built) -> None:
    """The next run may have packed the same records, wherever that was."""
    tell(mixed, "abandoned")
    second = tags_torn.with_name("second")
    mixed.lines("a", [b"more"])
    archive(mixed, second)
    mixed.log.set_cursor("a", 0, rewind=True)
    archive(mixed, second.with_name("third"))

    assert errors(tags_torn, second.with_name("third"), root=mixed.root) == []
    assert notes(tags_torn, mixed) == [ABANDONED]


@pytest.fixture
def two(mixed: Built, dest: Path) -> Path:
    """Two bags of route a."""
    archive(mixed, dest)
    mixed.lines("a", [b"more"])
    archive(mixed, dest)
    return dest


class TestSpelling:
    """The ledger has the path of a directory as it was given."""

    def test_a_link_leads_to_the_same_directory(self, two: Path, mixed: Built, tmp_path: Path) -> None:
        """The ledger may have the path of the link, too."""
        link = tmp_path / "link"
        link.symlink_to(two)
        mixed.lines("a", [b"through the link"])
        archive(mixed, link)
        assert errors(link, root=mixed.root) == errors(two, root=mixed.root) == []
        shutil.rmtree(bags(two)[1])
        shutil.rmtree(bags(two)[1])

        missing = [(f"data/a-{sequence:020d}.tar", MISSING) for sequence in (18, 19)]
        assert errors(link, root=mixed.root) == errors(two, root=mixed.root) == missing

    def test_a_place_that_the_ledger_does_not_know_is_an_error(self, two: Path, mixed: Built, tmp_path: Path) -> None:
        """Otherwise an empty verification would succeed."""
        copy = copied(two, tmp_path / "copy")

        (found,) = [found for found in findings(copy, root=mixed.root) if found.level is Level.ERROR]

        assert found.name == str(copy)
        assert f"records no bundles here, only at {two}" in found.message
        assert "omit --root" in found.message
        assert errors(copy) == []
        assert len(errors(two, copy, root=mixed.root)) == 1

    def test_an_address_is_what_it_is_and_a_ledger_without_bundles_says_nothing_of_places(self) -> None:
        line: dict[str, object] = {"event": "archived", "dest": "s3://bucket/a", "bag": "a/1-2", "bundle": "x"}

        assert recorded_at([line], "s3://bucket/a").bundles == {("a/1-2", "x"): line}
        assert recorded_at([line], "s3://bucket/b") == Recorded(elsewhere=("s3://bucket/a",))

        begun: dict[str, object] = {"event": "begun", "dest": "s3://bucket/a", "bag": "a/1-2", "group": "g"}

        assert recorded_at([begun], "s3://bucket/b") == recorded_at([], "s3://bucket/b") == Recorded()
        archived = begun | {"event": "archived", "dest": "s3://bucket/b", "bundle": "x"}
        assert recorded_at([begun, archived], "s3://bucket/a").bags == {"a/1-2": RecordedBag(runs={"g": "begun"})}


def test_bags_that_moved_to_another_destination_are_found_there(two: Path, mixed: Built, tmp_path: Path) -> None:
    tape = tmp_path / "tape"
    (tape / "a").mkdir(parents=True)
    old = bags(two)[0]
    shutil.move(old, tape / "a" / old.name)

    assert any(message == MISSING for _, message in errors(two, root=mixed.root))
    assert errors(two, tape, root=mixed.root) == errors(tape, two, root=mixed.root) == []
    moved = [found.message for found in findings(two, tape, root=mixed.root) if found.message.startswith("moved")]
    assert moved == [f"moved to {tape}"]


def test_another_bundle_of_the_same_name_elsewhere_does_not_count(mixed: Built, dest: Path, tmp_path: Path) -> None:
    archive(mixed, dest)
    archive(mixed, tmp_path / "other", group="other", size=Records(3))
    shutil.rmtree(bags(dest)[0])

    assert ("data/a-00000000000000000001.tar", MISSING) in errors(dest, tmp_path / "other", root=mixed.root)


def test_what_desktops_leave_in_every_directory_is_no_damage(mixed: Built, dest: Path) -> None:
    archive(mixed, dest)
    (bag,) = bags(dest)
    for place in (dest, dest / "a", bag, bag / "data"):
        (place / "Thumbs.db").write_bytes(b"x")
        (place / "._x").write_bytes(b"x")
    (dest / "a/@eaDir").mkdir()

    assert errors(dest, root=mixed.root) == []
    assert notes(dest, mixed).count("not part of the archive") == 9
    (bag / "data/notes.txt").write_bytes(b"x")
    assert errors(dest, root=mixed.root) == [("data/notes.txt", "does not belong here")]
