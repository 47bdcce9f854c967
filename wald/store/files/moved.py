"""Marks that the former commands ``wald route rename`` and ``wald route merge`` left in ``routes/<name>/moved``.

Marks no longer have any effect: records sent to a route are stored in it. A start and ``wald verify`` report each mark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from wald.errors import Damaged, InvalidInput
from wald.format.names import DEFAULT_GROUP, check_route
from wald.hints import hint_for
from wald.store.files.directory import Root
from wald.store.files.regular import read_regular


class Mark(NamedTuple):
    """A mark that no longer has an effect; ``hint`` names the commands that remove it."""

    path: Path
    message: str
    hint: str


def moved_marks(root: Root) -> Iterator[Mark]:
    """Yield the marks of routes that are not retired."""
    for route in root.route_names():
        path = root.moved(route)
        if not path.is_file() or root.retired(route).exists():
            continue
        to = _destination(path, route)
        message = f"records sent to {route} are stored in {route} again, and not in {to or 'another route'}"
        if to is None:
            yield Mark(path, message, hint_for("moved-mark-unreadable", root=root.path, route=route))
            continue
        groups = root.groups(route)
        group = "" if DEFAULT_GROUP in groups or not groups else groups[0]
        yield Mark(path, message, hint_for("moved-mark", root=root.path, route=route, group=group, to=to))


def _destination(path: Path, route: str) -> str | None:
    """Return the other route that a mark names; None without one."""
    try:
        to = check_route(json.loads(read_regular(path))["to"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, InvalidInput, Damaged):
        return None
    return to if to != route else None
