"""``python -m sidecars.spark.audit`` is ``wald-audit``."""

from sidecars.spark.audit.command import main

main()
