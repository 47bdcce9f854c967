"""Contents of a log as a consumer reads them, and as ``wald verify`` judges them."""

from pathlib import Path

import wald
from wald.checking.checker import Level
from wald.checking.verifier import verify
from wald.errors import Damaged
from wald.files.layout import Root
from wald.format.records import Record


def records(root: Path, route: str | None = None) -> list[Record]:
    """Return every durable record, in order."""
    return list(wald.open(root).records(route))


def values(root: Path, route: str | None = None) -> list[bytes]:
    """Return the bytes of every durable record."""
    return [record.value for record in records(root, route)]


def text(root: Path, route: str) -> bytes:
    """Return a route as its producer wrote it: lines with their original newlines."""
    return b"".join(record.value + b"\n" * record.terminated for record in records(root, route))


def readable(root: Path) -> tuple[dict[int, Record], list[Damaged]]:
    """Return what can be read of a damaged log, and the reported damage."""
    reported: list[Damaged] = []
    found = wald.open(root).records(start=1, on_damage=reported.append, on_missing="skip")
    return {record.sequence: record for record in found}, reported


def errors(root: Path) -> list[str]:
    """Return all errors in a log."""
    return [f"{found.path}: {found.message}" for found in verify(Root(root)) if found.level is Level.ERROR]


def assert_sound(root: Path) -> None:
    """Check that the log has no damage, and consecutive sequences from 1."""
    assert errors(root) == []
    sequences = [record.sequence for record in records(root)]
    assert sorted(sequences) == list(range(1, len(sequences) + 1))
