"""A manifest is parsed unchanged, and the files derived from it are valid for other tools."""

from __future__ import annotations

import hashlib
import json
from array import array

import pytest
from damage import every_flip, every_truncation

from wald_archive.bundle import Bundle, Contents, Origin
from wald_archive.codecs import Codec
from wald_archive.manifest import BadManifest, BundleEntry, Manifest, Previous, decode_manifest, tag_files
from wald_archive.objects import BagName, parse_bag_name
from wald_archive.parts import PartFacts

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


def test_it_comes_back() -> None:
    assert decode_manifest(MANIFEST.encode()) == MANIFEST


def test_it_says_what_programs_of_others_look_for() -> None:
    reported = json.loads(MANIFEST.encode())

    assert {key: reported[key] for key in ("format", "log", "route", "first", "last", "after", "count")} == {
        "format": 1,
        "log": "ab" * 16,
        "route": "web",
        "first": 1,
        "last": 300,
        "after": 0,
        "count": 299,
    }
    assert [each["previous"] for each in reported["bundles"]] == [
        None,
        {"bundle": "web-00000000000000000001.tar.gz", "sha256": "a" * 64},
    ]
    assert reported["bundles"][0]["earliest"] == "2023-11-14T22:13:20.000000000Z"
    assert reported["bundles"][1]["latest"] == "2023-11-14T22:13:21.000000001Z"


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
    for key, value in [
        ("format", 2),
        ("route", "../etc"),
        ("route", 5),
        ("log", None),
        ("codec", "rar"),
        ("bundles", []),
        ("bundles", None),
        ("first", "1"),
        ("count", 298),
    ]:
        reported = json.loads(MANIFEST.encode())

        with pytest.raises(BadManifest):
            decode_manifest(json.dumps(reported | {key: value}, indent=2).encode() + b"\n")


def test_a_bundle_that_wald_cannot_have_made_is_refused() -> None:
    """So nothing in it leads out of the bag."""
    for key, value in [
        ("bundle", "../../evil.tar.gz"),
        ("first", 1.0),
        ("first", -1),
        ("latest_ns", 1 << 80),
        ("sha256", "A" * 64),
        ("sha256", 5),
        ("parts", [{}]),
        ("previous", {"bundle": "x"}),
    ]:
        reported = json.loads(MANIFEST.encode())
        reported["bundles"][0][key] = value

        with pytest.raises(BadManifest):
            decode_manifest(json.dumps(reported, indent=2).encode() + b"\n")


def test_the_tag_files_follow_from_it() -> None:
    files = tag_files(MANIFEST)

    assert next(iter(files)) == "manifest.json"
    assert list(files)[-1] == "tagmanifest-sha256.txt"
    assert files["tagmanifest-sha256.txt"].decode().splitlines() == [
        f"{hashlib.sha256(files[name]).hexdigest()}  {name}" for name in sorted(files) if not name.startswith("tag")
    ]
    beside = f"{'a' * 64}  web-00000000000000000001.tar.gz\n".encode()
    assert hashlib.sha256(beside).hexdigest().encode() in files["manifest-sha256.txt"]
    assert f"Payload-Oxum: {2 * (60 + len(beside))}.4\n".encode() in files["bag-info.txt"]


@pytest.mark.parametrize("codec", Codec)
def test_the_page_to_read_names_the_bundles_as_they_are(codec: Codec) -> None:
    page = tag_files(Manifest(ORIGIN, codec, MANIFEST.entries))["README.txt"].decode()

    assert f"*{codec.suffix};" in page
    assert max(map(len, page.splitlines())) <= 120


@pytest.mark.parametrize("folder", ["1-2", "x", "", f"{1:020d}-{2:021d}", f"{1:020d}-{2:020d}x"])
def test_another_name_is_no_bag(folder: str) -> None:
    assert parse_bag_name("a", folder) is None


def test_the_name_of_a_bag_comes_back() -> None:
    name = BagName("a", 1, 250)

    assert parse_bag_name("a", str(name).removeprefix("a/")) == name


def test_what_a_bundle_follows_is_told_by_its_name_and_digest() -> None:
    assert FIRST.as_previous() == Previous("web-00000000000000000001.tar.gz", "a" * 64)
