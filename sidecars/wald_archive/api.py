"""What other programs may import of the archive: destinations, bundles, proofs, and making bundles.

destinations  open_destination gives one; parse_bag_name recognises its folders that are bags
bundles       bundles_of lists those of a route, checked_parts reads one
proofs        survey finds the bags, Proof proves one, Bags judges them together; each gives a Finding
making        an Engine makes the bundles of a Run, with write_bundle
"""

from wald_archive.bundle import Bundle
from wald_archive.codecs import Codec
from wald_archive.destination import Destination
from wald_archive.engine import Engine, write_bundle
from wald_archive.layout import PAYLOAD, BagName, parse_bag_name
from wald_archive.ledger import Recorded, Run, recorded_at
from wald_archive.manifest import BundleEntry, Manifest
from wald_archive.objects import open_destination
from wald_archive.parts import Form, IndexEntry, Part
from wald_archive.proof import Finding, Proof
from wald_archive.restore import bundles_of, checked_parts
from wald_archive.sizes import Size, split
from wald_archive.verify import Bags, bag_bytes, survey

__all__ = [
    "PAYLOAD",
    "BagName",
    "Bags",
    "Bundle",
    "BundleEntry",
    "Codec",
    "Destination",
    "Engine",
    "Finding",
    "Form",
    "IndexEntry",
    "Manifest",
    "Part",
    "Proof",
    "Recorded",
    "Run",
    "Size",
    "bag_bytes",
    "bundles_of",
    "checked_parts",
    "open_destination",
    "parse_bag_name",
    "recorded_at",
    "split",
    "survey",
    "write_bundle",
]
