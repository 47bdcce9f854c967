"""What is kept for how long: the settings of ``[retention]``, and the limits that each route may set for itself.

``wald-reclaim`` applies them; beyond ``pinned_max_bytes`` the daemon lets producers wait, or refuses what they send.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from wald.setting_types import TIB, Choice, Count, Duration, Flag, SettingType, Size, setting

_DAY = 86400
_CENTURY = 36_600 * _DAY
_BYTES_MAX = 1024 * TIB
_RECORDS_MAX = 10**18


def _limit(type_: SettingType, default: object, meaning: str) -> Any:
    """The field of a limit that a table may leave out."""
    unset = "" if isinstance(default, str) else None
    return field(default=unset, metadata={"type": type_, "default": type_.parse(default), "meaning": meaning})


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """What a route may keep, in its own records and payload bytes; None and "" are not set, 0 is no limit."""

    max_age: float | None = _limit(
        Duration(1, _CENTURY, zero=True), 0, "what has been complete for longer goes; 0: no limit"
    )
    max_bytes: int | None = _limit(
        Size(1, _BYTES_MAX, zero=True), 0, "what is beyond the newest so many payload bytes goes; 0: no limit"
    )
    max_records: int | None = _limit(
        Count(0, _RECORDS_MAX), 0, "what is beyond the newest so many records goes; 0: no limit"
    )
    unread: str = _limit(
        Choice(("keep", "expire")),
        "keep",
        "whether a limit spares what a group has not read; expire LOSES DATA, and the ledger counts it",
    )
    pinned_max_bytes: int | None = _limit(
        Size(1, _BYTES_MAX, zero=True), 0, "the most payload bytes that a group has not read; 0: no limit"
    )
    on_pinned: str = _limit(
        Choice(("block", "reject", "expire")),
        "block",
        "beyond pinned_max_bytes the producers of the route wait, or get ERR full, or its oldest unread segments are "
        "deleted, which LOSES DATA",
    )


@dataclass(frozen=True, slots=True)
class Retention(RouteLimits):
    """What ``wald-reclaim`` keeps; the limits are those of every route that sets none itself."""

    min_age: float = setting(Duration(0, _CENTURY), 0, "segments that have been complete for less are kept")
    keep_bytes: int = setting(Size(0, _BYTES_MAX), 0, "at least so many bytes are kept, the newest")
    require_archived: bool = setting(Flag(), False, "records that wald-archive has not put into a bundle are kept")
    verify: bool = setting(Flag(), False, "every frame of a sealed segment is read before it is deleted")
    compact_pinned: bool = setting(
        Flag(), False, "sealed segments that stay for a few unread records are rewritten to what is still unread"
    )
    grace: float = setting(
        Duration(0, 366 * _DAY), "60s", "how long a released segment stays, for readers about to open it"
    )
    log_max_age: float = setting(
        Duration(1, _CENTURY, zero=True), 0, "as max_age, of the log and not of each route; 0: no limit"
    )
    log_max_bytes: int = setting(
        Size(1, _BYTES_MAX, zero=True), 0, "as max_bytes, of the log: all complete segments, as files; 0: no limit"
    )
    log_max_records: int = setting(Count(0, _RECORDS_MAX), 0, "as max_records, of the log; 0: no limit")


def in_force(own: RouteLimits, defaults: RouteLimits) -> RouteLimits:
    """The limits of a route that sets ``own``; None is no limit.

    >>> in_force(RouteLimits(max_bytes=5, max_age=0), RouteLimits(max_bytes=9, max_age=7.0, max_records=8))
    RouteLimits(max_age=None, max_bytes=5, max_records=8, unread='keep', pinned_max_bytes=None, on_pinned='block')
    """
    values: dict[str, Any] = {}
    for each in fields(RouteLimits):
        found = (getattr(table, each.name) for table in (own, defaults))
        value = next((value for value in found if value not in (None, "")), each.metadata["default"])
        values[each.name] = value or None
    return RouteLimits(**values)
