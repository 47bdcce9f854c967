"""Spark sessions for the jobs: a suitable Java, UTC, little output, and workers that run this Python."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from wald.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLDEST = 17
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
LOCAL = "local[*]"
_PACKAGES = ("pyspark.sql", "pyarrow", "numpy", "pandas")
ATTEMPTS = 4  # of each task, as on a cluster; by default a local master tries once
_LOOPBACK = re.compile(r"local|spark://(127\.|localhost)")
_THREADS = re.compile(r"local(\[(?P<threads>\*|\d+)\])?")
_STANDALONE = "spark://"
ANSWER_SECONDS = 5.0
SILENT_SECONDS = 5.0  # a longer wait is reported
_SETTINGS = {
    "spark.driver.memory": "2g",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}


@dataclass(frozen=True, slots=True)
class Java:
    """Installed Java; ``home`` is the value of JAVA_HOME."""

    home: Path
    version: int


@cache
def find_java() -> Java | None:
    """Return the first Java that is new enough: from JAVA_HOME, PATH, then the distribution."""
    for home in _homes():
        with suppress(OSError, subprocess.SubprocessError):
            line = [str(home / "bin" / "java"), "-version"]
            printed = subprocess.run(line, capture_output=True, text=True, timeout=30, check=True)
            if (found := _VERSION.search(printed.stderr)) and int(found[1]) >= OLDEST:
                return Java(home, int(found[1]))
    return None


def require_java() -> Java:
    java = find_java()
    if java is None:
        raise NotFound(
            f"Spark needs Java {OLDEST} or newer, but JAVA_HOME, PATH and /usr/lib/jvm have none",
            hint="apt install default-jre-headless; or set JAVA_HOME",
        )
    return java


def _homes() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home)
    if program := shutil.which("java"):
        yield Path(program).resolve().parents[1]
    yield from sorted(Path("/usr/lib/jvm").glob("*"), reverse=True)


def require_spark() -> None:
    for package in _PACKAGES:
        try:
            import_module(package)
        except ImportError as error:
            raise NotFound(
                f"there is no {package} in this Python ({sys.executable})",
                hint="in a clone of wald: pip install '.[spark]'",
            ) from error


@contextmanager
def session(app: str, *, master: str = LOCAL, settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Yield a session for one job, which is stopped at the end.

    Settings from spark-defaults.conf, PYSPARK_SUBMIT_ARGS or spark-submit are kept, except for the master and for
    ``settings``.
    """
    started = _start(app, master, settings or {})
    try:
        _await_executor(started, master)
        yield started
    finally:
        with suppress(Exception):  # its JVM may have been killed
            started.stop()


def _start(app: str, master: str, settings: Mapping[str, str]) -> SparkSession:
    os.environ["JAVA_HOME"] = str(require_java().home)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # otherwise workers run the python3 on the PATH
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    require_spark()
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    _require_master(master)
    wanted = dict(_SETTINGS)
    if _LOOPBACK.match(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        wanted |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    kept = _set_elsewhere()
    builder = SparkSession.builder.appName(app).master(_with_attempts(master))
    for name, value in ({name: wanted[name] for name in wanted if name not in kept} | dict(settings)).items():
        builder = builder.config(name, value)
    started_before = _children()
    with _stderr_captured() as printed:
        try:
            return builder.getOrCreate()
        except Exception as error:
            reason = _reason(error)
            if isinstance(error, PySparkException | RuntimeError | OSError):
                reason = _last_line(printed()) or reason
            hint = "--master 'local[2]' needs no cluster"
            raise Unavailable(f"Spark does not start on {master}: {reason}", hint=hint) from error
        except BaseException:  # interrupted; otherwise the JVM would continue
            for pid in _children() - started_before:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            raise


def _require_master(master: str) -> None:
    """Check that a standalone master answers; Spark would try for a minute, and then report a stopped context."""
    if not master.startswith(_STANDALONE):
        return
    for address in master.removeprefix(_STANDALONE).split(","):
        host, _, port = address.rpartition(":")
        with suppress(OSError, ValueError), socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS):
            return
    raise Unavailable(
        f"no Spark master answers at {master}", hint="scripts/spark-cluster start; --master 'local[2]' needs no cluster"
    )


def _await_executor(session: SparkSession, master: str) -> None:
    """Wait until a standalone master has started an executor: it may have no workers, or no free ones."""
    if not master.startswith(_STANDALONE):
        return
    tracker = session.sparkContext._jsc.sc().statusTracker()  # noqa: SLF001 - PySpark's own tracker does not have it
    report_at = time.monotonic() + SILENT_SECONDS
    while len(tracker.getExecutorInfos()) < 2:  # the driver is one of them
        if time.monotonic() >= report_at:
            sys.stderr.write(f"waiting for {master}: no worker has joined it, or other jobs use them all\n")
            report_at += 6 * SILENT_SECONDS
        time.sleep(0.1)


def _last_line(printed: list[str]) -> str:
    """Return the JVM's last output line that is not a stack frame; "" if there is none.

    >>> _last_line(['Exception in thread "main" org.apache.SparkException: no', "  at org.apache.A.b(A.scala)"])
    'org.apache.SparkException: no'
    """
    frames = ("at ", "... ")
    lines = [line.strip() for line in printed if line.strip() and not line.strip().startswith(frames)]
    return lines[-1].removeprefix('Exception in thread "main" ') if lines else ""


def _reason(error: Exception) -> str:
    """Return the JVM's exception without the text of py4j around it, which ends in stack frames."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line[2:] for line in lines if line.startswith(": ")), next(filter(None, lines), type(error).__name__))


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        found |= {*map(int, (task / "children").read_text().split())}
    return found


def _set_elsewhere() -> set[str]:
    """Return the names of settings made elsewhere, which a builder's settings would replace."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # below spark-submit: its JVM has them
        from pyspark import SparkConf, SparkContext

        SparkContext._ensure_initialized()  # noqa: SLF001 - the only way to that JVM before there is a session
        return {name for name, _ in SparkConf().getAll()}
    arguments = os.environ.get("PYSPARK_SUBMIT_ARGS", "")
    names = set(re.findall(r"\bspark\.[\w.]+", arguments))
    names |= {"spark.driver.memory"} if "--driver-memory" in arguments else set()
    home = os.environ.get("SPARK_HOME")
    if directory := os.environ.get("SPARK_CONF_DIR") or (home and os.path.join(home, "conf")):
        with suppress(FileNotFoundError), open(os.path.join(directory, "spark-defaults.conf")) as file:
            names |= {parts[0] for line in file if (parts := re.split(r"[\s=]+", line.strip())) and parts[0]}
    return names


def _with_attempts(master: str) -> str:
    """Return a local master with a number of attempts; any other master unchanged.

    >>> _with_attempts("local[*]"), _with_attempts("local[2,1]"), _with_attempts("spark://a:7077")
    ('local[*,4]', 'local[2,1]', 'spark://a:7077')
    """
    match = _THREADS.fullmatch(master)
    return f"local[{match['threads'] or 1},{ATTEMPTS}]" if match else master


@contextmanager
def _stderr_captured() -> Iterator[Callable[[], list[str]]]:
    """Capture the JVM's output on stderr while Spark starts: it prints warnings even if nothing is wrong."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)

        def printed() -> list[str]:
            file.seek(0)
            return file.read().decode(errors="replace").splitlines()

        try:
            yield printed
        finally:
            os.dup2(kept, 2)
            os.close(kept)
