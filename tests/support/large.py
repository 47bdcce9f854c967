"""A log of many small segments and many routes, with real records, as a page or a command has to show it."""

from __future__ import annotations

from pathlib import Path

from logs import Built

EACH = 10
"""How many of the routes are in each segment, with a record each."""


def large(path: Path, segments: int, routes: int) -> Built:
    """A root with so many segments, all sealed and none read, and a group on each route."""
    log = Built(path)
    for number in range(segments):
        for each in range(EACH):
            route = (number * EACH + each) % routes
            log.lines(f"route-{route:04}", [b"record %d of segment %d" % (each, number)])
        log.cut()
    log.seal()
    for route in range(routes):
        log.root.cursor(f"route-{route:04}", "processed").write_text("0\n")
    return log
