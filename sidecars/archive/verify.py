"""Proving an archive: every byte is read, nothing is changed, and all that is wrong is told of with its name.

    manifest.json               there is one way to write it, and a digest over it in tagmanifest-sha256.txt
    every other small file      made anew from the manifest and compared byte for byte
    a bundle                    digest of the file, digest of the tar, then every part against its index, and all of it
                                against bundle.json and the manifest
    the bundles of a route      each follows the one before (sidecars.archive.chain)
    the ledger, if given        tells of no bundle that is not there

Where the manifest itself cannot be believed, the rest of the bag is held to the digests that are left.

Of a run that the ledger does not call finished, tag files may be missing or cut short; nothing else is forgiven.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache

from sidecars.archive.bundle import Tally, about
from sidecars.archive.chain import Placed, broken_links
from sidecars.archive.codecs import BadStream, Codec, ahead
from sidecars.archive.contents import BadBundle, Reading
from sidecars.archive.destination import Destination, Listing, first_difference
from sidecars.archive.finding import Finding
from sidecars.archive.layout import DIGEST_SUFFIX, MANIFEST, PAYLOAD, BagName, digest_line, parse_bag_name
from sidecars.archive.manifest import BadManifest, Entry, Manifest, Previous, decode_manifest
from sidecars.archive.tags import PAYLOAD_DIGESTS, TAG_DIGESTS, TAGS, digest_file, tag_files
from wald.errors import NotFound
from wald.format.names import is_route
from wald.store.history import Entry as Line
from wald.store.verifier import Level

_DIGEST_LINE = re.compile(rb"([0-9a-f]{64})  ([^\n]+)")


@dataclass(slots=True)
class Told:
    """What the ledger says is at one destination.

    Attributes:
        bundles: the lines ``archived``, by bag and name of the bundle.
        whole: the bags that these are about: such a line is written when the whole bag has been read back.
        unfinished: bag and group of each run that was begun, and neither finished nor abandoned.
        abandoned: bag and group of each run that was given up.
        elsewhere: the destinations of all bundles it tells of, if it tells of nothing here.
    """

    bundles: dict[tuple[str, str], Line] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    unfinished: set[tuple[str, str]] = field(default_factory=set)
    abandoned: set[tuple[str, str]] = field(default_factory=set)
    elsewhere: tuple[str, ...] = ()

    def excuse(self, bag: str, group: str | None) -> str:
        """Why a bag of ``group`` (None: whoever's) may be half-written; "" if it may not."""
        if bag in self.whole:
            return ""
        for begun, whose in sorted(self.unfinished):
            if begun == bag and group in (None, whose):
                route = bag.partition("/")[0]
                return f"unfinished: an interrupted run; wald-archive {route} --group {whose} goes on with it"
        if any(begun == bag and group in (None, whose) for begun, whose in self.abandoned):
            return "an abandoned run; it may be removed"
        return ""


def told_of(entries: Iterable[Line], place: str) -> Told:
    """The lines of a ledger about one destination, however its path is spelled there."""
    told = Told()
    real = cache(_real)
    known, others = False, set()
    for entry in entries:
        dest, event = str(entry.get("dest")), entry.get("event")
        if real(dest) != real(place):
            if event == "archived":
                others.add(dest)
            continue
        known = True
        bag = str(entry.get("bag"))
        run = bag, str(entry.get("group"))
        if event == "archived":
            told.bundles[bag, str(entry.get("bundle"))] = entry
            told.whole.add(bag)
        elif event == "begun":
            told.unfinished.add(run)
            told.abandoned.discard(run)
        elif event == "finished":
            told.unfinished.discard(run)
        elif event == "abandoned":
            told.unfinished.discard(run)
            told.abandoned.add(run)
    told.elsewhere = () if known else tuple(sorted(others))
    return told


def verify(
    destinations: Sequence[Destination], told: Sequence[Told], *, on_bytes: Callable[[int], None]
) -> Iterator[Finding]:
    """Read everything at ``destinations``; no error finding means that all of it is good.

    Args:
        told: for each destination what the ledger says; empty where there is none.
        on_bytes: told how many bytes of bundles have been read.

    Raises:
        NotFound: there is nothing at all at a destination.
        OSError: it cannot be read.
    """
    bags: list[Placed] = []
    present: set[Previous] = set()
    for destination, lines in zip(destinations, told, strict=True):
        proof = _Proof(destination, lines, on_bytes)
        yield from proof.run()
        bags += proof.bags
        present |= {Previous(name, sha256) for (_, name), sha256 in proof.digests.items() if sha256}
    yield from broken_links(bags, frozenset(present))


def bundle_bytes(destination: Destination) -> int:
    """How much there is to read, about: for those who wait."""
    total = 0
    for route in destination.listing("").folders:
        for bag in destination.listing(route).folders:
            folder = f"{route}/{bag}/{PAYLOAD}"
            bundles = [name for name in destination.listing(folder).files if not name.endswith(DIGEST_SUFFIX)]
            total += sum(destination.length(f"{folder}/{name}") for name in bundles)
    return total


class _Proof:
    """One destination.

    Attributes:
        bags: the manifests that can be believed.
        digests: of the bundles that are there, by bag and name; "" of those that were not read.
    """

    def __init__(self, destination: Destination, told: Told, on_bytes: Callable[[int], None]) -> None:
        self._destination = destination
        self._told = told
        self._on_bytes = on_bytes
        self.bags: list[Placed] = []
        self.digests: dict[tuple[str, str], str] = {}

    def run(self) -> Iterator[Finding]:
        top = self._destination.listing("")
        if not top.folders and not top.files:
            raise NotFound(
                f"{self._destination.place}: there is nothing here",
                hint="wald-archive verify DEST, with what --dest was when it was packed",
            )
        if self._told.elsewhere:
            known = ", ".join(self._told.elsewhere)
            words = f"the log's ledger tells of nothing here (it tells of {known})"
            yield self._error("", "", f"{words}; leave out --root to prove the archive by itself")
        for name in (*top.files, *(folder for folder in top.folders if not is_route(folder))):
            yield self._finding(Level.INFO, "", name, "no part of the archive")
        for route in filter(is_route, top.folders):
            listing = self._destination.listing(route)
            for name in listing.files:
                yield self._error("", f"{route}/{name}", "does not belong here")
            for folder in listing.folders:
                bag = parse_bag_name(route, folder)
                if bag is None:
                    yield self._error("", f"{route}/{folder}", "not the name of a bag")
                else:
                    yield from self._bag(bag)
        for bag_name, name in self._told.bundles:
            if (bag_name, name) not in self.digests:
                yield self._error(bag_name, f"{PAYLOAD}/{name}", "missing; the ledger says that it is here")

    def _bag(self, name: BagName) -> Iterator[Finding]:
        bag = str(name)
        listing, payload = self._destination.listing(bag), self._destination.listing(f"{bag}/{PAYLOAD}")
        stored = {file: b"".join(self._destination.read(f"{bag}/{file}")) for file in listing.files if file in TAGS}
        try:
            manifest = decode_manifest(stored[MANIFEST])
        except KeyError:
            words = "missing" if TAG_DIGESTS in stored else "missing: the bag is unfinished"
            yield from self._without_manifest(bag, words, stored, payload)
            return
        except BadManifest as error:
            yield from self._without_manifest(bag, str(error), stored, payload)
            return
        tags = tag_files(manifest)
        excuse = self._told.excuse(bag, manifest.origin.group)
        begun = all(data.startswith(stored.get(file, b"")) for file, data in tags.items())
        if excuse and begun and stored != tags:
            yield self._finding(Level.INFO, bag, "", excuse)
            stored = tags  # what is missing of them is told
        digest_agrees = digest_line(_sha256(stored[MANIFEST]), MANIFEST) in stored.get(TAG_DIGESTS, b"")
        if not digest_agrees:
            yield self._error(bag, MANIFEST, f"its sha256 is not the one in {TAG_DIGESTS}")
        if digest_agrees or _derives(tags, stored):
            yield from self._against_manifest(name, manifest, stored, listing, payload)
        else:
            yield from self._against_digests(bag, stored, payload)

    def _without_manifest(self, bag: str, words: str, stored: dict[str, bytes], payload: Listing) -> Iterator[Finding]:
        """A bag in which there is none, or one that cannot be read."""
        excuse = self._told.excuse(bag, None)
        if excuse and stored.keys() <= {MANIFEST}:  # which is written before the others, so it may be cut short
            yield self._finding(Level.INFO, bag, "", excuse)
        else:
            yield self._error(bag, MANIFEST, words)
            yield from self._against_digests(bag, stored, payload)

    def _against_manifest(
        self, name: BagName, manifest: Manifest, stored: dict[str, bytes], listing: Listing, payload: Listing
    ) -> Iterator[Finding]:
        bag = str(name)
        if bag in self._told.whole or (bag, manifest.origin.group) not in self._told.abandoned:
            self.bags.append(Placed(self._destination.place, manifest))
        if manifest.bag != name:
            yield self._error(bag, MANIFEST, f"the bag is {manifest.bag}, not what its name says")
        files = tag_files(manifest)
        for file, data in files.items():
            yield from self._compared(bag, file, stored.get(file), data)
        expected: set[str] = set()
        for entry in manifest.entries:
            bundle = entry.bundle.name
            expected |= {bundle, bundle + DIGEST_SUFFIX}
            if bundle in payload.files:
                yield from self._bundle(bag, manifest, entry)
            else:
                yield self._error(bag, f"{PAYLOAD}/{bundle}", "missing")
            beside = f"{PAYLOAD}/{bundle}{DIGEST_SUFFIX}"
            there = None
            if bundle + DIGEST_SUFFIX in payload.files:
                there = b"".join(self._destination.read(f"{bag}/{beside}"))
            yield from self._compared(bag, beside, there, digest_file(entry.bundle.sha256, bundle))
        foreign = [file for file in listing.files if file not in files]
        foreign += [folder for folder in listing.folders if folder != PAYLOAD]
        foreign += [f"{PAYLOAD}/{file}" for file in (*payload.files, *payload.folders) if file not in expected]
        for file in foreign:
            yield self._error(bag, file, "does not belong here")

    def _bundle(self, bag: str, manifest: Manifest, entry: Entry) -> Iterator[Finding]:
        """One bundle, read once."""
        bundle = entry.bundle
        file = f"{PAYLOAD}/{bundle.name}"
        stored, tar = hashlib.sha256(), hashlib.sha256()
        chunks = self._counted(self._destination.read(f"{bag}/{file}"), stored)
        content = _digested(manifest.codec, chunks, tar)
        reading = Reading(bundle.name.removesuffix(manifest.codec.suffix), content)
        tally = Tally(bundle.contents.after)
        problem = ""
        try:
            for part in reading.parts():
                tally.add(part)
        except BadBundle as error:
            problem = str(error)
            with suppress(BadStream):
                for _ in content:
                    """A thread may be at work on the next chunk; only through it can they be read on."""
        for _ in chunks:
            """The digest is that of the whole file, wherever it could not be decompressed any more."""
        self.digests[bag, bundle.name] = bundle.sha256  # if it has another, that is told here, and once is enough
        digest = stored.hexdigest()
        if digest != bundle.sha256:
            yield self._error(bag, file, f"its sha256 is {digest}, not {bundle.sha256}")
            return
        line = self._told.bundles.get((bag, bundle.name))
        if line is not None and line.get("sha256") != digest:
            problem = f"the ledger says that its sha256 is {line.get('sha256')}"
        if not problem and tar.hexdigest() != bundle.tar_sha256:
            problem = f"the sha256 of its tar is {tar.hexdigest()}, not {bundle.tar_sha256}"
        if not problem:
            contents = replace(tally.contents(bundle.contents.after), record_bytes=bundle.contents.record_bytes)
            if contents != bundle.contents or reading.about != about(manifest.origin, contents):
                problem = "its parts are not those that bundle.json and manifest.json tell of"
            elif line is not None and line.get("runs") != tally.runs.tolist():
                problem = "it does not hold the sequences that the ledger tells of"
        if problem:
            yield self._error(bag, file, problem)
        else:
            count, first, last = bundle.contents.count, bundle.contents.first, bundle.contents.last
            yield self._finding(Level.OK, bag, file, f"{count} records, {first} to {last}")

    def _against_digests(self, bag: str, stored: dict[str, bytes], payload: Listing) -> Iterator[Finding]:
        """What is left without a manifest: every file that some digest tells of."""
        sources = {file: stored[file] for file in (PAYLOAD_DIGESTS, TAG_DIGESTS) if file in stored}
        for file in payload.files:
            if file.endswith(DIGEST_SUFFIX):
                sources[f"{PAYLOAD}/{file}"] = b"".join(self._destination.read(f"{bag}/{PAYLOAD}/{file}"))
        actual = {file: _sha256(data) for file, data in (stored | sources).items()}
        for file in payload.files:
            if not file.endswith(DIGEST_SUFFIX):
                digest = hashlib.sha256()
                for _ in self._counted(self._destination.read(f"{bag}/{PAYLOAD}/{file}"), digest):
                    """Read to its end."""
                actual[f"{PAYLOAD}/{file}"] = self.digests[bag, file] = digest.hexdigest()
        for source, data in sources.items():
            for line in data.removesuffix(b"\n").split(b"\n"):
                match = _DIGEST_LINE.fullmatch(line)
                if match is None:
                    yield self._error(bag, source, "not a list of digests")
                    continue
                file = match[2].decode(errors="replace")
                file = f"{PAYLOAD}/{file}" if source.endswith(DIGEST_SUFFIX) else file
                if file != MANIFEST and actual.get(file) != match[1].decode():
                    words = f"its sha256 is {actual[file]}, not the one in" if file in actual else "missing; it is in"
                    yield self._error(bag, file, f"{words} {source}")

    def _compared(self, bag: str, file: str, there: bytes | None, expected: bytes) -> Iterator[Finding]:
        if there is None:
            yield self._error(bag, file, "missing")
        elif (offset := first_difference(there, expected)) is not None:
            yield self._error(bag, file, f"not what {MANIFEST} leads to", offset)

    def _counted(self, chunks: Iterator[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
        for chunk in chunks:
            digest.update(chunk)
            self._on_bytes(len(chunk))
            yield chunk

    def _finding(self, level: Level, bag: str, file: str, message: str, offset: int | None = None) -> Finding:
        return Finding(level, self._destination.place, bag, file, message, offset)

    def _error(self, bag: str, file: str, message: str, offset: int | None = None) -> Finding:
        return self._finding(Level.ERROR, bag, file, message, offset)


def _derives(tags: dict[str, bytes], stored: dict[str, bytes]) -> bool:
    """Whether everything but the digest over it speaks for a manifest."""
    return all(stored.get(file) == data for file, data in tags.items() if file != TAG_DIGESTS)


def _real(place: str) -> str:
    """One spelling of each directory; an address is what it is."""
    return place if "://" in place else os.path.realpath(place)


def _digested(codec: Codec, chunks: Iterator[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    """The decompressed content."""
    for content in ahead(codec.decompress(chunks)):
        digest.update(content)
        yield content


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
