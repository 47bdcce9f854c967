"""Bundles that follow each other are good; one that is missing, doubled or exchanged shows in its neighbour."""

from __future__ import annotations

from archives_manifest import manifest

from wald.checking.checker import Level
from wald_archive.manifest import Manifest
from wald_archive.verify import Bags

LOG = "ab" * 16


def bags(*ranges: tuple[int, int]) -> list[Manifest]:
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


ONE, TWO, THREE = bags((1, 10), (11, 20), (21, 30))


def test_a_whole_chain_is_good_in_whatever_order_it_is_found() -> None:
    assert judged(THREE, ONE, TWO) == []


def test_a_copy_elsewhere_is_no_second_bundle() -> None:
    assert judged(ONE, TWO, ONE, TWO) == []


def test_a_missing_one_shows_in_the_one_behind_it() -> None:
    ((level, bundle, message),) = judged(ONE, THREE)

    assert (level, bundle) == (Level.ERROR, "21")
    assert message == f"follows a-{11:020d}.tar with sha256 {TWO.entries[0].bundle.sha256}, which is not here"


def test_a_missing_first_one_shows() -> None:
    assert [(level, bundle) for level, bundle, _ in judged(TWO, THREE)] == [(Level.ERROR, "11")]


def test_a_missing_last_one_does_not_show_here() -> None:
    """The ledger tells of it."""
    assert judged(ONE, TWO) == []


def test_another_bundle_in_its_place_shows() -> None:
    other = manifest(log=LOG, first=11, last=20, after=10, previous=ONE.entries[0].as_previous(), digest="f")

    ((level, bundle, message),) = judged(ONE, other, THREE)

    assert (level, bundle) == (Level.ERROR, "21")
    assert message.endswith(f"the a-{11:020d}.tar here is another")


def test_a_second_beginning_shows() -> None:
    begins = manifest(log=LOG, first=11, last=20, after=10, previous=None)

    assert [(level, bundle) for level, bundle, _ in judged(ONE, begins)] == [(Level.ERROR, "11")]


def test_doubled_records_show() -> None:
    doubled = manifest(log=LOG, first=5, last=15, after=4, previous=None)

    ((level, bundle, message),) = judged(ONE, doubled)

    assert (level, bundle, message) == (Level.ERROR, "5", f"holds records that a-{1:020d}.tar holds too")


def test_a_bundle_that_begins_before_the_end_of_the_one_it_follows_shows() -> None:
    early = manifest(log=LOG, first=11, last=20, after=9, previous=ONE.entries[0].as_previous())

    assert [(level, bundle) for level, bundle, _ in judged(ONE, early)] == [(Level.ERROR, "11")]


def test_records_that_were_passed_over_are_worth_knowing() -> None:
    """Somebody has moved the cursor; no bundle is missing."""
    later = manifest(log=LOG, first=31, last=40, after=30, previous=ONE.entries[0].as_previous())

    ((level, bundle, message),) = judged(ONE, later)

    assert (level, bundle) == (Level.INFO, "31")
    assert "from record 11 to 30" in message


def test_groups_routes_and_logs_have_chains_of_their_own() -> None:
    others = [
        manifest(log="00" * 16, first=1, last=10, after=0, previous=None),
        manifest(log=LOG, route="b", first=1, last=10, after=0, previous=None),
        manifest(log=LOG, group="other", first=1, last=10, after=0, previous=None),
    ]

    assert judged(ONE, *others) == []


def test_what_a_damaged_bag_holds_counts_as_present() -> None:
    """The damage itself is reported; what follows it is not damaged."""
    found = together(ONE, THREE)
    found.add("/dest", TWO.bag, None, {entry.bundle.name: entry.bundle.sha256 for entry in TWO.entries})

    assert list(found.broken_links()) == []
