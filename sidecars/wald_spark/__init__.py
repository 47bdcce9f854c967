"""wald on Spark: a data source for queries and streams, and jobs for what is too much for one machine."""
