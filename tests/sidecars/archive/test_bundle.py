"""A bundle is a pure function of its records, in bounded memory, and stock tools can read it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import pytest
from archives import copied, files
from damage import peak_bytes
from golden.archive import MOMENT, log_id_of, sample_log
from logs import Built

from wald.format.batch import Buffer
from wald.format.names import ROUTE_MAX_LENGTH
from wald_archive.bundle import Bundle, Origin, bundle
from wald_archive.codecs import Codec
from wald_archive.reader import BundleReader

MIB = 1 << 20


def made(built: Built, route: str = "a", codec: Codec = Codec.NONE) -> tuple[Bundle, bytes]:
    origin = Origin(log_id_of(built), route, "processed", "wald test", MOMENT)
    chunks: list[Buffer] = []
    facts = bundle(built.log.batches(route), origin=origin, codec=codec, after=0, sink=chunks.append)
    return facts, b"".join(chunks)


def members(tar: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        return {member.name: member for member in opened.getmembers()}


def test_headers_say_nothing_of_the_machine(mixed: Built) -> None:
    for member in members(made(mixed)[1]).values():
        assert (member.uid, member.gid, member.uname, member.gname, member.mode) == (0, 0, "", "", 0o644)
        assert member.pax_headers == {}
        assert member.type == tarfile.REGTYPE


def test_members_are_named_by_what_they_hold(mixed: Built) -> None:
    names = [name.removeprefix(f"a-{1:020d}/") for name in members(made(mixed)[1])]

    assert names == [
        f"batches/{1:020d}.jsonl",
        f"records/{1:020d}.txt",
        f"batches/{12:020d}.jsonl",
        f"records/{12:020d}.jsonl",
        f"batches/{16:020d}.jsonl",
        f"records/{16:020d}.txt",
        "bundle.json",
    ]


def test_its_time_is_that_of_the_records(mixed: Built) -> None:
    """Not that of the packing."""
    times = [member.mtime for member in members(made(mixed)[1]).values()]

    assert times[0] == next(iter(mixed.log.records("a"))).append_time_ns // 10**9
    assert times == sorted(times)


@pytest.mark.parametrize("codec", Codec)
def test_the_tar_is_the_same_whatever_the_codec(mixed: Built, codec: Codec) -> None:
    facts, stored = made(mixed, codec=codec)
    plain, tar = made(mixed)

    assert b"".join(codec.decompress([stored])) == tar
    assert (facts.tar_sha256, facts.contents, facts.bytes) == (plain.sha256, plain.contents, len(stored))
    assert sum(length for length, _ in facts.frames) == len(stored)
    assert len(tar) % 10240 == 0


def test_the_ledger_gets_runs_that_count_from_after(mixed: Built) -> None:
    """Records 1 to 10, one of another route, 12 and 13, two of another route, 16 and 17."""
    assert made(mixed)[0].runs.tolist() == [0, 10, 1, 2, 2, 2]


def test_bundle_json_says_what_is_known_of_the_whole(mixed: Built) -> None:
    facts, tar = made(mixed)
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        file = opened.extractfile(f"a-{1:020d}/bundle.json")
        assert file is not None
        reported = json.load(file)

    assert {
        key: reported[key] for key in ("format", "bundle", "route", "group", "first", "last", "after", "count")
    } == {
        "format": 1,
        "bundle": f"a-{1:020d}",
        "route": "a",
        "group": "processed",
        "first": 1,
        "last": 17,
        "after": 0,
        "count": 14,
    }
    assert [part["count"] for part in reported["parts"]] == [10, 2, 2]
    assert facts.contents.record_bytes == 70 + len(b"value\x00\xff\nkey") + len(b'{"h":"1"}') + 2 + 3 + 11


def test_stock_tar_lists_and_unpacks_it(mixed: Built, tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar"
    path.write_bytes(made(mixed)[1])

    listed = subprocess.run(["tar", "-tf", path], capture_output=True, text=True, check=True)
    lines = subprocess.run(
        ["tar", "-xOf", path, "--wildcards", "*/records/*.txt"], capture_output=True, check=True
    ).stdout

    assert listed.stderr == ""
    assert listed.stdout.splitlines() == list(members(path.read_bytes()))
    assert lines == b"".join(b"line %d\n" % number for number in range(10)) + b"\xfe\r\nno newline\n"


def test_the_longest_route_has_a_bundle(tmp_path: Path) -> None:
    """Its names are too long for the old tar header, so they need a pax one."""
    built = Built(tmp_path / "root")
    route = "r" * ROUTE_MAX_LENGTH
    built.lines(route, [b"x"])
    facts, tar = made(built, route)
    path = tmp_path / "bundle.tar"
    path.write_bytes(tar)

    listed = subprocess.run(["tar", "-tf", path], capture_output=True, text=True, check=True)

    assert listed.stdout.splitlines()[-1] == f"{route}-{1:020d}/bundle.json"
    assert [part.count for part in BundleReader(f"{route}-{1:020d}", facts.contents, iter([tar])).parts()] == [1]
    assert len(facts.name) <= 255


def test_a_second_making_elsewhere_has_the_same_bytes(tmp_path: Path) -> None:
    """Another time zone, locale, umask, working directory, hash seed, and order of files in the log."""
    built = sample_log(tmp_path / "root")
    here = made(built)[1]
    root = tmp_path / "copy"
    root.mkdir()
    for path in sorted(built.root.path.iterdir(), reverse=True):
        copied(path, root / path.name) if path.is_dir() else (root / path.name).write_bytes(path.read_bytes())
    script = (
        "import os; os.umask(0o077); from pathlib import Path; from golden.archive import write; "
        f"write(Path({str(root)!r}), Path({str(tmp_path / 'there.tar')!r}))"
    )
    environment = os.environ | {
        "TZ": "Asia/Kolkata",
        "LC_ALL": "tr_TR.UTF-8",
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, env=environment)

    assert (tmp_path / "there.tar").read_bytes() == here
    assert files(tmp_path / "root" / "segments") == files(root / "segments")


@pytest.mark.parametrize("codec", [Codec.ZST, Codec.GZ])
def test_memory_does_not_grow_with_the_bundle(tmp_path: Path, codec: Codec) -> None:
    """Four times the records, no more memory."""
    line = os.urandom(500).replace(b"\n", b" ") + b"\n"
    peaks = []
    for times in (24, 96):
        built = Built(tmp_path / f"root-{times}", segment_max_bytes=1 << 30)
        for _ in range(times):
            built.append("a", line * 1000, 1000)
        peaks.append(peak_bytes(partial(bundle_only, built, codec)))

    assert peaks[1] < peaks[0] + 8 * MIB


def bundle_only(built: Built, codec: Codec) -> None:
    origin = Origin(log_id_of(built), "a", "processed", "wald test", MOMENT)
    bundle(built.log.batches("a"), origin=origin, codec=codec, after=0, sink=len)
