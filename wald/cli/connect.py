"""Connections of commands to the daemon, and whether one runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wald.errors import Unavailable
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.files.locks import is_locked

if TYPE_CHECKING:
    from wald.client.producer import Producer

START_SECONDS = 10.0  # a daemon that holds the lock and does not listen yet is recovering the log
_NEVER_SEEN_SECONDS = 2.0  # without a daemon: perhaps the command before has just started one


def daemon_at(root: Path, socket: Path | None) -> Producer:
    """A connection for a request to the daemon."""
    from wald.client.producer import Producer
    from wald.status.findings import frozen  # which wald append does not need

    read_identity(Root(root))
    if (stopped := frozen(Root(root))) is not None:
        raise Unavailable(stopped.message, hint=stopped.hint)
    return Producer(socket or root, retry_for=START_SECONDS, connect_for=START_SECONDS if runs(root) else 0.0)


def producer_at(root: Path, socket: Path | None, route: str, *, retry_for: float, insists: bool) -> Producer:
    """A connection that sends records to ``route``, also across restarts of the daemon.

    Args:
        retry_for: how many seconds to wait for a daemon.
        insists: whether to wait so long at the start too, if no daemon runs.
    """
    from wald.client.producer import Producer

    read_identity(Root(root))
    Root(root).require_route(route)
    connect_for = retry_for if insists or runs(root) else min(retry_for, _NEVER_SEEN_SECONDS)
    return Producer(socket or root, retry_for=retry_for, connect_for=connect_for)


def runs(root: Path) -> bool:
    """Return True if a daemon holds the root, even if it does not listen yet."""
    return is_locked(Root(root).lock, Disk())
