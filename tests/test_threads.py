"""Threads of test tools report their exceptions."""

from __future__ import annotations

import subprocess
import threading

from running import run
from threads import started


def test_what_a_thread_raises_is_reported() -> None:
    wrong: list[str] = []
    started("sidecars", lambda: run(["sleep", "1000"], timeout=0), wrong).join()

    (reported,) = wrong
    assert reported.startswith(f"sidecars: {subprocess.TimeoutExpired.__name__}: ")


def test_what_a_thread_raises_that_is_to_end_is_not() -> None:
    wrong: list[str] = []
    hushed = threading.Event()
    hushed.set()
    started("consumer", lambda: 1 // 0, wrong, hushed=hushed).join()

    assert wrong == []
