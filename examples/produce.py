"""Produce records with keys, times and headers, and print the sequences that they got.

usage: produce.py ROOT
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta

import wald

CUSTOMERS = ["ann", "bob", "cleo"]
ORDERED_AT = datetime(2026, 11, 21, 10, tzinfo=UTC)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: produce.py ROOT")
    with wald.Producer(sys.argv[1]) as producer:
        producer.send(
            "orders",
            [f"{customer} {count}" for count, customer in enumerate(CUSTOMERS, start=1)],
            keys=CUSTOMERS,
            times=[ORDERED_AT + timedelta(minutes=number) for number in range(len(CUSTOMERS))],
            headers=[{"from": "web"}, {"from": "shop"}, None],
        )
        for first, last in producer.flush():  # returns once they are on disk
            print(f"durable: records {first} to {last}")


if __name__ == "__main__":
    main()
