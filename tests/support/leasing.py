"""A work group on route a of a built log, and its deliveries."""

from __future__ import annotations

import time

from logs import Built

from wald.work.group import Order, WorkGroup
from wald.work.owner import Delivery


def group(built: Built, *, order: Order = "log", window: int = 1_000_000) -> WorkGroup:
    return WorkGroup(built.root.path, "a", "g", order=order, window=window)


def values(deliveries: list[Delivery]) -> list[bytes]:
    return [delivery.record.value for delivery in deliveries]


def sequences(deliveries: list[Delivery]) -> list[int]:
    return [delivery.record.sequence for delivery in deliveries]


def tries(deliveries: list[Delivery]) -> list[int]:
    return [delivery.tries for delivery in deliveries]


def leased(work: WorkGroup, count: int) -> list[int]:
    """Lease ``count`` records for x."""
    got: list[int] = []
    while len(got) < count:
        more = sequences(work.lease("x", count - len(got), wait=30))
        assert more, "no more records came"
        got += more
    return got


def cursor(built: Built) -> int:
    return built.log.cursor("a", "g").sequence


class Watch:
    """Clocks that the test sets."""

    def __init__(self) -> None:
        self.ahead_ns = 0

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.ahead_ns

    def time_ns(self) -> int:
        return time.time_ns() + self.ahead_ns

    def passed(self, seconds: float) -> None:
        self.ahead_ns += int(seconds * 10**9)


def killed(work: WorkGroup) -> None:
    """Simulate SIGKILL: nothing is written."""
    work._held.close()
