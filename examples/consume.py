"""Process the orders for the group "billing" until SIGTERM or SIGINT; each order at least once.

usage: consume.py ROOT
"""

from __future__ import annotations

import sys

import wald
from wald.loop import stop_on_signals


def bill(order: wald.Record) -> None:
    """Process an order. An error raised here ends the program, and the order comes again at the next start."""
    customer = order.key.decode() if order.key else "a stranger"
    print(f"order {order.sequence} of {customer}: {order.value.decode()}", flush=True)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: consume.py ROOT")
    with (
        stop_on_signals() as stop,
        wald.Consumer(sys.argv[1], "orders", group="billing", follow=True, cancel=stop) as consumer,
    ):
        for order in consumer:
            bill(order)  # the order is processed once the next one is asked for


if __name__ == "__main__":
    main()
