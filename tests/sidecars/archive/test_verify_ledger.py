"""Verification with the ledger of the log: expected bundles, and the files of interrupted runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from archives import archive, bags, copied, errors, findings, ledger_lines, wald_archive
from damage import flipped
from faults import Died, DyingDisk
from logs import Built, Unsynced

from wald.checking.checker import Level
from wald.errors import Damaged, NotFound
from wald.files.ledger_write import Ledger
from wald_archive.ledger import Recorded, RecordedBag, recorded_at
from wald_archive.parts import Records

ENOUGH_STEPS = 100
PARTS = [0.5, pytest.param(0.0, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.slow)]
UNFINISHED = "unfinished: an interrupted run; wald-archive a --group processed continues it"
MISSING = "missing; the ledger says that it is here; if it was moved, verify its new DEST as well"
ABANDONED = "an abandoned run; it may be removed"


def interrupt(built: Built, dest: Path, step: int, part: float = 0.5) -> bool:
    """Archive route a in two bundles, and die; False if the run came to its end before."""
    disk = DyingDisk(step, part=part)
    try:
        archive(built, dest, size=Records(7), disk=disk)
    except Died:
        disk.abandon()
        return True
    return False


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
        died = interrupt(built, dest, step, part)
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


def test_half_of_the_tag_files_are_an_error_without_the_ledger(tags_torn: Path, mixed: Built) -> None:
    assert notes(tags_torn, mixed) == [UNFINISHED]
    assert errors(tags_torn)


def test_the_bundles_of_an_unfinished_bag_are_proven(tags_torn: Path, mixed: Built) -> None:
    for path in sorted(bags(tags_torn)[0].glob("data/*")):
        data = path.read_bytes()
        path.write_bytes(flipped(data, 8 * (len(data) // 2)))
        assert f"data/{path.name}" in [file for file, _ in errors(tags_torn, root=mixed.root)]
        path.write_bytes(data)


def test_a_changed_tag_file_of_an_unfinished_bag_is_an_error(tags_torn: Path, mixed: Built) -> None:
    """A crash leaves the beginning of a file, not another one."""
    path = bags(tags_torn)[0] / "README.txt"
    path.write_bytes(flipped(path.read_bytes(), 80))

    assert errors(tags_torn, root=mixed.root)


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
    assert interrupt(mixed, dest, 12)
    tell(mixed, "abandoned")
    assert notes(dest, mixed) == [ABANDONED]
    tell(mixed, "begun", group="other")
    assert notes(dest, mixed) == ["unfinished: an interrupted run; wald-archive a --group other continues it"]


def test_a_run_begun_again_is_not_abandoned_any_more(mixed: Built, dest: Path) -> None:
    assert interrupt(mixed, dest, 12)
    tell(mixed, "abandoned")
    tell(mixed, "begun")

    assert notes(dest, mixed) == [UNFINISHED]


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


class TestSpelling:
    """The ledger has the path of a directory as it was given."""

    @pytest.fixture
    def place(self, mixed: Built, dest: Path) -> Path:
        archive(mixed, dest)
        mixed.lines("a", [b"more"])
        archive(mixed, dest)
        return dest

    def test_a_link_leads_to_the_same_directory(self, place: Path, mixed: Built, tmp_path: Path) -> None:
        link = tmp_path / "link"
        link.symlink_to(place)
        shutil.rmtree(bags(place)[1])

        missing = [(f"data/a-{18:020d}.tar", MISSING)]
        assert errors(link, root=mixed.root) == errors(place, root=mixed.root) == missing

    def test_what_was_packed_through_a_link_is_found_without(self, mixed: Built, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        archive(mixed, tmp_path / "link")

        lines = ledger_lines(mixed.root)
        assert set(recorded_at(lines, str(tmp_path / "real")).bundles) == set(
            recorded_at(lines, str(tmp_path / "link")).bundles
        )
        assert recorded_at(lines, str(tmp_path / "real")).bundles

    def test_a_place_that_the_ledger_does_not_know_is_an_error(self, place: Path, mixed: Built, tmp_path: Path) -> None:
        """Otherwise an empty verification would succeed."""
        copy = copied(place, tmp_path / "copy")

        (found,) = [found for found in findings(copy, root=mixed.root) if found.level is Level.ERROR]

        assert found.name == str(copy)
        assert f"records no bundles here, only at {place}" in found.message
        assert "omit --root" in found.message
        assert errors(copy) == []

    def test_each_of_several_places_has_to_be_known(self, place: Path, mixed: Built, tmp_path: Path) -> None:
        copy = copied(place, tmp_path / "copy")

        assert len(errors(place, copy, root=mixed.root)) == 1

    def test_an_address_is_what_it_is(self) -> None:
        line: dict[str, object] = {"event": "archived", "dest": "s3://bucket/a", "bag": "a/1-2", "bundle": "x"}

        assert recorded_at([line], "s3://bucket/a").bundles == {("a/1-2", "x"): line}
        assert recorded_at([line], "s3://bucket/b") == Recorded(elsewhere=("s3://bucket/a",))

    def test_a_ledger_without_bundles_says_nothing_of_places(self) -> None:
        """Nothing was archived yet, or the ledger was lost and restarted."""
        begun: dict[str, object] = {"event": "begun", "dest": "s3://bucket/a", "bag": "a/1-2", "group": "g"}

        assert recorded_at([begun], "s3://bucket/b") == recorded_at([], "s3://bucket/b") == Recorded()
        archived = begun | {"event": "archived", "dest": "s3://bucket/b", "bundle": "x"}
        assert recorded_at([begun, archived], "s3://bucket/a").bags == {"a/1-2": RecordedBag(runs={"g": "begun"})}


def test_bags_that_moved_to_another_destination_are_found_there(mixed: Built, dest: Path, tmp_path: Path) -> None:
    archive(mixed, dest)
    mixed.lines("a", [b"more"])
    archive(mixed, dest)
    tape = tmp_path / "tape"
    (tape / "a").mkdir(parents=True)
    old = bags(dest)[0]
    shutil.move(old, tape / "a" / old.name)

    assert any(message == MISSING for _, message in errors(dest, root=mixed.root))
    assert errors(dest, tape, root=mixed.root) == errors(tape, dest, root=mixed.root) == []
    moved = [found.message for found in findings(dest, tape, root=mixed.root) if found.message.startswith("moved")]
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
    assert notes(dest, mixed).count("no part of the archive") == 9
    (bag / "data/notes.txt").write_bytes(b"x")
    assert errors(dest, root=mixed.root) == [("data/notes.txt", "does not belong here")]
