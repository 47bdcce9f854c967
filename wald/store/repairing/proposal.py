"""What a repair would do to a log, found without changing it.

What is lost is decided by the ledgers. So if one of them is broken, the facts are taken with what it would become.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from wald.errors import Damaged
from wald.format.names import LEDGERS
from wald.store.files.directory import Root
from wald.store.files.ledger import read_ledger
from wald.store.repairing.facts import Facts, examine
from wald.store.repairing.ledgers import whole_lines
from wald.store.repairing.plan import Act, Deed, Plan, plan


@contextmanager
def proposed(root: Root) -> Iterator[tuple[Plan, Facts]]:
    """The plan for ``root``, and the facts, which may be used as long as the block lasts.

    Raises:
        Damaged: the log's identity, or the directory of its segments, is lost.
    """
    broken = dict(_broken(root))
    acts = tuple(Act(Deed.LEDGER, path, reason) for path, reason in broken.items())
    if not broken:
        facts = examine(root)
        yield plan(facts), facts
        return
    with tempfile.TemporaryDirectory(prefix="wald-repair-") as name:
        facts = examine(_rehearsed(root, broken, Path(name)))
        found = plan(facts)
        yield replace(found, acts=acts + found.acts), facts


def _broken(root: Root) -> Iterator[tuple[Path, str]]:
    """The ledgers of which a line is damaged, or does not follow the one before it; and what is wrong."""
    for name in LEDGERS:
        path = root.ledger / name
        try:
            broken = read_ledger(path).broken
        except (Damaged, OSError):
            continue  # nothing can be made of it
        if broken:
            number, reason = broken[0]
            more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
            yield path, f"line {number}: {reason}{more}"


@dataclass(frozen=True)
class _Rehearsed(Root):
    """A root whose ledgers are those that a repair would make."""

    ledgers: Path = field(default_factory=Path)

    @property
    def ledger(self) -> Path:
        return self.ledgers


def _rehearsed(root: Root, broken: dict[Path, str], directory: Path) -> Root:
    for path in root.ledger.iterdir():
        if path in broken:
            (directory / path.name).write_bytes(whole_lines(path, kept="", sha256="", now_ns=0))
        elif path.is_file():
            shutil.copyfile(path, directory / path.name)
    return _Rehearsed(root.path, directory)
