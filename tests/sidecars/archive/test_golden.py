"""The golden bag of the first release is written, verified and restored identically."""

from __future__ import annotations

from pathlib import Path

from archives import errors, files, findings, restored
from contents import text
from golden.archive import FOLDER, make, sample_log

from wald.checking.checker import Level


def test_the_same_log_makes_the_golden_bag(tmp_path: Path) -> None:
    make(tmp_path / "dest", tmp_path / "root")

    assert files(tmp_path / "dest") == files(FOLDER)


def test_the_golden_bag_is_good() -> None:
    assert errors(FOLDER) == []
    assert [found.level for found in findings(FOLDER)] == [Level.OK] * 3


def test_the_golden_bag_gives_its_records_back(tmp_path: Path) -> None:
    built = sample_log(tmp_path / "root")

    assert restored(FOLDER) == text(built.root.path, "a") + b"\n"
    lines = "".join(record.to_json() + "\n" for record in built.log.records("a"))
    assert restored(FOLDER, as_json=True) == lines.encode()
