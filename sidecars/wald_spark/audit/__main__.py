"""``python -m wald_spark.audit`` is ``wald-audit``."""

from wald_spark.audit.command import main

main()
