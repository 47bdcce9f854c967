"""The examples of the Spark pages work: Python in a session and commands in a shell, on a generated log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from logs import Built
from pages import blocks
from spark_jobs import quickly
from typed import typed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def built(place: Path) -> Built:
    """Log with JSON values and keys; all but the newest records are in sealed segments."""
    log = Built(place / "spool" / "wald")
    log.lines("access", [b'{"status": 200, "host": "a"}'] * 50)
    log.columns("users", [b"ann", b"bob"], keys=[b"1", b"2"])
    log.cut()
    log.seal()
    log.lines("access", [b'{"status": 404, "host": "b"}'] * 50)
    log.log.set_cursor("access", 10)
    return log


def moved(text: str, place: Path) -> str:
    """Replace the paths of a page by paths below ``place``, and the cluster by a local master."""
    for there, here in (("/var/spool", "/spool"), ("/srv/*", "/*"), ("/data", "/data")):
        text = text.replace(there, f"{place}{here}")
    return text.replace("spark://host:7077", "local[2]")


@pytest.mark.parametrize("page", ["docs/spark/source.md", "docs/spark/streams.md"])
def test_python_can_be_typed(page: str, spark: SparkSession, tmp_path: Path) -> None:
    built(tmp_path)
    names: dict[str, object] = {"spark": spark}
    for block in blocks(page):
        if block.language == "python" and block.mode == "spark":
            exec(moved(block.text, tmp_path), names)
    for query in spark.streams.active:
        assert query.awaitTermination(120)

    assert page == "docs/spark/source.md" or spark.read.parquet(str(tmp_path / "data/out")).count() == 102


def test_commands_can_be_typed(spark: SparkSession, tmp_path: Path) -> None:
    """The front page includes the commands of the other pages; they run after a stream has left its checkpoint."""
    log = built(tmp_path)
    stream = next(block.text for block in blocks("docs/spark/streams.md") if block.language == "python")
    exec(moved(stream, tmp_path), {"spark": spark})
    for query in spark.streams.active:
        assert query.awaitTermination(120)
    lines = [
        block.text
        for page in ("docs/spark/index.md", "docs/spark/streams.md")
        for block in blocks(page)
        if (block.language, block.mode) == ("sh", "spark")
    ]
    typed("set -e\n" + moved("\n".join(lines), tmp_path), at=tmp_path, root=log.root.path, settings=quickly(tmp_path))

    assert (tmp_path / "data/users/latest").is_dir()
    assert log.log.cursor("access", "spark").sequence == 102


def test_every_command_of_the_other_pages_is_on_the_front_page() -> None:
    """Each command therefore runs once."""
    front = {line.split(" #")[0].strip() for block in blocks("docs/spark/index.md") for line in block.text.splitlines()}
    others = {
        line.split(" #")[0].strip()
        for page in ("docs/spark/audit.md", "docs/spark/compact.md", "docs/spark/export.md")
        for block in blocks(page)
        if block.mode == "spark"
        for line in block.text.splitlines()
    }

    assert others <= front
