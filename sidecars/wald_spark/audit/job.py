"""The audit as a job: what is to be read is shared out among executors, and joined here when all of it has been."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from wald_spark.audit.archives import reports
from wald_spark.audit.pieces import Outcomes, do
from wald_spark.audit.plan import Plan
from wald_spark.audit.result import Audit
from wald_spark.tasks import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def audit(spark: SparkSession, planned: Plan, *, on_bytes: Callable[[int], None]) -> Audit:
    """Read everything, change nothing, and tell what is there.

    Args:
        on_bytes: told how many stored bytes have been read.

    Raises:
        Unavailable: Spark gives up, or an executor does not have what it is to read.
    """
    began = time.perf_counter()
    work, outcomes = planned.work, Outcomes()
    with closing(run(spark, work, do, on_done=lambda number: on_bytes(work[number].stored_bytes))) as results:
        for number, told in results:
            outcomes.add(work[number], told)
    logs = tuple(log.report(outcomes) for log in planned.logs)
    archives = tuple(reports(planned.archives, outcomes))
    return Audit(logs, archives, time.perf_counter() - began)
