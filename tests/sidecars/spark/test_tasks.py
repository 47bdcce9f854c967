"""Pieces of work run on executors; results arrive individually, and errors keep their type."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from running import eventually

from wald.errors import Damaged, Unavailable
from wald_spark import progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Executors cannot import test modules, so the functions that they call are defined inside the tests.


def ignore(_: int) -> None:
    pass


@pytest.mark.parametrize("count", [0, 4, 10])
def test_every_piece_gives_its_result_once(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """More pieces than tasks are shared out."""
    monkeypatch.setattr(progress, "_TASKS_PER_CORE", 2)
    done: list[int] = []
    results = dict(progress.run_tasks(spark, range(count), lambda piece: str(piece).encode(), on_done=done.append))
    assert results == {number: str(number).encode() for number in range(count)}
    assert sorted(done) == list(range(count))


def test_a_result_arrives_while_others_are_being_made(spark: SparkSession, tmp_path: Path) -> None:
    """The second result arrives while the first piece is still running; otherwise the test would hang."""

    def work(piece: Path) -> bytes:
        while not piece.exists():
            pass
        return piece.name.encode()

    first, second = tmp_path / "first", tmp_path / "second"
    second.touch()
    running = progress.run_tasks(spark, [first, second], work, on_done=ignore)
    assert next(running) == (1, b"second")
    first.touch()
    assert list(running) == [(0, b"first")]


def test_an_error_arrives_as_what_it_was(spark: SparkSession) -> None:
    def damaged(piece: str) -> bytes:
        raise Damaged(f"{piece}: offset 7: no batch", hint=f"wald inspect --content {piece}")

    def missing(piece: str) -> bytes:
        return Path(piece).read_bytes()

    with pytest.raises(Damaged, match=r"a\.wal: offset 7: no batch") as caught:
        list(progress.run_tasks(spark, ["a.wal"], damaged, on_done=ignore))
    assert caught.value.hint == "wald inspect --content a.wal"
    with pytest.raises(FileNotFoundError) as gone:
        list(progress.run_tasks(spark, ["/nowhere/at/all"], missing, on_done=ignore))
    assert gone.value.filename == "/nowhere/at/all"


def test_a_piece_that_fails_at_every_attempt_ends_the_job(spark: SparkSession) -> None:
    def broken(piece: int) -> bytes:
        raise ValueError(f"no {piece}")

    with pytest.raises(Unavailable, match="given up: ValueError: no 5"):
        list(progress.run_tasks(spark, [5], broken, on_done=ignore))


def test_a_piece_whose_worker_dies_is_tried_again(spark: SparkSession, tmp_path: Path) -> None:
    """Its result arrives once."""

    def work(piece: Path) -> bytes:
        if not piece.exists():
            piece.touch()
            os._exit(1)
        return piece.name.encode()

    found = dict(progress.run_tasks(spark, [tmp_path / name for name in "ab"], work, on_done=ignore))
    assert found == {0: b"a", 1: b"b"}


def test_closing_the_results_ends_the_job(spark: SparkSession, tmp_path: Path) -> None:
    """The worker process that was still busy ends."""
    pid = tmp_path / "pid"

    def work(piece: Path) -> bytes:
        piece.write_text(str(os.getpid()))
        while piece.name == "pid":
            pass
        return b""

    running = progress.run_tasks(spark, [tmp_path / "quick", pid], work, on_done=ignore)
    assert next(running) == (0, b"")
    eventually(lambda: pid.exists() and pid.read_text())
    running.close()
    eventually(lambda: not Path("/proc", pid.read_text()).exists())


# Like PySpark's daemon: the name is in its command line, and it forks workers.
DAEMON = """
import os, signal
from wald_spark.progress import end_with_parent
if os.fork() == 0:
    end_with_parent()
    print("ready", flush=True)
signal.pause()
"""


def test_a_worker_ends_with_the_process_that_forked_it() -> None:
    """If PySpark's daemon is killed with the driver, orphaned workers must not write alongside the next run."""
    line = [sys.executable, "-c", DAEMON, "pyspark.daemon"]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        assert process.communicate(timeout=60)[0] == b""  # EOF on stdout, which the worker keeps open
