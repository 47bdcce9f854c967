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
_NS = 1_000_000_000


def rules_of(route: str, order: Order, window: int, max_tries: int | None, dead_letter: str) -> Rules:
    if order not in get_args(Order):
        raise InvalidInput(f"order {order!r}", hint=f"one of {', '.join(get_args(Order))}")
    if window < 1 or not 1 <= (max_tries or 1) <= TRIES_MAX or max_tries == 0:
        raise InvalidInput(
            f"window {window}, max_tries {max_tries}", hint=f"window is above 0; max_tries is None, or 1 to {TRIES_MAX}"
        )
    if check_route(dead_letter) == route and max_tries is not None:
        raise InvalidInput(
            f"route {route}: cannot be its own dead-letter route", hint="dead_letter is the name of another route"
        )
    return Rules(order == "key", window, max_tries, dead_letter)


def named_by(consumer: str, sequences: Collection[int]) -> list[int]:
    """The records that a consumer names."""
    if not consumer or not isinstance(consumer, str):
        raise InvalidInput(f"the consumer {consumer!r}", hint='a name: "worker-1"')
    return sorted(map(index, sequences))


def text_of(reason: object) -> str:
    """A reason as text that can be stored, also that of an error about a file whose name is none."""
    return str(reason).encode(errors="backslashreplace").decode()


def nanoseconds(seconds: float) -> int:
    if not seconds >= 0:
        raise InvalidInput(f"{seconds!r} seconds", hint="seconds are 0 or more")
    return int(min(seconds, FOREVER_SECONDS) * _NS)
