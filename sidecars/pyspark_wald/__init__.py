"""Here Spark finds the source ``wald`` by itself: it asks every top-level package ``pyspark_…`` for a DefaultSource."""

from wald_spark.source import WaldDataSource

DefaultSource = WaldDataSource
