"""Entry point for Spark, which asks every top-level package ``pyspark_…`` for a DefaultSource."""

from wald_spark.source import WaldDataSource

DefaultSource = WaldDataSource
