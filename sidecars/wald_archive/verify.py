"""Proving an archive: every byte is read, nothing is changed, and every finding names its file.

    a bag                       by itself (wald_archive.proof)
    the bundles of a route      each follows the one before (broken_links)
    the ledger, if given        records no bundle that is missing

Bags may be proven in any order, and by several processes; what follows from all of them comes last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from wald.checking.checker import Level
from wald.errors import NotFound
from wald.format.names import is_route
from wald_archive.destination import Destination
from wald_archive.layout import DIGEST_SUFFIX, PAYLOAD, BagName, is_left_by_desktop, parse_bag_name
from wald_archive.ledger import Recorded
from wald_archive.manifest import BundleEntry, Manifest, Previous
from wald_archive.proof import Finding, Proof


def verify(
    destinations: Sequence[Destination], recorded: Sequence[Recorded], *, on_bytes: Callable[[int], None]
) -> Iterator[Finding]:
    """Read everything at ``destinations``; no error finding means that all of it is good.

    Args:
        recorded: for each destination what the ledger says; empty if there is no ledger.
        on_bytes: called with the number of bytes of bundles that were read.

    Raises:
        NotFound: there is nothing at all at a destination.
        OSError: it cannot be read.
    """
    whole, given = Bags(), {each.address for each in destinations}
    for destination, lines in zip(destinations, recorded, strict=True):
        elsewhere = tuple(address for address in lines.elsewhere if address not in given)
        for found in survey(destination, replace(lines, elsewhere=elsewhere)):
            if isinstance(found, Finding):
                yield found
                continue
            proof = Proof(destination, found, lines, on_bytes)
            yield from proof.findings()
            whole.add(destination.address, found, proof.manifest, proof.digests)
    for destination, lines in zip(destinations, recorded, strict=True):
        if (
            lines.elsewhere
            and given >= {*lines.elsewhere}
            and not whole.has_moved(destination.address, recorded, given)
        ):
            yield _unknown(destination.address, lines)
        yield from whole.missing(destination.address, lines)
    yield from whole.broken_links()


def survey(destination: Destination, recorded: Recorded) -> Iterator[Finding | BagName]:
    """The bags at a destination, and what is wrong around them.

    Raises:
        NotFound: there is nothing at all.
        OSError: it cannot be read.
    """
    address = destination.address
    top = destination.listing("")
    if not top.folders and not top.files:
        raise NotFound(
            f"{address}: there is nothing here",
            hint="wald-archive verify DEST, with the --dest of wald-archive pack",
        )
    if recorded.elsewhere:
        yield _unknown(address, recorded)
    for name in (*top.files, *(folder for folder in top.folders if not is_route(folder))):
        yield Finding(Level.INFO, address, "", name, "no part of the archive")
    for route in filter(is_route, top.folders):
        listing = destination.listing(route)
        for name in listing.files:
            if is_left_by_desktop(name):
                yield Finding(Level.INFO, address, "", f"{route}/{name}", "no part of the archive")
            else:
                yield Finding(Level.ERROR, address, "", f"{route}/{name}", "does not belong here")
        for folder in listing.folders:
            bag = parse_bag_name(route, folder)
            if bag is None and is_left_by_desktop(folder):
                yield Finding(Level.INFO, address, "", f"{route}/{folder}", "no part of the archive")
                continue
            yield bag or Finding(Level.ERROR, address, "", f"{route}/{folder}", "not the name of a bag")


def _unknown(address: str, recorded: Recorded) -> Finding:
    message = f"the ledger records no bundles here, only at {', '.join(recorded.elsewhere)}"
    return Finding(Level.ERROR, address, "", "", f"{message}; omit --root to verify this archive alone")


class Bags:
    """Bags of one or more destinations, judged together.

    Args:
        first: bundles with earlier records may be missing.
    """

    def __init__(self, *, first: int = 1) -> None:
        self._first = first
        self._bags: list[Placed] = []
        self._present: set[Previous] = set()
        self._there: set[tuple[str, str, str]] = set()

    def add(self, address: str, bag: BagName, manifest: Manifest | None, digests: Mapping[str, str]) -> None:
        """Take in a bag, with what its proof has left."""
        if manifest is not None:
            self._bags.append(Placed(address, manifest))
        self._present |= {Previous(name, sha256) for name, sha256 in digests.items()}
        self._there |= {(address, str(bag), name) for name in digests}

    def missing(self, address: str, recorded: Recorded) -> Iterator[Finding]:
        """What the ledger says is at a destination and is not, when all of its bags have been taken in."""
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
        """Return True if a bundle in the ledger is at ``address`` but at none of its ``homes``."""
        return any(
            (address, *what) in self._there
            and not any((home, *what) in self._there for home in homes if home != address)
            for lines in recorded
            for what in lines.bundles
        )

    def broken_links(self) -> Iterator[Finding]:
        """What is wrong between bundles, when everything has been taken in."""
        return broken_links(self._bags, frozenset(self._present), first=self._first)


@dataclass(frozen=True, slots=True)
class Placed:
    """A manifest, and the destination at which it was found."""

    address: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class _Link:
    """A bundle of a chain."""

    address: str
    bag: str
    entry: BundleEntry

    def error(self, message: str) -> Finding:
        return Finding(Level.ERROR, self.address, self.bag, f"{PAYLOAD}/{self.entry.bundle.name}", message)


def broken_links(bags: Iterable[Placed], present: frozenset[Previous], *, first: int = 1) -> Iterator[Finding]:
    """What is wrong between bundles of the same log, route and group.

    Args:
        first: bundles with earlier records may be missing.
        present: every bundle there is, with its digest, also of bags whose manifest cannot be read.
    """
    chains: dict[tuple[str, str, str], dict[Previous, _Link]] = defaultdict(dict)
    for bag in bags:
        origin = bag.manifest.origin
        chain = chains[origin.log, origin.route, origin.group]
        for entry in bag.manifest.entries:  # a copy at another destination is the same link
            chain.setdefault(entry.as_previous(), _Link(bag.address, str(bag.manifest.bag), entry))
    names = {bundle.bundle for bundle in present}
    for links in chains.values():
        before: _Link | None = None
        for link in sorted(links.values(), key=lambda each: each.entry.bundle.contents.first):
            partial = before is None and link.entry.bundle.contents.after < first
            if not (partial and link.entry.previous not in present):
                yield from _judge(link, before, links, present, names)
            before = link


def _judge(
    link: _Link, before: _Link | None, links: dict[Previous, _Link], present: frozenset[Previous], names: set[str]
) -> Iterator[Finding]:
    previous, contents = link.entry.previous, link.entry.bundle.contents
    if before is not None and contents.first <= before.entry.bundle.contents.last:
        yield link.error(f"holds records that {before.entry.bundle.name} holds too")
    elif previous is None:
        if before is not None:
            yield link.error(f"says that it is the first, and {before.entry.bundle.name} comes before it")
    elif previous not in present:
        other = f"; the {previous.bundle} here is another" if previous.bundle in names else ", which is not here"
        yield link.error(f"follows {previous.bundle} with sha256 {previous.sha256}{other}")
    elif previous in links:
        end = links[previous].entry.bundle.contents.last
        if end > contents.after:
            yield link.error(f"begins after record {contents.after}, and {previous.bundle} ends with {end}")
        elif end < contents.after:
            message = f"what the route got from record {end + 1} to {contents.after} was never archived by this group"
            yield Finding(Level.INFO, link.address, link.bag, f"{PAYLOAD}/{link.entry.bundle.name}", message)


def bundle_bytes(destination: Destination) -> int:
    """About how many bytes there are to read, for a progress bar."""
    total = 0
    for route in destination.listing("").folders:
        total += sum(bag_bytes(destination, f"{route}/{bag}") for bag in destination.listing(route).folders)
    return total


def bag_bytes(destination: Destination, bag: str) -> int:
    """How much of that is in one bag."""
    folder = f"{bag}/{PAYLOAD}"
    bundles = [name for name in destination.listing(folder).files if not name.endswith(DIGEST_SUFFIX)]
    return sum(destination.length(f"{folder}/{name}") for name in bundles)
