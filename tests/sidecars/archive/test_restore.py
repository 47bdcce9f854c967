"""A restore gives the same bytes as the log, or an error that names the bundle, in little memory."""

import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import bombs
import pytest
import zstandard
from archives import archive, bags, command, output_of, refusal_of, restored
from bombs import GIB, MEMORY_MAX_BYTES, MIB, ZEROS, run
from damage import flipped, peak_bytes
from faults import DyingDisk, after_each_death
from hypothesis import given, settings
from hypothesis import strategies as st
from json_page import require_documented
from logs import Built, Unsynced
from running import Daemon, eventually, reclaim, wald
from running import output_of as wald_output_of
from some_logs import STEPS, Step, build

from wald.errors import Damaged, InvalidInput, NotFound
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.listing import list_segments
from wald_archive.bundle import Bytes, Records
from wald_archive.codecs import Codec
from wald_archive.lookup import runs_of
from wald_archive.manifest import Manifest, decode_manifest, tag_files
from wald_archive.objects import DIGEST_SUFFIX, MANIFEST, Directory, digest_line, open_destination
from wald_archive.restore import restore_into


def read(built: Built, *, first: int = 1, last: int | None = None, as_json: bool = False) -> bytes:
    """Return the output of ``wald read``."""
    batches = [batch for batch in built.log.batches("a", "earliest", last) if batch.last_sequence >= first]
    trimmed = [batch.between(first, batch.last_sequence) for batch in batches]
    if not as_json:
        return b"".join(bytes(batch.raw()) for batch in trimmed if batch)
    return b"".join(record.to_json().encode() + b"\n" for batch in trimmed if batch for record in batch.records())


