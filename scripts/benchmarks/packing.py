"""Seconds that one core takes to make a bundle of a whole route: `python -m benchmarks.packing ROOT CODEC`."""

from __future__ import annotations

import os
import sys
import time

import wald
from benchmarks.stage import ROUTE
from wald_archive.bundle import Origin, bundle
from wald_archive.codecs import Codec


def main(root: str, codec: str) -> None:
    log = wald.open(root)
    origin = Origin(log.identity.log_id.hex(), ROUTE, "bench", "wald bench", "2026-11-21T10:00:00Z")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    began = time.perf_counter()
    bundle(log.batches(ROUTE), origin=origin, codec=Codec(codec), after=0, sink=len)
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
