"""Verification of archives: reads every byte, changes nothing, and names the file of each finding.

    manifest.json               there is one way to write it, and a digest over it in tagmanifest-sha256.txt
    every other small file      derived from the manifest again and compared byte for byte
    a bundle                    digest of the file, digest of the tar, then every part against its index, and all of it
                                against bundle.json and the manifest
    the bundles of a route      each follows the one before
    the ledger, if given        records no bundle that is missing

If the manifest is not intact, the rest of the bag is checked against the remaining digests. In a run that the ledger
does not call finished, tag files may be missing or cut short; nothing else is tolerated. Bags may be verified in any
order, and by several processes; findings about all of them come last.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from wald.checking.checker import Level
from wald.cli.output import json_line, progress
from wald.errors import Damaged, NotFound
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.ledger_read import read_files, readable_entries
from wald.format.batch import Buffer
from wald.format.ledger_lines import Entry
from wald.format.names import is_route
from wald.format.spans import BadRunLengths, unpack
from wald_archive.bundle import Tally, about
from wald_archive.codecs import BadStream, Codec, ahead
from wald_archive.ledger import Recorded, RecordedBag, recorded_at
from wald_archive.lookup import BadBundle, BundleReader
from wald_archive.manifest import (
    PAYLOAD_DIGESTS,
    TAG_DIGESTS,
    TAGS,
    BadManifest,
    BundleEntry,
    Manifest,
    Previous,
    count_bundles,
    decode_manifest,
    tag_files,
)
from wald_archive.objects import (
    DIGEST_SUFFIX,
    MANIFEST,
    PAYLOAD,
    BagName,
    Destination,
    Listing,
    digest_line,
    first_difference,
    is_left_by_desktop,
    open_destination,
    parse_bag_name,
)

_DIGEST_LINE = re.compile(rb"([0-9a-f]{64})  ([^\n]+)")


def report_findings(addresses: Sequence[str], root: Path | None, *, as_json: bool, write: Callable[[str], None]) -> int:
    """Verify archives, with the ledger of ``root``; write a line for each finding, and return the exit code."""
    archives = [open_destination(address, Disk()) for address in addresses]
    recorded = [Recorded() for _ in archives]
    counts: Counter[Level] = Counter()

    def report(found: Finding) -> None:
        counts[found.level] += 1
        if as_json:
            fields = {
                "kind": "finding",
                "level": found.level.value,
                "dest": found.address,
                "bag": found.bag,
                "file": found.file,
                "offset": found.offset,
                "message": found.message,
            }
            write(json_line("archive.verify", fields))
        elif found.level is not Level.OK:
            at = "" if found.offset is None else f" offset {found.offset}:"
            write(f"{found.level.value:5}  {found.name}:{at} {found.message}")

    if root is not None:
        read_identity(Root(root))
        path = Root(root).ledger / "archive.jsonl"
        for file, decoded in read_files(path):
            for number, reason in decoded.broken_lines:
                report(Finding(Level.ERROR, str(file), "", "", f"line {number}: {reason}"))
        recorded = [recorded_at(readable_entries(path), archive.address) for archive in archives]
    total = sum(
        bag_bytes(archive, f"{route}/{bag}")
        for archive in archives
        for route in archive.listing("").folders
        for bag in archive.listing(route).folders
    )
    with progress("verify", total) as advance:
        for found in verify(archives, recorded, on_bytes=advance):
            report(found)
    errors = counts[Level.ERROR]
    if as_json:
        findings = {level.value: counts[level] for level in Level}
        write(json_line("archive.verify", {"kind": "summary", "good": not errors, "findings": findings}))
    else:
        verdict, plural = "damaged" if errors else "OK", "s" * (errors != 1)
        proven, noted = count_bundles(counts[Level.OK]), counts[Level.INFO]
        write(f"{verdict}: {proven} proven, {noted} info, {errors} error{plural}")
    return Damaged.exit_code if errors else 0


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about one file."""

    level: Level
    address: str
    bag: str  # bag at the destination ``address``, or "" if the file is in none
    file: str  # name in the bag, or else in the destination
    message: str
    offset: int | None = None  # first wrong byte, or None

    @property
    def name(self) -> str:
        return "/".join(part for part in (self.address, self.bag, self.file) if part)


