"""What one client may ask over time, and at once: a bucket of requests and one of bytes, which fill up again.

A client is who asks by a token, a certificate or as a user; of those who need not show who they are, an address.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from wald_gate.limits import Limits
from wald_gate.problems import HttpError

_CLIENTS_MAX = 10_000  # that are remembered


@dataclass(slots=True)
class Allowance:
    """Of one client.

    Attributes:
        requests, sent_bytes: what is left; below zero it has taken more than that.
        under_way: requests that have not been answered to their end.
        at: when this was so, by the monotonic clock.
    """

    requests: float
    sent_bytes: float
    at: float
    under_way: int = 0

    def end(self) -> None:
        """Take in that a request is answered."""
        self.under_way -= 1

    def take_bytes(self, count: int) -> None:
        """Take in what has come of a body; the next requests wait for it."""
        self.sent_bytes -= count


class Allowances:
    """Of all clients.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._of: OrderedDict[str, Allowance] = OrderedDict()
        self._rates = (0, 0)

    def begin(self, client: str) -> Allowance:
        """Begin a request; :meth:`Allowance.end` has to follow.

        Raises:
            HttpError: 429, the client has too many under way, or has taken what there was.
        """
        limits, now = self._limits.settings, self._clock()
        self._begin_anew((limits.requests_per_second, limits.bytes_per_second))
        found = self._of.get(client)
        if found is None:
            found = self._of[client] = Allowance(limits.requests_per_second, limits.bytes_per_second, now)
            self._forget()
        self._of.move_to_end(client)
        passed, found.at = now - found.at, now
        found.requests = min(found.requests + passed * limits.requests_per_second, limits.requests_per_second)
        found.sent_bytes = min(found.sent_bytes + passed * limits.bytes_per_second, limits.bytes_per_second)
        if found.under_way >= limits.requests_at_once:
            raise _refused(f"{client} has {found.under_way} requests under way", 1)
        if limits.requests_per_second and found.requests < 1:
            seconds = (1 - found.requests) / limits.requests_per_second
            raise _refused(f"{client} may ask {limits.requests_per_second} times a second", seconds)
        if limits.bytes_per_second and found.sent_bytes <= 0:
            seconds = (1 - found.sent_bytes) / limits.bytes_per_second
            raise _refused(f"{client} may send {limits.bytes_per_second} bytes a second", seconds)
        found.requests -= 1
        found.under_way += 1
        return found

    def _begin_anew(self, rates: tuple[int, int]) -> None:
        """Give all clients what there is under new limits, whatever they have taken under the old ones, or without."""
        if rates != self._rates:
            self._rates = rates
            for each in self._of.values():
                each.requests, each.sent_bytes = rates

    def _forget(self) -> None:
        """Forget the client that has not asked for longest, and has no request under way."""
        if len(self._of) > _CLIENTS_MAX:
            idle = next((client for client, each in self._of.items() if not each.under_way), None)
            if idle is not None:
                del self._of[idle]


def _refused(message: str, seconds: float) -> HttpError:
    return HttpError(
        429,
        "too-many",
        message,
        hint="[limits] of the gate's file of settings",
        headers={"Retry-After": str(max(1, math.ceil(seconds)))},
    )
