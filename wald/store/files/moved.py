"""Moved routes: what is sent to one is stored in another route, and its own records stay for the groups that need them.

The mark ``routes/<name>/moved`` is made in one step, and everything follows from it. The FIFO of a moved route stays
where it is, so no writer notices. Nothing is ever written to ``<name>`` again until it is retired and taken back.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass

from wald.errors import Damaged, InvalidInput, Refused, command_line
from wald.format.names import check_route
from wald.store.files.directory import Root
from wald.store.files.regular import read_regular


@dataclass(frozen=True, slots=True)
class Moved:
    """What the mark says.

    Attributes:
        to: the route that gets the records.
        after: no record behind this one is in the moved route.
        at: when it was moved.
    """

    to: str
    after: int
    at: str

    def message(self, route: str) -> str:
        """What to say to those who still use ``route``."""
        return f"{route} was moved: what was sent to it after record {self.after} is in {self.to}"

    def encoded(self) -> bytes:
        return json.dumps({"to": self.to, "after": self.after, "at": self.at}).encode() + b"\n"


def moved(root: Root, route: str) -> Moved | None:
    """Where a route was moved; None if it was not, or if this user may not see it.

    Raises:
        InvalidInput: an illegal name.
        Damaged: the mark cannot be read.
    """
    path = root.moved(route)
    try:
        fields = json.loads(read_regular(path))
        return Moved(check_route(fields["to"]), int(fields["after"]), str(fields["at"]))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, InvalidInput) as error:
        retiring = command_line(root.path, f"route retire {route}")
        raise Damaged(f"{path}: does not say where the route was moved ({error})", hint=retiring) from error


def moved_routes(root: Root) -> dict[str, Moved]:
    """The routes that were moved and are not retired; a mark that cannot be read is left to those who need it."""
    found = {}
    for route in root.route_names():
        with suppress(Damaged):
            if (mark := moved(root, route)) is not None and not root.retired(route).exists():
                found[route] = mark
    return found


def destination(root: Root, route: str) -> str:
    """The route in which records that are sent to ``route`` are stored: itself, unless it was moved.

    Raises:
        InvalidInput, Damaged: as of :func:`moved`; or the marks lead in a circle.
    """
    passed = [route]
    while (mark := moved(root, passed[-1])) is not None:
        if mark.to in passed:
            path = root.moved(passed[-1])
            raise Damaged(f"{path}: leads back to {mark.to}", hint=command_line(root.path, f"route retire {route}"))
        passed.append(mark.to)
    return passed[-1]


def require_no_source(root: Root, route: str) -> None:
    """
    Raises:
        Refused: what is sent to another route is stored in this one.
    """
    others = [name for name in root.route_names() if name != route and not root.retired(name).exists()]
    for other in others:
        if root.moved(other).exists() and destination(root, other) == route:
            raise Refused(
                f"what is sent to {other} is stored in {route}",
                hint=f"{command_line(root.path, f'route retire {other}')}, when its groups have read it",
            )
