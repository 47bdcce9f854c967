"""``python -m sidecars.spark.export`` is ``wald-export``."""

from sidecars.spark.export.command import main

main()
