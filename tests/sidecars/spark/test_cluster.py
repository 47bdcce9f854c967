"""scripts/spark-cluster runs real daemons; an unusable master is reported quickly; the examples of the pages work."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from logs import Built
from pages import blocks
from running import eventually
from spark_jobs import quickly
from typed import typed

from wald.errors import Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


pytestmark = pytest.mark.spark
SCRIPT = Path(__file__).parents[3] / "scripts" / "spark-cluster"
# Two tasks: each creates a file named after its executor and waits for the file "go".
JOB = """
import sys
from pathlib import Path
from wald_spark.session import session

master, place = sys.argv[1:]

def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])

def work(numbers):
    import os, time
    executor = parent(os.getppid())
    Path(place, f"on-{executor}").touch()
    while not Path(place, "go").exists():
        time.sleep(0.05)
    yield sum(numbers), sys.executable, str(executor), os.getcwd()

quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
quickly = {"spark.driver.extraJavaOptions": quick, "spark.executor.extraJavaOptions": quick}

with session("test", master=master, settings=quickly) as spark:
    done = spark.sparkContext.parallelize(range(1000), 2).mapPartitions(work).collect()
    print(sum(each[0] for each in done))
    for each in done:
        print(*each[1:])
"""


def cluster_command(*words: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)


def answers(url: str) -> bool:
    host, port = url.removeprefix("spark://").split(":")
    with socket.socket() as connection:
        return connection.connect_ex((host, int(port))) == 0


def alive(pid: str) -> bool:
    """Return False if the process has ended, even as a zombie: a zombie has no command line."""
    try:
        return Path("/proc", pid, "cmdline").read_bytes() != b""
    except OSError:
        return False


def test_a_job_survives_the_death_of_an_executor(cluster: str, tmp_path: Path) -> None:
    """Spark replaces an executor that is killed during its task and retries the task; the result is correct."""
    with subprocess.Popen(
        [sys.executable, "-c", JOB, cluster, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        eventually(lambda: len(list(tmp_path.glob("on-*"))) == 2 or job.poll() is not None, timeout=90)
        first = {path.name.removeprefix("on-") for path in tmp_path.glob("on-*")}
        killed = min(first)
        os.kill(int(killed), signal.SIGKILL)
        eventually(lambda: len(list(tmp_path.glob("on-*"))) == 3 or job.poll() is not None, timeout=90)
        (tmp_path / "go").touch()
        answer, complaint = job.communicate(timeout=300)

    assert job.returncode == 0, complaint
    total, *tasks = answer.splitlines()
    assert int(total) == sum(range(1000))
    assert len(tasks) == 2
    for python, executor, _ in map(str.split, tasks):
        assert python == sys.executable
        assert executor != killed


def test_what_is_started_is_stopped_without_a_trace(tmp_path: Path) -> None:
    """After `stop`, no process is running and no port is open, even if a worker was killed earlier."""
    place = ("--dir", tmp_path)
    started = cluster_command("start", "--workers", 1, *place)
    url = started.stdout.strip()
    assert (started.returncode, started.stderr) == (0, "")
    assert answers(url)

    content = cluster_command("status", *place)
    again = cluster_command("start", *place)
    assert content.returncode == 0
    assert content.stdout.startswith(f"{url}\n  worker ")
    assert again.returncode != 0
    assert "already" in again.stderr

    processes = re.search(r"processes: (\d+) (\d+);", content.stdout)
    assert processes is not None
    os.kill(int(processes[2]), signal.SIGKILL)
    assert cluster_command("stop", *place).returncode == 0
    eventually(lambda: not answers(url), timeout=1)  # the kernel closes the port shortly after the process ends
    assert not any(alive(pid) for pid in processes.groups())
    assert cluster_command("status", *place).returncode == 1


def test_a_start_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM while the script waits for its daemons stops those as well."""
    line = [sys.executable, str(SCRIPT), "start", "--dir", str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL) as start:
        eventually((tmp_path / "worker-1.log").exists)
        start.terminate()

    assert start.returncode == 128 + signal.SIGTERM
    assert cluster_command("status", "--dir", tmp_path).returncode == 1


def audit(root: Path, master: str) -> list[str]:
    return [sys.executable, "-m", "wald_spark.audit", "--root", str(root), "--master", master]


@pytest.mark.parametrize(
    ("master", "words"),
    [
        ("bogus", "Master must either be yarn or start with"),
        ("local[x]", "Could not parse Master URL"),
        ("spark://127.0.0.1:1", "no Spark master answers at spark://127.0.0.1:1"),
        ("spark://nowhere", "no Spark master answers at spark://nowhere"),
    ],
)
def test_a_master_that_is_none_is_reported_with_its_reason(tmp_path: Path, master: str, words: str) -> None:
    root = Built(tmp_path / "root").root.path
    done = subprocess.run(audit(root, master), capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == Unavailable.exit_code
    assert words in done.stderr
    assert "  hint: " in done.stderr


def test_a_master_without_workers_is_waited_for_aloud(tmp_path: Path) -> None:
    """Workers may join later, so the job keeps waiting and reports that it waits."""
    root = Built(tmp_path / "root").root.path
    start: list[str | Path] = [sys.executable, SCRIPT, "start", "--dir", tmp_path / "cluster", "--workers"]
    url = subprocess.run([*start, "0"], capture_output=True, text=True, timeout=300, check=True).stdout.strip()
    try:
        assert re.fullmatch(r"spark://.*:\d+", url)
        complaint = tmp_path / "stderr"
        with complaint.open("w") as file, subprocess.Popen(audit(root, url), stderr=file) as job:
            eventually(lambda: "waiting for spark://" in complaint.read_text() or job.poll() is not None, timeout=90)
            assert job.poll() is None, complaint.read_text()
            job.send_signal(signal.SIGINT)
            assert job.wait(60) != 0
    finally:
        subprocess.run([sys.executable, SCRIPT, "stop", "--dir", tmp_path / "cluster"], timeout=300, check=True)
    assert "waiting for spark://" in complaint.read_text()


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
