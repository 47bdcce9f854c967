"""The gate's page on a log of 10,000 segments and 1,000 routes, in Debian's Chromium, while records arrive.

Measures the time of a view from the click to its first paint, and the time that an update blocks the main thread of the
page. The browser, the gate, the daemon and the sending client share the processors.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from browsing import Chromium, Visit, lack
from gating import Gate
from large import large, sending
from running import Daemon

from benchmarks.report import Goal, Row
from benchmarks.stage import Stage

_PAINT, _TASK = Goal(1000, at_most=True), Goal(50, at_most=True)
_VIEWS = {
    "overview": "/",
    "routes": "/routes",
    "records": "/records?route=route-0007",
    "records, followed": "/records?follow=1",
    "history": "/history",
}


def measure(stage: Stage) -> tuple[list[Row], list[str]]:
    if why := lack():
        return [], [f"the page ({why})"]
    segments, routes = (500, 50) if stage.quick else (10_000, 1_000)
    root = stage.fresh(stage.fast)
    large(root, segments, routes)
    group = f"The page: {segments:,} segments, {routes:,} routes, records coming"
    rows: list[Row] = []
    with (
        Daemon(root),
        Gate(root, anew=True) as gate,
        Chromium() as browser,
        sending(root, ["route-0007"], batch=100),  # a thousand records a second
    ):
        for name, path in _VIEWS.items():
            with browser.visit(gate.origin) as visit:
                paints = [_paint(visit, path) for _ in range(max(3, stage.repeat))]
                rows.append(Row(group, f"{name}, first paint", "ms", sorted(paints)[len(paints) // 2], goal=_PAINT))
                longest = visit.longest_task_ms(3 if stage.quick else 10)
                rows.append(Row(group, f"{name}, longest task of updates", "ms", longest, goal=_TASK))
    return rows, []


def _paint(visit: Visit, path: str) -> float:
    visit.page.goto(path)
    paint = visit.first_paint_ms()
    visit.page.wait_for_timeout(1500)  # until the first update is over
    return paint
