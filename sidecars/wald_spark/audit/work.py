"""What executors do for an audit: check one segment, or prove one bag; and what they return."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wald.checking.checker import CheckResult, Level, SegmentToCheck, check
from wald.errors import DiskFailure, InvalidInput, NotPermitted, Unavailable, WaldError
from wald.files.disk import Disk
from wald_archive.api import BagName, Finding, Manifest, Proof, Recorded, open_destination

# Missing credentials or packages, a store that does not answer: nothing is known about the bytes.
UNREAD = (DiskFailure, InvalidInput, NotPermitted, PermissionError)


def described(error: Exception) -> str:
    """Return the message of an error with its hint."""
    hint = error.hint if isinstance(error, WaldError) else ""
    return f"{error}; {hint}" if hint else str(error)


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """One segment to be checked; ``stored_bytes``: of the file."""

    target: SegmentToCheck
    stored_bytes: int

    @property
    def key(self) -> SegmentToCheck:
        return self.target

    def outcome(self) -> CheckResult | None:
        """None if the segment is gone because it was sealed or reclaimed meanwhile.

        Raises:
            Unavailable: the log is not on this machine.
        """
        try:
            return check(self.target)
        except FileNotFoundError:
            _require(self.target.segment.path.parent)
            return None


@dataclass(frozen=True, slots=True)
class Proven:
    """A bag's findings, and the data with which :class:`wald_archive.api.Bags` judges it together with others.

    Attributes:
        unread: why the bag, which may be good, could not be read to its end; None if it was.
    """

    findings: tuple[Finding, ...]
    manifest: Manifest | None
    digests: dict[str, str]
    unread: Finding | None = None


@dataclass(frozen=True, slots=True)
class BagWork:
    """One bag at ``place`` to be proven; ``stored_bytes``: of its bundles."""

    place: str
    bag: BagName
    recorded: Recorded
    stored_bytes: int

    @property
    def key(self) -> tuple[str, BagName]:
        return self.place, self.bag

    def outcome(self) -> Proven:
        """
        Raises:
            Unavailable: the archive is not on this machine.
        """
        if "://" not in self.place:
            _require(Path(self.place))
        findings: list[Finding] = []
        proof: Proof | None = None
        unread: Finding | None = None
        try:
            proof = Proof(open_destination(self.place, Disk()), self.bag, self.recorded, on_bytes=lambda _: None)
            findings += proof.findings()
        except (WaldError, OSError) as error:
            found = Finding(Level.ERROR, self.place, str(self.bag), "", f"cannot be read: {described(error)}")
            if isinstance(error, UNREAD):
                unread = found
            else:
                findings.append(found)
        if proof is None:
            return Proven(tuple(findings), None, {}, unread)
        return Proven(tuple(findings), proof.manifest, proof.digests, unread)


Work = SegmentWork | BagWork


def pickled_outcome(work: Work) -> bytes:
    """Do ``work``, on an executor."""
    return pickle.dumps(work.outcome())


@dataclass(slots=True)
class Outcomes:
    """The outcomes of work, pickled as they arrive, because there may be very many."""

    _pickled: dict[Hashable, bytes] = field(default_factory=dict)

    def add(self, work: Work, pickled: bytes) -> None:
        self._pickled[work.key] = pickled

    def of(self, key: Hashable) -> Any:  # the type depends on the work
        """The outcome of the work with this key; None if there was no such work."""
        return pickle.loads(self._pickled[key]) if key in self._pickled else None  # noqa: S301 - from executors of ours


def _require(directory: Path) -> None:
    """
    Raises:
        Unavailable: it is not on this machine. That is not damage.
    """
    if not directory.is_dir():
        raise Unavailable(
            f"{directory}: not there on {socket.gethostname()}",
            hint="every machine needs it under the same path; --master 'local[*]' needs no other machine",
        )
