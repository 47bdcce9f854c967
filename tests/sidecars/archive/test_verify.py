"""A proof finds every change of every file, names it, and changes nothing itself."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from archives import archive, bags, copied, errors, files, findings, ledger_lines
from damage import flipped
from logs import Built

from wald.checking.checker import Level
from wald.errors import NotFound
from wald.files.ledger_write import Ledger
from wald_archive.codecs import Codec
from wald_archive.parts import Records

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


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\n", lambda data: b""])
def test_every_file_that_is_longer_or_shorter_is_named(place: Path, change: object) -> None:
    assert callable(change)
    for path in every_file(place):
        data = path.read_bytes()
        path.write_bytes(change(data))
        assert named(place, path) in [file for file, _ in errors(place)]
        path.write_bytes(data)


def test_every_missing_file_is_named(place: Path) -> None:
    for path in every_file(place):
        data = path.read_bytes()
        path.unlink()
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


@pytest.mark.parametrize("old", [b'"count": 7', b'"log": "', b'"sha256": "', b'"archived_at": "2026', b'"format": 1'])
def test_a_changed_manifest_is_named_and_its_bundles_are_still_proven(place: Path, old: bytes) -> None:
    """By the digests that are left; they are good, so nothing is said of them."""
    path = bags(place)[0] / "manifest.json"
    data = path.read_bytes()
    assert old in data
    at = data.index(old) + len(old) + (1 if old.endswith(b'"') else -1)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])

    wrong = [file for file, _ in errors(place)]
    assert "manifest.json" in wrong
    assert not any(file.startswith("data/") for file in wrong)

    harmed = next(bags(place)[0].glob("data/*.zst"))
    harmed.write_bytes(flipped(harmed.read_bytes(), 8 * 100))
    assert named(place, harmed) in [file for file, _ in errors(place)]


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


def test_a_copy_is_no_second_archive(place: Path, tmp_path: Path) -> None:
    assert errors(place, copied(place, tmp_path / "copy")) == []


def test_a_place_where_nothing_is_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is nothing here"):
        findings(tmp_path / "none")


def test_skipped_records_are_worth_knowing(place: Path, mixed: Built) -> None:
    """Somebody has moved the cursor by hand."""
    first = mixed.lines("a", [b"skipped", b"archived"])
    mixed.log.set_cursor("a", first)
    archive(mixed, place)

    (found,) = [found for found in findings(place) if found.level is Level.INFO]

    assert f"to {first} was never archived" in found.message
    assert errors(place) == []
