"""Bundles and segments that are small and claim to hold gigabytes: refused as damage, in little memory."""

import io
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import zstandard
from archives import archive
from bombs import GIB, MEMORY_MAX_BYTES, MIB, ZEROS, run
from logs import Built

from wald_archive.codecs import Codec
from wald_archive.manifest import Manifest, decode_manifest, tag_files
from wald_archive.objects import DIGEST_SUFFIX, MANIFEST, digest_line


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
