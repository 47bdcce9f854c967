"""What a program may ask of a work group: each call is checked, and becomes an ask for a turn."""

from __future__ import annotations

from collections.abc import Collection
from operator import index
from typing import TypeVar

from wald.errors import InvalidInput
from wald.log import Log
from wald.work.arguments import named_by, nanoseconds, text_of
from wald.work.asks import AckAsk, Ask, LeaseAsk, Make
from wald.work.deliveries import Refusal
from wald.work.owner import Owner
from wald.work.sharing import Wanted
from wald.work.terms import Clock, Failure, Pending
from wald.work.window import Run

T = TypeVar("T")


class Calls:
    """The calls of threads and of tasks; :class:`wald.WorkGroup` says what each of them does."""

    def __init__(self, log: Log, owner: Owner, clock: Clock) -> None:
        self._log = log
        self._owner = owner
        self._clock = clock

    def lease(
        self,
        consumer: str,
        max_records: int,
        max_bytes: int,
        lease_for: float,
        wait: float,
        done: Collection[int],
        make: Make[T],
    ) -> LeaseAsk[T]:
        max_records, max_bytes, lease_ns = index(max_records), index(max_bytes), nanoseconds("lease_for", lease_for)
        if max_records < 1 or max_bytes < 1 or not lease_ns:
            raise InvalidInput(
                f"max_records {max_records}, max_bytes {max_bytes}, lease_for {lease_for!r}: each must be above 0",
                hint="max_records 100, max_bytes 1048576, lease_for 30",
            )
        wanted = Wanted(consumer, max_records, max_bytes, lease_ns)
        until_ns = self._clock.monotonic_ns() + nanoseconds("wait", wait)
        return LeaseAsk(wanted, (consumer, named_by(consumer, done)), make, until_ns=until_ns)

    def ack(self, consumer: str, sequences: Collection[int]) -> AckAsk:
        return AckAsk((consumer, named_by(consumer, sequences)))

    def nack(
        self, consumer: str, sequences: Collection[int], delay: float, reason: str, tries: int | None
    ) -> Ask[list[Refusal]]:
        named, delay_ns, reason = named_by(consumer, sequences), nanoseconds("delay", delay), text_of(reason)
        count = 0 if tries is None else index(tries)
        return Ask(
            lambda: self._owner.give_back(consumer, named, delay_ns, reason, count), durable=delay_ns > 0 or count > 0
        )

    def failed(self, sequence: int) -> Ask[Failure | None]:
        return Ask(lambda: self._owner.failure(sequence))

    def give_up(self, consumer: str, sequences: Collection[int], reason: str, tries: int | None) -> Ask[list[Refusal]]:
        named, reason, head = named_by(consumer, sequences), text_of(reason), self._log.head()
        count = None if tries is None else index(tries)
        durable = 0 if head is None else head.sequence
        return Ask(lambda: self._owner.give_up(consumer, named, reason, count, durable), durable=True)

    def extend(self, consumer: str, sequences: Collection[int], lease_for: float) -> Ask[list[Refusal]]:
        named, lease_ns = named_by(consumer, sequences), nanoseconds("lease_for", lease_for)
        return Ask(lambda: self._owner.extend(consumer, named, lease_ns))

    def release(self, consumer: str) -> Ask[int]:
        named_by(consumer, ())
        return Ask(lambda: self._owner.release(consumer))

    def claim(self, min_idle: float) -> Ask[int]:
        idle_ns = nanoseconds("min_idle", min_idle)
        return Ask(lambda: self._owner.claim(idle_ns))

    def pending(self) -> Ask[list[Pending]]:
        return Ask(self._owner.pending)

    def skip(self, run: Run) -> Ask[list[Run] | None]:
        return Ask(lambda: self._owner.skip(run), durable=True)
