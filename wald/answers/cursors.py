"""How far a group has processed a route."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wald.retention.cursors import Cursor


def cursor_fields(cursor: Cursor) -> dict[str, object]:
    """A cursor as ``wald cursor get --json`` has it."""
    return {
        "route": cursor.route,
        "group": cursor.group,
        "state": cursor.state.value,
        "sequence": cursor.sequence,
        "path": str(cursor.path),
        "message": cursor.message,
    }
