"""A manifest is parsed unchanged, and the files derived from it are valid for other tools."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from archives import manifest
from damage import every_flip, every_truncation

from wald.errors import Damaged, Refused
from wald_archive.bundle import Bundle, Bytes, Contents, Origin, PartFacts, Records
from wald_archive.codecs import Codec
from wald_archive.ledger import Past, Run, last_recorded, past
from wald_archive.manifest import BadManifest, BundleEntry, Manifest, Previous, decode_manifest, tag_files
from wald_archive.objects import BagName, parse_bag_name
from wald_archive.pack import check_lineage

ORIGIN = Origin("ab" * 16, "web", "processed", "wald 1", "2026-11-21T10:00:00Z")


def bundle(first: int, last: int, after: int, digest: str) -> Bundle:
    parts = (PartFacts(f"{first:020d}.txt", first, last, last - first + 1, 100),)
    contents = Contents(
        first, last, after, last - first + 1, 100, 1_700_000_000_000_000_000, 1_700_000_001_000_000_001, parts
    )
    return Bundle(f"web-{first:020d}.tar.gz", contents, 60, digest * 64, "c" * 64, array("Q", [0, 1]))


FIRST = BundleEntry(bundle(1, 250, 0, "a"), None)
SECOND = BundleEntry(bundle(252, 300, 250, "b"), FIRST.as_previous())
MANIFEST = Manifest(ORIGIN, Codec.GZ, (FIRST, SECOND))


def test_a_manifest_and_the_name_of_a_bag_come_back() -> None:
    assert decode_manifest(MANIFEST.encode()) == MANIFEST
    name = BagName("a", 1, 250)
    assert parse_bag_name("a", str(name).removeprefix("a/")) == name
    for folder in ["1-2", "x", "", f"{1:020d}-{2:021d}", f"{1:020d}-{2:020d}x"]:
        assert parse_bag_name("a", folder) is None


def test_no_changed_bit_reads_as_the_same_manifest() -> None:
    """It is refused, or says something else."""
    for changed in every_flip(MANIFEST.encode()):
        try:
            assert decode_manifest(changed) != MANIFEST
        except BadManifest:
            continue


def test_no_part_of_it_is_a_manifest() -> None:
    for cut in every_truncation(MANIFEST.encode()):
        with pytest.raises(BadManifest):
            decode_manifest(cut)


def test_a_manifest_that_wald_cannot_have_written_is_refused() -> None:
    """So nothing in it leads out of the bag."""
    cases: list[tuple[str, object]] = [
        *[("format", 2), ("route", "../etc"), ("route", 5), ("log", None), ("codec", "rar"), ("first", "1")],
        *[("bundles", []), ("bundles", None), ("count", 298)],
    ]
    of_a_bundle: list[tuple[str, object]] = [
        *[("bundle", "../../evil.tar.gz"), ("first", 1.0), ("first", -1), ("latest_ns", 1 << 80)],
        *[("sha256", "A" * 64), ("sha256", 5), ("parts", [{}]), ("previous", {"bundle": "x"})],
    ]
    for number, (key, value) in enumerate([*cases, *of_a_bundle]):
        reported = json.loads(MANIFEST.encode())
        (reported if number < len(cases) else reported["bundles"][0])[key] = value

        with pytest.raises(BadManifest):
            decode_manifest(json.dumps(reported, indent=2).encode() + b"\n")


def test_the_page_to_read_names_the_bundles_as_they_are() -> None:
    for codec in Codec:
        page = tag_files(Manifest(ORIGIN, codec, MANIFEST.entries))["README.txt"].decode()

        assert f"*{codec.suffix};" in page
        assert max(map(len, page.splitlines())) <= 120


LOG = "ab" * 16
BEGUN_BY = Origin(LOG, "a", "processed", "wald 1", "2026-11-21T10:00:00Z")
RUN = Run(BEGUN_BY, "/dest", 0, 1, 250, Records(100), Codec.GZ, Previous("before", "d" * 64))
LATER = Run(BEGUN_BY, "/dest", 250, 251, 300, Bytes(1000), Codec.ZST, None)


def archived(run: Run, last: int, **changed: object) -> dict[str, Any]:
    line = {"event": "archived", "route": "a", "group": "processed", "dest": run.dest, "bag": str(run.bag)}
    return line | {"bundle": f"a-{last}", "last": last, "sha256": "e" * 64} | changed


def judged(*entries: dict[str, Any]) -> Past:
    return past(reversed(entries), log=LOG, route="a", group="processed", dest="/dest")


def test_a_begun_run_is_done_again_as_it_was_begun_until_it_has_finished() -> None:
    """Whatever is asked for now; it is complete when its last bundle is reported, and others hold up nobody."""
    begun, ended = RUN.begun(at_ns=1), RUN.ended("finished", at_ns=2)
    assert [judged(begun), judged(LATER.begun(at_ns=1))] == [Past(RUN), Past(LATER)]
    assert judged(begun, archived(RUN, 250), ended) == Past()
    assert judged(begun, ended, LATER.begun(at_ns=3)).unfinished == LATER
    for lasts in ((), (100,), (100, 200), (100, 250)):
        found = judged(begun, *(archived(RUN, last) for last in lasts))
        assert found.recorded == {f"a-{last}" for last in lasts}
        assert found.complete == (250 in lasts)
    for other in ({"route": "b"}, {"group": "other"}, {"dest": "/elsewhere"}):
        assert judged(begun | other) == Past()


def test_a_line_that_cannot_be_used_is_reported() -> None:
    """Never guessed: another range would make other bundles."""
    cases: list[dict[str, Any]] = [
        {"codec": "rar"},
        {"first": None},
        {"previous": {}},
        {"records_per_bundle": None},
        {"after": "x"},
    ]
    for changed in cases:
        with pytest.raises(Damaged, match=r"archive\.jsonl: the line about bag a/0+1-0+250"):
            judged(RUN.begun(at_ns=1) | changed)


def test_a_run_follows_the_latest_bundle_behind_which_it_begins() -> None:
    entries = [
        archived(RUN, 100),
        archived(RUN, 250, sha256="1" * 64),
        archived(RUN, 250, sha256="2" * 64, dest="/elsewhere"),
        archived(RUN, 300),
        archived(RUN, 240, group="other"),
        archived(RUN, 245, route="b"),
    ]

    assert last_recorded(entries[::-1], route="a", group="processed", after=260) == Previous("a-250", "2" * 64)
    assert last_recorded(entries[::-1], route="a", group="processed", after=99) is None
    assert last_recorded(entries[::-1], route="a", group="other", after=250) == Previous("a-240", "e" * 64)


def test_the_line_about_a_run_says_all_that_decides_its_bytes() -> None:
    """The contract with readers of the ledger."""
    assert RUN.begun(at_ns=5) == {
        "event": "begun",
        "route": "a",
        "group": "processed",
        "dest": "/dest",
        "bag": "a/00000000000000000001-00000000000000000250",
        "after": 0,
        "first": 1,
        "last": 250,
        "records_per_bundle": 100,
        "bytes_per_bundle": None,
        "codec": "gz",
        "software": "wald 1",
        "archived_at": "2026-11-21T10:00:00Z",
        "previous": {"bundle": "before", "sha256": "d" * 64},
        "at": 5,
    }


class TestLineage:
    @pytest.fixture
    def bag(self) -> tuple[str, Manifest]:
        return "/dest/a/bag", manifest(log=LOG, group="processed", first=101, last=200)

    @pytest.mark.parametrize(("first", "last"), [(1, 100), (201, 300), (201, 201)])
    def test_beside_the_others_there_is_room(self, bag: tuple[str, Manifest], first: int, last: int) -> None:
        check_lineage([bag], log=LOG, root=Path("/log"), group="processed", first=first, last=last)

    @pytest.mark.parametrize(("first", "last"), [(1, 101), (150, 160), (200, 300), (1, 300)])
    def test_records_are_not_archived_twice_to_one_place(
        self, bag: tuple[str, Manifest], first: int, last: int
    ) -> None:
        with pytest.raises(Refused, match=r"/dest/a/bag: .*already has records 101 to 200"):
            check_lineage([bag], log=LOG, root=Path("/log"), group="processed", first=first, last=last)
