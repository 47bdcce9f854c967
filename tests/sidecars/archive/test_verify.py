"""A proof finds every change of every file, names it, and changes nothing itself."""

from __future__ import annotations

import random
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType

import pytest
from archives import archive, bags, errors, files, findings, ledger_lines
from archives_manifest import manifest
from damage import flipped
from logs import Built
from running import eventually

from wald.checking.checker import Level
from wald.errors import NotFound
from wald.files.disk import Disk
from wald.files.ledger_write import Ledger
from wald_archive.codecs import Codec
from wald_archive.manifest import Manifest
from wald_archive.objects import Directory
from wald_archive.parts import Records
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


def test_a_changed_bundle_is_the_only_one_accused(place: Path) -> None:
    """The bundles after it in the chain are not named."""
    path = next(bags(place)[0].glob("data/*.zst"))
    path.write_bytes(flipped(path.read_bytes(), 8 * 100))

    assert {file for file, _ in errors(place)} == {named(place, path)}


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


def test_a_missing_first_bag_shows_in_the_one_that_follows(place: Path) -> None:
    shutil.rmtree(bags(place)[0])

    ((file, message),) = errors(place)

    assert file == f"data/a-{18:020d}.tar.gz"
    assert message.startswith(f"follows a-{8:020d}.tar.zst with sha256 ")
    assert message.endswith("which is not here")


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


def test_several_places_are_proven_together(place: Path, tmp_path: Path) -> None:
    """Tape after tape: what one bundle follows may be on another."""
    second = tmp_path / "second"
    (second / "a").mkdir(parents=True)
    bags(place)[1].rename(second / "a" / bags(place)[1].name)

    assert len(errors(second)) == 1
    assert errors(place, second) == errors(second, place) == []


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
    digest = TWO.entries[0].bundle.sha256
    for manifests, level, bundle, said in (
        ((ONE, THREE), Level.ERROR, "21", f"follows a-{11:020d}.tar with sha256 {digest}, which is not here"),
        ((TWO, THREE), Level.ERROR, "11", ""),
        ((ONE, another, THREE), Level.ERROR, "21", f"the a-{11:020d}.tar here is another"),
        ((ONE, second), Level.ERROR, "11", ""),
        ((ONE, doubled), Level.ERROR, "5", f"holds records that a-{1:020d}.tar holds too"),
        ((ONE, early), Level.ERROR, "11", ""),
        ((ONE, later), Level.INFO, "31", "from record 11 to 30"),
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
