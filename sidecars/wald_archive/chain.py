"""Do the bundles follow each other without one missing? Facts in, findings out.

Each bundle names the one before it, with its digest, also across bags; and ``after``, the sequence at which that one
ends. So a bundle or a whole bag that is missing in the middle shows in the one that follows it. One that is missing at
the end shows in the ledger only.

Records that no bundle holds although none is missing are worth knowing and no damage: somebody has moved the cursor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from wald.store.checking.finding import Level
from wald_archive.finding import Finding
from wald_archive.layout import PAYLOAD
from wald_archive.manifest import Entry, Manifest, Previous


@dataclass(frozen=True, slots=True)
class Placed:
    """A manifest, and the destination at which it was found."""

    place: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class _Link:
    """A bundle of a chain."""

    place: str
    bag: str
    entry: Entry

    def error(self, message: str) -> Finding:
        return Finding(Level.ERROR, self.place, self.bag, f"{PAYLOAD}/{self.entry.bundle.name}", message)


def broken_links(bags: Iterable[Placed], present: frozenset[Previous]) -> Iterator[Finding]:
    """What is wrong between bundles of the same log, route and group.

    Args:
        present: every bundle there is, with its digest, also of bags whose manifest cannot be read.
    """
    chains: dict[tuple[str, str, str], dict[Previous, _Link]] = defaultdict(dict)
    for bag in bags:
        origin = bag.manifest.origin
        chain = chains[origin.log, origin.route, origin.group]
        for entry in bag.manifest.entries:  # a copy at another destination is the same link
            chain.setdefault(entry.as_previous(), _Link(bag.place, str(bag.manifest.bag), entry))
    names = {bundle.bundle for bundle in present}
    for links in chains.values():
        before: _Link | None = None
        for link in sorted(links.values(), key=lambda each: each.entry.bundle.contents.first):
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
            yield link.error(f"begins behind record {contents.after}, and {previous.bundle} ends with {end}")
        elif end < contents.after:
            words = f"what the route got from record {end + 1} to {contents.after} was never archived by this group"
            yield Finding(Level.INFO, link.place, link.bag, f"{PAYLOAD}/{link.entry.bundle.name}", words)
