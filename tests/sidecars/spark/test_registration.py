"""Spark finds the source by its name if the package ``pyspark_wald`` is on the path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from logs import Built
from pyspark.errors import PySparkException

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_name_is_enough(spark: SparkSession, tmp_path: Path) -> None:
    """A session without registration reads a log from Python and from SQL."""
    Built(tmp_path / "root").lines("a", [b"one", b"two"])
    fresh = spark.newSession()

    assert fresh.read.format("wald").load(str(tmp_path / "root")).count() == 2
    fresh.sql(f"CREATE TEMPORARY VIEW log USING wald OPTIONS (path '{tmp_path / 'root'}')")
    assert fresh.sql("SELECT max(seq) FROM log").head() == (2,)
    with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
        fresh.sql(f"CREATE TABLE kept USING wald OPTIONS (path '{tmp_path / 'root'}')")


def test_being_found_costs_others_nothing() -> None:
    """Spark imports the package for every unknown format, so it must not load Arrow or the store."""
    script = """
import sys, pyspark.sql.datasource
before = set(sys.modules)
import pyspark_wald
print(*set(sys.modules) - before)
"""
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()

    assert "wald_spark.source" in loaded
    assert [name for name in loaded if name.startswith(("pyarrow", "numpy", "pandas", "wald.store", "zstandard"))] == []
