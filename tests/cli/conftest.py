"""A root with a running daemon, and a check that failing commands leave it unchanged."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Daemon, eventually, output_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The path of a log that may not exist yet."""
    return tmp_path / "log"


@pytest.fixture
def daemon(root: Path) -> Iterator[Daemon]:
    """A running daemon with one route, ``a``."""
    with Daemon(root) as running:
        output_of("route", "add", "a", "--root", root)
        yield running


@pytest.fixture
def two_segments(daemon: Daemon, root: Path) -> Path:
    """The log of the daemon with three sealed records, and three active ones, of which the first has a key."""
    output_of("append", "a", "--root", root, stdin=b"one\ntwo\nthree\n")
    output_of("cut", "--root", root)
    eventually(lambda: list((root / "segments").glob("*.wal.zst")))
    output_of("append", "a", "--key-separator", "=", "--root", root, stdin=b"k=four\n\xff\nsix words\n")
    return root
