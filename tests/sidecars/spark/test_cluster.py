"""scripts/spark-cluster runs real daemons on loopback and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from running import eventually

pytestmark = pytest.mark.spark  # the daemons need Java, too
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
