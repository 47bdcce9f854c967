"""What a repair would do to a log, found without changing it.

What is lost is decided by the ledgers, and what is foreign by the identity. So if one of them is broken, the facts are
taken with what it would become.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from wald.errors import Damaged
from wald.format.names import LEDGERS
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald.store.files.identity import encode_identity, read_identity
from wald.store.files.ledger_read import read_files
from wald.store.repairing.facts import Facts, examine
from wald.store.repairing.identity import LostIdentity, lost_identity
from wald.store.repairing.ledgers import anew
from wald.store.repairing.plan import Act, Deed, Plan, plan

_PREFIX = "wald-repair-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def proposed(root: Root) -> Iterator[tuple[Plan, Facts]]:
    """The plan for ``root``, and the facts, which may be used as long as the block lasts.

    Raises:
        NotFound: there is no log.
        Damaged: it is not certain which log it is, or the directory of its segments is lost.
    """
    _remove_abandoned()
    broken = dict(_broken(root))
    acts = tuple(Act(Deed.LEDGER, path, reason) for path, reason in broken.items())
    lost = lost_identity(root)
    if lost is not None:
        acts += (Act(Deed.IDENTITY, root.identity, lost.reason, identity=lost.identity),)
    if not acts:
        facts = examine(root)
        yield plan(facts), facts
        return
    with _scratch() as made:
        facts = examine(_rehearsed(root, broken, lost, made))
        found = plan(facts)
        yield replace(found, acts=acts + found.acts), facts


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make a directory, and hold its lock while it exists: an unlocked one is a leftover."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with suppress(FileNotFoundError):  # removed as a leftover just before it was locked
            descriptor = os.open(path, _DIRECTORY)
            if Disk().lock(descriptor) and os.fstat(descriptor).st_nlink:
                break
            os.close(descriptor)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned() -> None:
    """Remove the copies made by killed repairs: directories of this user that no process has locked."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if directory.stat(follow_symlinks=False).st_uid == os.geteuid():
                descriptor = os.open(directory, _DIRECTORY)
                try:
                    if Disk().lock(descriptor):
                        shutil.rmtree(directory)
                finally:
                    os.close(descriptor)


def _broken(root: Root) -> Iterator[tuple[Path, str]]:
    """The ledgers of which a line is damaged, or does not follow the one before it; and what is wrong."""
    for name in LEDGERS:
        path = root.ledger / name
        try:
            broken = [(each.name, *line) for each, decoded in read_files(path) for line in decoded.broken]
        except (Damaged, OSError):
            continue  # nothing can be made of it
        if broken:
            file, number, reason = broken[0]
            more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
            yield path, f"{file}: line {number}: {reason}{more}"


@dataclass(frozen=True)
class _Rehearsed(Root):
    """A root whose ledgers and identity are those that a repair would make.

    Attributes:
        made: the directory of what is rehearsed.
        rehearses_ledgers: whether any ledger is; all of them are in one directory, so then all are copied there.
    """

    made: Path
    rehearses_ledgers: bool

    @property
    def ledger(self) -> Path:
        return self.made / "ledger" if self.rehearses_ledgers else super().ledger

    @property
    def identity(self) -> Path:
        return self.made / "log.json"


def _rehearsed(root: Root, broken: dict[Path, str], lost: LostIdentity | None, made: Path) -> Root:
    identity = read_identity(root) if lost is None else lost.identity
    rehearsed = _Rehearsed(root.path, made, rehearses_ledgers=bool(broken))
    rehearsed.identity.write_bytes(encode_identity(uuid.UUID(bytes=identity.log_id), now=identity.created))
    if broken:
        _rehearse_ledgers(root, broken, rehearsed.ledger)
    return rehearsed


def _rehearse_ledgers(root: Root, broken: dict[Path, str], directory: Path) -> None:
    directory.mkdir()
    for path in root.ledger.iterdir():
        if path.is_file():
            shutil.copyfile(path, directory / path.name)
    for path in broken:
        found = anew(root, path)
        if found.entries is not None:
            (directory / path.name).write_bytes(found.lines(kept="", sha256="", now_ns=0))
        for part in found.gone:
            (directory / part.name).unlink()
