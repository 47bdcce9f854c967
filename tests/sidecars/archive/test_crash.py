"""Wherever a run ends, the next one ends with the same bundles, and nothing is reported, packed or moved twice."""

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from archives import archive, bags, command, copied, errors, files, interrupt, ledger_lines, wald_archive
from faults import DyingDisk, FailingDisk, SteppingDisk, after_each_death, until_it_survives
from logs import Built
from running import eventually, launched

import wald
from wald.files.layout import Root
from wald_archive.bundle import Records
from wald_archive.codecs import Codec

slow = partial(pytest.param, marks=pytest.mark.slow)
BAGIT = Path(sys.executable).with_name("bagit.py")


@pytest.fixture
def root(mixed: Built) -> Path:
    """A log that copies are made of."""
    mixed.crash()
    return mixed.root.path


@pytest.fixture
def whole(root: Path, tmp_path: Path) -> dict[str, bytes]:
    """Result of an undisturbed run."""
    archive(copied(root, tmp_path / "undisturbed"), tmp_path / "whole", size=Records(7), codec=Codec.ZST)
    return files(tmp_path / "whole")


def packed(root: Path, dest: Path, *, disk: SteppingDisk | None = None) -> None:
    archive(root, dest, size=Records(7), codec=Codec.ZST, disk=disk)


def assert_as_if_undisturbed(root: Path, dest: Path, whole: dict[str, bytes]) -> None:
    """The same files; each line of the ledger once; the cursor where it belongs."""
    assert files(dest) == whole
    lines = ledger_lines(Root(root))
    reported = [(line["event"], line.get("bundle")) for line in lines]
    assert reported == [
        ("begun", None),
        ("archived", f"a-{1:020d}.tar.zst"),
        ("archived", f"a-{8:020d}.tar.zst"),
        ("finished", None),
    ]
    assert wald.open(root).cursor("a").sequence == 17
    assert errors(dest, root=Root(root)) == []


@pytest.mark.parametrize("part", [slow(0.0), 0.5, slow(1.0)])
def test_the_next_run_does_what_a_dead_one_has_left(
    root: Path, tmp_path: Path, whole: dict[str, bytes], part: float
) -> None:
    """Died at each step, with all, half or nothing of its write on disk; other options are asked for afterwards."""

    def die(number: int, disk: DyingDisk) -> None:
        packed(copied(root, tmp_path / f"root-{number}"), tmp_path / f"dest-{number}", disk=disk)

    for number in after_each_death(die, part=part, least=40):
        copy, dest = tmp_path / f"root-{number}", tmp_path / f"dest-{number}"
        if ledger_lines(Root(copy)):
            archive(copy, dest, size=Records(2), codec=Codec.GZ, moment="2030-01-01T00:00:00Z")
        else:
            packed(copy, dest)
        assert_as_if_undisturbed(copy, dest, whole)
    subprocess.run([sys.executable, BAGIT, "--validate", "--quiet", bags(tmp_path / "dest-20")[0]], check=True)


@pytest.mark.parametrize("part", [slow(0.0), 0.5])
def test_a_full_disk_is_reported_and_the_next_run_goes_on(
    root: Path, tmp_path: Path, whole: dict[str, bytes], part: float
) -> None:
    """Failed at each step; no descriptor that failed is used again, and the cursor does not move too early."""
    for number, disk in enumerate(until_it_survives(lambda bad: FailingDisk(bad, part=part))):
        copy, dest = copied(root, tmp_path / f"root-{number}"), tmp_path / f"dest-{number}"
        assert isinstance(disk, FailingDisk)
        try:
            packed(copy, dest, disk=disk)
            break
        except OSError:
            disk.abandon()
        if wald.open(copy).cursor("a").sequence:
            assert len([line for line in ledger_lines(Root(copy)) if line["event"] == "archived"]) == 2
        packed(copy, dest)
        assert_as_if_undisturbed(copy, dest, whole)
    assert number > 40


