"""wald on Spark: a data source for queries and streams, and jobs for data that exceeds one machine."""
