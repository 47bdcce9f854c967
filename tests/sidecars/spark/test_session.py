"""An unusable master is reported quickly, with the reason in one line."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from logs import Built
from running import eventually

from wald.errors import Unavailable

pytestmark = pytest.mark.spark
SCRIPT = Path(__file__).parents[3] / "scripts" / "spark-cluster"


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
