"""Log to a route with the standard library's logging.

usage: log.py ROOT [CUSTOMER...]
"""

from __future__ import annotations

import logging
import sys

from wald.logging import WaldHandler

logger = logging.getLogger("shop")


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: log.py ROOT [CUSTOMER...]")
    handler = WaldHandler(sys.argv[1], "orders", block_for=0.5)
    logging.basicConfig(handlers=[handler], level=logging.INFO, format="%(levelname)s %(message)s")
    logger.info("open")
    try:
        price = 10 / len(sys.argv[2:])
    except ZeroDivisionError:
        logger.exception("no customers")  # with its traceback: one record of several lines
    else:
        logger.info("a share is %.2f", price)
    logger.info("closed")  # what is queued is sent when the program exits


if __name__ == "__main__":
    main()
