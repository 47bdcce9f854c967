"""A log to archive, and places to archive it to."""

from pathlib import Path

import pytest
from logs import Built


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """An empty log."""
    return Built(tmp_path / "root")


@pytest.fixture
def mixed(tmp_path: Path) -> Built:
    """Route a: ten lines, two columns, one line, one without newline: 14 records from 1 to 17; route b between them."""
    built = Built(tmp_path / "root")
    built.lines("a", [b"line %d" % number for number in range(10)])
    built.lines("b", [b"other"])
    built.columns("a", [b"value", b"\x00\xff\n"], keys=[b"key", None], headers=[None, b'{"h":"1"}'])
    built.lines("b", [b"other", b"other"])
    built.lines("a", [b"\xfe\r"])
    built.piece("a", b"no newline", begins=True, ends=True)
    return built


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    """Destination of bags."""
    return tmp_path / "dest"
