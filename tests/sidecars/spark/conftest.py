"""Session fixtures: one local Spark session and one cluster, each started by the first test that needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from logs import Built

from wald_spark.session import find_java, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The session lives for minutes, so optimizing compilation in the JVM does not pay off.
_QUICK = {
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "2",
}
_CLUSTER = Path(__file__).parents[3] / "scripts" / "spark-cluster"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("spark") and find_java() is None and not os.environ.get("JAVA_REQUIRED"):
        pytest.skip("Spark needs apt-get install default-jre-headless")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Local session with two threads and two attempts per task, in its own directory."""
    here = tmp_path_factory.mktemp("spark")
    places = {"spark.sql.warehouse.dir": str(here / "warehouse"), "spark.local.dir": str(here / "local")}
    with session("wald tests", master="local[2,2]", settings=_QUICK | places) as started:
        yield started


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a cluster with two single-core workers, which ends with this process, however it dies.

    Each application takes all cores, so only one can run at a time. A session on the cluster must be in another process
    than ``spark``.
    """
    place = tmp_path_factory.mktemp("cluster")
    until_stdin_ends = ["sh", "-c", "echo $0; cat", "{}"]
    line = [sys.executable, str(_CLUSTER), "run", "--dir", str(place), "--", *until_stdin_ends]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("spark://"), "the cluster has said why on stderr"
        yield url
    assert process.returncode == 0


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """An empty log."""
    return Built(tmp_path / "root")


@pytest.fixture
def thirty(built: Built) -> Built:
    """Thirty records of route a in three segments: sealed, sealed, active."""
    for number in range(3):
        built.lines("a", [b"%d" % (10 * number + n) for n in range(1, 11)])
        if number < 2:
            built.cut()
    built.seal()
    return built
