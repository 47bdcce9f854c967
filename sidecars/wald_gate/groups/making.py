"""A group is there once it has a cursor on its route: PUT of the cursor makes it."""

from __future__ import annotations

from wald.errors import NotFound
from wald.log import Log
from wald.retention.cursors import CursorState


def require_group(log: Log, route: str, group: str, *, more: str = "") -> None:
    """
    Args:
        more: for the hint: what else could be done.

    Raises:
        NotFound: there is no such route, or no such group on it, whose name may be misspelt.
    """
    cursor = log.cursor(route, group)
    if cursor.state is CursorState.ABSENT:
        making = f'PUT {{"sequence": "earliest"}} to /v1/routes/{route}/cursors/{group} makes it'
        raise NotFound(f"there is no group {group!r} on route {route}", hint=f"{making}{more}")
