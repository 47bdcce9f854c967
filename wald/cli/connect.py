"""Reaching the daemon of a root from a command."""

from __future__ import annotations

from pathlib import Path

from wald.producer import Producer
from wald.store.files.directory import Root, read_identity
from wald.store.files.disk import Disk
from wald.store.writing.lock import is_held

START_SECONDS = 10.0  # a daemon that holds the lock and does not listen yet is recovering
_NEVER_SEEN_SECONDS = 2.0  # one that nobody has seen is perhaps being started by the line before


def daemon_at(root: Path, socket: Path | None) -> Producer:
    """A connection for commands: the daemon answers, or there is none.

    Raises:
        NotFound: no such root.
        Unavailable: no daemon.
    """
    read_identity(Root(root))
    return Producer(socket or root, retry_for=START_SECONDS, connect_for=START_SECONDS if runs(root) else 0.0)


def producer_at(root: Path, socket: Path | None, route: str, *, retry_for: float, insists: bool) -> Producer:
    """A connection for records of ``route``, which may outlive restarts of the daemon.

    Args:
        retry_for: seconds without a daemon that are sat out.
        insists: whether they are sat out at the start, too, where no daemon runs.

    Raises:
        NotFound: no such root, or no such route.
        Unavailable: no daemon.
    """
    read_identity(Root(root))
    Root(root).require_route(route)
    connect_for = retry_for if insists or runs(root) else min(retry_for, _NEVER_SEEN_SECONDS)
    return Producer(socket or root, retry_for=retry_for, connect_for=connect_for)


def runs(root: Path) -> bool:
    """Whether a daemon holds the root, listening or not."""
    return is_held(Root(root), Disk())
