"""Faults of an interpreter that a test requests: its clock jumps, and its threads meet at bad moments.

PYTHONPATH          contains this directory
DISTURBED_CLOCK     a file of eight bytes: signed error of the wall clock in nanoseconds, read at each clock read
DISTURBED_DELAYS    "0.02,5": two percent of the system calls that change files wait up to 5 ms, before and after
"""

import functools
import mmap
import os
import random
import select
import struct
import time
from collections.abc import Callable
from typing import Any

_CHANGING = (
    "close",
    "fdatasync",
    "fsync",
    "ftruncate",
    "link",
    "open",
    "pwritev",
    "rename",
    "unlink",
)


def _jump(path: str) -> None:
    with open(path, "r+b") as file:
        offset = mmap.mmap(file.fileno(), 8)
    true_ns = time.time_ns

    def time_ns() -> int:
        return true_ns() + int(struct.unpack("<q", offset[:8])[0])

    time.time_ns = time_ns
    time.time = lambda: time_ns() / 1e9


def _delay(share: float, milliseconds: float) -> None:
    chance = random.Random()

    def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def late(*arguments: Any, **named: Any) -> Any:
            for moment in ("before", "after"):
                if chance.random() < share:
                    select.select((), (), (), chance.uniform(0, milliseconds) / 1000)
                if moment == "before":
                    result = call(*arguments, **named)
            return result

        return late

    for name in _CHANGING:
        setattr(os, name, delayed(getattr(os, name)))


if clock := os.environ.get("DISTURBED_CLOCK"):
    _jump(clock)
if delays := os.environ.get("DISTURBED_DELAYS"):
    _delay(*map(float, delays.split(",")))