@pytest.mark.parametrize("examples", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_restored_is_what_was_read(examples: int) -> None:
    """For any log, packed in one run or two, completely or in part, raw or as JSON."""
    given_anything = given(
        steps=STEPS,
        records=st.integers(1, 8),
        codec=st.sampled_from(Codec),
        bounds=st.tuples(st.integers(1, 30), st.none() | st.integers(1, 30)),
        runs=st.integers(0, 6),
    )
    settings(max_examples=examples, deadline=None)(given_anything(assert_restored))()


def assert_restored(steps: list[Step], records: int, codec: Codec, bounds: tuple[int, int | None], runs: int) -> None:
    first, last = bounds
    with tempfile.TemporaryDirectory() as folder:
        dest = Path(folder) / "dest"
        built = build(Path(folder) / "root", steps[:runs])
        archive(built, dest, size=Records(records), codec=codec)
        for step in steps[runs:]:
            step.append(built)
        archive(built, dest, size=Records(records), codec=codec)
        if not read(built):
            with pytest.raises(NotFound, match="there is no route 'a' here"):
                restored(dest)
            return

        for as_json in (False, True):
            assert restored(dest, as_json=as_json) == read(built, as_json=as_json)
            expected = read(built, first=first, last=last, as_json=as_json)
            assert restored(dest, first=first, last=last, as_json=as_json) == expected


@pytest.fixture
def three(built: Built, dest: Path) -> Path:
    """Records 1 to 6 in a bag of two bundles, 7 to 9 in a bag of one."""
    built.lines("a", [b"%d" % number for number in range(1, 7)])
    archive(built, dest, size=Records(3))
    built.lines("a", [b"%d" % number for number in range(7, 10)])
    archive(built, dest, size=Records(3))
    return dest


def harm(dest: Path, first: int) -> Path:
    """Change a byte of a record in the bundle that begins with ``first``."""
    (bundle,) = dest.rglob(f"a-{first:020d}.tar")
    data = bytearray(bundle.read_bytes())
    data[data.index(b"%d\n" % first)] ^= 0x10
    bundle.write_bytes(data)
    return bundle


def test_nothing_of_a_damaged_bundle_is_given_out(three: Path) -> None:
    bundle = harm(three, 4)
    pieces = runs_of(Directory(three, Disk()), "a", 1, None)

    assert next(pieces).data == b"1\n2\n3\n"
    with pytest.raises(Damaged, match=f"{bundle}: its sha256 is not"):
        next(pieces)


def test_bundles_outside_the_range_are_not_read(three: Path) -> None:
    """So damage in them does not matter."""
    harm(three, 1)
    harm(three, 7)

    assert restored(three, first=4, last=6) == b"4\n5\n6\n"
    assert restored(three, first=5, last=5) == b"5\n"


def test_a_bundle_that_is_gone_and_a_damaged_manifest_are_reported(three: Path) -> None:
    (bundle,) = three.rglob(f"a-{4:020d}.tar")
    bundle.unlink()
    with pytest.raises(Damaged, match=f"{bundle}: missing"):
        restored(three)

    path = bags(three)[0] / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 7'))
    with pytest.raises(Damaged, match=f"{path}: format 7"):
        restored(three)

    shutil.rmtree(bags(three)[0])  # the first bundle that is left follows one that is not here
    with pytest.raises(Damaged, match="begins after record 6, and no bundle has the records after record 0"):
        restored(three)
    assert restored(three, first=7) == b"7\n8\n9\n"


def test_a_gap_inside_the_range_is_reported_and_one_outside_does_not_matter(three: Path, built: Built) -> None:
    """The bag of records 7 to 9 is gone, and one follows."""
    built.lines("a", [b"10"])
    archive(built, three)
    shutil.rmtree(bags(three)[1])
    said = "begins after record 9, and no bundle has the records after record"
    for first, last in ((1, None), (6, None), (1, 8), (1, 7), (6, 7)):
        with pytest.raises(Damaged, match=said) as damaged:
            restored(three, first=first, last=last)
        assert "--from 10" in damaged.value.hint
    assert restored(three, first=1, last=6) == b"1\n2\n3\n4\n5\n6\n"
    for last in (None, 99):
        assert restored(three, first=10, last=last) == b"10\n"


def test_what_two_groups_have_archived_comes_once(built: Built, dest: Path) -> None:
    built.lines("a", [b"1", b"2", b"3"])
    archive(built, dest)
    built.lines("a", [b"4"])
    archive(built, dest, group="cold")

    assert restored(dest) == b"1\n2\n3\n4\n"


@pytest.mark.parametrize("codec", [Codec.ZST, Codec.GZ])
def test_memory_does_not_grow_with_the_bundle(tmp_path: Path, codec: Codec) -> None:
    line = os.urandom(500).replace(b"\n", b" ") + b"\n"
    peaks = []
    for times in (24, 96):
        built = Built(tmp_path / f"root-{times}", segment_max_bytes=1 << 30)
        for _ in range(times):
            built.append("a", line * 1000, 1000)
        dest = tmp_path / f"dest-{times}"
        archive(built, dest, size=Bytes(1 << 30), codec=codec)
        peaks.append(peak_bytes(partial(deque, runs_of(Directory(dest, Disk()), "a", 1, None), maxlen=0)))

    assert peaks[1] < peaks[0] + 8 * MIB


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """Path of the new log, which a shell would split."""
    return tmp_path / "new log"


def read_log(root: Path, *words: object) -> list[dict[str, object]]:
    """Return records as ``wald read --format json`` prints them, without their senders, which are not archived."""
    done = wald("read", *words, "--format", "json", "--root", root)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return [{key: value for key, value in record.items() if key != "sender"} for record in records]


def require_good(root: Path) -> None:
    verified = wald_output_of("verify", "--root", root).decode()
    assert verified.splitlines()[-1].endswith("0 errors"), verified
    assert wald("explain", "--root", root).returncode == 0


def restored_by(built: Built, dest: Path, new: Path, *, disk: Disk | None = None) -> None:
    source = open_destination(str(dest), Unsynced())
    restore_into(source, (), new, disk=disk or Unsynced(), first=1, last=None, on_record=lambda _: None)


def where(root: Path, sequence: int) -> str:
    return wald_output_of("where", sequence, "--root", root).decode()


@pytest.mark.parametrize("codec", [pytest.param("gz", marks=pytest.mark.slow), "zst"])
def test_it_reads_as_the_log_that_was_archived_and_goes_on_behind_it(tmp_path: Path, new: Path, codec: str) -> None:
    """With everything that records can be, written by a daemon, packed, deleted there, and restored."""
    old, dest = tmp_path / "old", tmp_path / "dest"
    objects = (
        b'{"value":"v","key":"k","event_time_ns":-5,"headers":{"h":"1"}}\n{"value_hex":"00ff0a","event_time_ns":7}\n'
    )
    with Daemon(old):
        wald_output_of("route", "add", "pipe", "--fifo", "--root", old)
        wald_output_of("route", "add", "web", "--root", old)
        with (old / "routes/pipe/in").open("wb") as pipe:
            pipe.write(b"one\n\n" + b"long" * 75_000 + b"\n\xff\r\nno newline")
            pipe.flush()
            for number in range(7):
                wald_output_of("append", "web", "--root", old, stdin=b"line %d\n\n" % number)
                wald_output_of("append", "web", "--jsonl", "-", "--root", old, stdin=objects)
        wald_output_of("route", "retire", "pipe", "--root", old)
        wald_output_of("append", "web", "--root", old, stdin=b"the last\n")
        before = read_log(old)
        output_of("pipe", "web", "--root", old, "--dest", dest, "--codec", codec, "--records-per-bundle", 3)
        wald_output_of("cut", "--root", old)
        reclaim(old, "--grace", 0)

    reported = output_of("restore", dest, "--into", new).decode()

    assert f"at {new}: records 1 to {len(before)} of log " in reported
    assert max(len(str(record.get("value"))) for record in before) == 300_000
    for route in ("pipe", "web"):
        assert read_log(new, route) == [record for record in before if record["route"] == route]
    require_good(new)
    with Daemon(new):
        appended = wald_output_of("append", "web", "--root", new, stdin=b"more\n").split()
        assert [int(word) for word in appended] == [len(before) + 1] * 2
        assert read_log(new)[:-1] == before
        require_good(new)


def test_of_one_route_the_other_sequences_are_answered(mixed: Built, dest: Path, new: Path) -> None:
    """They are reported as not restored; no reader of the route misses anything, and neither does one of all."""
    archive(mixed, dest, size=Records(4))
    archive(mixed, dest, route="b")
    before = read_log(mixed.root.path, "a")
    assert before[-1]["terminated"] is False

    reported = json.loads(output_of("restore", dest, "a", "--into", new, "--json"))

    require_documented("wald-archive restore", reported)
    assert (reported["records"], reported["missing"], reported["holes"]) == (14, 3, 2)
    assert (reported["from_log"], reported["log"]) == (mixed.log_id.hex(), read_identity(Root(new)).log_id.hex())
    assert read_log(new, "a") == before
    assert read_log(new) == before
    assert "not restored at 20" in where(new, 14)
    assert f"in no bundle of a in {dest}" in where(new, 14)
    require_good(new)
    with Daemon(new):
        assert wald_output_of("append", "a", "--root", new, stdin=b"more\n").split()[0] == b"18"
    require_good(new)


def test_a_large_hole_ends_a_segment(built: Built, dest: Path, new: Path) -> None:
    built.lines("a", [b"one"])
    built.lines("b", [b""] * 70_000)
    built.lines("a", [b"two"])
    built.lines("b", [b"between"])
    built.lines("a", [b"three"])
    archive(built, dest)
    before = read_log(built.root.path, "a")

    output_of("restore", dest, "--into", new)

    assert [segment.base_sequence for segment in list_segments(Root(new)).segments] == [1, 70_002]
    assert read_log(new) == before
    assert "not restored" in where(new, 35_000)
    assert "not restored" in where(new, 70_003)
    require_good(new)


def test_readers_are_told_what_of_their_route_may_be_missing(built: Built, dest: Path, new: Path) -> None:
    """The archive of b ends before that of a; and records before --from were not requested."""
    for number in range(5):
        built.lines("a", [b"a%d" % number])
        built.lines("b", [b"b%d" % number])
    archive(built, dest)
    archive(built, dest, route="b", to=6)

    output_of("restore", dest, "--into", new, "--from", 3)

    assert [record["sequence"] for record in read_log(new, "a", "--from", 3)] == [3, 5, 7, 9]
    done = wald("read", "b", "--root", new)
    assert done.stdout == b"b1\nb2\n"
    assert b"before --from 3" in done.stderr
    assert b"record 8 is lost: up to 1 record of route b is missing; it was not restored at" in done.stderr
    assert "before --from 3" in where(new, 2)
    require_good(new)


def test_only_a_new_or_an_empty_directory_is_taken(mixed: Built, dest: Path, new: Path) -> None:
    archive(mixed, dest)
    new.mkdir()
    output_of("restore", dest, "--into", new)
    assert refusal_of("restore", dest, "--into", new)[:2] == (
        2,
        f"{new}: already a log; records can only be restored into a new log",
    )
    (new.parent / "other").mkdir()
    (new.parent / "other/file").touch()
    assert "not empty" in refusal_of("restore", dest, "--into", new.parent / "other")[1]
    assert refusal_of("restore", dest, "b", "--into", new.parent / "third")[0] == 3
    assert "no bundle has a record" in refusal_of("restore", dest, "--into", new.parent / "third", "--from", 99)[1]
    assert refusal_of("restore", dest)[0] == 2
    assert not (new.parent / "third").exists()


def test_the_bundles_of_two_logs_are_not_mixed(mixed: Built, dest: Path, new: Path, tmp_path: Path) -> None:
    other = Built(tmp_path / "other")
    other.lines("b", [b"other"])
    archive(mixed, dest)
    archive(other, dest, route="b")

    code, message, _ = refusal_of("restore", dest, "--into", new)

    assert (code, "from several logs" in message) == (2, True)
    output_of("restore", dest, "b", "--into", new)
    assert [record["value"] for record in read_log(new)] == ["other"]


def test_a_damaged_bundle_leaves_no_log_and_a_hint_that_can_be_typed(mixed: Built, dest: Path, new: Path) -> None:
    archive(mixed, dest, size=Records(7))
    bundle = sorted((bags(dest)[0] / "data").glob("*.tar"))[1]
    whole = bundle.read_bytes()
    bundle.write_bytes(flipped(whole, 700))

    code, message, _ = refusal_of("restore", dest, "--into", new)
    assert (code, message.startswith(f"{bundle}: its sha256 is not")) == (4, True)
    assert wald("read", "--root", new).returncode == 3
    assert wald("run", "--root", new).returncode == 2

    bundle.write_bytes(whole)
    code, message, hint = refusal_of("restore", dest, "--into", new)
    assert (code, message) == (2, f"{new}: contains an unfinished restore, not a log")
    subprocess.run(["sh", "-c", hint.partition(";")[0]], check=True)
    output_of("restore", dest, "--into", new)
    require_good(new)


def test_whenever_it_dies_there_is_the_whole_log_or_none(mixed: Built, dest: Path, tmp_path: Path) -> None:
    """At each step, with half of its write on disk."""
    archive(mixed, dest)
    before = read_log(mixed.root.path, "a")

    def die(number: int, disk: DyingDisk) -> None:
        restored_by(mixed, dest, tmp_path / f"new-{number}", disk=disk)

    for number in after_each_death(die, part=0.5, least=30):
        new = tmp_path / f"new-{number}"
        try:
            read_identity(Root(new))
        except NotFound:
            if new.exists() and (new / "log.json.restoring").exists():
                with pytest.raises(InvalidInput, match="unfinished restore"):
                    restored_by(mixed, dest, new)
        else:
            assert read_log(new, "a") == before
    assert read_log(new, "a") == before


@pytest.mark.slow
def test_100_mb_are_restored_in_little_memory(tmp_path: Path, new: Path) -> None:
    """And a restore that is killed in the middle leaves no log."""
    built, dest = Built(tmp_path / "old", segment_max_bytes=16 << 20), tmp_path / "dest"
    for number in range(800):
        line = b"%08d " % number + os.urandom(32).hex().encode() * 2
        built.lines("ab"[number % 2], [line] * 1000)
    for route in "ab":
        archive(built, dest, route=route, codec=Codec.ZST, size=Records(100_000))
    words = command("restore", dest, "--into", new)
    killed = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    eventually(lambda: list(new.glob("segments/*.zst")))
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    with pytest.raises(NotFound):
        read_identity(Root(new))
    shutil.rmtree(new)

    code, said, peak_bytes = bombs.run("wald_archive", "restore", dest, "--into", new)

    assert code == 0, said
    assert peak_bytes < 192 * bombs.MIB
    require_good(new)
    original = wald_output_of("read", "--root", built.root.path)
    assert (len(original) > 100_000_000, wald_output_of("read", "--root", new) == original) == (True, True)


def assert_refused(place: Path, *words: str) -> None:
    """By restore and by verify."""
    for arguments in (("verify", place), ("restore", place, "a")):
        code, reported, memory = run("wald_archive", *arguments)
        assert (code, "Traceback" in reported) == (4, False), reported
        assert memory < MEMORY_MAX_BYTES
    for word in words:  # of restore
        assert word in reported


class Bag:
    """A bag with one bundle of route a, whose content a test replaces, digests and all."""

    def __init__(self, built: Built, dest: Path) -> None:
        built.lines("a", [b"one", b"two"])
        archive(built, dest, codec=Codec.NONE)
        self.place = dest
        (self.path,) = (dest / "a").iterdir()
        self.manifest = decode_manifest((self.path / MANIFEST).read_bytes())
        self.tar = self._bundle.read_bytes()

    @property
    def _bundle(self) -> Path:
        return self.path / "data" / self.manifest.entries[0].bundle.name

    def plant(
        self,
        data: bytes,
        change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
        *,
        codec: Codec = Codec.ZST,
    ) -> None:
        """Replace the content of the bundle by ``data``, and all digests of it."""
        for old in (self._bundle, Path(f"{self._bundle}{DIGEST_SUFFIX}")):
            old.unlink()
        (entry,) = self.manifest.entries
        name = entry.bundle.name.removesuffix(self.manifest.codec.suffix) + codec.suffix
        digest = sha256(data).hexdigest()
        bundle = replace(entry.bundle, name=name, bytes=len(data), sha256=digest, tar_sha256=digest)
        self.manifest = change(replace(self.manifest, codec=codec, entries=(replace(entry, bundle=bundle),)))
        self._bundle.write_bytes(data)
        Path(f"{self._bundle}{DIGEST_SUFFIX}").write_bytes(digest_line(digest, name))
        for file, content in tag_files(self.manifest).items():
            (self.path / file).write_bytes(content)

    def member(self, folder: str) -> tarfile.TarInfo:
        """The file of the tar that is in ``folder``."""
        with tarfile.open(fileobj=io.BytesIO(self.tar)) as tar:
            return next(member for member in tar.getmembers() if folder in member.name)

    def claiming(self, folder: str, size: int) -> bytes:
        """The tar up to the content of that file, of which the header says that it has ``size`` bytes."""
        member = self.member(folder)
        header = tarfile.TarInfo(member.name)
        header.size = size
        return self.tar[: member.offset] + header.tobuf(tarfile.PAX_FORMAT)


def one_frame(pieces: Iterable[bytes], size: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=True).compressobj(size=size)
    return b"".join([*map(compressor.compress, pieces), compressor.flush()])


@pytest.fixture
def bag(built: Built, dest: Path) -> Bag:
    return Bag(built, dest)


def test_a_frame_of_gigabytes_is_not_expanded(bag: Bag) -> None:
    data = one_frame([ZEROS] * (3 * 1024), 3 * GIB)
    assert len(data) < 512 << 10
    bag.plant(data)

    assert_refused(bag.place, "a frame")


def test_a_frame_that_holds_more_than_it_claims_is_not_expanded(bag: Bag) -> None:
    """The size in the header of a frame is a claim, too."""
    data = bytearray(one_frame([ZEROS] * 1024, GIB))
    assert zstandard.get_frame_parameters(bytes(data)).content_size == GIB
    at = data.index((GIB).to_bytes(4, "little"))
    data[at : at + 4] = (1000).to_bytes(4, "little")
    bag.plant(bytes(data))

    assert_refused(bag.place)


def test_a_gzip_member_of_hundreds_of_megabytes_is_not_expanded(bag: Bag) -> None:
    import zlib

    compressor = zlib.compressobj(1, wbits=31)
    data = b"".join([*(compressor.compress(ZEROS) for _ in range(400)), compressor.flush()])
    bag.plant(data, codec=Codec.GZ)

    assert_refused(bag.place, "a frame")


@pytest.mark.parametrize("folder", ["batches", "records", "bundle.json"])
def test_a_file_larger_than_the_manifest_tells_is_not_read(bag: Bag, folder: str) -> None:
    head = bytes(Codec.ZST.compress(bag.claiming(folder, 3 * GIB)))
    bag.plant(head + bytes(Codec.ZST.compress(ZEROS)) * (3 * 1024))

    assert_refused(bag.place, f"{3 * GIB} bytes")


def test_what_follows_the_end_of_a_tar_is_not_read(bag: Bag) -> None:
    bag.plant(bytes(Codec.ZST.compress(bag.tar)) + bytes(Codec.ZST.compress(ZEROS)) * (64 * 1024))

    assert_refused(bag.place, "after its end")


def test_a_header_of_more_than_one_block_is_refused(bag: Bag) -> None:
    """A header of pax may have any length, and any number of fields."""
    field = b"6 a=b\n"
    header = tarfile.TarInfo("./PaxHeaders/x")
    header.type = tarfile.XHDTYPE
    header.size = len(field) * (MIB // len(field) * 32)
    pax = header.tobuf(tarfile.USTAR_FORMAT) + field * (header.size // len(field))
    bag.plant(pax + bytes(-len(pax) % 512) + bag.tar, codec=Codec.NONE)

    assert_refused(bag.place, "a pax header of")


def test_a_manifest_that_tells_of_a_part_too_large_is_refused(bag: Bag) -> None:
    """A part has some MiB, or one record."""

    def change(manifest: Manifest) -> Manifest:
        (entry,) = manifest.entries
        contents = entry.bundle.contents
        large = replace(contents, parts=(replace(contents.parts[0], bytes=3 * GIB),))
        return replace(manifest, entries=(replace(entry, bundle=replace(entry.bundle, contents=large)),))

    head = bytes(Codec.ZST.compress(bag.claiming("records", 3 * GIB)))
    bag.plant(head + bytes(Codec.ZST.compress(ZEROS)) * (3 * 1024), change)

    assert_refused(bag.place, "part")


def test_a_sound_bag_is_restored_within_the_same_memory(bag: Bag) -> None:
    assert run("wald_archive", "restore", bag.place, "a")[0] == 0
