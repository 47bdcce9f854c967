"""The gate's page on a log of 10,000 segments and 1,000 routes, in Debian's Chromium, while records arrive.

Measures the time of a view from the click to its first paint, and the time that an update blocks the main thread of the
page. The browser, the gate, the daemon and the sending client share the processors.
"""

from __future__ import annotations

import json
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
                longest = _longest_task_ms(visit, 3 if stage.quick else 10)
                rows.append(Row(group, f"{name}, longest task of updates", "ms", longest, goal=_TASK))
    return rows, []


def _paint(visit: Visit, path: str) -> float:
    visit.page.goto(path)
    paint = _first_paint_ms(visit)
    visit.page.wait_for_timeout(1500)  # until the first update is over
    return paint


def _first_paint_ms(visit: Visit) -> float:
    """Return the time from the navigation to the first contentful paint."""
    return float(
        visit.page.evaluate(
            """() => new Promise((resolve) => new PerformanceObserver((list) => {
                const found = list.getEntriesByName("first-contentful-paint")
                if (found.length) resolve(found[0].startTime)
            }).observe({type: "paint", buffered: true}))"""
        )
    )


def _longest_task_ms(visit: Visit, seconds: float) -> float:
    """Return the longest task of the page's main thread during the next ``seconds``."""
    browser = visit.page.context.browser
    assert browser
    browser.start_tracing(page=visit.page, categories=["toplevel", "disabled-by-default-devtools.timeline"])
    visit.page.wait_for_timeout(seconds * 1000)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    main = {(each["pid"], each["tid"]) for each in events if each.get("args", {}).get("name") == "CrRendererMain"}
    tasks = [each for each in events if each["name"].endswith("RunTask") and (each["pid"], each["tid"]) in main]
    assert tasks, "no task was recorded"
    return max(float(each.get("dur", 0)) for each in tasks) / 1000
