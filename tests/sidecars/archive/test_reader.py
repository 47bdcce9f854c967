"""A tar is read as a bundle only if every part is what its index says, in its place."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from dataclasses import replace

import pytest
from damage import every_truncation
from golden.archive import FOLDER

from wald_archive.bundle import Contents
from wald_archive.manifest import decode_manifest
from wald_archive.reader import BadBundle, BundleReader

STEM = f"a-{1:020d}"
BUNDLE = next(FOLDER.rglob(f"{STEM}.tar"))
INDEX, RECORDS, ABOUT = f"batches/{1:020d}.jsonl", f"records/{1:020d}.txt", "bundle.json"

MANIFEST = decode_manifest((BUNDLE.parent.parent / "manifest.json").read_bytes())
CONTENTS = MANIFEST.entries[0].bundle.contents

Files = dict[str, bytes]


def unpacked() -> Files:
    """The files of the golden bundle, by name."""
    with tarfile.open(BUNDLE) as tar:
        return {
            member.name.removeprefix(f"{STEM}/"): file.read()
            for member in tar.getmembers()
            if (file := tar.extractfile(member))
        }


def packed(files: Files) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name if name.startswith("/") else f"{STEM}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def read(tar: bytes, contents: Contents = CONTENTS) -> list[tuple[int, int]]:
    """First and last record of each part."""
    return [(part.first, part.last) for part in BundleReader(STEM, contents, iter([tar])).parts()]


def test_a_bundle_is_read_whoever_has_packed_it() -> None:
    assert read(BUNDLE.read_bytes()) == read(packed(unpacked())) == [(1, 4)]


@pytest.mark.parametrize(
    "change",
    [
        lambda files: files | {RECORDS: files[RECORDS] + b"\n"},
        lambda files: files | {RECORDS: files[RECORDS][:-1]},
        lambda files: files | {RECORDS: files[RECORDS].replace(b"\n", b" ", 1)},
        lambda files: files | {RECORDS: b""},
        lambda files: files | {INDEX: files[INDEX].replace(b'"count": 4', b'"count": 3')},
        lambda files: files | {INDEX: files[INDEX].replace(b'"offset": 0', b'"offset": 1')},
        lambda files: files | {INDEX: files[INDEX] * 2},
        lambda files: files | {INDEX: b"garbage\n"},
        lambda files: files | {INDEX: b""},
        lambda files: {name: data for name, data in files.items() if name != INDEX},
        lambda files: {name: data for name, data in files.items() if name != RECORDS},
        lambda files: {name: data for name, data in files.items() if name != ABOUT},
        lambda files: {ABOUT: files[ABOUT]},
        lambda files: dict(reversed(files.items())),
        lambda files: files | {"more": b""},
        lambda files: {"more": b""} | files,
        lambda files: {"/outside": b""} | files,
        lambda files: {},
    ],
)
def test_anything_else_is_refused(change: Callable[[Files], Files]) -> None:
    """Missing, doubled, exchanged, or from elsewhere."""
    files = unpacked()
    changed = change(files)
    assert list(changed.items()) != list(files.items())

    with pytest.raises(BadBundle):
        read(packed(changed))


def test_parts_come_in_order_of_their_records() -> None:
    """Even where the manifest says otherwise."""
    files = unpacked()
    part = packed({INDEX: files[INDEX], RECORDS: files[RECORDS]}).rstrip(b"\0")
    twice = replace(CONTENTS, parts=CONTENTS.parts * 2)

    with pytest.raises(BadBundle, match="comes after record 4"):
        read(part + bytes(-len(part) % 512) + packed(files), twice)


def test_no_part_of_a_tar_is_a_bundle() -> None:
    """But for the zeros at its end."""
    data = BUNDLE.read_bytes()
    content = len(data.rstrip(b"\0"))
    for cut in every_truncation(data[:content]):
        if len(cut) % 64 == 0:
            with pytest.raises(BadBundle):
                read(cut)