def test_it_may_die_again_and_again(root: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """Every run gets two steps beyond its survey of the remaining work."""
    dest, deaths = tmp_path / "dest", 0
    while interrupt(root, dest, deaths + 3, part=0.3, codec=Codec.ZST):
        deaths += 1
    assert deaths > 5
    assert_as_if_undisturbed(root, dest, whole)


def test_what_came_since_goes_into_a_bag_of_its_own(mixed: Built, dest: Path) -> None:
    """The interrupted run is finished with its own options; then the rest follows."""
    assert interrupt(mixed, dest)
    mixed.lines("a", [b"came since"])

    runs = archive(mixed, dest)

    assert [(run.run.first, run.run.last, run.resumed) for run in runs] == [(1, 17, True), (18, 18, False)]
    assert errors(dest, root=mixed.root) == []


def test_an_interrupted_run_elsewhere_does_not_hold_up_this_one(root: Path, dest: Path, tmp_path: Path) -> None:
    assert interrupt(root, dest)

    (run,) = archive(root, tmp_path / "elsewhere")

    assert not run.resumed
    assert errors(tmp_path / "elsewhere", root=Root(root)) == []


def test_acknowledging_does_not_need_the_records(mixed: Built, dest: Path) -> None:
    """Once the ledger has all bundles, RECLAIM may have deleted their records."""
    packed(mixed.root.path, dest)
    ledger = mixed.root.ledger / "archive.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))  # "finished" was not written
    mixed.cut()
    mixed.seal()
    mixed.lines("b", [b"x"])
    mixed.reclaim(1)

    (run,) = archive(mixed, dest)

    assert (run.manifest, run.resumed) == (None, True)
    assert ledger_lines(mixed.root)[-1]["event"] == "finished"


def test_a_run_whose_records_somebody_else_has_processed_is_given_up(mixed: Built, dest: Path) -> None:
    """Somebody has moved the cursor of this group, and RECLAIM believed it."""
    assert interrupt(mixed, dest, 8)
    mixed.log.set_cursor("a", 17)
    mixed.cut()
    mixed.seal()
    mixed.lines("a", [b"x"])
    mixed.reclaim(1)

    (run,) = archive(mixed, dest)

    assert (run.run.first, run.run.last) == (18, 18)
    assert [line["event"] for line in ledger_lines(mixed.root)] == [
        *("begun", "abandoned"),
        *("begun", "archived", "finished"),
    ]


def test_a_place_that_was_left_for_another_is_used_again(root: Path, tmp_path: Path) -> None:
    """The run died at one destination; everything went to another, and later the first one is there again."""
    assert interrupt(root, tmp_path / "first", 8)
    packed(root, tmp_path / "second")
    built = Built(root, epoch=2)
    built.lines("a", [b"more"])
    packed(root, tmp_path / "first")

    assert [bag.parent.parent.name for bag in bags(tmp_path / "first") if (bag / "manifest.json").exists()] == ["first"]
    assert wald.open(root).cursor("a").sequence == built.last


class TestKilled:
    """A real process, and SIGKILL."""

    @pytest.fixture
    def large(self, tmp_path: Path) -> Path:
        """Enough to be killed in the middle of."""
        built = Built(tmp_path / "large", segment_max_bytes=1 << 30)
        for number in range(40):
            built.append("a", b"line %03d of a log that is not too small\n" % number * 20_000, 20_000)
        built.crash()
        return built.root.path

    def test_the_next_run_finishes(self, large: Path, dest: Path) -> None:
        """Killed when there is a bundle, when there are two, …: at each moment that a poll can see."""
        arguments = ["a", "--root", large, "--dest", dest, "--records-per-bundle", 100_000]
        kills = 0
        for count in (1, 2, 4, 6, 9, 12, 15):
            process = launched(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            eventually(partial(has_ended_or_files, process, dest, count))
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
        assert kills >= 3

        assert wald_archive(*arguments).returncode == 0

        lines = ledger_lines(Root(large))
        assert [line["event"] for line in lines] == ["begun", *["archived"] * 8, "finished"]
        assert [line["count"] for line in lines[1:-1]] == [100_000] * 8
        assert errors(dest, root=Root(large)) == []
        subprocess.run([sys.executable, BAGIT, "--validate", "--quiet", bags(dest)[0]], check=True)


def has_ended_or_files(process: subprocess.Popen[bytes], dest: Path, count: int) -> bool:
    """Return True if the payload has that number of files, or the process has ended."""
    return process.poll() is not None or len(list(dest.rglob("data/*"))) >= count
