"""Which names the directories of a log may hold; what has another name, no program of wald has made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from wald.format.names import (
    CURSOR_SUFFIX,
    FOUND,
    LEDGERS,
    is_of_group,
    is_route,
    parse_ledger_part_name,
    parse_segment_name,
)
from wald.store.files.directory import TEMPORARY, Root

_ANY = Root(Path())
_OF_ROOT = {
    "lost+found",
    *(path.name for path in (_ANY.identity, _ANY.unfinished_identity, _ANY.lock, _ANY.head)),
    *(path.name for path in (_ANY.transfers, _ANY.clock_steps, _ANY.socket, _ANY.archive)),
    *(path.name for path in (_ANY.segments, _ANY.routes, _ANY.ledger, _ANY.quarantine, _ANY.recovery, _ANY.gate)),
}
_OF_LEDGER = {*LEDGERS, *(str(Path(name).with_suffix(".lock")) for name in LEDGERS)}
_OF_ROUTE = {at("any").name for at in (_ANY.fifo, _ANY.retired, _ANY.moved, _ANY.cursor_directory)}


def known_names(root: Root) -> Iterator[tuple[Path, Callable[[str], bool]]]:
    """Each directory whose names are known, without following a link, and whether a name is one of them.

    A directory may be missing.
    """
    yield root.path, lambda name: name in _OF_ROOT or _is_anywhere(name)
    yield root.segments, lambda name: parse_segment_name(name) is not None or _is_anywhere(name)
    yield root.ledger, lambda name: name in _OF_LEDGER or _is_part(name) or _is_anywhere(name)
    yield root.routes, lambda name: is_route(name) or _is_anywhere(name)
    for route in _routes(root):
        yield root.route(route), _is_of_route
        yield root.cursor_directory(route), _is_of_group


def _routes(root: Root) -> list[str]:
    try:
        return [] if root.routes.is_symlink() else root.route_names()
    except OSError:  # may not be listed
        return []


def _is_anywhere(name: str) -> bool:
    """A temporary file; and a cursor, because a group that loses it loses what it has not read."""
    return name.endswith((TEMPORARY, CURSOR_SUFFIX))


def _is_part(name: str) -> bool:
    part = parse_ledger_part_name(name)
    return part is not None and part[0] in LEDGERS


def _is_of_route(name: str) -> bool:
    is_found = name.startswith(FOUND) and name.removeprefix(FOUND).isdecimal()
    return name in _OF_ROUTE or is_found or _is_anywhere(name)


def _is_of_group(name: str) -> bool:
    return is_of_group(name) or _is_anywhere(name)
