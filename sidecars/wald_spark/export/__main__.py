"""``python -m wald_spark.export`` is ``wald-export``."""

from wald_spark.export.command import main

main()
