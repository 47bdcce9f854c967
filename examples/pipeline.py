"""Consume the orders with asyncio, and produce an invoice for each.

An order counts as processed once its invoice is durable. After a crash an order may come again, so there may be two
invoices with the same header "order": at least once.

usage: pipeline.py ROOT
"""

from __future__ import annotations

import asyncio
import sys

import wald
from wald import aio


async def invoice(order: wald.Record) -> str:
    """Ask the price service, say; meanwhile the event loop does something else."""
    await asyncio.sleep(0)
    return f"invoice for {order.value.decode()}"


async def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: pipeline.py ROOT")
    root = sys.argv[1]
    async with aio.Producer(root) as producer, aio.Consumer(root, "orders", group="invoices") as consumer:
        async for batch in consumer.batches():
            orders = list(batch.records())
            invoices = await asyncio.gather(*map(invoice, orders))
            headers = [{"order": str(order.sequence)} for order in orders]
            await producer.send("invoices", invoices, keys=[order.key for order in orders], headers=headers)
            for first, last in await producer.flush():
                print(f"durable: invoices {first} to {last}")


if __name__ == "__main__":
    asyncio.run(main())
