"""``python -m wald_spark.compact`` is ``wald-compact``."""

from wald_spark.compact.command import main

main()
