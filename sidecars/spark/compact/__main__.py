"""``python -m sidecars.spark.compact`` is ``wald-compact``."""

from sidecars.spark.compact.command import main

main()
