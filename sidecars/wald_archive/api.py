"""Interface of the archive for other programs.

destinations  open_destination opens one; parse_bag_name recognises the folders that are bags
bundles       bundles_of lists those of a route, checked_parts reads one
verification  survey finds the bags, Proof verifies one, Bags verifies them together; each yields Findings
making        an Engine makes the bundles of a Run, with write_bundle
"""

from wald_archive.bundle import Bundle
from wald_archive.codecs import Codec
from wald_archive.engines import Engine, write_bundle
from wald_archive.layout import PAYLOAD, BagName, parse_bag_name
from wald_archive.ledger import Recorded, Run, recorded_at
from wald_archive.manifest import BundleEntry, Manifest
from wald_archive.objects import Destination, open_destination
from wald_archive.parts import Form, IndexEntry, Part, Size, split
from wald_archive.restore import bundles_of, checked_parts
from wald_archive.verify import Bags, Finding, Proof, bag_bytes, survey

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
