"""A work group on route a of a built log, and its deliveries."""

from dataclasses import dataclass

from logs import START_NS, Built

from wald.work.group import Order, WorkGroup
from wald.work.owner import Delivery


@dataclass
class Clocks:
    """The clocks of an owner, which only a test moves."""

    now_ns: int = 0
    wall_ns: int = START_NS

    def monotonic_ns(self) -> int:
        return self.now_ns

    def time_ns(self) -> int:
        return self.wall_ns

    def advance(self, ns: int) -> None:
        self.now_ns += ns
        self.wall_ns += ns


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


def killed(work: WorkGroup) -> None:
    """Simulate SIGKILL: nothing is written."""
    work._held.close()
