"""Spark commands as processes, with a JVM that starts fast and compiles little."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

PATIENCE_SECONDS = 300.0
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_SETTINGS = {
    "spark.driver.extraJavaOptions": _QUICK,
    "spark.executor.extraJavaOptions": _QUICK,
    "spark.sql.shuffle.partitions": "2",
}


def quickly(place: Path) -> dict[str, str]:
    """Return the environment of a command that starts fast; its configuration is written to ``place``."""
    conf = place / "conf"
    conf.mkdir(exist_ok=True)
    (conf / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in _SETTINGS.items()))
    return {"SPARK_CONF_DIR": str(conf)}


def run_job(line: Sequence[object], place: Path) -> subprocess.CompletedProcess[bytes]:
    """Run a command line to completion."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("WALD_")}
    return subprocess.run(
        list(map(str, line)),
        env=env | quickly(place),
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
