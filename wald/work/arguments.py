"""What a program may ask of a work group, checked first: an error in a turn would end the group for all."""

from __future__ import annotations

from collections.abc import Collection
from operator import index
from typing import Literal, get_args

from wald.errors import InvalidInput
from wald.format.names import check_route
from wald.format.work import TRIES_MAX
from wald.work.terms import FOREVER_SECONDS, Rules

Order = Literal["log", "key"]
CONSUMER_MAX = 200
_NS = 1_000_000_000


def rules_of(route: str, order: Order, window: int, max_tries: int | None, dead_letter: str) -> Rules:
    if order not in get_args(Order):
        raise InvalidInput(f"order {order!r}: must be one of {', '.join(get_args(Order))}", hint='order "log"')
    if window < 1:
        raise InvalidInput(f"window {window}: must be above 0", hint="window 1000000")
    if max_tries is not None and not 1 <= max_tries <= TRIES_MAX:
        raise InvalidInput(f"max_tries {max_tries}: must be None, or 1 to {TRIES_MAX}", hint="max_tries 5")
    if check_route(dead_letter) == route and max_tries is not None:
        raise InvalidInput(
            f"route {route}: cannot be its own dead-letter route", hint="dead_letter is the name of another route"
        )
    return Rules(order == "key", window, max_tries, dead_letter)


def named_by(consumer: object, sequences: Collection[int]) -> list[int]:
    """The records that a consumer names."""
    if not (isinstance(consumer, str) and 0 < len(consumer) <= CONSUMER_MAX and consumer.isprintable()):
        raise InvalidInput(
            f"consumer {str(consumer)[:40]!r}: must be text of 1 to {CONSUMER_MAX} printable characters, on one line",
            hint='consumer "worker-1"',
        )
    return sorted(map(index, sequences))


def text_of(reason: object) -> str:
    """A reason as text that can be stored, also that of an error about a file whose name is none."""
    return str(reason).encode(errors="backslashreplace").decode()


def nanoseconds(name: str, seconds: float) -> int:
    """A duration in nanoseconds; one that is very long is :data:`FOREVER_SECONDS`."""
    if not seconds >= 0:
        raise InvalidInput(f"{name} {seconds!r}: must be 0 or more, in seconds", hint=f"{name} 30, or 0.5")
    return int(min(seconds, FOREVER_SECONDS) * _NS)
