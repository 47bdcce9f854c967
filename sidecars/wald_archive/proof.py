"""Proving one bag: its small files against its manifest, and its bundles against that and the ledger.

    manifest.json               there is one way to write it, and a digest over it in tagmanifest-sha256.txt
    every other small file      made again from the manifest and compared byte for byte
    a bundle                    digest of the file, digest of the tar, then every part against its index, and all of it
                                against bundle.json and the manifest

Where the manifest itself cannot be believed, the rest of the bag is held to the digests that are left.

Of a run that the ledger does not call finished, tag files may be missing or cut short; nothing else is forgiven.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from wald.checking.checker import Level
from wald.format.batch import Buffer
from wald.format.ledger_lines import Entry
from wald.format.spans import BadRunLengths, unpack
from wald_archive.bundle import Tally, about
from wald_archive.bundle_reader import BadBundle, BundleReader
from wald_archive.codecs import BadStream, Codec, ahead
from wald_archive.destination import Destination, Listing, first_difference
from wald_archive.layout import DIGEST_SUFFIX, MANIFEST, PAYLOAD, BagName, digest_line, is_left_by_desktop
from wald_archive.ledger import Recorded
from wald_archive.manifest import BadManifest, BundleEntry, Manifest, decode_manifest
from wald_archive.tags import PAYLOAD_DIGESTS, TAG_DIGESTS, TAGS, digest_file, tag_files

_DIGEST_LINE = re.compile(rb"([0-9a-f]{64})  ([^\n]+)")


@dataclass(frozen=True, slots=True)
class Finding:
    """
    Attributes:
        address: the destination. bag: in it; "" for what is in none. file: in the bag, or else in the destination.
        offset: the byte from which on it is wrong; None where that says nothing.
    """

    level: Level
    address: str
    bag: str
    file: str
    message: str
    offset: int | None = None

    @property
    def name(self) -> str:
        """The whole path or address."""
        return "/".join(part for part in (self.address, self.bag, self.file) if part)


class Proof:
    """The proof of the bag ``name``.

    Args:
        recorded: what the ledger says of it.
        on_bytes: called with the number of bytes of bundles that were read.

    Attributes:
        manifest: that of the bag, once the findings are there, if it can be believed.
        digests: of the bundles that are there.
    """

    def __init__(
        self, destination: Destination, name: BagName, recorded: Recorded, on_bytes: Callable[[int], None]
    ) -> None:
        self._destination = destination
        self._name = name
        self._bag = str(name)
        self._recorded = recorded
        self._on_bytes = on_bytes
        self.manifest: Manifest | None = None
        self.digests: dict[str, str] = {}

    def findings(self) -> Iterator[Finding]:
        """All that there is to find, once.

        Raises:
            OSError: something cannot be read.
        """
        listing, payload = self._destination.listing(self._bag), self._destination.listing(f"{self._bag}/{PAYLOAD}")
        stored = {file: self._content(file) for file in listing.files if file in TAGS}
        try:
            manifest = decode_manifest(stored[MANIFEST])
        except KeyError:
            message = "missing" if TAG_DIGESTS in stored else "missing: the bag is unfinished"
            yield from self._without_manifest(message, stored, payload)
            return
        except BadManifest as error:
            yield from self._without_manifest(str(error), stored, payload)
            return
        tags = tag_files(manifest)
        excuse = self._recorded.excuse(self._bag, manifest.origin.group)
        begun = all(data.startswith(stored.get(file, b"")) for file, data in tags.items())
        if excuse and begun and stored != tags:
            yield self._finding(Level.INFO, "", excuse)
            stored = tags  # the missing ones are reported
        digest_agrees = digest_line(_sha256(stored[MANIFEST]), MANIFEST) in stored.get(TAG_DIGESTS, b"")
        if not digest_agrees:
            yield self._error(MANIFEST, f"its sha256 is not the one in {TAG_DIGESTS}")
        if digest_agrees or _derives(tags, stored):
            yield from self._against_manifest(manifest, stored, listing, payload)
        else:
            yield from self._against_digests(stored, payload)

    def _without_manifest(self, message: str, stored: dict[str, bytes], payload: Listing) -> Iterator[Finding]:
        """A bag in which there is none, or one that cannot be read."""
        excuse = self._recorded.excuse(self._bag, None)
        if excuse and stored.keys() <= {MANIFEST}:  # which is written before the others, so it may be cut short
            yield self._finding(Level.INFO, "", excuse)
        else:
            yield self._error(MANIFEST, message)
            yield from self._against_digests(stored, payload)

    def _against_manifest(
        self, manifest: Manifest, stored: dict[str, bytes], listing: Listing, payload: Listing
    ) -> Iterator[Finding]:
        bag = self._bag
        if bag in self._recorded.whole or (bag, manifest.origin.group) not in self._recorded.abandoned:
            self.manifest = manifest
        if manifest.bag != self._name:
            yield self._error(MANIFEST, f"the bag is {manifest.bag}, not what its name says")
        files = tag_files(manifest)
        for file, data in files.items():
            yield from self._compared(file, stored.get(file), data)
        expected: set[str] = set()
        for entry in manifest.entries:
            bundle = entry.bundle.name
            expected |= {bundle, bundle + DIGEST_SUFFIX}
            if bundle in payload.files:
                yield from self._bundle(manifest, entry)
            else:
                yield self._error(f"{PAYLOAD}/{bundle}", "missing")
            beside = f"{PAYLOAD}/{bundle}{DIGEST_SUFFIX}"
            there = None
            if bundle + DIGEST_SUFFIX in payload.files:
                there = self._content(beside)
            yield from self._compared(beside, there, digest_file(entry.bundle.sha256, bundle))
        foreign = [file for file in listing.files if file not in files]
        foreign += [folder for folder in listing.folders if folder != PAYLOAD]
        foreign += [f"{PAYLOAD}/{file}" for file in (*payload.files, *payload.folders) if file not in expected]
        for file in foreign:
            if is_left_by_desktop(file.removeprefix(f"{PAYLOAD}/")):
                yield self._finding(Level.INFO, file, "no part of the archive")
            else:
                yield self._error(file, "does not belong here")

    def _bundle(self, manifest: Manifest, entry: BundleEntry) -> Iterator[Finding]:
        """One bundle, read once."""
        bundle = entry.bundle
        file = f"{PAYLOAD}/{bundle.name}"
        stored, tar = hashlib.sha256(), hashlib.sha256()
        chunks = self._counted(self._destination.read(f"{self._bag}/{file}"), stored)
        content = _digested(manifest.codec, chunks, tar)
        reading = BundleReader(bundle.name.removesuffix(manifest.codec.suffix), bundle.contents, content)
        tally = Tally(bundle.contents.after)
        problem = ""
        try:
            for part in reading.parts():
                tally.add(part)
        except BadBundle as error:
            problem = str(error)
        with suppress(BadStream):
            content.close()  # a thread may be at work on the next chunk
        for _ in chunks:
            """The digest is that of the whole file, wherever it could not be decompressed any more."""
        self.digests[bundle.name] = bundle.sha256  # another digest is reported here, once
        digest = stored.hexdigest()
        if digest != bundle.sha256:
            yield self._error(file, f"its sha256 is {digest}, not {bundle.sha256}")
            return
        line = self._recorded.bundles.get((self._bag, bundle.name))
        if line is not None and line.get("sha256") != digest:
            problem = f"the ledger says that its sha256 is {line.get('sha256')}"
        if not problem and tar.hexdigest() != bundle.tar_sha256:
            problem = f"the sha256 of its tar is {tar.hexdigest()}, not {bundle.tar_sha256}"
        if not problem:
            contents = replace(tally.contents(bundle.contents.after), record_bytes=bundle.contents.record_bytes)
            if contents != bundle.contents or reading.about != about(manifest.origin, contents):
                problem = "its parts are not those of bundle.json and manifest.json"
            elif line is not None and not _holds(line, tally.runs):
                problem = "it does not hold the sequences that the ledger records"
        if problem:
            yield self._error(file, problem)
        else:
            count, first, last = bundle.contents.count, bundle.contents.first, bundle.contents.last
            yield self._finding(Level.OK, file, f"{count} records, {first} to {last}")

    def _against_digests(self, stored: dict[str, bytes], payload: Listing) -> Iterator[Finding]:
        """Check without a manifest: every file that has a digest somewhere."""
        sources = {file: stored[file] for file in (PAYLOAD_DIGESTS, TAG_DIGESTS) if file in stored}
        for file in payload.files:
            if file.endswith(DIGEST_SUFFIX):
                sources[f"{PAYLOAD}/{file}"] = self._content(f"{PAYLOAD}/{file}")
        actual = {file: _sha256(data) for file, data in (stored | sources).items()}
        for file in payload.files:
            if not file.endswith(DIGEST_SUFFIX):
                digest = hashlib.sha256()
                for _ in self._counted(self._destination.read(f"{self._bag}/{PAYLOAD}/{file}"), digest):
                    """Read to its end."""
                actual[f"{PAYLOAD}/{file}"] = self.digests[file] = digest.hexdigest()
        for source, data in sources.items():
            for line in data.removesuffix(b"\n").split(b"\n"):
                match = _DIGEST_LINE.fullmatch(line)
                if match is None:
                    yield self._error(source, "not a list of digests")
                    continue
                file = match[2].decode(errors="replace")
                file = f"{PAYLOAD}/{file}" if source.endswith(DIGEST_SUFFIX) else file
                if file != MANIFEST and actual.get(file) != match[1].decode():
                    message = f"its sha256 is {actual[file]}, not the one in" if file in actual else "missing; it is in"
                    yield self._error(file, f"{message} {source}")

    def _compared(self, file: str, there: bytes | None, expected: bytes) -> Iterator[Finding]:
        if there is None:
            yield self._error(file, "missing")
        elif (offset := first_difference(there, expected)) is not None:
            yield self._error(file, f"not what {MANIFEST} leads to", offset)

    def _content(self, file: str) -> bytes:
        return b"".join(self._destination.read(f"{self._bag}/{file}"))

    def _counted(self, chunks: Iterator[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
        for chunk in chunks:
            digest.update(chunk)
            self._on_bytes(len(chunk))
            yield chunk

    def _finding(self, level: Level, file: str, message: str, offset: int | None = None) -> Finding:
        return Finding(level, self._destination.address, self._bag, file, message, offset)

    def _error(self, file: str, message: str, offset: int | None = None) -> Finding:
        return self._finding(Level.ERROR, file, message, offset)


def _holds(line: Entry, turns: array[int]) -> bool:
    """Whether a bundle with these sequences is the one that the ledger's line is about."""
    try:
        return unpack(line.get("runs"), sum(turns[1::2])) == turns
    except BadRunLengths:
        return False


def _derives(tags: dict[str, bytes], stored: dict[str, bytes]) -> bool:
    """Whether everything but the digest over it speaks for a manifest."""
    return all(stored.get(file) == data for file, data in tags.items() if file != TAG_DIGESTS)


def _digested(codec: Codec, chunks: Iterator[bytes], digest: hashlib._Hash) -> Generator[Buffer]:
    """The decompressed content."""
    with closing(ahead(codec.decompress(chunks))) as contents:
        for content in contents:
            digest.update(content)
            yield content


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
