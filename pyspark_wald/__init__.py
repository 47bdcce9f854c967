"""Here Spark finds the source ``wald`` by itself: it asks every top-level package ``pyspark_…`` for a DefaultSource."""

from sidecars.spark.source import WaldDataSource

DefaultSource = WaldDataSource