class Proof:
    """Verification of the bag ``name``. Sets ``manifest`` if it is intact, and the digests of existing bundles."""

    def __init__(
        self, destination: Destination, name: BagName, recorded: RecordedBag, on_bytes: Callable[[int], None]
    ) -> None:
        self._destination = destination
        self._name = name
        self._bag = str(name)
        self._recorded = recorded
        self._on_bytes = on_bytes
        self.manifest: Manifest | None = None
        self.digests: dict[str, str] = {}

    def findings(self) -> Iterator[Finding]:
        """Read the bag once and yield all findings; raise OSError if a file is unreadable."""
        listing, payload = self._destination.listing(self._bag), self._destination.listing(f"{self._bag}/{PAYLOAD}")
        stored = {file: self._content(file) for file in listing.files if file in TAGS}
        try:
            manifest = decode_manifest(stored.get(MANIFEST, b""))
        except BadManifest as error:
            reason = self._recorded.why_incomplete(self._name.route, None)
            if reason and stored.keys() <= {MANIFEST}:  # which is written before the others, so it may be cut short
                yield self._finding(Level.INFO, "", reason)
                return
            absent = "missing" if TAG_DIGESTS in stored else "missing: the bag is unfinished"
            yield self._error(MANIFEST, str(error) if MANIFEST in stored else absent)
            yield from self._against_digests(stored, payload)
            return
        tags = tag_files(manifest)
        reason = self._recorded.why_incomplete(self._name.route, manifest.origin.group)
        begun = all(data.startswith(stored.get(file, b"")) for file, data in tags.items())
        if reason and begun and stored != tags:
            yield self._finding(Level.INFO, "", reason)
            stored = tags  # the missing ones are reported
        digest_agrees = digest_line(_sha256(stored[MANIFEST]), MANIFEST) in stored.get(TAG_DIGESTS, b"")
        if not digest_agrees:
            yield self._error(MANIFEST, f"its sha256 is not the one in {TAG_DIGESTS}")
        # All files derived from the manifest, except the digests of digests, agree with it:
        derived = all(stored.get(file) == data for file, data in tags.items() if file != TAG_DIGESTS)
        if digest_agrees or derived:
            yield from self._against_manifest(manifest, tags, stored, listing, payload)
        else:
            yield from self._against_digests(stored, payload)

    def _against_manifest(
        self, manifest: Manifest, tags: dict[str, bytes], stored: dict[str, bytes], listing: Listing, payload: Listing
    ) -> Iterator[Finding]:
        if self._recorded.bundles or self._recorded.runs.get(manifest.origin.group) != "abandoned":
            self.manifest = manifest
        if manifest.bag != self._name:
            yield self._error(MANIFEST, f"the bag is {manifest.bag}, unlike the name of this directory")
        for file, data in tags.items():
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
            there = self._content(beside) if bundle + DIGEST_SUFFIX in payload.files else None
            yield from self._compared(beside, there, digest_line(entry.bundle.sha256, bundle))
        foreign = [file for file in listing.files if file not in tags]
        foreign += [folder for folder in listing.folders if folder != PAYLOAD]
        foreign += [f"{PAYLOAD}/{file}" for file in (*payload.files, *payload.folders) if file not in expected]
        for file in foreign:
            if is_left_by_desktop(file.removeprefix(f"{PAYLOAD}/")):
                yield self._finding(Level.INFO, file, "not part of the archive")
            else:
                yield self._error(file, "does not belong here")

    def _bundle(self, manifest: Manifest, entry: BundleEntry) -> Iterator[Finding]:
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
            content.close()  # a thread may be reading the next chunk
        for _ in chunks:  # the digest covers the rest of the file even if that cannot be decompressed
            pass
        self.digests[bundle.name] = bundle.sha256  # another digest is reported here, once
        digest = stored.hexdigest()
        if digest != bundle.sha256:
            yield self._error(file, f"its sha256 is {digest}, not {bundle.sha256}")
            return
        line = self._recorded.bundles.get(bundle.name)
        if line is not None and line.get("sha256") != digest:
            problem = f"the ledger says that its sha256 is {line.get('sha256')}"
        if not problem and tar.hexdigest() != bundle.tar_sha256:
            problem = f"the sha256 of its tar is {tar.hexdigest()}, not {bundle.tar_sha256}"
        if not problem:
            contents = replace(tally.contents(), record_bytes=bundle.contents.record_bytes)
            if contents != bundle.contents or reading.about != about(manifest.origin, contents):
                problem = "its parts differ from those in bundle.json and manifest.json"
            elif line is not None and not _holds(line, tally.runs):
                problem = "it does not hold the sequences that the ledger records"
        if problem:
            yield self._error(file, problem)
        else:
            count, first, last = bundle.contents.count, bundle.contents.first, bundle.contents.last
            yield self._finding(Level.OK, file, f"{count} records, {first} to {last}")

    def _against_digests(self, stored: dict[str, bytes], payload: Listing) -> Iterator[Finding]:
        """Verify, without a manifest, every file that has a digest."""
        sources = {file: stored[file] for file in (PAYLOAD_DIGESTS, TAG_DIGESTS) if file in stored}
        for file in payload.files:
            if file.endswith(DIGEST_SUFFIX):
                sources[f"{PAYLOAD}/{file}"] = self._content(f"{PAYLOAD}/{file}")
        actual = {file: _sha256(data) for file, data in (stored | sources).items()}
        for file in payload.files:
            if not file.endswith(DIGEST_SUFFIX):
                digest = hashlib.sha256()
                for _ in self._counted(self._destination.read(f"{self._bag}/{PAYLOAD}/{file}"), digest):
                    pass
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
            yield self._error(file, f"does not match {MANIFEST}", offset)

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
    try:
        return unpack(line.get("runs"), sum(turns[1::2])) == turns
    except BadRunLengths:
        return False


