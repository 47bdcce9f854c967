"""Who is let in at the socket: so many in all, so many of one user, and nobody on the descriptors the log itself needs.

Everybody is accepted first, because only then the kernel says who it is; whom there is no place for is told so.
Some places are kept for the log's owner and root, who could not look at what goes on otherwise.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from wald.metrics import Metrics

_DESCRIPTORS_KEPT = 32  # for segments, pipes that are added, and whoever asks for metrics
_OWNERS_SHARE = 16  # one place of so many
_TELL_SECONDS = 10.0  # between lines in the journal


@dataclass(frozen=True, slots=True)
class NoPlace:
    """Why somebody is not let in.

    Attributes:
        message: for the peer and for the journal.
        user_id: whose connections have to become fewer; None: anybody's.
    """

    message: str
    user_id: int | None = None


class Admission:
    """Counts the places, and tells of those who found none.

    Args:
        connections_max: places in all.
        per_user_max: of one user, but not of the log's owner or root.
    """

    def __init__(
        self, metrics: Metrics, journal: FilteringBoundLogger, *, connections_max: int, per_user_max: int
    ) -> None:
        self._metrics = metrics
        self._journal = journal
        self._places = connections_max
        self._per_user = per_user_max
        self._kept = connections_max // _OWNERS_SHARE
        self._owners = frozenset({0, os.geteuid()})
        self._count: dict[int, int] = {}
        self._refused = 0
        self._told_at = float("-inf")

    def judge(self, user_id: int, descriptor: int) -> NoPlace | None:
        """Why a user's new connection has no place; None: it has one.

        Args:
            descriptor: that the connection got; the kernel gives out the lowest that is free.
        """
        if not self.leaves_enough(descriptor):
            return NoPlace("too few descriptors are left")
        total = sum(self._count.values())
        if user_id not in self._owners:
            if self._count.get(user_id, 0) >= self._per_user:
                return NoPlace(f"user {user_id} has {self._per_user} connections already", user_id)
            total += self._kept
        return NoPlace(f"{self._places} connections are open already") if total >= self._places else None

    def leaves_enough(self, descriptor: int) -> bool:
        """Whether the log itself has the descriptors it needs, where the lowest free one was ``descriptor``."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return descriptor < soft - _DESCRIPTORS_KEPT

    def enter(self, user_id: int) -> None:
        self._count[user_id] = self._count.get(user_id, 0) + 1

    def leave(self, user_id: int) -> None:
        self._count[user_id] -= 1
        if not self._count[user_id]:
            del self._count[user_id]

    def refuse(self, user_id: int, words: str) -> None:
        """Count somebody who is not let in, or not let stay; the journal gets a line now and then."""
        self._metrics.connections_refused += 1
        self._refused += 1
        now = time.monotonic()
        if now - self._told_at >= _TELL_SECONDS:
            self._journal.warning("connection refused", reason=words, user=user_id, refused=self._refused)
            self._told_at, self._refused = now, 0
