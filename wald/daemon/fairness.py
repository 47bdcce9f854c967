"""Which connection is served first, and which makes way for a newcomer: no user gets more by opening more of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, zip_longest

from wald.daemon.connection import Connection


def in_turn(ready: Iterable[Connection]) -> Iterable[Connection]:
    """One connection of each user, then a second one of each; of a user's, the one first that was served longest ago.

    A turn that cannot serve all of them goes on in the next turn with those that it has left out.
    """
    by_user: dict[int, list[Connection]] = {}
    for connection in sorted(ready, key=lambda each: each.served):
        by_user.setdefault(connection.user_id, []).append(connection)
    if len(by_user) <= 1:
        return chain.from_iterable(by_user.values())
    return (each for row in zip_longest(*by_user.values()) for each in row if each is not None)


def makes_way(
    connections: Iterable[Connection],
    counts: Mapping[int, int],
    newcomer: int,
    *,
    only_user: int | None,
    quiet_since: float,
) -> Connection | None:
    """The connection whose place a new one of the user ``newcomer`` gets; None: no connection has to make way.

    First come those that have sent no whole request yet or do not read their replies, at once, from the user that has
    the most connections, if the newcomer's user has no more than that one; then those that are idle for long.

    Args:
        counts: how many connections each user has.
        only_user: whose connection it has to be; None: any user's.
        quiet_since: a connection that has been idle since then has been so for long.
    """
    candidates = [each for each in connections if only_user in (None, each.user_id)]
    hasty = [each for each in candidates if not each.is_settled and counts[each.user_id] >= counts.get(newcomer, 0)]
    idle = [each for each in candidates if each.active_at <= quiet_since]
    by_user = sorted(hasty, key=lambda each: (-counts[each.user_id], each.active_at))
    return next(_yielding(chain(by_user, sorted(idle, key=lambda each: each.active_at))), None)


def _yielding(connections: Iterable[Connection]) -> Iterator[Connection]:
    return (each for each in connections if each.may_yield)