def _digested(codec: Codec, chunks: Iterator[bytes], digest: hashlib._Hash) -> Generator[Buffer]:
    with closing(ahead(codec.decompress(chunks))) as contents:
        for content in contents:
            digest.update(content)
            yield content


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def verify(
    destinations: Sequence[Destination], recorded: Sequence[Recorded], *, on_bytes: Callable[[int], None]
) -> Iterator[Finding]:
    """Read everything at ``destinations``; they are intact unless a finding has level ERROR."""
    whole, given = Bags(), {each.address for each in destinations}
    for destination, lines in zip(destinations, recorded, strict=True):
        elsewhere = tuple(address for address in lines.elsewhere if address not in given)
        for found in survey(destination, replace(lines, elsewhere=elsewhere)):
            if isinstance(found, Finding):
                yield found
                continue
            proof = Proof(destination, found, lines.bags[str(found)], on_bytes)
            yield from proof.findings()
            whole.add(destination.address, found, proof.manifest, proof.digests)
    for destination, lines in zip(destinations, recorded, strict=True):
        address = destination.address
        if lines.elsewhere and given >= {*lines.elsewhere} and not whole.has_moved(address, recorded, given):
            yield _unknown(address, lines)
        yield from whole.missing(address, lines)
    yield from whole.broken_links()


def survey(destination: Destination, recorded: Recorded) -> Iterator[Finding | BagName]:
    """Yield the bags at a destination, and findings about other files there."""
    address = destination.address
    top = destination.listing("")
    if not top.folders and not top.files:
        raise NotFound(
            f"{address}: there is nothing here",
            hint="wald-archive verify DEST, with the --dest of wald-archive pack",
        )
    if recorded.elsewhere:
        yield _unknown(address, recorded)

    def other(name: str, message: str) -> Finding:
        if is_left_by_desktop(name.rpartition("/")[2]) or "/" not in name:
            return Finding(Level.INFO, address, "", name, "not part of the archive")
        return Finding(Level.ERROR, address, "", name, message)

    for name in (*top.files, *(folder for folder in top.folders if not is_route(folder))):
        yield other(name, "")
    for route in filter(is_route, top.folders):
        listing = destination.listing(route)
        for name in listing.files:
            yield other(f"{route}/{name}", "does not belong here")
        for folder in listing.folders:
            yield parse_bag_name(route, folder) or other(f"{route}/{folder}", "not the name of a bag")


def _unknown(address: str, recorded: Recorded) -> Finding:
    message = f"the ledger records no bundles here, only at {', '.join(recorded.elsewhere)}"
    return Finding(Level.ERROR, address, "", "", f"{message}; omit --root to verify this archive alone")


