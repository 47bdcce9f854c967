"""What ``wald-reclaim`` is to do: an option of the command line, else the file of settings, else the default.

0 is no limit in both. ``--unread expire`` is a default, and routes may say ``keep``; ``--unread keep`` spares what is
unread on every route.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import wald.settings
from wald.errors import InvalidInput
from wald_reclaim.policy import Limits, RouteLimits

_OF_THE_LOG = {"max_age": "log_max_age", "max_bytes": "log_max_bytes", "max_records": "log_max_records"}
"""Options that limit the whole log, and their names in the file, where the short names are of each route."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for each pass.

    Attributes:
        grace_ns: how long a released segment stays.
        verify: whether to read the frames of a segment before it is deleted.
        shrink_pinned: whether to shrink pinned segments to their unread records.
    """

    limits: Limits
    grace_ns: int
    verify: bool
    shrink_pinned: bool


def settings(path: Path | None, options: Mapping[str, Any]) -> Settings:
    """The settings from the file at ``path`` and the ``options`` that are not None.

    Raises:
        InvalidInput: the file cannot be read, or is wrong; unread records are to expire, and no limit says when.
    """
    given = {name: value for name, value in options.items() if value is not None}
    config = wald.settings.Config() if path is None else wald.settings.load(path, os.environ)
    same_name = {name: value for name, value in given.items() if name not in _OF_THE_LOG}
    config = replace(config, retention=replace(config.retention, **same_name))
    retention = config.retention
    log = {name: given.get(name, getattr(retention, key)) or None for name, key in _OF_THE_LOG.items()}
    spares = given.get("unread") == "keep"
    of_each = {name: _of_route(config.limits(name), spares_unread=spares) for name in config.routes}
    others = _of_route(config.limits(""), spares_unread=spares)
    limits = Limits(
        min_age_ns=_nanoseconds(retention.min_age or None),
        keep_bytes=retention.keep_bytes or None,
        require_archived=retention.require_archived,
        max_age_ns=_nanoseconds(log["max_age"]),
        max_bytes=log["max_bytes"],
        max_records=log["max_records"],
        of_routes={name: own for name, own in of_each.items() if own != others},
        others=others,
    )
    if given.get("unread") == "expire" and not _says_when(limits):
        raise InvalidInput("--unread expire needs a limit that says when", hint="--max-bytes 10GiB, or --max-age 30d")
    return Settings(limits, int(retention.grace * 1e9), retention.verify, retention.shrink_pinned)


def _of_route(limits: wald.settings.RouteLimits, *, spares_unread: bool) -> RouteLimits:
    expires = limits.on_pinned == "expire" and not spares_unread
    return RouteLimits(
        max_age_ns=_nanoseconds(limits.max_age),
        max_bytes=limits.max_bytes,
        max_records=limits.max_records,
        expire=limits.unread == "expire" and not spares_unread,
        pinned_max_bytes=limits.pinned_max_bytes if expires else None,
    )


def _says_when(limits: Limits) -> bool:
    """Whether anything has an upper limit."""
    of_log = (limits.max_age_ns, limits.max_bytes, limits.max_records)
    return limits.by_route or any(limit is not None for limit in of_log)


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)
