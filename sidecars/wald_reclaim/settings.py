"""Settings of ``wald-reclaim``: options override the configuration file; 0 means unlimited in both.

``--unread expire`` is a default that routes may override; ``--unread keep`` overrides every route.
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

_LOG_LIMITS = {"max_age": "log_max_age", "max_bytes": "log_max_bytes", "max_records": "log_max_records"}
"""Options that limit the whole log, by their names in the file, where the short names limit each route."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Effective settings of a pass."""

    limits: Limits
    grace_ns: int
    verify: bool
    shrink_pinned: bool


def load_settings(path: Path | None, options: Mapping[str, Any]) -> Settings:
    """Return the settings from the file at ``path`` and the ``options`` that are not None."""
    given = {name: value for name, value in options.items() if value is not None}
    config = wald.settings.Config() if path is None else wald.settings.load(path, os.environ)
    same_name = {name: value for name, value in given.items() if name not in _LOG_LIMITS}
    retention = replace(config.retention, **same_name)
    config = replace(config, retention=retention)
    log = {name: given.get(name, getattr(retention, key)) or None for name, key in _LOG_LIMITS.items()}
    keep_unread = given.get("unread") == "keep"
    of_routes = {name: _route_limits(config.limits(name), keep_unread=keep_unread) for name in config.routes}
    others = _route_limits(config.limits(""), keep_unread=keep_unread)
    limits = Limits(
        min_age_ns=_nanoseconds(retention.min_age or None),
        keep_bytes=retention.keep_bytes or None,
        require_archived=retention.require_archived,
        max_age_ns=_nanoseconds(log["max_age"]),
        max_bytes=log["max_bytes"],
        max_records=log["max_records"],
        of_routes={name: own for name, own in of_routes.items() if own != others},
        others=others,
    )
    has_limit = limits.by_route or any(limit is not None for limit in log.values())
    if given.get("unread") == "expire" and not has_limit:
        raise InvalidInput("--unread expire needs a limit that says when", hint="--max-bytes 10GiB, or --max-age 30d")
    return Settings(limits, int(retention.grace * 1e9), retention.verify, retention.shrink_pinned)


def _route_limits(limits: wald.settings.RouteLimits, *, keep_unread: bool) -> RouteLimits:
    expires_pinned = limits.on_pinned == "expire" and not keep_unread
    return RouteLimits(
        max_age_ns=_nanoseconds(limits.max_age),
        max_bytes=limits.max_bytes,
        max_records=limits.max_records,
        expire=limits.unread == "expire" and not keep_unread,
        pinned_max_bytes=limits.pinned_max_bytes if expires_pinned else None,
    )


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)