@dataclass(frozen=True, slots=True)
class _Link:
    address: str
    bag: str
    entry: BundleEntry

    def finding(self, level: Level, message: str) -> Finding:
        return Finding(level, self.address, self.bag, f"{PAYLOAD}/{self.entry.bundle.name}", message)


class Bags:
    """Bags of one or more destinations, verified together; ``first``: bundles with earlier records may be missing."""

    def __init__(self, *, first: int = 1) -> None:
        self._first = first
        self._chains: dict[tuple[str, str, str], dict[Previous, _Link]] = defaultdict(dict)  # by log, route and group
        self._present: set[Previous] = set()  # even in bags without an intact manifest
        self._there: set[tuple[str, str, str]] = set()

    def add(self, address: str, bag: BagName, manifest: Manifest | None, digests: Mapping[str, str]) -> None:
        if manifest is not None:
            origin = manifest.origin
            for entry in manifest.entries:  # a copy at another destination is the same link
                chain = self._chains[origin.log, origin.route, origin.group]
                chain.setdefault(entry.as_previous(), _Link(address, str(bag), entry))
        self._present |= {Previous(name, sha256) for name, sha256 in digests.items()}
        self._there |= {(address, str(bag), name) for name in digests}

    def missing(self, address: str, recorded: Recorded) -> Iterator[Finding]:
        """Yield findings about recorded bundles missing from a destination; call it once all bags are added."""
        for (bag, name), line in recorded.bundles.items():
            last = line.get("last")
            if (address, bag, name) in self._there or (isinstance(last, int) and last < self._first):
                continue
            others = sorted(place for place, *what in self._there if what == [bag, name])
            if others and Previous(name, str(line.get("sha256"))) in self._present:
                yield Finding(Level.INFO, address, bag, f"{PAYLOAD}/{name}", f"moved to {others[0]}")
            else:
                message = "missing; the ledger says that it is here; if it was moved, verify its new DEST as well"
                yield Finding(Level.ERROR, address, bag, f"{PAYLOAD}/{name}", message)

    def has_moved(self, address: str, recorded: Iterable[Recorded], homes: Iterable[str]) -> bool:
        """Return True if a recorded bundle is at ``address`` and at none of the ``homes`` that the ledger names."""
        return any(
            (address, *what) in self._there
            and not any((home, *what) in self._there for home in homes if home != address)
            for lines in recorded
            for what in lines.bundles
        )

    def broken_links(self) -> Iterator[Finding]:
        """Yield findings about the order of bundles of one log, route and group; call it once all bags are added."""
        for links in self._chains.values():
            before: _Link | None = None
            for link in sorted(links.values(), key=lambda each: each.entry.bundle.contents.first):
                partial = before is None and link.entry.bundle.contents.after < self._first
                if not (partial and link.entry.previous not in self._present):
                    yield from self._judge(link, before, links)
                before = link

    def _judge(self, link: _Link, before: _Link | None, links: Mapping[Previous, _Link]) -> Iterator[Finding]:
        previous, contents = link.entry.previous, link.entry.bundle.contents
        message, level = "", Level.ERROR
        if before is not None and contents.first <= before.entry.bundle.contents.last:
            message = f"has records that are also in {before.entry.bundle.name}"
        elif previous is None:
            if before is not None:
                message = f"claims to be the first bundle, but {before.entry.bundle.name} precedes it"
        elif previous not in self._present:
            is_other = any(present.bundle == previous.bundle for present in self._present)
            other = f"; the {previous.bundle} here is a different one" if is_other else ", which is missing"
            message = f"follows {previous.bundle} with sha256 {previous.sha256}{other}"
        elif previous in links:
            end = links[previous].entry.bundle.contents.last
            if end > contents.after:
                message = f"begins after record {contents.after}, but {previous.bundle} ends with {end}"
            elif end < contents.after:
                level = Level.INFO
                message = f"this group never archived the route's records from {end + 1} to {contents.after}"
        if message:
            yield link.finding(level, message)


def bag_bytes(destination: Destination, bag: str) -> int:
    folder = f"{bag}/{PAYLOAD}"
    bundles = [name for name in destination.listing(folder).files if not name.endswith(DIGEST_SUFFIX)]
    return sum(destination.length(f"{folder}/{name}") for name in bundles)
